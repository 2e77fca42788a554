"""The cases that draw at random: a tower draws its rows of what one device draws.

Goes in and comes out: what ``cases`` says; this file adds the group ``draws``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from . import cases
from .cases import KERAS_3, LABELS, TF_KERAS, Run, case

_OWN = "layers and names of the other Keras"


def _noisy(keras: Any, **arguments: Any) -> Any:
    """Every layer that draws for numbers; 35 numbers a row, so that towers begin between counters.
    """
    layers = keras.layers
    return cases.classifier(
        keras, layers.GaussianNoise(0.2), layers.Dense(7, activation="tanh"),
        layers.SpatialDropout1D(0.2), layers.Dropout(0.3, noise_shape=(None, 1, 7)),
        layers.GaussianDropout(0.2), layers.AlphaDropout(0.2), layers.Dropout(0.3, **arguments),
        shape=(5, 7))


def _sequences(rows: int = cases.ROWS) -> dict[str, Any]:
    return {"x": cases.numbers(rows, 5, 7), "y": cases.labelled(rows)["y"]}


@case("draws/dropout and noise")
def _(keras: Any) -> Run:
    return Run(_noisy(keras, seed=11), **_sequences(), compile=LABELS, fit={"epochs": 3})


@case("draws/dropout and noise, batches of one shape", wide=True)
def _(keras: Any) -> Run:
    data = _sequences()
    batches = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
    return Run(_noisy(keras), batches.batch(8, drop_remainder=True), compile=LABELS,
               fit={"batch_size": None, "epochs": 3})


@case("draws/dropout and noise, batches of two rows", wide=True)
def _(keras: Any) -> Run:
    return Run(_noisy(keras), **_sequences(7), compile=LABELS, fit={"batch_size": 2})


@case("draws/dropout, steps_per_execution=3", wide=True)
def _(keras: Any) -> Run:
    return Run(_noisy(keras), **_sequences(), compile={**LABELS, "steps_per_execution": 3})


@case("draws/dropout, mixed_bfloat16", wide=True, policy="mixed_bfloat16", bound=2e-2,
      reason="bfloat16 has 8 bits: sums of a batch in another order round to another neighbour")
def _(keras: Any) -> Run:
    return Run(_noisy(keras), **_sequences(), compile=LABELS)


@case("draws/dropout, float64", wide=True, policy="float64", bound=1e-12)
def _(keras: Any) -> Run:
    data = _sequences()
    return Run(_noisy(keras), data["x"].astype("float64"), data["y"], compile=LABELS)


# In float32 its own rounding comes to the bound (8e-6 on two towers, 1.008e-5 on two stages).
@case("draws/a transformer", wide=True, policy="float64", bound=1e-12)
def _(keras: Any) -> Run:
    layers = keras.layers
    inputs = keras.Input([5])
    x = layers.Embedding(11, 8)(inputs)
    for _ in range(2):
        attended = layers.MultiHeadAttention(2, 4, dropout=0.2, use_bias=False)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
        fed = layers.Dense(8)(layers.Dense(12, activation="gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(fed))
    outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    return Run(keras.Model(inputs, outputs), cases.words()["x"], cases.labelled()["y"],
               compile=LABELS, fit={"epochs": 3})


@case("draws/recurrent dropout", wide=True)
def _(keras: Any) -> Run:
    layers = keras.layers
    # In tf_keras masks of inputs are drawn in a loop, too, in an order that is not the same in two
    # runs of one device; with a generator, which is a variable, it is.
    first = layers.LSTM(4, dropout=0.2 * cases.is_keras_3(keras), recurrent_dropout=0.3,
                        return_sequences=True)
    return Run(cases.classifier(keras, first, layers.GRU(3, recurrent_dropout=0.3), shape=(5, 7)),
               **_sequences(), compile=LABELS)


@case("draws/recurrent dropout of cells, generators", keras=(TF_KERAS,), reason=_OWN,
      wide=True)
def _(keras: Any) -> Run:
    layers, options = keras.layers, {"dropout": 0.2, "recurrent_dropout": 0.3,
                                     "rng_type": "stateful"}
    cells = [layers.LSTMCell(4, seed=3, **options), layers.GRUCell(3, seed=4, **options)]
    return Run(cases.classifier(keras, layers.RNN(cells), shape=(5, 7)), **_sequences(),
               compile=LABELS)


@case("draws/dropout with a seed, steps_per_execution=3", wide=True, keras=(TF_KERAS,), reason=_OWN)
def _(keras: Any) -> Run:
    return Run(_noisy(keras, seed=11), **_sequences(),
               compile={**LABELS, "steps_per_execution": 3})


def _pictures(rows: int = cases.ROWS) -> dict[str, Any]:
    data = cases.images(rows, channels=3)
    return {"x": (data["x"] * 40 + 127).clip(0, 255), "y": data["y"]}


def _augmented(keras: Any, *layers: Any) -> Any:
    scale = keras.layers.Rescaling(1 / 127, -1)
    return cases.classifier(keras, *layers, scale, shape=(6, 6, 3))


@case("draws/augmentation in the model", wide=True)
def _(keras: Any) -> Run:
    layers = keras.layers
    some = (layers.RandomTranslation(0.3, 0.3), layers.RandomRotation(0.2), layers.RandomZoom(0.2),
            layers.RandomBrightness(0.2))
    if cases.is_keras_3(keras):
        some += (layers.RandomFlip(), layers.RandomContrast(0.3), layers.RandomHue(0.2),
                 layers.RandomErasing(), layers.RandomShear(0.2, 0.2), layers.RandomSaturation(0.3))
    return Run(_augmented(keras, *some), **_pictures(), compile=LABELS)


@case("draws/generators", keras=(TF_KERAS,), reason=_OWN)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(cases.classifier(
        keras, layers.Dropout(0.3, rng_type="stateful"), layers.Dense(7, activation="tanh"),
        layers.GaussianNoise(0.3, rng_type="stateful", seed=3),
        layers.Dropout(0.2, rng_type="stateless", seed=4), shape=(5, 7)),
        **_sequences(), compile=LABELS, fit={"epochs": 3})


def _drawing_step(keras: Any, eagerly: bool = False) -> Run:
    """Noise on rows and on weights, from a seed that counts, from a generator and from TensorFlow's
    operations with a state."""
    class Noisy(keras.Model):

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.generator = tf.random.Generator.from_seed(5)
            self.drawn = tf.Variable(0, dtype=tf.int64, trainable=False)

        def train_step(self, data: Any) -> Any:
            x, y = data
            seed = tf.stack([self.drawn, 3])
            x += 0.3 * tf.random.stateless_normal(tf.shape(x), seed)
            x += 0.3 * self.generator.uniform(tf.shape(x), -1.0, 1.0)
            x *= tf.random.stateless_gamma(tf.shape(x), seed, 9.0) / 9.0
            x *= 1.0 + 0.2 * self.generator.normal([5])  # as long as a row, not as the batch
            x += 0.1 * tf.random.normal(tf.shape(x))
            if cases.is_keras_3(keras):
                x += 0.1 * keras.random.truncated_normal(tf.shape(x), seed=4)
            self.drawn.assign_add(1)
            return super().train_step((x, y))

    inputs = keras.Input([5])
    return Run(Noisy(inputs, keras.layers.Dense(3)(inputs)), **cases.regression(),
               compile={"run_eagerly": eagerly}, fit={"epochs": 3},
               seen=lambda model: {"state": model.generator.state.numpy()})


@case("draws/own train_step", wide=True)
def _(keras: Any) -> Run:
    return _drawing_step(keras)


@case("draws/own train_step, eagerly", wide=True)
def _(keras: Any) -> Run:
    return _drawing_step(keras, eagerly=True)


@case("draws/predictions that draw", wide=True)
def _(keras: Any) -> Run:
    class Always(keras.layers.Layer):
        """Draws in ``predict``, too."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dropout(0.5)

        def call(self, x: Any) -> Any:
            return self.inner(x, training=True)

    data = cases.regression()

    def seen(model: Any) -> dict[str, np.ndarray]:
        return {"predict": model.predict(data["x"], batch_size=7, verbose=0)}

    model = keras.Sequential([keras.Input([5]), Always(), keras.layers.Dense(3)])
    return Run(model, **data, seen=seen)




