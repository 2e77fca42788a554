"""Loops with ``strategy.run`` and recurrent layers on two GPU towers: the weights are one GPU's.

Without a GPU two CPU devices stand for the towers.  On GPUs LSTM and GRU are cuDNN's kernels.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

pytestmark = pytest.mark.wide
ARE_GPUS = bool(tf.config.list_physical_devices("GPU"))
TOWERS = ["GPU:0", "GPU:1"] if ARE_GPUS else ["CPU:1", "CPU:2"]
BATCH, ROWS = 7, 15  # the last batch is a row: a tower has none


def convolutions(kit):
    layers = kit.layers
    return [8, 8, 3], [
        layers.Conv2D(8, 3, activation="relu"), layers.BatchNormalization(synchronized=True),
        layers.SeparableConv2D(8, 3), layers.MaxPooling2D(), layers.Flatten()]


def sequence(kit):
    return [6, 3], [kit.layers.Conv1D(4, 2), kit.layers.LSTM(5, return_sequences=True),
                    kit.layers.GRU(4)]


def masked(kit):
    return [6, 1], [kit.layers.Masking(-9.), kit.layers.LSTM(5)]


def both_ways(kit):
    return [6, 3], [kit.layers.Bidirectional(kit.layers.GRU(4))]


def cells(kit):
    return [6, 3], [kit.layers.RNN(kit.layers.LSTMCell(4))]


def results(kit, make, strategy, train):
    """The losses of each batch and the weights, after training in the order of the rows."""
    kit.utils.set_random_seed(1)
    shape, layers = make(kit)
    random = np.random.default_rng(0)
    x = random.normal(size=[ROWS, *shape]).astype("float32")
    if make is masked:
        x[::2, 4:] = -9
    y = np.sin(x.reshape([ROWS, -1]).sum(1, keepdims=True))
    data = tf.data.Dataset.from_tensor_slices((x, y))
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kit.Sequential([kit.Input(shape), *layers, kit.layers.Dense(1)])
        optimizer = kit.optimizers.Adam(0.01)
    losses = train(strategy or tf.distribute.get_strategy(), model, optimizer, data.batch(BATCH))
    return losses, model.get_weights()


def loop(strategy, model, optimizer, batches, make_step):
    """The losses of a loop over the batches with ``make_step(step of x and y)``."""
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - model(x, training=True))) / BATCH
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    train = make_step(step)
    return [float(train(*batch)) for batch in strategy.experimental_distribute_dataset(batches)]


def by_run(strategy, *arguments):
    """Trains in a loop with ``strategy.run``."""
    return loop(strategy, *arguments, lambda step: tf.function(
        lambda *batch: strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)))


def by_function(strategy, *arguments):
    """Trains in a loop with ``strategy.function``."""
    return loop(strategy, *arguments, getattr(strategy, "function", tf.function))


def by_fit(strategy, model, optimizer, batches):
    """Trains with ``fit``."""
    with strategy.scope():
        model.compile(optimizer, "mse", jit_compile=False)
    return model.fit(batches, epochs=2, shuffle=False, verbose=0).history["loss"]


class LoopTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        self.addCleanup(tf.config.experimental.enable_tensor_float_32_execution, True)

    @wide.product(1, 1, kit=(keras, tf_keras), train=(by_run, by_function, by_fit),
                  make=(convolutions, sequence, masked, both_ways, cells))
    def test_trains_as_one_gpu(self, kit, train, make):
        """Else a loop that is right on one GPU trains something else on towers."""
        merge = TOWERS[0] if train is by_fit else "balanced"
        wanted = results(kit, make, None, train)
        found = results(kit, make, towerstrategy.TowerStrategy(TOWERS, merge), train)
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4)
        for one, other in zip(found[1], wanted[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)

    def test_sums_and_rows(self):
        """Else sums over the towers, or rows put together again, are others than one GPU's."""
        strategy = towerstrategy.TowerStrategy(TOWERS)
        rows = np.random.default_rng(0).normal(size=[7, 4]).astype("float32")
        for x in (rows, rows.astype("int32"), rows.astype("float16"), rows[:1]):
            found = tf.function(lambda x: strategy.run(lambda x: x * x, args=(x,)))(
                strategy.split(tf.constant(x)))
            np.testing.assert_array_equal(strategy.gather(found, 0), x * x)
            np.testing.assert_allclose(strategy.reduce("SUM", found, axis=0), (x * x).sum(0),
                                       rtol=1e-2 if x.dtype == "float16" else 1e-5)
