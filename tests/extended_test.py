"""extended: tf.distribute's extension points, as libraries call them."""

import collections
import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
from peers import mirrored, outcome, per_replica, plain, two_towers

Sync = tf.VariableSynchronization
Aggregation = tf.VariableAggregation


def made(strategy, value=1., **kwargs):
    with strategy.scope():
        return tf.Variable(value, **kwargs)


def first(strategy, value):
    """The first local result, plain: MirroredStrategy has one a replica where we have one."""
    return plain(strategy.experimental_local_results(value)[0])


def context():
    return tf.distribute.get_replica_context()


def update(strategy, **kwargs):
    v = made(strategy)
    strategy.extended.update(v, lambda part, x: part.assign_add(x), args=(2.,), **kwargs)
    return plain(v.read_value())


def update_in_merge_call(strategy):
    v = made(strategy)

    def merged(strategy, x):
        x = strategy.extended.reduce_to("SUM", x, destinations=v)
        strategy.extended.update(v, lambda part, x: part.assign_add(x), args=(x,))

    def replica():
        context().merge_call(
            merged, args=(tf.cast(context().replica_id_in_sync_group, tf.float32) + 1.,))

    tf.function(lambda: strategy.run(replica))()
    return plain(v.read_value())


def update_in_replica(strategy):
    v = made(strategy)
    strategy.run(lambda: strategy.extended.update(v, lambda part: part.assign_add(5.)))
    return plain(v.read_value())


def update_tower_local(strategy):
    v = made(strategy, synchronization=Sync.ON_READ, aggregation=Aggregation.SUM)
    strategy.extended.update(v, lambda part, x: part.assign(x), args=(per_replica(
        strategy, 3., 5.),))
    return plain(v.read_value())


def update_non_slot(strategy):
    devices = strategy.extended.non_slot_devices([made(strategy)])
    updated = strategy.extended.update_non_slot(devices, lambda x: x + 1., (tf.constant(2.),))
    return first(strategy, updated)


CALLS = {
    "update": update,
    "update_ungrouped": lambda strategy: update(strategy, group=False),
    "update_in_merge_call": update_in_merge_call,
    "update_in_replica": update_in_replica,
    "update_tower_local": update_tower_local,
    "update_non_slot": update_non_slot,
    "reduce_to_variable": lambda strategy: first(strategy, strategy.extended.reduce_to(
        "SUM", per_replica(strategy, 1., 2.), made(strategy))),
    "reduce_to_device": lambda strategy: plain(strategy.extended.reduce_to(
        tf.distribute.ReduceOp.MEAN, per_replica(strategy, 1., 2.), "/device:CPU:3")),
    "reduce_to_value": lambda strategy: plain(strategy.extended.reduce_to(
        "SUM", per_replica(strategy, 1., 2.), per_replica(strategy, 1., 2.))),
    "reduce_to_list": lambda strategy: strategy.extended.reduce_to(
        "SUM", per_replica(strategy, 1., 2.), ["/device:CPU:3"]),
    "reduce_plain_mean": lambda strategy: plain(
        strategy.extended.reduce_to("MEAN", 3., "/device:CPU:1")),
    "reduce_plain_sum": lambda strategy: strategy.extended.reduce_to("SUM", 3., "/device:CPU:1"),
    "batch_reduce_to": lambda strategy: [
        first(strategy, value) for value in strategy.extended.batch_reduce_to("SUM", [
            (per_replica(strategy, 1., 2.), made(strategy)),
            (per_replica(strategy, [3.], [4.]), made(strategy))])],
    "broadcast_to_variable": lambda strategy: first(
        strategy, strategy.extended.broadcast_to(tf.constant(2.), made(strategy))),
    "broadcast_to_device": lambda strategy: plain(
        strategy.extended.broadcast_to(tf.constant(2.), "/device:CPU:1")),
    "broadcast_number": lambda strategy: strategy.extended.broadcast_to(2., "/device:CPU:1"),
    "call_for_each_replica": lambda strategy: plain(strategy.extended.call_for_each_replica(
        lambda x, k: x + k, args=(per_replica(strategy, 1., 2.),), kwargs={"k": 1.})),
    "call_for_each_replica_in_replica": lambda strategy: strategy.run(
        lambda: strategy.extended.call_for_each_replica(lambda: 1)),
    "value_container": lambda strategy: [
        strategy.extended.value_container(part) is v
        for v in (made(strategy), made(strategy, synchronization=Sync.ON_READ,
                                       aggregation=Aggregation.SUM))
        for part in strategy.experimental_local_results(v)[:1]],
    "value_container_of_value": lambda strategy: strategy.extended.value_container(3),
    "read_var": lambda strategy: plain(strategy.extended.read_var(made(strategy, 4.))),
    "read_var_tower_local": lambda strategy: plain(strategy.extended.read_var(made(
        strategy, 4., synchronization=Sync.ON_READ, aggregation=Aggregation.SUM))),
    "reduce_variable": lambda strategy: plain(strategy.reduce("MEAN", made(strategy), axis=None)),
    "reduce_tower_local": lambda strategy: plain(strategy.reduce("SUM", made(
        strategy, 4., synchronization=Sync.ON_READ, aggregation=Aggregation.SUM), axis=None)),
    "created_in_scope": lambda strategy: [
        strategy.extended.variable_created_in_scope(v)
        for v in (made(strategy), tf.Variable(1.), made(towerstrategy.TowerStrategy(["CPU:1"])))],
    "kind": lambda strategy: (
        strategy.extended.experimental_require_static_shapes,
        strategy.extended._global_batch_size, strategy.extended.experimental_between_graph,
        strategy.extended.should_checkpoint, strategy.extended.should_save_summary,
        strategy.extended.experimental_should_init, strategy.extended._in_multi_worker_mode()),
    "worker_devices": lambda strategy: strategy.extended.worker_devices,
}


