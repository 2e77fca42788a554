"""strategy: the constructor, and the methods that a user calls outside of towers."""

import copy
import inspect
import typing

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide
from peers import mirrored, outcome, per_replica, plain, two_towers

MATRIX = ([[1., 2.], [3., 4.]], [[5., 6.], [7., 9.]])
AXES = (None, 0, 1, -1, 2)


class ConstructorTest(parameterized.TestCase):

    def test_repr(self):
        """Else a log does not say which devices were used."""
        self.assertEqual(repr(two_towers()),
                         "<TowerStrategy 2 towers (CPU:1, CPU:2), merge device CPU:0>")
        self.assertIn("merge device balanced", repr(two_towers("balanced")))
        self.assertEqual(
            repr(towerstrategy.TowerStrategy(["CPU:1"], micro_batches=4, shares=[2])),
            "<TowerStrategy 1 tower of 4 micro-batches (CPU:1), merge device CPU:1, shares 2>")

    @parameterized.parameters(
        (["CPU:1", "CPU:2"], "<TowerStrategy 2 towers of 4 micro-batches (CPU:1, CPU:2), "
         "merge device CPU:0>"),
        ([["CPU:1", "CPU:2"]], "<TowerStrategy 1 tower of 2 stages and 4 micro-batches "
         "([CPU:1, CPU:2]), merge device each stage's>"))
    def test_a_bracket_more(self, devices, wanted):
        """Else who forgot a bracket, or has one too many, finds out from the speed."""
        with self.assertLogs("towerstrategy", "INFO") as logged:
            strategy = towerstrategy.TowerStrategy(devices, micro_batches=4)
        self.assertEqual(repr(strategy), wanted)
        self.assertIn(wanted, logged.output[0])
        self.assertEqual(strategy.devices, devices)

    def test_says_what_it_was_made_with(self):
        """Else a script has to remember what it gave, or read private names."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "CPU:3", micro_batches=2,
                                               shares=[3, 1])
        self.assertEqual((strategy.devices, strategy.num_towers, strategy.merge_device,
                          strategy.micro_batches),
                         (["CPU:1", "CPU:2"], 2, "CPU:3", 2))
        self.assertEqual(strategy.num_replicas_in_sync, 4)
        self.assertIsNone(towerstrategy.TowerStrategy([["CPU:1", "CPU:2"]]).merge_device)

    def test_signatures(self):
        """Else an editor shows private types, or a type checker lets a misspelled choice pass."""
        for function in (towerstrategy.TowerStrategy.__init__, towerstrategy.multi_gpu_model,
                         towerstrategy.split_cpu, towerstrategy.estimate_memory):
            self.assertNotRegex(str(inspect.signature(function)), r"_lib\.|Argument|OneDevice")
        choices = typing.get_args(typing.get_type_hints(
            towerstrategy.TowerStrategy.__init__)["draws"])
        self.assertIn("per_row", choices)
        drawn = [towerstrategy.TowerStrategy(2, draws=choice).extended.draws_rows
                 for choice in choices]
        self.assertEqual(drawn, ["row" in choice for choice in choices])

    def test_public_names(self):
        """Else completion shows forty names that are no one's business."""
        for module in (towerstrategy, towerstrategy.losses, towerstrategy.report,
                       towerstrategy.sharding):
            self.assertEqual(dir(module), sorted(module.__all__))
            for name in dir(module):
                self.assertTrue(hasattr(module, name), name)

    def test_cross_device_ops(self):
        """Else MirroredStrategy's arguments cannot be kept, or a wrong one is taken in silence."""
        towerstrategy.TowerStrategy(
            ["CPU:1"], cross_device_ops=tf.distribute.HierarchicalCopyAllReduce())
        with self.assertRaisesRegex(TypeError, "cross_device_ops must be None or.*got 'nccl'"):
            towerstrategy.TowerStrategy(["CPU:1"], cross_device_ops="nccl")

    def test_graph_mode_is_refused(self):
        """Else a TensorFlow 1 program fails somewhere inside."""
        with tf.Graph().as_default(), self.assertRaisesRegex(RuntimeError, "TensorFlow 2"):
            towerstrategy.TowerStrategy(["CPU:1"])

    def test_deepcopy(self):
        """Else an object that holds a strategy cannot be copied, or the copies share variables."""
        strategy = two_towers()
        with strategy.scope():
            tf.Variable(1.)
        strategy.run(tf.function(lambda: 1))
        strategy.reduce("SUM", per_replica(strategy, [1.], [2.]), axis=0)
        copied = copy.deepcopy(strategy)
        with copied.scope():
            v = tf.Variable(1., aggregation=tf.VariableAggregation.SUM)
        copied.run(lambda: v.assign_add(tf.constant(2.)))
        self.assertEqual(v.numpy(), 5.)
        self.assertIs(v.distribute_strategy, copied)
        self.assertEqual(repr(copied), repr(strategy))
        self.assertLen(list(copied.extended.variables()), 1)
        with self.assertRaisesRegex(RuntimeError, "deepcopy"):
            copy.copy(strategy)


