"""whole_batch and WholeBatch in strategy.run: a loss of all rows, with a tower that has none."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy

ROWS = np.random.default_rng(0).normal(size=[7, 4]).astype("float32")


def alike(rows):
    """How alike all pairs of rows are: a number."""
    return tf.reduce_mean(tf.square(tf.matmul(rows, rows, transpose_b=True)))


def likeness(rows):
    """How alike each row is to all: a number a row."""
    return tf.reduce_mean(tf.matmul(rows, rows, transpose_b=True), 1)


@parameterized.product(count=[7, 2], in_function=[True, False])
class WholeBatchTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], "CPU:0")

    def run_on(self, fn, rows, in_function):
        fn = tf.function(fn) if in_function else fn
        return self.strategy.run(fn, (self.strategy.split(rows),))

    def test_gradient(self, count, in_function):
        """Else a contrastive loss in a loop of one's own trains otherwise than on one device."""
        with self.strategy.scope():
            weight = tf.Variable(tf.reshape(tf.range(12.), [4, 3]) / 10)

        def gradient(x):
            with tf.GradientTape() as tape:
                rows = towerstrategy.whole_batch(tf.matmul(x, weight))
                loss = self.strategy.scale_loss(alike(rows))
            return tape.gradient(loss, weight)

        parts = self.run_on(gradient, ROWS[:count], in_function)
        with tf.GradientTape() as tape:
            loss = alike(tf.matmul(ROWS[:count], weight))
        np.testing.assert_allclose(self.strategy.reduce("SUM", parts, axis=None),
                                   tape.gradient(loss, weight), rtol=1e-5)

    def test_values_a_row(self, count, in_function):
        """Else a tower gets the values of another tower's rows."""
        loss = towerstrategy.losses.WholeBatch(likeness)
        values = self.run_on(lambda x: loss(x), ROWS[:count], in_function)
        np.testing.assert_allclose(self.strategy.gather(values, 0), likeness(ROWS[:count]),
                                   rtol=1e-5)

    def test_numbers(self, count, in_function):
        """Else the parts of towers, and of one without rows, do not add up to the batch's loss."""
        loss = towerstrategy.losses.WholeBatch(alike)
        parts = self.run_on(lambda x: loss(x), ROWS[:count], in_function)
        np.testing.assert_allclose(self.strategy.reduce("SUM", parts, axis=None),
                                   alike(ROWS[:count]), rtol=1e-5)