def _mixing(name: str, make: Any, **options: Any) -> None:
    @case(f"draws/{name}", keras=(KERAS_3,), reason=_OWN, **options)
    def _(keras: Any) -> Run:
        run = Run(_augmented(keras, make(keras)), **_pictures(), compile=LABELS)
        # Whole numbers: where a layer compares or counts colours, no rounding decides.
        run.x = run.x.round()
        return run


_mixing("MixUp and CutMix", lambda keras: keras.Sequential([
    keras.layers.MixUp(0.5), keras.layers.CutMix()]), wide=True)
_mixing("RandAugment", lambda keras: keras.layers.RandAugment(), wide=True)
_mixing("Equalization", lambda keras: keras.layers.Equalization(), wide=True)


@case("draws/AugMix", wide=True, keras=(KERAS_3,), reason=_OWN)
def _(keras: Any) -> Run:
    run = Run(_augmented(keras, keras.layers.AugMix()), **_pictures(), compile={**LABELS})
    run.x = run.x.round()
    # On one device Keras 3 makes its variables in a step, which is traced again then.
    optimizer = run.compile["optimizer"] = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(run.model.trainable_variables)
    return run


@case("draws/shuffles in an own train_step")
def _(keras: Any) -> Run:
    """Noise that is another row's, by every shuffle; one of columns; one of indices of rows."""
    class Shuffling(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.drawn = tf.Variable(0, dtype=tf.int64, trainable=False)

        def train_step(self, data: Any) -> Any:
            x, y = data
            x += 0.3 * tf.random.experimental.stateless_shuffle(x, seed=tf.stack([self.drawn, 5]))
            x += 0.2 * tf.random.shuffle(x, seed=8)
            x *= tf.random.experimental.stateless_shuffle(tf.linspace(0.5, 1.5, 5), seed=[3, 4])
            if cases.is_keras_3(keras):
                x += 0.3 * keras.random.shuffle(x, seed=2)
                x = keras.random.shuffle(x, axis=1, seed=6)
            self.drawn.assign_add(1)
            return super().train_step((x, y))

    inputs = keras.Input([5])
    return Run(Shuffling(inputs, keras.layers.Dense(3)(inputs)), **cases.regression(),
               fit={"epochs": 3})
