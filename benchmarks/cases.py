"""The models that the benchmarks train, with random data and a batch size.

Goes in: the name of a case and a Keras.  Comes out: a :class:`Case`, which builds the model and its
data.  All cases use Adam and cross-entropy.  The global batch size does not depend on the number of
towers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

CLASSES = 10
_BATCHES = 4  # different batches, which repeat
_TABLE = 500_000  # rows of the embedding table


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
      title: a few words about what the case measures.
      batch: rows of the global batch.
      build: makes the model, uncompiled, from a Keras and whether the model is small.
      draw_inputs: makes inputs from a random generator and a number of rows.
    """

    title: str
    batch: int
    build: Callable[[Any, bool], Any]
    draw_inputs: Callable[[np.random.Generator, int], np.ndarray]


def dataset(case: Case, drop_remainder: bool = False) -> tf.data.Dataset:
    """An endless dataset of random batches; with ``drop_remainder``, they have a static shape."""
    import tensorflow as tf  # not installed where JAX is measured

    rows = tf.data.Dataset.from_tensor_slices(_data(case))
    return rows.repeat().batch(case.batch, drop_remainder).prefetch(tf.data.AUTOTUNE)


def batches(case: Case) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The endless batches of :func:`dataset`, as arrays in memory."""
    rows, labels = _data(case)
    while True:
        for start in range(0, len(labels), case.batch):
            yield rows[start:start + case.batch], labels[start:start + case.batch]


def generator() -> np.random.Generator:
    """The random generator for the data."""
    return np.random.default_rng(0)


def _data(case: Case) -> tuple[np.ndarray, np.ndarray]:
    random, count = generator(), case.batch * _BATCHES
    labels = random.integers(0, CLASSES, count).astype("int32")
    return case.draw_inputs(random, count), labels


def compiled(case: Case, keras: Any, small: bool = False, xla: bool = False) -> Any:
    """The compiled model of a case; call it in the scope of a strategy.

    Args:
      case: the case.
      keras: ``keras`` or ``tf_keras``.
      small: whether to make a small model.
      xla: the value of ``jit_compile``.
    """
    model = case.build(keras, small)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, jit_compile=xla)
    return model


def dense(widths: list[int], features: int) -> Callable[[Any, bool], Any]:
    """A function that builds an MLP with hidden layers of ``widths``."""
    def build(keras: Any, small: bool) -> Any:
        hidden = [min(width, 32) for width in widths[:4]] if small else widths
        layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
        return keras.Sequential([keras.Input([features]), *layers, keras.layers.Dense(CLASSES)])

    return build


def _embedding(keras: Any, small: bool) -> Any:
    return keras.Sequential([
        keras.Input([32], dtype="int32"),
        keras.layers.Embedding(_TABLE, 2 if small else 32),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(CLASSES)])


def _resnet(keras: Any, small: bool) -> Any:
    """A CIFAR ResNet of three stages of three blocks; if ``small``, of one block."""
    layers = keras.layers

    def convolved(x: Any, filters: int, size: int, strides: int) -> Any:
        x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input([32, 32, 3])
    x = layers.Activation("relu")(convolved(inputs, 16, 3, 1))
    for filters in (16,) if small else (16, 32, 64):
        for block in range(1 if small else 3):
            strides = 2 if block == 0 and filters > 16 else 1
            shortcut = convolved(x, filters, 1, strides) if strides > 1 else x
            inner = layers.Activation("relu")(convolved(x, filters, 3, strides))
            x = layers.Add()([convolved(inner, filters, 3, 1), shortcut])
            x = layers.Activation("relu")(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def floats(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    """A function that draws rows of ``shape`` from the normal distribution."""
    return lambda random, count: random.standard_normal((count, *shape)).astype("float32")


def _ids(random: np.random.Generator, count: int) -> np.ndarray:
    return random.integers(0, _TABLE, (count, 32)).astype("int32")


CASES: dict[str, Case] = {
    "mlp": Case("merging and updating 20 M parameters", 64,
                dense([3072, 3072, 2048], 1024), floats(1024)),
    "embedding": Case("sparse gradients of a 500,000 x 32 table", 256, _embedding, _ids),
    "conv": Case("a ResNet of 9 blocks with batch norm", 64, _resnet, floats(32, 32, 3)),
    "deep": Case("302 variables", 64, dense([64] * 150, 64), floats(64)),
    "input": Case("splitting of batches, and Python overhead", 64, dense([], 256), floats(256)),
}

# The case `scaling` measures these with several numbers of towers.
SCALING = ("conv", "deep")
