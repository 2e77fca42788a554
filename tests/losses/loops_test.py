"""loops and other steering: what a number made of all rows decides in a step."""

import contextlib
import warnings

import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy

RANDOM = np.random.default_rng(2)
X, Y = RANDOM.normal(size=[11, 4]).astype("float32"), RANDOM.normal(size=[11, 1]).astype("float32")


def trained(strategy, number):
    """The weight after a step by the gradient of what ``number`` makes of rows and weight."""
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        weight = tf.Variable(np.ones([4, 1], "float32"))
        optimizer = tf_keras.optimizers.SGD(.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss, term = number(x, y, weight)
            scaled = loss if strategy is None else strategy.scale_loss(loss)
        gradient = tape.gradient(scaled, weight)
        optimizer.apply_gradients([(gradient if term is None else gradient + term, weight)])

    if strategy is None:
        tf.function(step)(X, Y)
    else:
        tf.function(lambda parts: strategy.run(step, parts))(strategy.split((X, Y)))
    return weight.numpy()


def squares(x, y, weight):
    return tf.reduce_sum(tf.square(tf.matmul(x, weight) - y), 1)


def turned(x, goes_on, residual):
    def body(turn, z, _):
        new = .5 * tf.tanh(z) + .3 * x
        return turn + 1, new, residual(new - z)

    return tf.while_loop(goes_on, body, [0, tf.zeros_like(x), tf.constant(1.)],
                         maximum_iterations=50)[1]


def residual(x, y, weight):
    z = turned(x, lambda turn, z, left: left > 1e-4, lambda by: tf.reduce_mean(tf.square(by)))
    return tf.reduce_mean(squares(z, y, weight)), None


def largest_step(x, y, weight):
    z = turned(x, lambda turn, z, left: tf.reduce_max(tf.abs(z)) < left, lambda by: 0.4)
    return tf.reduce_mean(squares(z, y, weight)), None


def turns(x, y, weight):
    z = turned(x, lambda turn, z, left: turn < 5, lambda by: tf.reduce_mean(by))
    return tf.reduce_mean(squares(z, y, weight)), None


def own_turns(x, y, weight):
    longest = tf.reduce_max(tf.cast(tf.abs(4 * x), tf.int32))
    kept = tf.while_loop(lambda turn, z: turn < longest, lambda turn, z: (
        turn + 1, tf.where(turn < tf.cast(tf.abs(4 * x), tf.int32), .5 * z, z)), [0, x])[1]
    return tf.reduce_mean(squares(kept, y, weight)), None


def over_the_largest(x, y, weight):
    found = squares(x, y, weight)
    return tf.reduce_mean(found * found / tf.reduce_max(tf.stop_gradient(found))), None


def by_counts(x, y, weight):
    _, places, counts = tf.unique_with_counts(tf.cast(x[:, 0] > 0, tf.int32))
    return tf.reduce_mean(squares(x, y, weight) / tf.cast(tf.gather(counts, places), "float32")
                          ), None


def by_distinct(x, y, weight):
    distinct, places = tf.unique(tf.cast(x[:, 0] > 0, tf.int32))
    table = tf.gather(tf.constant([.5, 2.]), distinct)
    return tf.reduce_mean(squares(x, y, weight) * tf.gather(table, places)), None


def below_the_largest_of_a_row(x, y, weight):
    wide = x * weight[:, 0]
    lifted = tf.exp(wide - tf.reduce_max(wide, 1, keepdims=True))
    return tf.reduce_mean(tf.math.log(tf.reduce_sum(lifted, 1))), None


def with_a_decay_of_the_loss(x, y, weight):
    loss = tf.reduce_mean(squares(x, y, weight))
    return loss, .1 * loss * weight


def in_a_branch(x, y, weight):
    loss = tf.reduce_mean(squares(x, y, weight))
    step = tf.cond(loss > 1., lambda: tf.stop_gradient(loss), lambda: tf.zeros([]))
    return loss + 0. * step, None


class LoopsTest(parameterized.TestCase):

    @parameterized.parameters(turns, own_turns, by_distinct, below_the_largest_of_a_row,
                              with_a_decay_of_the_loss, in_a_branch)
    def test_as_on_one_device_in_silence(self, number):
        """Else steps that are right are warned of, or a multiple of the loss counts R times."""
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "towerstrategy")
            got = trained(towerstrategy.TowerStrategy(4), number)
        np.testing.assert_allclose(got, trained(None, number), rtol=1e-5)

    @parameterized.parameters((residual, "is a loop that ends by"),
                              (largest_step, "is a loop that ends by"),
                              (over_the_largest, "puts rows of the batch together"),
                              (by_counts, "puts rows of the batch together"))
    def test_what_comes_out_otherwise_is_told(self, number, message):
        """Else weights are others than on one device, and nobody knows."""
        with self.assertWarnsRegex(UserWarning, message):
            trained(towerstrategy.TowerStrategy(4), number)

    def test_a_branch_returns_a_gradient_of_one_element(self):
        """Else a step that skips updates by its loss ends in a TypeError of NumPy's."""
        def skipped(strategy):
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                bias = tf.Variable([1.])
                optimizer = tf_keras.optimizers.SGD(.1)

            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(x - bias))
                    scaled = loss if strategy is None else strategy.scale_loss(loss)
                gradient = tape.gradient(scaled, bias)
                kept = tf.cond(loss > 0., lambda: 2. * gradient, lambda: tf.zeros([1]))
                optimizer.apply_gradients([(kept, bias)])

            if strategy is None:
                tf.function(step)(X)
            else:
                tf.function(lambda x: strategy.run(step, (x,)))(strategy.split(X))
            return bias.numpy()

        np.testing.assert_allclose(skipped(towerstrategy.TowerStrategy(3)), skipped(None),
                                   rtol=1e-5)


if __name__ == "__main__":
    absltest.main()