class AsMirroredTest(parameterized.TestCase):

    @parameterized.parameters(*CALLS)
    def test_call(self, name):
        """Else a library that uses this extension point does something else."""
        self.assertEqual(*(outcome(CALLS[name], strategy)
                           for strategy in (two_towers(), mirrored())))


class DevicesTest(parameterized.TestCase):

    def test_parameter_devices(self):
        """Else a library puts state on towers and not where the variables are."""
        for merge_device, wanted in (("CPU:0", ["CPU:0"]), ("balanced", ["CPU:1", "CPU:2"])):
            extended = two_towers(merge_device).extended
            self.assertEqual([device[-5:] for device in extended.parameter_devices], wanted)
            self.assertEqual([device[-5:] for device in extended.non_slot_devices([])], ["CPU:0"])

    @parameterized.parameters("CPU:0", "CPU:1")
    def test_merges_on_the_merge_device(self, merge_device):
        """Else tower 0 does the merging whatever the user chose."""
        strategy = two_towers(merge_device)
        v = made(strategy)
        summed = strategy.extended.reduce_to("SUM", per_replica(strategy, 1., 2.), v)
        self.assertEqual(summed.device[-5:], merge_device)
        places = strategy.extended.update(
            v, lambda part: tf.constant(tf.zeros([]).device), group=False)
        self.assertEqual([plain(place)[-5:] for place in places], [merge_device.encode()])

    def test_reduce_to_many_devices(self):
        """Else a value for each tower is made on one of them."""
        strategy = two_towers()
        value = per_replica(strategy, 1., 2.)
        with tf.device("CPU:1"):
            one = tf.identity(1.)
        with tf.device("CPU:2"):
            two = tf.identity(2.)
        value = strategy.experimental_distribute_values_from_function(
            lambda context: [one, two][context.replica_id_in_sync_group])
        summed = strategy.extended.reduce_to("SUM", value, value)
        self.assertEqual([(plain(part), part.device[-5:]) for part in summed.values],
                         [(3., "CPU:1"), (3., "CPU:2")])

    def test_arrays(self):
        """Else who makes the towers' values with numpy, as with MirroredStrategy, is refused."""
        strategy = two_towers()
        made = strategy.experimental_distribute_values_from_function(
            lambda context: np.array([1., 2.]) * context.replica_id_in_sync_group)
        for value in (made, strategy.run(lambda part: part, (made,))):
            self.assertEqual(plain(strategy.reduce("SUM", value, axis=None)), [1., 2.])
            self.assertEqual(plain(strategy.reduce("MEAN", value, axis=0)), 0.75)
            self.assertEqual(plain(strategy.gather(value, axis=0)), [0., 0., 1., 2.])
        with self.assertRaisesRegex(TypeError, "value of tower 0 on CPU:1 is <ndarray of"):
            strategy.reduce("SUM", strategy.experimental_distribute_values_from_function(
                lambda context: np.array([str(context.replica_id_in_sync_group)])), axis=None)

    def test_run_steps_on_iterator(self):
        """Else the error of a program of the first API does not say what to write instead."""
        strategy = two_towers()
        with self.assertRaisesRegex(NotImplementedError, "call strategy.run in a loop"):
            strategy.extended.experimental_run_steps_on_iterator(
                lambda context, x: x, iter(()), iterations=2)

    def test_update_with_values_that_differ(self):
        """Else one tower's value is written and the others' are lost in silence."""
        strategy = two_towers()
        v = made(strategy)
        with self.assertRaisesRegex(ValueError, "(?s)differs between the towers.*Reduce it first"):
            strategy.extended.update(v, lambda part, x: part.assign(x),
                                     args=(per_replica(strategy, 1., 2.),))


class GraphOptimizerTest(parameterized.TestCase):

    def run_operations(self, strategy):
        """The operations of a step as TensorFlow runs it, by type."""
        def chain(x):
            for _ in range(20):
                x = tf.identity(x) * tf.exp(tf.constant(2.))
            return x

        with strategy.scope():
            model = keras.Sequential([keras.Input([2]), keras.layers.Lambda(chain)])
            model.compile("sgd", "mse")
        with tempfile.TemporaryDirectory() as folder:
            with tf.summary.create_file_writer(folder).as_default(step=0):
                tf.summary.trace_on(graph=True)
                model.evaluate(np.ones([4, 2]), np.ones([4, 2]), verbose=0)
                tf.summary.trace_export("step")
            [path] = tf.io.gfile.glob(f"{folder}/*")
            runs = [tf.compat.v1.RunMetadata.FromString(value.tensor.string_val[0])
                    for event in tf.compat.v1.train.summary_iterator(path)
                    for value in event.summary.value]
        return collections.Counter(node.op for run in runs for function in run.function_graphs
                                   for graph in function.partition_graphs for node in graph.node)

    def test_identities_are_not_run(self):
        """Else thousands of operations of a large model's step do nothing, on towers of CPUs."""
        counts = self.run_operations(two_towers())
        self.assertGreater(counts["Exp"], 0)
        self.assertLess(counts["Identity"], 40)
