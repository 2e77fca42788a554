"""shares=[...]: how many rows each tower gets, in proportion wherever they are dealt."""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib
from towerstrategy.placement import devices as devices_lib

KERAS = (("keras", keras), ("tf_keras", tf_keras))
SHARES = ([3, 1], [1, 2, 5], [1, .001, 1, .001], [1 / 3, 2 / 3], [.1, .2, .7], [7, 1e-9],
          *([1] * towers for towers in (1, 2, 3, 5, 8)))


def unequal(*shares, **more):
    return towerstrategy.TowerStrategy([f"CPU:{tower}" for tower in range(len(shares))],
                                       shares=list(shares), **more)


def counts(part):
    return [int(value.shape[0]) for value in part.values]


class DealTest(parameterized.TestCase):

    @parameterized.parameters(*SHARES)
    def test_largest_remainder(self, *shares):
        """Else a row is lost or doubled, or a tower gets less than its share's whole rows."""
        units, towers = rows_lib.units_of(shares), len(shares)
        for rows in [*range(20), 997]:
            sizes = rows_lib.split_rows(rows, towers, units)
            self.assertEqual(sum(sizes), rows)
            exact = [rows * share / sum(shares) for share in shares]
            for size, wanted in zip(sizes, exact):
                self.assertGreaterEqual(size, int(wanted + 1e-6))
                self.assertLessEqual(size, int(wanted) + 1)
            left = [wanted - int(wanted + 1e-6) for wanted in exact]
            got = [size > int(wanted + 1e-6) for size, wanted in zip(sizes, exact)]
            largest = sorted(range(towers), key=lambda tower: -round(left[tower], 6))[:sum(got)]
            self.assertCountEqual([tower for tower in range(towers) if got[tower]], largest)

    @parameterized.parameters(*SHARES)
    def test_tensors_deal_as_ints(self, *shares):
        """Else a pipeline, or another machine, deals otherwise than eager code."""
        units, towers = rows_lib.units_of(shares), len(shares)
        for rows in [*range(20), 2**31 - 1]:
            sizes = rows_lib.split_rows(tf.constant(rows, tf.int64), towers, units)
            self.assertEqual(sizes.numpy().tolist(), rows_lib.split_rows(rows, towers, units))

    def test_rows_counted_in_python(self):
        """Else a layer that asks for ``x.shape[0]``, or a replica function, ends in an error."""
        class Summed(tf_keras.layers.Layer):
            def call(self, inputs):
                return tf.reduce_sum(inputs, 1, keepdims=True) * inputs.shape[0]

        strategy = unequal(3, 1)
        with strategy.scope():
            model = tf_keras.Sequential([Summed()])
            model.compile("sgd", "mse")
        batches = tf.data.Dataset.from_tensor_slices(
            (tf.ones([16, 2]), tf.zeros([16, 1]))).batch(8, drop_remainder=True)
        self.assertEqual(model.evaluate(batches, verbose=0), 16 ** 2)
        rows = tf.function(lambda batch: strategy.run(lambda x, _: x.shape[0] * x[0, 0], batch))
        for batch in strategy.experimental_distribute_dataset(batches):
            self.assertEqual([6, 2], list(map(float, rows(batch).values)))

    def test_equal_shares_are_no_shares(self):
        """Else who names equal shares pays for what he does not get."""
        self.assertIsNone(rows_lib.units_of([2, 2., np.float32(2)]))
        strategy = unequal(2, 2)
        self.assertEqual(counts(strategy.split(np.arange(5))), [3, 2])


class UnequalTest(parameterized.TestCase):

    def test_traced_once(self):
        """Else each tower, and each number of rows, costs a trace of its own."""
        strategy, traces = unequal(3, 1), []

        @tf.function
        def total(x):
            traces.append(x)
            return strategy.reduce("SUM", strategy.run(tf.reduce_sum, (x,)), None)

        ragged = tf.RaggedTensor.from_row_lengths(tf.range(6.), [1, 2, 3])
        self.assertEqual(float(total(strategy.split(ragged))), 15)
        self.assertEqual(float(total(strategy.split(ragged[:2]))), 3)
        self.assertLen(traces, 1)
        for rows in (8, 10, 4):
            self.assertEqual(float(total(strategy.split(np.ones(rows, np.float32)))), rows)
        self.assertLen(traces, 2)
        dataset = tf.data.Dataset.from_tensors(1.).repeat(20).batch(8)
        for distributed, batches in ((dataset, [8, 8, 4]),
                                     (dataset.take(2), [8, 8])):
            distributed = strategy.experimental_distribute_dataset(distributed)
            self.assertEqual([float(total(batch)) for batch in distributed], batches)
        fixed = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensors(1.).repeat(20).batch(8, drop_remainder=True))
        self.assertEqual([counts(batch) for batch in fixed], [[6, 2], [6, 2]])
        self.assertEqual(fixed.element_spec._component_specs[0].shape.as_list(), [6])
        self.assertEqual([float(total(batch)) for batch in fixed], [8, 8])
        self.assertLen(traces, 2)
        self.assertEmpty(strategy.extended.own_trace_reasons)

    @wide.product(kit=KERAS, merge=["cpu", "CPU:1", "balanced"])
    def test_predicts_in_order(self, kit, merge):
        """Else a user's predictions belong to other rows than his inputs."""
        strategy = unequal(1, 2, 5, merge_device=merge)
        with strategy.scope():
            model = kit[1].Sequential([kit[1].layers.Input([1]), kit[1].layers.Dense(
                1, kernel_initializer="ones")])
            model.compile("sgd", "mse")
        x = np.arange(21, dtype=np.float32)[:, None]
        np.testing.assert_array_equal(model.predict(x, batch_size=8, verbose=0), x)
        np.testing.assert_array_equal(model.predict_on_batch(x[:1]), x[:1])

    def test_dataset_functions(self):
        """Else who makes each tower's batches does not know how large they are to be."""
        strategy, seen = unequal(3, 1), []

        def make(context):
            seen.append(context)
            rows = context.get_per_replica_batch_size(10)
            return tf.data.Dataset.range(20).shard(2, context.input_pipeline_id).batch(rows)

        options = tf.distribute.InputOptions(
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA)
        made = strategy.distribute_datasets_from_function(make, options)
        self.assertEqual(counts(next(iter(made))), [8, 2])
        self.assertEqual([context.shares for context in seen], [(.75,), (.25,)])
        self.assertEqual([context.rows_of(10) for context in seen], [[8], [2]])

        def make_alone(context):
            self.assertEqual((context.shares, context.rows_of(10)), ((.75, .25), [8, 2]))
            self.assertEqual(context.num_input_pipelines, 1)
            with self.assertRaisesRegex(ValueError, r"\[8, 2\] rows.*rows_of\(10\)"):
                context.get_per_replica_batch_size(10)
            return tf.data.Dataset.from_generator(
                lambda: map(np.ones, context.rows_of(10)), output_signature=tf.TensorSpec([None]))

        made = strategy.distribute_datasets_from_function(make_alone)
        self.assertEqual(counts(next(iter(made))), [8, 2])

    def test_said_in_the_table(self):
        """Else nobody sees which tower gets what."""
        self.assertIn("CPU:1   tower 1            62.5%          0", unequal(3, 5).describe())
        self.assertNotIn("share", towerstrategy.TowerStrategy(["CPU:0"]).describe())


class DevicesTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        cards = [tf.config.LogicalDevice(f"/device:GPU:{index}", "GPU") for index in range(2)]
        cpu = [tf.config.LogicalDevice("/device:CPU:0", "CPU")]
        self.enter_context(mock.patch.object(
            tf.config, "list_logical_devices",
            lambda kind=None: {"GPU": cards, "CPU": cpu}.get(kind, cards + cpu)))

    def test_memory(self):
        """Else a card with half the memory of the other is filled first."""
        with mock.patch.object(_tf, "memory_limits", lambda: {0: 24 * 2**30, 1: 8 * 2**30}):
            placed = devices_lib.place(["GPU:1", "GPU:0"], None, "memory")
            self.assertEqual(rows_lib.units_of(placed.shares), (1, 3))
            with self.assertRaisesRegex(ValueError, "GPUs alone, but the towers are GPU:0, CPU:0"):
                devices_lib.place(["GPU:0", "CPU:0"], None, "memory")

    def test_kinds(self):
        """Else a workstation's CPU cannot help its GPU, or does so with as many rows."""
        placed = devices_lib.place(["GPU:0", "CPU:0"], None, [9, 1])
        self.assertEqual(placed.kinds, {"GPU", "CPU"})
        self.assertFalse(placed.on_cpu)
        self.assertFalse(placed.towers_on_host)
        self.assertFalse(placed.compiles)
        for asked in ([0, "CPU:0"], ["CPU:0", "GPU:1", 0]):
            placed = devices_lib.place(asked, None, "measured")
            self.assertEqual((placed.shares, placed.shares_from),
                             ((1.,) * len(asked), "measured"))
            self.assertEqual(placed.merge, placed.towers[asked.index("CPU:0")])
        self.assertTrue(devices_lib.place(["GPU:0", "CPU:0"], "balanced", [9, 1]).balanced)

    @parameterized.parameters(
        (["GPU:0", "CPU:0"], None, None, r"mixes CPU and GPU.*shares=\[...\]"),
        (["GPU:0", "CPU:0"], None, [9], "a number for each of the 2 towers, but got 1"),
        (["GPU:0", "CPU:0"], None, [9, 0], "above 0 and finite, but got 0 for CPU:0"),
        (["GPU:0", "CPU:1"], None, [9, 1], "'CPU:1'.*which is not there"),
        (["GPU:0", "CPU:0", 0], None, [9, 1, 1], "names GPU:0 twice"),
        (["GPU:0", "CPU:0"], "GPU:7", [9, 1], "merge_device names 'GPU:7'"))
    def test_kinds_refused(self, asked, merge_device, shares, message):
        """Else a slip in a list of unlike devices is found out when a model trains."""
        with self.assertRaisesRegex(ValueError, message):
            devices_lib.place(asked, merge_device, shares)


class KindsTest(parameterized.TestCase):

    @parameterized.parameters((keras, 1), (tf_keras, 3))
    @pytest.mark.wide
    def test_trains_as_one_device(self, kit, steps):
        """Else a GPU and a CPU tower, with parts fetched to each, train something else."""
        x = np.random.RandomState(0).randn(19, 4).astype("f")
        found = []
        for shares in (None, [3, 1]):
            kit.utils.set_random_seed(3)
            with contextlib.ExitStack() as stack:
                if shares:
                    stack.enter_context(mock.patch.object(
                        devices_lib.Placement, "kinds", {"CPU", "GPU"}))
                    strategy = towerstrategy.TowerStrategy(["CPU:2", "CPU:0"], shares=shares)
                    stack.enter_context(strategy.scope())
                model = kit.Sequential([kit.layers.Input([4]), kit.layers.Dense(8, "tanh"),
                                        kit.layers.Dropout(.4), kit.layers.Dense(1)])
                model.compile("adam", "mse", steps_per_execution=steps)
                logs = model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
                found.append([logs.history["loss"], model.predict(x, batch_size=8, verbose=0),
                              *model.get_weights()])
        for one, other in zip(*found):
            np.testing.assert_allclose(other, one, 1e-5, 1e-6)


if __name__ == "__main__":
    absltest.main()
