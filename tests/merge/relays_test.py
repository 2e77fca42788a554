"""relays: what is large travels in pieces; the numbers stay, and no link carries the rest's load.

Logical CPU devices stand for GPUs.
"""

import contextlib
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from benchmarks import kernels, on_gpus, traffic
from towerstrategy.merge import relays

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=[37, 9]).astype("float32"), RANDOM.normal(size=[37, 7]).astype("float32")
WIDTH = 64


@contextlib.contextmanager
def as_gpus(relayed, least=200):
    """Within, towers are GPUs, and what has ``least`` bytes is large, if anything is."""
    with on_gpus.tracing(), mock.patch.object(relays, "LEAST", least if relayed else 2**40):
        yield


def wide_step(merge_device, relayed, towers=7):
    """The traced step of one wide layer, as traffic and as a GraphDef."""
    with as_gpus(relayed):
        strategy = towerstrategy.TowerStrategy(on_gpus.towers(towers), merge_device)
        with strategy.scope():
            model = keras.Sequential([keras.Input([WIDTH]), keras.layers.Dense(WIDTH)])
            model.compile("sgd", "mse")
        batch = (np.ones([towers, WIDTH], "float32"),) * 2
        model.train_on_batch(*batch)
        strategy.extended.keep_graphs = True
        step = tf.function(lambda *data: strategy.run(model.train_step, (data,)), autograph=False)
        function = step.get_concrete_function(*strategy.split(batch))
    return traffic.count(function, 1), function.graph.as_graph_def()


class ChosenTest(parameterized.TestCase):

    @parameterized.parameters(
        ("a", "abcd", [9, 9, 9], [True] * 3, "all on one tower"),
        ("c", "abcd", [9, 9, 0], [True, True, False], "a small one gains nothing"),
        ("h", "abcd", [9], [True], "a home that is no tower"),
        ("ab", "ab", [9, 9], [False, False], "two towers have nobody to hand on to"),
        ("h", "ab", [9], [True], "but with a third device as their home"),
        ("abcd", "abcd", [9, 9, 9, 9], [False] * 4, "balanced already"),
        ("abcd", "abcd", [9, 1, 1, 1], [True] + [False] * 3, "one is larger than its share"),
        ("a", "", [9], [False], "towers that do not hand on"))
    def test_chosen(self, homes, towers, sizes, wanted, why):
        """Else links that are balanced carry more, or one that is not goes on carrying all."""
        homes = (homes * len(sizes))[:len(sizes)] if len(homes) == 1 else homes
        with mock.patch.object(relays, "LEAST", 1):
            self.assertEqual(relays.chosen(homes, sizes, list(towers)), wanted, why)


class ResultsTest(parameterized.TestCase):

    @parameterized.parameters(11, 2)
    def test_steps_of_ones_own(self, rows):
        """Else a tower without rows counts where gradients meet in pieces."""
        found = []
        for relayed in (True, False):
            with as_gpus(relayed):
                strategy = towerstrategy.TowerStrategy(on_gpus.towers(3), "CPU:1")
                with strategy.scope():
                    weights = tf.Variable(tf.reshape(tf.range(63.), [9, 7]) / 63)
                    optimizer = tf_keras.optimizers.SGD(.1)
                    optimizer.build([weights])

                def replica(x, y, weights=weights, optimizer=optimizer, strategy=strategy):
                    with tf.GradientTape() as tape:
                        loss = strategy.scale_loss(tf.reduce_mean((x @ weights - y) ** 2))
                    optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])

                step = tf.function(lambda *data, run=strategy.run, fn=replica: run(fn, data),
                                   autograph=False, reduce_retracing=True)
                step(*strategy.split((X[:rows], Y[:rows])))
                found.append(weights.numpy())
        np.testing.assert_allclose(*found, 1e-6)
        self.assertTrue(np.isfinite(found[0]).all())


class LinksTest(parameterized.TestCase):

    def test_tables_stay_at_home(self):
        """Else a whole embedding table is handed round for the rows that a batch uses."""
        with as_gpus(relayed=True):
            strategy = towerstrategy.TowerStrategy(on_gpus.towers(4), "CPU:1")
            with strategy.scope():
                model = keras.Sequential([keras.Input([3], dtype="int32"),
                                          keras.layers.Embedding(5000, 8), keras.layers.Flatten(),
                                          keras.layers.Dense(40)])
                model.compile("sgd", "mse")
            batch = np.ones([8, 3], "int32"), np.ones([8, 40], "float32")
            model.train_on_batch(*batch)
            strategy.extended.keep_graphs = True
            step = tf.function(lambda *data: strategy.run(model.train_step, (data,)),
                               autograph=False)
            with mock.patch.object(relays, "spread", wraps=relays.spread) as spread:
                found = traffic.count(step.get_concrete_function(*strategy.split(batch)), 1)
        self.assertEqual(spread.call_count, 1, "the kernel alone")
        self.assertLess(found.busiest, 5000 * 8 * 4)

    @parameterized.parameters("CPU:1", "balanced", "cpu")
    def test_bytes(self, merge_device):
        """Else the home's link carries a large variable once for each tower, both ways."""
        kernel, bias = 4 * WIDTH * WIDTH, 4 * WIDTH
        whole, _ = wide_step(merge_device, relayed=False)
        pieces, graph = wide_step(merge_device, relayed=True)
        # From or to the home, and handed on by a tower: the variable each time.
        self.assertGreaterEqual(whole.busiest, 6 * kernel)
        self.assertBetween(pieces.busiest, 1.7 * kernel, 2 * kernel + 8 * (bias + 100))
        self.assertEmpty(kernels.missing(on_gpus.nodes(graph)))
