"""Rows behind each other, and each for itself: the towers do them, one device's result comes."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy
import wide

DEVICES = towerstrategy.split_cpu(8)
X = np.random.RandomState(0).normal(size=[7, 4])


def encoded(w, rows):
    hidden = tf.nn.relu(rows @ w)
    mean, variance = tf.nn.moments(hidden, 0)
    return (hidden - mean) / tf.sqrt(variance + 1e-3)


def simclr(w, x):
    rows = tf.shape(x)[0]
    views = tf.math.l2_normalize(encoded(w, tf.concat([x, tf.reverse(x, [1])], 0)), 1)
    scores = tf.matmul(views, views, transpose_b=True) - 9. * tf.eye(2 * rows, dtype=x.dtype)
    labels = tf.concat([tf.range(rows, 2 * rows), tf.range(rows)], 0)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


def slices(w, x):
    rows = tf.shape(x)[0]
    views = encoded(w, tf.concat([x, 2 * x, x + 1], 0))
    first, second, third = views[:rows], views[rows:2 * rows], views[2 * rows:]
    return tf.reduce_mean(tf.square(first - second)) + tf.reduce_mean(first * third)


def split(w, x):
    first, second = tf.split(encoded(w, tf.tile(x, [2, 1])), 2)
    return tf.reduce_mean(tf.square(first + second))


def halves(w, x):
    views = encoded(w, tf.concat([x, -x], 0))
    half = tf.shape(views)[0] // 2
    return tf.reduce_mean(tf.square(views[:half] - 3 * views[half:]))


def noisy_labels(w, x):
    """Real rows and made ones, as GANs put them together."""
    rows = tf.shape(x)[0]
    labels = tf.concat([tf.ones([rows, 1], x.dtype), tf.zeros([rows, 1], x.dtype)], 0)
    labels += tf.random.stateless_uniform(tf.shape(labels), [1, 2], dtype=x.dtype)
    return tf.reduce_mean(tf.square(encoded(w, tf.concat([x, x * x], 0)) - labels))


def worst(w, x):
    """What needs the rows in the batch's order."""
    views = encoded(w, tf.concat([x, -x], 0))[:, 0]
    places = tf.cast(tf.argsort(views), x.dtype)
    return tf.reduce_sum(tf.cumsum(views) * places) + tf.reduce_sum(views[:3])


def dilated(w, x):
    """On CPUs of rows of which TensorFlow makes more, and back."""
    return tf.reduce_mean(tf.nn.convolution(
        (x @ w)[..., tf.newaxis], w[:2, tf.newaxis], padding="SAME", dilations=2) ** 2)


def each_example(w, x):
    """Of examples in two tensors, one after another."""
    return tf.reduce_mean(tf.vectorized_map(
        lambda both: tf.reduce_sum(both[0]) * tf.reduce_max(both[1][tf.newaxis] @ w), (x @ w, x)))


class BlocksTest(parameterized.TestCase):

    @wide.product(loss=[simclr, slices, split, halves, noisy_labels, worst, dilated,
                        each_example],
                  towers=[3, 4])
    def test_as_on_one_device(self, loss, towers):
        """Else contrastive losses and GANs train wrongly, or on one device alone."""
        def step(x):
            with tf.GradientTape() as tape:
                value = loss(weights, x)
            weights.assign_sub(0.1 * tape.gradient(value, weights))
            return value

        strategy = towerstrategy.TowerStrategy(DEVICES[:towers])
        found = []
        for function in (tf.function, strategy.function):
            weights = tf.Variable(np.random.RandomState(1).normal(size=[4, 3]))
            traced = function(step)
            split_rows = strategy.split if function == strategy.function else tf.constant
            losses = [traced(split_rows(X[:rows])).numpy() for rows in (7, 7, 2)]
            found.append((losses, weights.numpy()))
        for expected, given in zip(*found):
            np.testing.assert_allclose(given, expected, rtol=1e-9, atol=1e-12)
        if loss in (slices, split, halves, dilated, each_example):
            self.assertEmpty(strategy.extended.done_with_all_rows)
        self.assertNotIn("Relu", strategy.extended.done_with_all_rows)


if __name__ == "__main__":
    absltest.main()
