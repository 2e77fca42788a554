"""XLA on the towers (``jit_compile=True``): the same results, what is compiled and what is not.

Models are tiny: each compilation takes seconds.
"""

import collections
import contextlib
import re
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized
from tensorflow.python.eager import context

import towerstrategy
import wide
from towerstrategy import _tensorflow
from towerstrategy.extras import xla

IN_TURN = wide.turns(("keras", keras), ("tf_keras", tf_keras))
ROWS = np.random.RandomState(0).rand(10, 3).astype("f")
TARGETS = ROWS.sum(1, keepdims=True)


def towers(count=3):
    return towerstrategy.TowerStrategy([f"CPU:{1 + number}" for number in range(count)], "CPU:0")


@contextlib.contextmanager
def marked():
    """Within, the operations of steps that are to be compiled are listed."""
    found = []
    mark = xla._tf.compile_by_xla
    with mock.patch.object(xla._tf, "compile_by_xla", lambda operation, scope: (
            found.append(operation), mark(operation, scope))):
        yield found


def compiled_on(call):
    """The devices on which a call of towers on CPU:1 and on runs what XLA has compiled.

    TensorFlow keeps the graphs of all that the process runs meanwhile, in other threads, too.
    """
    context.enable_run_metadata()
    try:
        call()
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    return {node.device[-5:] for each in graphs
            if any(node.name.startswith("tower_0_CPU_1/")
                   for node in each.pre_optimization_graph.node)
            for graph in each.partition_graphs for node in graph.node if node.op == "_XlaRun"}


def dense(kit, units, activation=None):
    return kit.layers.Dense(units, activation,
                            kernel_initializer=kit.initializers.GlorotUniform(seed=units))


def model_of(kit, layers, strategy, jit_compile, inputs=None):
    kit.utils.set_random_seed(3)
    with strategy.scope() if strategy else tf.device(None):
        model = kit.Sequential([kit.Input([3]) if inputs is None else inputs, *layers()])
        model.compile(kit.optimizers.SGD(.1, .9), "mse", metrics=["mae"], jit_compile=jit_compile)
    return model


def results(model, x=ROWS, batch_size=4):
    """Of training with a remainder of two rows, evaluating and predicting."""
    data = tf.data.Dataset.from_tensor_slices((x, TARGETS)).batch(batch_size)
    history = model.fit(data, epochs=2, verbose=0).history
    return {"logs": [history[name] for name in sorted(history)],
            "evaluated": model.evaluate(data, verbose=0),
            "predicted": model.predict(x, batch_size=batch_size, verbose=0),
            "weights": model.get_weights()}


def assert_same(got, wanted):
    for name in wanted:
        for one, other in zip(tf.nest.flatten(got[name]), tf.nest.flatten(wanted[name])):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)


class MarkTest(parameterized.TestCase):

    def test_sums_are_compiled_with_the_rest(self):
        """Lost otherwise: one stretch for a layer, which Grappler cuts at sums that it rewrites."""
        @tf.function
        def normalized(x, offset):
            scale = tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True)) * offset
            result = tf.exp(tf.tanh(x) * scale + tf.sin(x) * scale + offset)
            for operation in result.graph.get_operations():
                if operation.type not in ("Placeholder", "Const"):
                    _tensorflow.compile_by_xla(operation, "tower_0")
            return result

        context.enable_run_metadata()
        self.addCleanup(context.disable_run_metadata)
        normalized(tf.ones([2, 4, 16]), tf.ones([16]))
        made = [node.op for each in context.export_run_metadata().function_graphs
                for graph in each.partition_graphs for node in graph.node]
        self.assertEqual(made.count("_XlaRun"), 1, made)


