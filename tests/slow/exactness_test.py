"""Whole models with dropout, batch norm and losses over the batch: three epochs as on one device.

``python -m tests.slow.exactness_test [MODEL ...]`` prints the differences as the table of BUILD.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy
from tests.parity import cases, runner

COUNTS = (1, 3, 4, 8)
ROWS, BATCH = 19, 8  # the last batch has three rows, fewer than four towers


def _pictures(size: int) -> dict[str, Any]:
    x = np.random.RandomState(0).uniform(0, 255, [ROWS, size, size, 3])
    return {"x": x, "y": np.arange(ROWS) % 10}


def _application(name: str) -> Any:
    def make(keras: Any) -> cases.Run:
        # Smaller pictures, and larger steps, make batch norm of some rows of one pixel each
        # magnify a difference in the last bit a thousand times a step.
        model = getattr(keras.applications, name)(
            input_shape=(64, 64, 3), weights=None, classes=10)
        return cases.Run(model, **_pictures(64), compile={
            **cases.LABELS, "optimizer": keras.optimizers.SGD(0.005)})

    return make


def _transformer(keras: Any) -> cases.Run:
    return cases.CASES["draws/a transformer"].make(keras)


def _contrast(y: Any, outputs: Any) -> tf.Tensor:
    """SimCLR's loss: a row's two views are to be nearer than those of all other rows."""
    del y
    views = tf.concat(tf.split(tf.math.l2_normalize(outputs, -1), 2, axis=-1), 0)
    rows = tf.shape(outputs)[0]
    products = tf.matmul(views, views, transpose_b=True) / 0.5
    products -= 1e9 * tf.eye(2 * rows, dtype=products.dtype)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.concat([tf.range(rows) + rows, tf.range(rows)], 0), products)
    return tf.reduce_mean(tf.reshape(losses, [2, rows]), 0)


def _simclr(keras: Any) -> cases.Run:
    layers = keras.layers
    encoder = keras.Sequential([
        keras.Input((12, 12, 3)), layers.RandomTranslation(0.2, 0.2), layers.RandomContrast(0.3),
        layers.Rescaling(1 / 127, -1), layers.GaussianNoise(0.1),
        layers.Conv2D(6, 3, use_bias=False), layers.BatchNormalization(),
        layers.Activation("swish"), layers.Conv2D(8, 3, use_bias=False),
        layers.BatchNormalization(), layers.Activation("swish"), layers.GlobalAveragePooling2D(),
        layers.Dropout(0.2), layers.Dense(8)])
    inputs = keras.Input((12, 12, 3))
    model = keras.Model(inputs, layers.Concatenate()([encoder(inputs), encoder(inputs)]))
    return cases.Run(model, **_pictures(12), compile={
        "loss": towerstrategy.losses.WholeBatch(_contrast), "optimizer": cases.adam(keras)})


def _in_batch(y: Any, outputs: Any) -> tf.Tensor:
    """In-batch negatives: the query of a row is to be nearest to the row's item."""
    del y
    query, item = tf.split(outputs, 2, axis=-1)
    products = tf.matmul(query, item, transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(query)[0]), products)


def _retrieval(keras: Any) -> cases.Run:
    layers = keras.layers

    def tower(name: str) -> Any:
        return keras.Sequential([
            keras.Input((), dtype="int32"), layers.Embedding(11, 8), layers.Dense(
                8, activation="tanh"), layers.Dropout(0.2), layers.BatchNormalization(),
            layers.Dense(4)], name=name)

    query, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")
    outputs = layers.Concatenate()([tower("query")(query), tower("item")(item)])
    ids = np.random.RandomState(1).randint(0, 11, [2, 19]).astype("int32")
    return cases.Run(keras.Model([query, item], outputs), list(ids), np.zeros(19), compile={
        "loss": towerstrategy.losses.WholeBatch(_in_batch), "optimizer": cases.adam(keras)})


MODELS = {"MobileNetV3Small": _application("MobileNetV3Small"),
          "EfficientNetB0": _application("EfficientNetB0"), "transformer": _transformer,
          "SimCLR": _simclr, "retrieval": _retrieval}


def differences(name: str, keras: str, counts: Any = COUNTS) -> Iterator[tuple[int, Any]]:
    """How far a model on each number of towers is from one device."""
    def make(keras: Any) -> cases.Run:
        run = MODELS[name](keras)
        run.fit = {**run.fit, "epochs": 3, "batch_size": BATCH}
        return run

    case = cases.Case(f"slow/{name}", make, policy="float64")
    module = runner.keras_module(keras)
    wanted = runner.train(case, module, None)
    moved = runner.difference(wanted["weights"], wanted["initial weights"], runner.WEIGHT_FLOOR)
    assert moved > 1e-3, f"{name} trains nothing: its weights moved by {moved}"
    for count in counts:
        strategy = runner.Towers(count).strategy(synchronize_batch_norm=True)
        yield count, runner.differences(runner.train(case, module, strategy), wanted)


class ExactnessTest(parameterized.TestCase):

    @parameterized.product(name=list(MODELS), keras=[cases.KERAS_3, cases.TF_KERAS])
    def test_three_epochs_as_on_one_device(self, name, keras):
        """Else dropout, batch norm or a contrastive loss makes a user's model another one."""
        for count, found in differences(name, keras):
            with self.subTest(towers=count):
                self.assertLessEqual(found.worst, 1e-5, str(found))


if __name__ == "__main__":
    if sys.argv[1:]:
        towerstrategy.split_cpu(8)
        for model in sys.argv[1].split(","):
            for version in sys.argv[2].split(","):
                for towers, difference in differences(
                        model, version, [int(number) for number in sys.argv[3].split(",")]):
                    print(f"{model} {version} R={towers}: {difference}", flush=True)
    else:
        absltest.main()
