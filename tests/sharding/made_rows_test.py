"""Rows that a step makes itself, of a constant number: which of them the towers make."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from towerstrategy.sharding import propagate, traffic
from towerstrategy.sharding.spec import REPLICATED, Sharded

DEVICES = towerstrategy.split_cpu(8)
D = tf.float64
FIRST, SECOND = (np.random.default_rng(seed).normal(size=[5, 5]) for seed in (1, 2))


def drawn(shape):
    return tf.random.stateless_normal(shape, [1, 2], dtype=D)


def network(x, first=FIRST):
    return tf.tanh(tf.tanh(x @ first) @ SECOND)


def noise_of_its_own(x, weights):
    return tf.reduce_mean(network(drawn([6, 5]), weights)) - tf.reduce_mean(network(x, weights))


def beside_the_batch(x, weights):
    both = tf.concat([network(drawn([7, 5]), weights), network(x, weights)], 0)
    return tf.reduce_mean(both ** 2, 0)


def drawn_with_parameters(x, weights):
    return tf.reduce_sum(network(tf.random.stateless_gamma([4, 5], [1, 2], 2., dtype=D), weights)
                         ) + tf.reduce_sum(x)


def in_a_loop(x, weights):
    noise = drawn([6, 5])
    for _ in tf.range(3):
        noise = network(noise, weights)
    return noise, tf.reduce_sum(x)


def in_branches(x, weights):
    noise = drawn([6, 5])
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_max(network(noise, weights)),
                   lambda: tf.reduce_sum(network(noise, weights)))


def rows_in_python(x, weights):
    kept = tf.nn.experimental.stateless_dropout(network(x, weights), 0.3, [1, 2])
    steps = tf.random.stateless_uniform([x.shape[0]], [1, 2], 0, 5, tf.int32)
    chosen = tf.gather_nd(kept, tf.stack([tf.range(x.shape[0]), steps], 1))
    numbers = tf.range(x.shape[0] + 0.5)[:, tf.newaxis]  # one more
    return (tf.reduce_mean((kept + drawn([x.shape[0], 5])) ** 2), tf.reduce_sum(chosen),
            tf.reduce_sum(numbers + tf.ones([1, 2])))


def noise_on_weights(x, weights):
    return tf.reduce_mean(network(x, weights + 0.1 * drawn([5, 5])), 0)


def noise_for_each_row(x, weights):
    return tf.reduce_mean(network(x[:, tf.newaxis] + drawn([6, 5]), weights), 0)


# Program -> the batches whose rows the towers make.
PROGRAMS = {
    noise_of_its_own: {"6 rows": 6}, beside_the_batch: {"7 rows": 7},
    drawn_with_parameters: {"4 rows": 4}, in_a_loop: {"6 rows": 6}, in_branches: {"6 rows": 6},
    rows_in_python: {"": 8}, noise_on_weights: {}, noise_for_each_row: {}}


class MadeRowsTest(parameterized.TestCase):

    @wide.some(2, *PROGRAMS)
    def test_same_as_one_device(self, program):
        """Else a GAN of a tutorial, with its batch size in the noise's shape, learns otherwise."""

        def step(x):
            weights = tf.constant(FIRST)
            with tf.GradientTape() as tape:
                tape.watch(weights)
                result = program(x, weights)
            return result, tape.gradient(result, weights)

        for options in ({}, {"shares": [3, 1, 2]}, {"micro_batches": 2}):
            strategy = towerstrategy.TowerStrategy(DEVICES[:3], **options)
            function = strategy.function(step)
            for rows in (8, 2):
                x = tf.reshape(tf.range(rows * 5, dtype=D), [rows, 5]) / 9
                one, given = tf.function(step)(x), function(strategy.split(x))
                for expected, result in zip(tf.nest.flatten(one), tf.nest.flatten(given)):
                    np.testing.assert_allclose(result, expected, rtol=1e-9, atol=1e-12)

    @parameterized.parameters(*PROGRAMS)
    def test_what_is_made_of_them_is_the_towers(self, program):
        """Else one device does a generator's passes for all; or rows that others need cross."""
        rows = 8 if program is rows_in_python else None
        graph = tf.function(program).get_concrete_function(
            tf.TensorSpec([rows, 5], D), tf.TensorSpec([5, 5], D)).graph
        layout = propagate.propagate(graph, [Sharded(0), REPLICATED], traffic.Traffic(replicas=3))
        self.assertEqual(layout.made, PROGRAMS[program])
        products = [each.plans[operation.name].once for each in layout.with_bodies()
                    for operation in each.order if operation.type == "MatMul"]
        self.assertEqual(products, [False] * len(products))

    def test_no_batch(self):
        """Else a network that trains on drawn points alone trains on one device of several."""
        strategy = towerstrategy.TowerStrategy(DEVICES[:3])
        step = strategy.function(lambda: tf.reduce_mean(network(drawn([20, 5])) ** 2))
        np.testing.assert_allclose(step(), tf.reduce_mean(network(drawn([20, 5])) ** 2))
        self.assertEqual(strategy.extended.crossings, {"reduce": 1})


if __name__ == "__main__":
    absltest.main()
