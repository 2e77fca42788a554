"""reads: one read serves all towers, small ones cross in one piece, and nothing else changes."""

import collections

import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
from towerstrategy.towers import reads

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]


def traced(strategy, fn):
    """The graph in which ``strategy`` has run ``fn``, and what the towers returned."""
    step = tf.function(lambda: strategy.run(fn), autograph=False)
    results = [np.asarray(value) for value in strategy.experimental_local_results(step())]
    graph_def = step.get_concrete_function().graph.as_graph_def()
    functions = {function.signature.name: function for function in graph_def.library.function}
    called = [node.attr["f"].func.name for node in graph_def.node if "f" in node.attr]
    nodes = [node for name in called for node in functions[name].node_def]
    return nodes, results


def context():
    return tf.distribute.get_replica_context()


def kinds(nodes):
    return collections.Counter(node.op for node in nodes)


class ReadsTest(parameterized.TestCase):

    @parameterized.parameters("CPU:0", "CPU:1")
    def test_small_variables_cross_together(self, merge_device):
        """Else a model of many small layers sends each of its variables to each tower by itself."""
        strategy = towerstrategy.TowerStrategy(DEVICES, merge_device)
        with strategy.scope():
            variables = [tf.Variable(tf.fill([2, 3], float(number))) for number in range(5)]
            other = tf.Variable(7.)

        def step():
            number = tf.cast(context().replica_id_in_sync_group, "float32")
            return tf.stack([tf.reduce_sum(variable) for variable in variables]) + other * number

        nodes, results = traced(strategy, step)
        count = kinds(nodes)
        self.assertEqual(count["ReadVariableOp"], 6, "one read of each variable for all towers")
        self.assertEqual(count["Split"], 2, "towers 1 and 2; tower 0 reads, or it is all there")
        split = {node.device[-5:] for node in nodes if node.op == "Split"}
        self.assertEqual(split, {"CPU:2", "CPU:3"})
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result, [7. * number + 6. * each for each in range(5)])

    @parameterized.parameters(1, 2)
    def test_homes_on_several_towers(self, micro_batches):
        """Else what one tower takes apart is put in the place of another's stack."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3", "CPU:4"], "balanced",
                                               micro_batches=micro_batches)
        with strategy.scope():
            variables = [tf.Variable(tf.fill([shape, 3], 1. + shape * number))
                         for number in range(8) for shape in (2, 5)]

        def step():
            number = tf.cast(context().replica_id_in_sync_group, "float32")
            return tf.stack([tf.reduce_mean(variable) for variable in variables]) + number

        nodes, results = traced(strategy, step)
        self.assertGreater(kinds(nodes)["Split"], 3)
        for number, result in enumerate(results):
            np.testing.assert_allclose(
                result, [1. + shape * each + number for each in range(8) for shape in (2, 5)])

    def test_a_fused_layer_normalization(self):
        """Else gamma is taken for beta, too, where the graph optimizer runs, as in predict."""
        def make():
            inputs = tf_keras.Input([4, 6])
            layer = tf_keras.layers.LayerNormalization(gamma_initializer="random_normal",
                                                       beta_initializer="random_normal")
            return tf_keras.Model(inputs, layer(inputs + inputs))

        strategy = towerstrategy.TowerStrategy(DEVICES, "CPU:0")
        with strategy.scope():
            model = make()
            model.compile("sgd", "mse")
        alone = make()
        alone.set_weights(model.get_weights())
        x = np.random.RandomState(0).rand(13, 4, 6).astype("float32")
        np.testing.assert_allclose(model.predict(x, batch_size=6, verbose=0), alone(x),
                                   rtol=1e-5, atol=1e-6)

    @parameterized.parameters(("int64", [2], 1), ("int64", [], 1), ("float16", [2], 1),
                              ("int32", [2], 0), ("uint8", [2], 0), ("bool", [2], 0))
    def test_dtypes(self, dtype, shape, stacks):
        """Else a value is stacked or taken apart on the CPU, as GPUs have no kernel for it."""
        strategy = towerstrategy.TowerStrategy(DEVICES, "CPU:0")
        with strategy.scope():
            variables = [tf.Variable(tf.cast(tf.fill(shape, number), dtype)) for number in (0, 3)]

        def step():
            number = tf.cast(context().replica_id_in_sync_group, "float32")
            return tf.stack([tf.cast(variable, "float32") + number for variable in variables])

        nodes, results = traced(strategy, step)
        count = kinds(nodes)
        own = sum(node.op == "Pack" and node.name.startswith("reads/") for node in nodes)
        self.assertEqual(own, stacks)
        self.assertEqual(count["Split"], 2 * stacks if dtype == "float16" else 0)
        last = 1. if dtype == "bool" else 3.
        values = np.stack([np.full(shape, number) for number in (0., last)])
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result, values + number)

    def test_a_tower_where_the_variable_lives_reads_it(self):
        """Else a GPU that holds the variables copies them once more for its own tower."""
        strategy = towerstrategy.TowerStrategy(DEVICES, "CPU:2")
        with strategy.scope():
            variables = [tf.Variable([1., float(number)]) for number in range(3)]
        nodes, results = traced(strategy, lambda: tf.add_n([each + 0. for each in variables]))
        split = {node.device[-5:] for node in nodes if node.op == "Split"}
        self.assertEqual(split, {"CPU:3"})
        np.testing.assert_array_equal(results, [[3., 3.]] * 3)

    def test_large_variables_cross_by_themselves(self):
        """Else each step copies the weights once more on the merge device."""
        strategy = towerstrategy.TowerStrategy(DEVICES, "CPU:0")
        size = reads.LARGEST_STACKED // 4 + 1
        with strategy.scope():
            variables = [tf.Variable(tf.ones([size])) for _ in range(2)]
        nodes, results = traced(strategy, lambda: tf.add_n([each[:1] for each in variables]))
        self.assertEqual(kinds(nodes)["Split"], 0)
        self.assertEqual(kinds(nodes)["ReadVariableOp"], 2)
        np.testing.assert_array_equal(results, [[2.]] * 3)

    def test_tower_local_variables_are_read_by_each_tower(self):
        """Else all towers add to tower 0's part of a metric."""
        strategy = towerstrategy.TowerStrategy(DEVICES, "CPU:0")
        with strategy.scope():
            local = tf.Variable(0., synchronization=tf.VariableSynchronization.ON_READ,
                                aggregation=tf.VariableAggregation.SUM)
        strategy.run(tf.function(lambda: local.assign_add(1. + tf.cast(
            context().replica_id_in_sync_group, "float32"))))
        _, results = traced(strategy, lambda: local + 0.)
        np.testing.assert_array_equal(results, [1., 2., 3.])

    def test_written_between_reads(self):
        """Else a tower reads the value from before, or after, the write that stands between."""
        strategy = towerstrategy.TowerStrategy(DEVICES, "CPU:0")
        with strategy.scope():
            variables = [tf.Variable(1., aggregation=tf.VariableAggregation.SUM) for _ in range(2)]

        def step():
            before = variables[0] + variables[1]
            for variable in variables:
                variable.assign_add(1.)
            return tf.stack([before, variables[0] + variables[1]])

        _, results = traced(strategy, step)
        np.testing.assert_array_equal(results, [[2., 8.]] * 3)

    def test_written_in_a_branch(self):
        """Else a tower reads what another has written there, or not what it has written itself."""
        def step():
            seen = variable.value()

            def write():
                variable.assign_add(1.)
                return 0.

            return tf.cond(seen > 0., write, lambda: 0.) + variable + 10. * seen

        results = []
        for trace_once in (True, False):
            strategy = towerstrategy.TowerStrategy(DEVICES, "CPU:0")
            strategy.extended.trace_once = trace_once
            with strategy.scope():
                variable = tf.Variable(1.)
            results.append(traced(strategy, step)[1])
        np.testing.assert_array_equal(results, [[12.] * 3] * 2)