class KerasTest(parameterized.TestCase):

    @IN_TURN
    def test_is_as_one_device(self, kit):
        """Lost otherwise: XLA with several devices, or the result of one."""
        def layers():
            return [dense(kit, 4, "tanh"), dense(kit, 5, "tanh"), dense(kit, 1)]

        wanted = results(model_of(kit, layers, None, False))
        model = model_of(kit, layers, towers(), True)
        self.assertEqual(compiled_on(lambda: model.predict_on_batch(ROWS)),
                         {"CPU:1", "CPU:2", "CPU:3"})
        with marked() as operations:
            assert_same(results(model), wanted)
        self.assertContainsSubset({"MatMul", "TanhGrad"}, {one.type for one in operations})

    @wide.some(2, "CPU:1", "balanced")
    def test_stretches_begin_when_their_tower_can(self, merge_device):
        """Lost otherwise: towers at the same time. One that is compiled together with a sum of all
        towers' gradients begins when the others have ended."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], merge_device)
        with strategy.scope():
            model = keras.Sequential([keras.Input([3]), dense(keras, 4, "gelu"), dense(keras, 1)])
            model.compile(keras.optimizers.Nadam(clipnorm=1.), "mse", jit_compile=True)
        with mock.patch.object(xla, "WEIGHTS_PER_FUNCTION", 1), marked() as operations:
            model.train_on_batch(ROWS, TARGETS)
        owners = collections.defaultdict(set)
        for one in operations:
            owners[one.get_attr("_XlaScope")].add(
                (re.search(r"tower_\d_CPU_\d|tower_update", one.name) or "nobody")[0])
        self.assertTrue(all(len(names) == 1 for names in owners.values()), owners)
        self.assertSetEqual(set().union(*owners.values()), {
            "tower_0_CPU_1", "tower_1_CPU_2", "tower_2_CPU_3", "tower_update"})
        self.assertTrue(all(scope.endswith(b" 0") for scope, names in owners.items()
                            if names == {"tower_update"}), "an update has no weights to wait for")

    @pytest.mark.wide
    def test_first_layers_do_not_wait_for_the_last_ones_weights(self):
        """Lost otherwise: weights that cross while a tower computes. One that is compiled as a
        whole begins when the last weight is there."""
        def layers():
            return [*(dense(keras, units, "tanh") for units in (4, 4, 5)), dense(keras, 1)]

        wanted = results(model_of(keras, layers, None, False))
        kernels = 4 * (3 * 4 + 4 * 4 + 4 * 5)  # bytes of the first three
        with mock.patch.object(xla, "WEIGHTS_PER_FUNCTION", kernels), marked() as operations:
            assert_same(results(model_of(keras, layers, towers(2), True)), wanted)
        stretches = collections.defaultdict(list)
        for one in operations:
            if one.type == "MatMul" and "gradient" not in one.name:
                owner, _, stretch = one.get_attr("_XlaScope").decode().split()
                stretches[owner].append(int(stretch))
        self.assertGreater(len(stretches), 1)
        for numbers in stretches.values():
            self.assertSequenceEqual(numbers[:4], [0, 0, 1, 1])

    def test_weights_leave_before_the_forward_pass_begins(self):
        """Lost otherwise: towers at the same time. On GPUs a copy waits for what runs already, so
        that the others would get a tower's weights behind its forward pass."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], "balanced")
        with strategy.scope():
            model = keras.Sequential([keras.Input([3]), *(
                dense(keras, units, "tanh") for units in (16, 17, 18)), dense(keras, 1)])
            model.compile("sgd", "mse", jit_compile=True)
        with marked() as operations:
            model.train_on_batch(ROWS, TARGETS)
        first = {}
        for one in operations:
            first.setdefault(one.get_attr("_XlaScope"), one)
        for number, name in enumerate(("tower_0_CPU_1", "tower_1_CPU_2")):
            one, = (one for scope, one in first.items() if scope.decode().startswith(name))
            gate, = one.control_inputs
            sent = [each for each in gate.control_inputs if any(
                consumer.device[-5:] == f"CPU:{2 - number}"
                for tensor in each.outputs for consumer in tensor.consumers())]
            self.assertNotEmpty(sent)
            self.assertLen(sent, len(gate.control_inputs))

    @wide.parameters(wide=[
        (keras, ["CPU:1", "CPU:2"], 2), (tf_keras, [["CPU:1", "CPU:2"], ["CPU:3", "CPU:4"]], 1),
        (tf_keras, ["CPU:0"], 3), (keras, [["CPU:1", "CPU:2"]], 3)])
    def test_micro_batches_and_stages(self, kit, devices, micro_batches):
        """Lost otherwise: XLA for models that need less memory; or micro-batches as one stretch,
        which take the memory that they were to save."""
        def layers():
            return [dense(kit, 4, "tanh"), kit.layers.Dropout(.2, seed=2), dense(kit, 3, "tanh"),
                    dense(kit, 1)]

        wanted = results(model_of(kit, layers, None, False))
        strategy = towerstrategy.TowerStrategy(devices, micro_batches=micro_batches)
        with marked() as operations:
            assert_same(results(model_of(kit, layers, strategy, True)), wanted)
        towers = {one.get_attr("_XlaScope").decode().partition(" ")[0] for one in operations}
        self.assertLen(towers - {"tower_update"}, len(strategy.extended.worker_devices))

    @IN_TURN
    @pytest.mark.wide
    def test_dropout_draws_what_it_draws_without(self, kit):
        """Lost otherwise: a run that can be compared with one without XLA."""
        def layers():
            return [kit.layers.Dropout(.5, seed=1), dense(kit, 1)]

        plain, model = (model_of(kit, layers, towers(2), jit) for jit in (False, True))
        for _ in range(2):
            np.testing.assert_allclose(model.train_on_batch(ROWS, TARGETS),
                                       plain.train_on_batch(ROWS, TARGETS), rtol=1e-5)

    @IN_TURN
    @pytest.mark.wide
    def test_one_tower_away_from_the_default_device(self, kit):
        """Lost otherwise: XLA on the second device, or with the weights elsewhere."""
        def layers():
            return [dense(kit, 4, "tanh"), dense(kit, 1)]

        single = model_of(kit, layers, None, False)
        with marked() as operations:
            model = model_of(kit, layers, towers(1), True)
            for _ in range(2):
                np.testing.assert_allclose(model.train_on_batch(ROWS, TARGETS),
                                           single.train_on_batch(ROWS, TARGETS), rtol=1e-5)
        assert_same({"weights": model.get_weights()}, {"weights": single.get_weights()})
        self.assertEqual({one.device[-5:] for one in operations}, {"CPU:1"})

    @IN_TURN
    @pytest.mark.wide
    def test_what_xla_does_not_have_stays_outside(self, kit):
        """Lost otherwise: a model with one layer that XLA cannot compile, or word of it."""
        class Host(kit.layers.Layer):
            def call(self, x):
                return x + tf.strings.to_number(tf.strings.as_string(tf.ones_like(x)))

        def layers():
            return [dense(kit, 3), Host(), dense(kit, 1)]

        wanted = results(model_of(kit, layers, None, False))
        with self.assertLogs("towerstrategy", "INFO") as logs:
            assert_same(results(model_of(kit, layers, towers(2), True)), wanted)
        self.assertRegex("\n".join(logs.output), "AsString .*host.*XLA does not have it")