class ReduceTest(parameterized.TestCase):

    @wide.product(2, 4, op=["sum", "MEAN", tf.distribute.ReduceOp.SUM, "other"], axis=AXES,
                           dtype=[tf.float32, tf.int32], in_function=[False, True])
    def test_as_mirrored(self, op, axis, dtype, in_function):
        """Else a loss or a count reduced by a loop is another number."""
        def reduced(strategy):
            value = tf.nest.map_structure(
                lambda part: tf.cast(part, dtype), per_replica(strategy, *MATRIX),
                expand_composites=True)
            def reduce(value):
                return strategy.reduce(op, value, axis=axis)

            return (tf.function(reduce) if in_function else reduce)(value)

        self.assertEqual(outcome(reduced, two_towers()), outcome(reduced, mirrored()))

    @parameterized.product(op=["SUM", "MEAN"], axis=[0, None])
    def test_plain_values(self, op, axis):
        """Else a value that is the same on all replicas is counted wrongly."""
        def reduced(strategy):
            return strategy.reduce(op, tf.constant([3., 4.]), axis=axis)

        self.assertEqual(outcome(reduced, two_towers()), outcome(reduced, mirrored()))

    def test_nests(self):
        """Else a dictionary of losses has to be reduced entry by entry."""
        def reduced(strategy):
            return strategy.reduce("SUM", {"a": per_replica(strategy, 1, 2),
                                           "b": [per_replica(strategy, 3., 4.)]}, axis=None)

        self.assertEqual(plain(reduced(two_towers())), {"a": 3, "b": [7.]})
        self.assertEqual(outcome(reduced, two_towers()), outcome(reduced, mirrored()))

    def test_uneven_rows(self):
        """Else the mean over rows is the mean of means."""
        strategy = two_towers()
        parts = strategy.split(tf.constant([1., 2., 6.]))
        self.assertEqual(plain(strategy.reduce("MEAN", parts, axis=0)), 3.)
        self.assertEqual(plain(strategy.reduce("SUM", parts, axis=0)), 9.)

    def test_slices(self):
        """Else sparse gradients cannot be reduced or gathered."""
        strategy = two_towers()
        slices = strategy.run(lambda: tf.IndexedSlices(
            tf.ones([1, 2]), tf.reshape(
                tf.distribute.get_replica_context().replica_id_in_sync_group, [1]),
            tf.constant([3, 2])))
        reduced = strategy.reduce("MEAN", slices, axis=None)
        self.assertIsInstance(reduced, tf.IndexedSlices)
        self.assertEqual(plain(reduced), [[.5, .5], [.5, .5], [0., 0.]])
        self.assertEqual(plain(strategy.gather(slices, axis=0)), [
            [1., 1.], [0., 0.], [0., 0.], [0., 0.], [1., 1.], [0., 0.]])

    @parameterized.parameters((True, "bool"), ("a", "string"))
    def test_values_without_a_sum(self, value, name):
        """Else the message is about a kernel."""
        strategy = two_towers()
        with self.assertRaisesRegex(TypeError, f"value of tower 0 on CPU:1 is .*{name}"):
            strategy.reduce("SUM", per_replica(strategy, value, value), axis=None)


class GatherTest(parameterized.TestCase):

    @parameterized.product(axis=[0, 1, -1], in_function=[False, True])
    def test_as_mirrored(self, axis, in_function):
        """Else predictions come back in another order."""
        def gathered(strategy):
            def gather(value):
                return strategy.gather(value, axis=axis)

            return (tf.function(gather) if in_function else gather)(per_replica(strategy, *MATRIX))

        results = [outcome(gathered, strategy) for strategy in (two_towers(), mirrored())]
        self.assertEqual(*results)
        self.assertIsInstance(results[0], list)

    def test_uneven_rows_and_dtypes(self):
        """Else predictions for a batch that does not divide cannot be gathered."""
        strategy = two_towers()
        for batch in ([1, 2, 3], [True, False, True], ["a", "b", "c"]):
            parts = strategy.split(tf.constant(batch))
            self.assertEqual(plain(strategy.gather(parts, axis=0)),
                             [plain(value) for value in tf.constant(batch).numpy().tolist()])

    def test_errors_say_what_is_wrong(self):
        """Else a wrong axis or a scalar ends in a message about ConcatV2."""
        strategy = two_towers()
        with self.assertRaisesRegex(ValueError, "axis=2 is out of range.*rank 2"):
            strategy.gather(per_replica(strategy, *MATRIX), axis=2)
        with self.assertRaisesRegex(ValueError, "rank 0 cannot be gathered"):
            strategy.gather(per_replica(strategy, 1., 2.), axis=0)


