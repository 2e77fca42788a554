"""Trains a convolutional network on several devices and shows that it is the same as on one.

Goes in: the 1,797 scanned handwritten digits that scikit-learn ships, and every GPU of the machine
(or four towers on its CPU).  Comes out: the training's progress; then where everything sits, the
test accuracy, the towers' weights beside one device's, the saved model read back without the
strategy, and a picture of it all in ``out/``.

    pip install ".[demo]"     # `make demo` does both, in .venv
    python examples/digits.py
    TF_USE_LEGACY_KERAS=1 python examples/digits.py     # the same with tf_keras
"""

from __future__ import annotations

import importlib.metadata
import pathlib
from typing import Any

import digits_picture
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn import datasets, model_selection

import towerstrategy

BATCH = 50  # 4 towers get 13, 13, 12 and 12 rows; an epoch's last batch has 37
WANTED_ACCURACY = 0.97
MOST_WEIGHT_DIFFERENCE = 1e-4
MOST_PREDICTION_DIFFERENCE = 1e-5

_EPOCHS = flags.DEFINE_integer("epochs", 12, "epochs of the training with dropout", lower_bound=1)
_TWIN_EPOCHS = flags.DEFINE_integer(
    "twin_epochs", 6, "epochs of the training that is done on the towers and on one device",
    lower_bound=1)
_OUT = flags.DEFINE_string("out", "out", "the folder for the model and the picture")


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images in [0, 1] of shape [rows, 8, 8, 1] and labels: 1,437 to train on, 360 to test with."""
    images, labels = datasets.load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape([-1, 8, 8, 1])
    x, x_test, y, y_test = model_selection.train_test_split(
        images, labels.astype("int32"), test_size=360, random_state=0, stratify=labels)
    return x, y, x_test, y_test


def network(keras: Any, dropout: float = 0.3) -> Any:
    """Three convolutions with batch norm, then two dense layers.

    Everything in it is smooth (swish and average pooling, not ReLU and max pooling), so that the
    last bit of a float cannot grow into another course of the training.

    Args:
      keras: the Keras to build with.
      dropout: how much of the features to drop.
    """
    layers = keras.layers
    model = keras.Sequential([keras.Input([8, 8, 1])], name="digits")
    for filters, pool in ((32, False), (32, True), (64, True)):
        # Batch norm takes the mean away, so a bias before it would only collect rounding errors.
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization(momentum=0.9))
        model.add(layers.Activation("swish"))
        if pool:
            model.add(layers.AveragePooling2D(2))
            model.add(layers.Dropout(dropout))
    model.add(layers.Flatten())
    model.add(layers.Dense(64, activation="swish"))
    model.add(layers.Dropout(dropout))
    model.add(layers.Dense(10, activation="softmax"))
    slower = keras.optimizers.schedules.ExponentialDecay(2e-3, decay_steps=100, decay_rate=0.6)
    model.compile(keras.optimizers.Adam(slower), "sparse_categorical_crossentropy",
                  metrics=["accuracy"])
    return model


def train_twins(keras: Any, strategy: tf.distribute.Strategy, x: np.ndarray, y: np.ndarray,
                epochs: int) -> tuple[dict[str, list[float]], dict[str, list[float]], float]:
    """Trains one network on the towers and its twin on one device, with nothing left to chance.

    Dropout draws by a seed of each network's own, so the twins have none.

    Returns:
      The history of the towers, that of one device, and the largest difference of their weights.
    """
    alone = network(keras, dropout=0)
    with strategy.scope():
        together = network(keras, dropout=0)
    together.set_weights(alone.get_weights())
    histories = [
        model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history
        for model in (together, alone)]
    difference = max(float(np.max(np.abs(one - other))) for one, other
                     in zip(together.get_weights(), alone.get_weights()))
    return histories[0], histories[1], difference


def reload_difference(keras: Any, model: Any, path: pathlib.Path, x: np.ndarray) -> float:
    """Saves ``model``, loads it without a strategy; the largest difference of the predictions."""
    model.save(path)
    loaded = keras.models.load_model(path)
    return float(np.max(np.abs(loaded.predict(x, verbose=0) - model.predict(x, verbose=0))))


def flow_of(strategy: tf.distribute.Strategy, model: Any, x: np.ndarray,
            y: np.ndarray) -> digits_picture.Flow:
    """Rows and bytes of one training step, counted on its first batch."""
    parts = strategy.split((x[:BATCH], y[:BATCH]))
    sub_batches = [strategy.experimental_local_results(part) for part in parts]
    placement = strategy.extended.placement
    return digits_picture.Flow(
        rows=[int(labels.shape[0]) for labels in sub_batches[1]],
        row_bytes=x[0].nbytes + y[0].nbytes,
        towers=[short(device) for device in placement.towers],
        merge="each weight's home" if placement.balanced else short(placement.merge),
        gradient_bytes=bytes_of(model.trainable_variables),
        state_bytes=bytes_of([*model.variables, *model.optimizer.variables]))


def bytes_of(variables: Any) -> int:
    """Bytes of Keras or TensorFlow variables."""
    return sum(int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
               for variable in variables)


def short(device: str) -> str:
    """``CPU:1`` for ``/job:localhost/replica:0/task:0/device:CPU:1``."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def report(findings: list[tuple[str, str, bool]]) -> int:
    """Prints the findings; 1 where one is not as promised, else 0."""
    width = max(len(title) for title, _, _ in findings)
    print()
    for title, text, good in findings:
        print(f"{title:<{width}}  {text}{'' if good else '   <-- NOT AS PROMISED'}")
    return 0 if all(good for _, _, good in findings) else 1


def main(argv: list[str]) -> int:
    """Trains, compares, saves, draws and reports; 0 where everything is as promised."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    keras = tf.keras
    gpus = tf.config.list_physical_devices("GPU")
    strategy = towerstrategy.TowerStrategy(None if gpus else towerstrategy.split_cpu(4))
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(1)
    x, y, x_test, y_test = digits()

    package = keras.Model.__module__.split(".")[0]  # keras or tf_keras
    print(f"Training on {len(x):,} digits in batches of {BATCH}, {package} "
          f"{importlib.metadata.version(package)}, {strategy!r}")
    with strategy.scope():
        model = network(keras)
    history = model.fit(x, y, batch_size=BATCH, epochs=_EPOCHS.value,
                        validation_data=(x_test, y_test)).history
    where = strategy.describe()  # now, before there is a second model
    accuracy = float(model.evaluate(x_test, y_test, batch_size=BATCH, verbose=0)[1])

    print(f"Training a twin on the towers and on one device, {_TWIN_EPOCHS.value} epochs each ...")
    towers, alone, difference = train_twins(keras, strategy, x, y, _TWIN_EPOCHS.value)
    saved = out / "digits.keras"
    reloaded = reload_difference(keras, model, saved, x_test)
    picture = out / "digits.png"
    digits_picture.draw(picture, flow_of(strategy, model, x, y), history, towers, alone, difference)

    print(f"\n{where}")
    return report([
        ("test accuracy", f"{accuracy:.2%} of {len(x_test)} digits that the network never saw",
         accuracy >= WANTED_ACCURACY),
        ("towers beside one device", f"largest weight difference {difference:.1e} after "
         f"{_TWIN_EPOCHS.value} epochs (no dropout)",
         difference <= MOST_WEIGHT_DIFFERENCE),
        ("loaded without the strategy", f"{saved}: largest difference of a predicted probability "
         f"{reloaded:.1e}", reloaded <= MOST_PREDICTION_DIFFERENCE),
        ("picture", f"{picture}", True)])


if __name__ == "__main__":
    app.run(main)