class FunctionTest(parameterized.TestCase):

    def results(self, function):
        """What two steps return that call compiled functions, and the weights; and the step."""
        kernel, steps = tf.Variable(tf.ones([3, 4])), tf.Variable(0.)

        @tf.function(jit_compile=True)
        def hidden(x):
            return tf.tanh(x @ kernel)

        @tf.function(jit_compile=True)
        def counted(x):
            steps.assign_add(1.)
            return x * steps

        @function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(hidden(x) ** 2)
            kernel.assign_sub(tape.gradient(loss, kernel))
            return loss, hidden(x), counted(x)

        return step, lambda x: [*step(x), *step(x), kernel, steps]

    def test_that_a_step_calls(self):
        """Lost otherwise: the user's XLA in a step, which cannot read a weight of another device;
        and what TensorFlow has no kernel for, such as Keras' Conv3D with groups."""
        strategy = towers(3)
        with strategy.scope():
            step, results = self.results(strategy.function)
        for one, other in zip(self.results(tf.function)[1](ROWS), results(strategy.split(ROWS))):
            np.testing.assert_allclose(other, one, rtol=1e-5)
        graph = step.get_concrete_function(strategy.split(ROWS)).graph.as_graph_def()
        nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
        compiled = collections.Counter(
            node.device[-5:] for node in nodes if node.attr["_XlaMustCompile"].b)
        self.assertEqual(compiled, dict.fromkeys(["CPU:1", "CPU:2", "CPU:3"], 3))


class RunTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.strategy = towers(3)
        with self.strategy.scope():
            self.kernel = tf.Variable(tf.ones([3, 4]))
            self.seen = tf.Variable(0., trainable=False, aggregation=tf.VariableAggregation.SUM,
                                    synchronization=tf.VariableSynchronization.ON_READ)

    def gradient(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ self.kernel) ** 2)
        self.seen.assign_add(loss)
        gradient = tape.gradient(loss, self.kernel)
        total = tf.distribute.get_replica_context().all_reduce("sum", gradient)
        return tf.reduce_sum(total * total) + 0 * tf.reduce_sum(x)

    @parameterized.named_parameters(("eagerly", False), ("in a function", True))
    def test_function_given_to_run(self, in_function):
        """Lost otherwise: XLA in loops of one's own."""
        fn = tf.function(self.gradient, jit_compile=True)

        def run(x):
            return self.strategy.run(fn, (x,))

        x = self.strategy.split(tf.constant(ROWS))
        with marked() as found:
            got = (tf.function(run) if in_function else run)(x)
        kernel = tf.Variable(tf.ones([3, 4]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(ROWS @ kernel) ** 2)
        wanted = tf.reduce_sum(tape.gradient(loss, kernel) ** 2)
        for value in self.strategy.experimental_local_results(got):
            np.testing.assert_allclose(value, wanted, rtol=1e-5)
        np.testing.assert_allclose(self.seen.read_value(), loss, rtol=1e-5)
        self.assertIn("Tanh", {operation.type for operation in found})
        self.assertGreaterEqual(len({operation.device for operation in found}), 3)

    @pytest.mark.wide
    def test_loops_read_trained_variables(self):
        """Lost otherwise: what recurrent layers do is left out of what is compiled."""
        def work(x):
            with tf.GradientTape() as tape:
                y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (
                    i + 1, tf.tanh(y @ self.kernel @ tf.transpose(self.kernel))), (0, x),
                    maximum_iterations=3)[1]
                loss = tf.reduce_sum(y)
            return tape.gradient(loss, self.kernel)

        x = self.strategy.split(tf.constant(ROWS[:9] - .5))
        got = self.strategy.run(tf.function(work, jit_compile=True), (x,))
        for value, rows in zip(self.strategy.experimental_local_results(got), x.values):
            np.testing.assert_allclose(value, work(rows), rtol=1e-4, atol=1e-6)

    @pytest.mark.wide
    def test_gradient_from_outside(self):
        """Lost otherwise: a tape around strategy.run."""
        work = tf.function(lambda x: tf.reduce_sum(tf.tanh(x @ self.kernel) ** 2),
                           jit_compile=True)

        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = self.strategy.reduce("sum", self.strategy.run(work, (x,)), axis=None)
            return tape.gradient(loss, self.kernel)

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(ROWS @ self.kernel) ** 2)
        np.testing.assert_allclose(step(self.strategy.split(tf.constant(ROWS))),
                                   tape.gradient(loss, self.kernel), rtol=1e-4)

    def test_run_inside_of_a_compiled_function_is_refused(self):
        """Lost otherwise: what to compile, before XLA dies of the other devices."""
        @tf.function(jit_compile=True)
        def step():
            return self.strategy.run(lambda: tf.ones([]))

        with self.assertRaisesRegex(ValueError, "inside of a function made with .*jit_compile"):
            step()
