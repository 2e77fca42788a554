"""Which of two right ways an operation is done, by what crosses between devices."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
from benchmarks import on_gpus
from towerstrategy.sharding import propagate, traffic as traffic_lib
from towerstrategy.sharding.layout import Nested
from towerstrategy.sharding.spec import REPLICATED, SUM, Sharded
from towerstrategy.sharding.traffic import Traffic


def layout_of(function, shapes, specs, traffic):
    graph = tf.function(function).get_concrete_function(
        *(tf.TensorSpec(shape) for shape in shapes)).graph
    return propagate.propagate(graph, specs, traffic)


def gradient(x, dy):
    return tf.matmul(x, dy, transpose_a=True)


class TrafficTest(parameterized.TestCase):

    @parameterized.parameters(
        (2048, Traffic(4, 256), REPLICATED), (2048, Traffic(), SUM), (8, Traffic(4, 256), SUM),
        (2048, Traffic(4, 10**5), SUM))
    def test_sums_of_wide_layers(self, width, traffic, wanted):
        """Else every tower sends a kernel of its own where a few rows would do, or the reverse."""
        layout = layout_of(gradient, [[None, width], [None, width]], [Sharded(0), Sharded(0)],
                           traffic)
        self.assertEqual(layout.outputs, [wanted])
        self.assertEmpty(layout.fallbacks)

    @parameterized.parameters(True, False)
    def test_padding_for_kernels_of_cpus(self, cpus):
        """Else a convolution of no rows fails on a CPU tower beside GPUs; or each GPU tower gives a
        copy of each layer's input, and no tower can run a loop of convolutions alone."""
        def step(images, kernel):
            return tf.while_loop(lambda step, images: step < 3, lambda step, images: (
                step + 1, tf.nn.conv2d(images, kernel, 1, "SAME")), (0, images))[1]

        layout = layout_of(step, [[None, 4, 4, 2], [3, 3, 2, 2]], [Sharded(0), REPLICATED],
                           Traffic(4, 256, kinds=frozenset({"CPU" if cpus else "GPU"})))
        loop, = (plan for plan in layout.plans.values() if isinstance(plan, Nested))
        padded = [plan.padded for plan in loop.layouts[1].plans.values()]
        self.assertEqual((any(padded), loop.local), (cpus, not cpus))

    def test_loops_stay_a_towers_own(self):
        """Else an RNN's backward loop, in which no tower needs another's, turns for all at once."""
        def looped(x, dy):
            return tf.while_loop(lambda i, _: i < 3, lambda i, total: (
                i + 1, total + gradient(x, dy)), (0, tf.zeros([512, 512])))[1]

        layout = layout_of(looped, [[None, 512], [None, 512]], [Sharded(0), Sharded(0)],
                           Traffic(4, 64))
        nested = [plan for plan in layout.plans.values() if isinstance(plan, Nested)]
        self.assertTrue(nested[0].local)

    @parameterized.parameters((True, True), (False, False))
    def test_weights_of_wide_layers(self, shared, once):
        """Else CPU devices, which share the cores, each go over all weights; or GPUs idle."""
        layout = layout_of(tf.matmul, [[None, 1024], [1024, 1024]], [Sharded(0), REPLICATED],
                           Traffic(4, 256, shared))
        self.assertEqual(layout.outputs, [Sharded(0)])
        plan = next(plan for name, plan in layout.plans.items() if name.startswith("MatMul"))
        self.assertEqual(plan.once, once)

    @parameterized.parameters((False, REPLICATED), (True, Sharded(0)))
    def test_rows_that_cross_once(self, of_rows, wanted):
        """Else an optimizer's steps of a table's gradient rows cross beside the rows themselves."""
        def step(x):
            squares = .1 * x ** 2
            return (tf.cumsum(x), tf.cumsum(squares), squares if of_rows else x)

        layout = layout_of(step, [[None, 8]], [Sharded(0)], Traffic(4, 64))
        square, = (operation for operation in layout.order if operation.type == "Pow")
        self.assertEqual(layout.specs[square.outputs[0].name], wanted)

    def test_what_was_drawn_once(self):
        """Else the numbers of a dropout cross in place of their mask, a quarter of the bytes; or
        what a layer makes of noise is made by one device."""
        def step(x, w):
            noise = tf.random.normal([tf.shape(x)[0], 8])
            return tf.where(tf.random.uniform(tf.shape(x)) < .5, x * 2, 0.), noise @ w

        layout = layout_of(step, [[None, 8], [8, 8]], [Sharded(0), REPLICATED], Traffic(4, 64))
        once = [operation.type for operation in layout.parted
                if layout.plans[operation.name].once]
        self.assertEqual(once, ["RandomUniform", "Less", "RandomStandardNormal", "Mul", "AddV2"])
        self.assertEqual(layout.outputs, [Sharded(0)] * 2)

    def test_rows_that_are_repeated(self):
        """Else pooled rows of a table's gradient cross once for each entry that was looked up."""
        def step(x):
            rows = tf.reshape(tf.broadcast_to(x[:, None] / 3., [tf.shape(x)[0], 3, 8]), [-1, 8])
            return tf.cumsum(rows)

        layout = layout_of(step, [[None, 8]], [Sharded(0)], Traffic(4, 64))
        specs = {operation.type: layout.specs[operation.outputs[0].name]
                 for operation in layout.order}
        self.assertEqual([specs["RealDiv"], specs["BroadcastTo"], specs["Reshape"]],
                         [Sharded(0), REPLICATED, REPLICATED])


class BatchRowsTest(parameterized.TestCase):
    """Else rows are guessed: a wide layer's gradient crosses where fewer rows would do."""

    def setUp(self):
        super().setUp()
        self.strategy = towerstrategy.TowerStrategy(towerstrategy.split_cpu(8)[:2])
        choose, self.rows = traffic_lib.of_strategy, set()

        def of_strategy(*args, **kwargs):
            chosen = choose(*args, **kwargs)
            self.rows.add(chosen.rows)
            return chosen

        self.enter_context(mock.patch.object(traffic_lib, "of_strategy", of_strategy))

    @parameterized.product(kit=(keras, tf_keras), data=("arrays", "dataset", "changed"))
    def test_in_fit(self, kit, data):
        x = np.ones([30, 4], "float32")
        with self.strategy.scope():
            model = kit.Sequential([kit.layers.Dense(1)])
            model.compile("sgd", "mse")
        if data == "arrays":
            model.fit(x, x[:, :1], batch_size=12, verbose=0)
        else:
            batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(12).prefetch(1)
            model.fit(batches if data == "dataset" else batches.map(lambda x, y: (x, y)),
                      verbose=0)
        self.assertEqual(self.rows, {12})

    def test_where_rows_cross(self):
        """Else the host computes the gradients of GPUs, which takes a hundred times as long."""
        towers = on_gpus.towers(2)
        with on_gpus.tracing():
            crossings = [traffic_lib.of_strategy(towerstrategy.TowerStrategy(towers, merge), 8)
                         .crossings for merge in ("balanced", towers[1], "cpu")]
        self.assertEqual(crossings, [2, 2, 0])

    def test_in_a_function(self):
        total = self.strategy.function(tf.reduce_sum)
        total(self.strategy.split(tf.ones([9, 2])))
        self.assertEqual(self.rows, {9})


if __name__ == "__main__":
    absltest.main()
