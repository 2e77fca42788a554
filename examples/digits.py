"""Trains a convolutional network on several devices and compares it with training on one device.

Goes in: the 1,797 scanned handwritten digits that scikit-learn ships, and all GPUs of the machine
(or four towers on its CPU).  Comes out: the progress of the training; the devices of all variables;
the test accuracy; the difference of the weights from one device's; the difference of predictions
after saving the model and loading it without the strategy; and a picture, in ``out/``.

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

BATCH = 50  # 4 towers get 13, 13, 12 and 12 rows; the last batch of an epoch has 37
MIN_ACCURACY = 0.97
MAX_WEIGHT_DIFFERENCE = 1e-4
MAX_PREDICTION_DIFFERENCE = 1e-5

_EPOCHS = flags.DEFINE_integer("epochs", 12, "epochs of the training with dropout", lower_bound=1)
_TWIN_EPOCHS = flags.DEFINE_integer(
    "twin_epochs", 6, "epochs of the training on the towers and on one device",
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

    All layers are smooth (swish and average pooling, not ReLU and max pooling): so differences in
    the last bit of a float do not grow in the training.

    Args:
      keras: ``keras`` or ``tf_keras``.
      dropout: the rate of dropout.
    """
    layers = keras.layers
    model = keras.Sequential([keras.Input([8, 8, 1])], name="digits")
    for filters, pool in ((32, False), (32, True), (64, True)):
        # Batch norm subtracts the mean, so a bias before it would only collect rounding errors.
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
    rate = keras.optimizers.schedules.ExponentialDecay(2e-3, decay_steps=100, decay_rate=0.6)
    model.compile(keras.optimizers.Adam(rate), "sparse_categorical_crossentropy",
                  metrics=["accuracy"])
    return model


def train_twins(keras: Any, strategy: tf.distribute.Strategy, x: np.ndarray, y: np.ndarray,
                epochs: int) -> tuple[dict[str, list[float]], dict[str, list[float]], float]:
    """Trains a network on the towers and the same network on one device.

    There is no dropout, as each network has a random seed of its own.

    Returns:
      The history on the towers, the history on one device, the largest difference of the weights.
    """
    single = network(keras, dropout=0)
    with strategy.scope():
        on_towers = network(keras, dropout=0)
    on_towers.set_weights(single.get_weights())
    histories = [
        model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0).history
        for model in (on_towers, single)]
    difference = max(float(np.max(np.abs(a - b))) for a, b
                     in zip(on_towers.get_weights(), single.get_weights()))
    return histories[0], histories[1], difference


def reload_difference(keras: Any, model: Any, path: pathlib.Path, x: np.ndarray) -> float:
    """Saves ``model`` and loads it without a strategy; returns the difference of predictions."""
    model.save(path)
    loaded = keras.models.load_model(path)
    return float(np.max(np.abs(loaded.predict(x, verbose=0) - model.predict(x, verbose=0))))


def flow_of(strategy: tf.distribute.Strategy, model: Any, x: np.ndarray,
            y: np.ndarray) -> digits_picture.Flow:
    """The rows and bytes of a training step, for the first batch."""
    parts = strategy.split((x[:BATCH], y[:BATCH]))
    sub_batches = [strategy.experimental_local_results(part) for part in parts]
    placement = strategy.extended.placement
    return digits_picture.Flow(
        rows=[int(labels.shape[0]) for labels in sub_batches[1]],
        row_bytes=x[0].nbytes + y[0].nbytes,
        towers=[short(device) for device in placement.towers],
        merge="each weight's device" if placement.balanced else short(placement.merge),
        gradient_bytes=bytes_of(model.trainable_variables),
        state_bytes=bytes_of([*model.variables, *model.optimizer.variables]))


def bytes_of(variables: Any) -> int:
    """The bytes of Keras or TensorFlow variables."""
    return sum(int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size
               for variable in variables)


def short(device: str) -> str:
    """``CPU:1`` for ``/job:localhost/replica:0/task:0/device:CPU:1``."""
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def report(findings: list[tuple[str, str, bool]]) -> int:
    """Prints findings of a title, a text and whether it is right; returns 1 if one is wrong."""
    width = max(len(title) for title, _, _ in findings)
    print()
    for title, text, good in findings:
        print(f"{title:<{width}}  {text}{'' if good else '   <-- WRONG'}")
    return 0 if all(good for _, _, good in findings) else 1


def main(argv: list[str]) -> int:
    """Trains, compares, saves, draws and reports; returns the exit status."""
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
    placement = strategy.describe()  # before there is a second model
    accuracy = float(model.evaluate(x_test, y_test, batch_size=BATCH, verbose=0)[1])

    print("Training a network without dropout on the towers and on one device, "
          f"{_TWIN_EPOCHS.value} epochs each ...")
    towers, single, difference = train_twins(keras, strategy, x, y, _TWIN_EPOCHS.value)
    saved = out / "digits.keras"
    reloaded = reload_difference(keras, model, saved, x_test)
    picture = out / "digits.png"
    digits_picture.draw(picture, flow_of(strategy, model, x, y), history, towers, single,
                        difference)

    print(f"\n{placement}")
    return report([
        ("test accuracy", f"{accuracy:.2%} of {len(x_test)} digits that were not trained on",
         accuracy >= MIN_ACCURACY),
        ("towers and one device", f"largest weight difference {difference:.1e} after "
         f"{_TWIN_EPOCHS.value} epochs (no dropout)",
         difference <= MAX_WEIGHT_DIFFERENCE),
        ("loaded without the strategy", f"{saved}: largest difference of a predicted probability "
         f"{reloaded:.1e}", reloaded <= MAX_PREDICTION_DIFFERENCE),
        ("picture", f"{picture}", True)])


if __name__ == "__main__":
    app.run(main)