class ValuesTest(parameterized.TestCase):

    def test_from_function(self):
        """Else each replica's own value (a seed, a sampler) cannot be made."""
        def made(strategy):
            return strategy.experimental_distribute_values_from_function(
                lambda context: {"id": tf.constant(context.replica_id_in_sync_group),
                                 "n": context.num_replicas_in_sync, "none": None})

        self.assertEqual(plain(made(two_towers())), plain(made(mirrored())))

    def test_local_results(self):
        """Else results of a step cannot be looked at replica by replica."""
        def results(strategy):
            return [strategy.experimental_local_results(value) for value in (
                3, per_replica(strategy, 1, 2), {"a": per_replica(strategy, 1, 2), "b": None})]

        self.assertEqual(plain(results(two_towers())), plain(results(mirrored())))

    def test_split(self):
        """Else a batch made by hand cannot be given to ``run``, or its rows get lost."""
        strategy = two_towers()
        batch = {"x": np.arange(6).reshape([3, 2]), "y": (["a", "b", "c"], None)}
        parts = strategy.split({**batch, "y": (tf.constant(batch["y"][0]), None)})
        self.assertEqual(plain(parts), {
            "x": ("per replica", [[[0, 1], [2, 3]], [[4, 5]]]),
            "y": (("per replica", [[b"a", b"b"], [b"c"]]), None)})
        one = towerstrategy.TowerStrategy(["CPU:1"]).split(np.arange(3))
        self.assertEqual(plain(one), [0, 1, 2])

    def test_split_twice(self):
        """Else a batch that is split already is split again."""
        strategy = two_towers()
        with self.assertRaisesRegex(ValueError, "split already"):
            strategy.split(strategy.split(np.arange(3)))


class ScopeTest(parameterized.TestCase):

    def test_get_strategy(self):
        """Else libraries do not find the strategy."""
        strategy = two_towers()
        self.assertFalse(tf.distribute.has_strategy())
        with strategy.scope():
            self.assertTrue(tf.distribute.in_cross_replica_context())
            self.assertIs(tf.distribute.get_strategy(), strategy)
            with strategy.scope():
                self.assertIs(tf.distribute.get_strategy(), strategy)
        strategy.run(lambda: self.assertIs(tf.distribute.get_strategy(), strategy))
        self.assertFalse(tf.distribute.has_strategy())

    def test_set_strategy(self):
        """Else the strategy of a whole program cannot be set."""
        strategy = two_towers()
        tf.distribute.experimental_set_strategy(strategy)
        try:
            self.assertIs(tf.distribute.get_strategy(), strategy)
            self.assertIs(tf.Variable(1.).distribute_strategy, strategy)
        finally:
            tf.distribute.experimental_set_strategy(None)
        self.assertFalse(tf.distribute.has_strategy())

    def test_alternating_strategies(self):
        """Else a second strategy in a process clashes with the first (as MirroredStrategy's do)."""
        strategies = [two_towers(), towerstrategy.TowerStrategy(3), mirrored()]
        steps = []
        for strategy in strategies:
            with strategy.scope():
                v = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)
            steps.append((strategy, tf.function(lambda v=v: v.assign_add(tf.ones([]))), v))
        for _ in range(3):
            for strategy, step, _ in steps:
                strategy.run(step)
        self.assertEqual([plain(v.read_value()) for _, _, v in steps], [6., 9., 6.])


class JitCompileTest(parameterized.TestCase):

    @parameterized.named_parameters(("keras", keras), ("tf_keras", tf_keras))
    def test_one_tower_trains(self, library):
        """Else one tower loses XLA for nothing."""
        with towerstrategy.TowerStrategy(["CPU:0"]).scope():
            model = library.Sequential([library.layers.Input([3]), library.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=True)
        history = model.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0)
        self.assertTrue(np.isfinite(history.history["loss"]).all())
