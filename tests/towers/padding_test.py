"""padding: ragged rows made dense in towers are as wide as on one device."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy

ROWS = [[1., 2.], [3.], [], [4., 5., 6., 7., 8.], [9.], [10., 11.], [12.]]


def row_means(ragged):
    return tf.reduce_mean(ragged.to_tensor(default_value=1.), axis=1)


def given_in_part(ragged):
    return tf.reduce_mean(ragged.to_tensor(shape=[None, None]), axis=1)


def given(ragged):
    return tf.reduce_sum(ragged.to_tensor(shape=[None, 3]), axis=1)


def deeper(ragged):
    twice = tf.stack([ragged, ragged * 2.], axis=2)
    return tf.reduce_mean(twice.to_tensor(), axis=[1, 2])


class PaddingTest(parameterized.TestCase):

    @parameterized.product(make=[row_means, given_in_part, given, deeper], traced=[True, False])
    def test_as_on_one_device(self, make, traced):
        """Else a row's mean depends on what rows are beside it in its tower, and nobody is told."""
        strategy = towerstrategy.TowerStrategy(3)
        for rows in (ROWS, ROWS[:2]):
            ragged = tf.ragged.constant(rows, ragged_rank=1)
            run = lambda parts: strategy.run(make, (parts,))  # noqa: E731
            found = (tf.function(run) if traced else run)(strategy.split(ragged))
            got = tf.concat(strategy.experimental_local_results(found), 0)
            np.testing.assert_allclose(got[:len(rows)], make(ragged), rtol=1e-6)

    def test_a_mean_over_all(self):
        """Else a loss over padded rows, and its gradient, are others than on one device."""
        strategy = towerstrategy.TowerStrategy(3)

        def part(ragged):
            return strategy.scale_loss(tf.reduce_mean(tf.exp(ragged.to_tensor() / 10.)))

        ragged = tf.ragged.constant(ROWS)
        parts = tf.function(lambda x: strategy.run(part, (x,)))(strategy.split(ragged))
        np.testing.assert_allclose(strategy.reduce("SUM", parts, axis=None),
                                   tf.reduce_mean(tf.exp(ragged.to_tensor() / 10.)), rtol=1e-6)


if __name__ == "__main__":
    absltest.main()
