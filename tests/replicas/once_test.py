"""once and replica: one trace gives what tracing every tower gives, or steps aside."""

import gc
import weakref

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]
ROWS = tf.reshape(tf.range(12.), [6, 2])


def context():
    return tf.distribute.get_replica_context()


def strategy_with(trace_once):
    strategy = towerstrategy.TowerStrategy(DEVICES, merge_device="CPU:0")
    strategy.extended.trace_once = trace_once
    return strategy


def results_of(strategy, fn, batch=ROWS):
    """What ``fn`` returns on every tower, run in a tf.function on a split batch."""
    parts = strategy.split(batch)
    result = tf.function(lambda: strategy.run(fn, (parts,)), autograph=False)()
    return tf.nest.map_structure(
        lambda leaf: [np.asarray(value) for value in strategy.experimental_local_results(leaf)],
        result)


def with_nested_function(x):
    doubled = tf.function(lambda: x * 2. + tf.cast(context().replica_id_in_sync_group, tf.float32))
    return doubled()


def in_branch(fn):
    """``fn`` in a branch that each tower takes by itself, and the other one does not."""
    return lambda x: tf.cond(tf.reduce_sum(x) < 1e9, lambda: fn(x), lambda: 2. * fn(x))


def in_loop(fn):
    """``fn`` in a loop of one iteration."""
    return lambda x: tf.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, fn(x)), (0, fn(x)))[1]


def with_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(context().all_reduce("SUM", x * x))
    return y, tape.gradient(y, x)


def with_gradient_of_a_loop(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * tf.reduce_mean(x)),
                             (0, tf.reduce_sum(x)))
    total = context().all_reduce("SUM", y)  # the loop gets outputs behind it
    return total, tape.gradient(y, x)


def with_branch(x):
    number = tf.cast(context().replica_id_in_sync_group, tf.float32)
    return tf.cond(number > 1., lambda: x + number, lambda: x - number)


def with_loop(x):
    steps = context().replica_id_in_sync_group + 1
    return tf.while_loop(lambda i, y: i < steps, lambda i, y: (i + 1, y * 2.), (0, x))


def with_control(x):
    with tf.control_dependencies([tf.debugging.check_numerics(x, "x")]):
        total = context().all_reduce("SUM", x)
    with tf.control_dependencies([total]):
        return tf.identity(x) + 1.


def needed_later(x):
    doubled = x * 2.  # nothing needs it when the towers meet
    total = context().all_reduce("SUM", x)
    return doubled + total


FUNCTIONS = {
    "plain": lambda x: {"sum": tf.reduce_sum(x), "same": 3, "none": None},
    "number": lambda x: x + tf.cast(context().replica_id_in_sync_group, tf.float32),
    "all_reduce": lambda x: context().all_reduce("SUM", x) + x,
    "mean": lambda x: context().all_reduce("MEAN", [x, tf.reduce_sum(x)]),
    "all_gather": lambda x: context().all_gather(x, 0),
    "gradient": with_gradient,
    "gradient_of_a_loop": with_gradient_of_a_loop,
    "branch": with_branch,
    "loop": with_loop,
    "nested_function": with_nested_function,
    "needed_later": needed_later,
    "repeated": lambda x: tf.concat([tf.exp(x), context().all_reduce("SUM", x), tf.exp(x)], 0),
    "share": lambda x: tf.cast(context().share, tf.float32) * x,
    "control": with_control,
    "py_function": lambda x: tf.py_function(
        lambda own, total: own * 2. + total.numpy(), [x, context().all_reduce("SUM", x)],
        tf.float32),
    "slices": lambda x: context().all_reduce(
        "SUM", tf.IndexedSlices(x, tf.range(2), tf.constant([2, 2]))).values,
}


class OpenRowsTest(parameterized.TestCase):
    """Batches of one size that the towers cannot share evenly."""

    def test_ragged_and_sparse_batches(self):
        """Else one of them is traced for every tower, or has tower 0's rows on all."""
        strategy = strategy_with(True)
        ragged = tf.RaggedTensor.from_row_lengths(tf.range(10.), [1, 2, 3, 0, 2, 1, 1])
        batch = {"ragged": ragged, "sparse": ragged.to_sparse()}
        found = results_of(strategy, lambda x: (
            tf.reduce_sum(x["ragged"], 1), x["ragged"].nrows(),
            tf.sparse.reduce_sum(x["sparse"], 1), tf.shape(x["sparse"])), batch)
        sums = [[0., 3., 12.], [0., 13.], [8., 9.]]
        for own, wanted in zip(found, (sums, [3, 2, 2], sums, [[3, 3], [2, 3], [2, 3]])):
            for tower in range(3):
                np.testing.assert_array_equal(own[tower], wanted[tower])
        self.assertEmpty(strategy.extended.own_trace_reasons)

    def test_an_error_of_ones_own_stays_that(self):
        """Else it is told as one of tracing, and not of the tower that has it."""
        def fn(x):
            raise KeyError(f"no {x.dtype.name}")

        with self.assertRaisesRegex(KeyError, "no float32") as caught:
            results_of(strategy_with(True), fn, tf.range(7.))
        self.assertIn("tower 0", "".join(getattr(caught.exception, "__notes__", ["tower 0"])))


class SameResultsTest(parameterized.TestCase):

    @wide.some(2, *FUNCTIONS)
    def test_as_tracing_every_tower(self, name):
        """Else a result depends on how the step was traced, which nobody can see."""
        copied = strategy_with(True)
        wanted = results_of(strategy_with(False), FUNCTIONS[name])
        tf.nest.map_structure(np.testing.assert_array_equal, results_of(copied, FUNCTIONS[name]),
                              wanted)
        self.assertEmpty(copied.extended.own_trace_reasons)

    def test_is_traced_again_as_a_whole(self):
        """Else what counts its traces (a layer's seed, Nadam's rates) is another than one's."""
        def traces(run):
            seen, made = [], {}

            def first(x):
                seen.append("first")
                if not made:
                    made["it"] = tf.Variable(tf.ones([2]) * 3., trainable=False)
                return x * made["it"][0]

            def second(x):
                seen.append("second")
                return x + made["it"][1]

            found = tf.function(lambda: run(second, run(first, None)), autograph=False)()
            return seen, found

        strategy = strategy_with(True)
        parts = strategy.split(ROWS)
        seen, found = traces(lambda fn, given: strategy.run(
            fn, (parts if given is None else given,)))
        wanted, value = traces(lambda fn, given: fn(ROWS if given is None else given))
        self.assertEqual(seen, wanted)
        np.testing.assert_allclose(tf.concat(strategy.experimental_local_results(found), 0), value)

    def test_what_nothing_needs_is_not_copied(self):
        """Else every tower pays for operations that have no effect."""
        def fn(x):
            tf.exp(x, name="useless")
            return tf.identity(x, name="useful")

        strategy = strategy_with(True)
        parts = strategy.split(ROWS)
        step = tf.function(lambda: strategy.run(fn, (parts,)), autograph=False)
        library = step.get_concrete_function().graph.as_graph_def().library.function
        names = [node.name for function in library for node in function.node_def]
        self.assertLen([name for name in names if "useful" in name], 3)
        self.assertLessEqual(len([name for name in names if "useless" in name]), 1)

    def test_constants_are_copied_once(self):
        """Else start-up pays on each tower for every constant that a step holds many times."""
        def fn(x):
            return x * tf.constant(2., name="same") + tf.constant(2., name="same")

        strategy = strategy_with(True)
        parts = strategy.split(ROWS)
        step = tf.function(lambda: strategy.run(fn, (parts,)), autograph=False)
        library = step.get_concrete_function().graph.as_graph_def().library.function
        names = [node.name for function in library for node in function.node_def]
        for tower, count in enumerate([1, 1, 1]):
            self.assertLen([name for name in names if f"tower_{tower}" in name
                            and name.split("/")[-1].startswith("same")], count)

    def test_the_trace_is_freed(self):
        """Else each traced step holds as much memory in Python as it takes to run."""
        graphs = []

        def fn(x):
            graphs.append(weakref.ref(x.graph))
            return tf.reduce_sum(x)

        strategy = strategy_with(True)
        parts = strategy.split(ROWS)
        step = tf.function(lambda: strategy.run(fn, (parts,)), autograph=False)
        step()
        gc.collect()
        self.assertIsNone(graphs[-1]())
        np.testing.assert_array_equal(strategy.experimental_local_results(step()), [6., 22., 38.])

    def test_gradients_of_a_call(self):
        """Else ``tf.gradients`` through ``strategy.run`` fails, which works on one device."""
        strategy = strategy_with(True)
        with strategy.scope():
            variable = tf.Variable([[2.], [3.]])

        @tf.function
        def gradients():
            def loss(x):
                return tf.reduce_sum(tf.tanh(tf.matmul(x, variable)) ** 2)

            rows = ROWS / 10.
            per_tower = strategy.run(loss, (strategy.split(rows),))
            return [tf.gradients(whole, [variable.handle, rows])
                    for whole in (strategy.reduce("SUM", per_tower, axis=None), loss(rows))]

        towers, device = gradients()
        tf.nest.map_structure(lambda one, other: np.testing.assert_allclose(one, other, 1e-5),
                              towers, device)

    @parameterized.product(mode=["SUM", "MEAN", "NONE", "ONLY_FIRST_REPLICA"],
                           local=[False, True])
    def test_variables(self, mode, local):
        """Else a weight or a metric is written once too often, or to another tower's part."""
        values = []
        for trace_once in (True, False):
            strategy = strategy_with(trace_once)
            with strategy.scope():
                variable = tf.Variable(
                    [1., 2.], aggregation=tf.VariableAggregation[mode],
                    synchronization=tf.VariableSynchronization.ON_READ if local
                    else tf.VariableSynchronization.AUTO)

            def write(x, variable=variable):
                variable.assign_add(tf.reduce_sum(x, 0))
                return variable.read_value()

            # A captured tensor of few elements would be a constant, which looks alike on all.
            rows = tf.reshape(tf.range(600.), [300, 2])
            read = results_of(strategy, write, rows)
            parts = variable.values if local else [variable]
            values.append((read, [part.numpy() for part in parts]))
        tf.nest.map_structure(np.testing.assert_array_equal, values[0], values[1])

    def test_one_trace(self):
        """Else start-up grows with the towers."""
        calls = []

        def fn(x):
            calls.append(1)
            return context().all_reduce("SUM", x)

        results_of(strategy_with(True), fn)
        self.assertLen(calls, 1)

    def test_gradient_from_outside(self):
        """Else a tape around strategy.run misses all towers but the first."""
        strategy = strategy_with(True)
        parts = strategy.split(ROWS)

        @tf.function(autograph=False)
        def outer():
            weight = tf.constant(2.)
            with tf.GradientTape() as tape:
                tape.watch(weight)
                losses = strategy.run(lambda x: tf.reduce_sum(x * weight), (parts,))
                loss = strategy.reduce("SUM", losses, axis=None)
            return tape.gradient(loss, weight)

        self.assertEqual(float(outer()), 66.)


def descending(strategy, start):
    """A variable, and an optimizer that takes its gradients off."""
    with strategy.scope():
        weight, optimizer = tf.Variable(start), keras.optimizers.SGD(1.)
        optimizer.build([weight])
    return weight, optimizer


class TotalsTest(parameterized.TestCase):

    @parameterized.product(rows=(2, 5), nested=(lambda fn: fn, tf.function))
    def test_rows_cross_in_place_of_gradients(self, rows, nested):
        """Else all towers make the gradient of each wide weight, and all of these cross."""
        strategy = strategy_with(True)
        strategy.extended.keep_graphs = True
        start, x = np.ones([300, 310], "f") / 300, np.random.rand(rows, 300).astype("f")
        weight, optimizer = descending(strategy, start)

        @nested
        def gradient(x):
            with tf.GradientTape() as tape:  # of no rows the loss, and so the gradient, is NaN
                loss = strategy.scale_loss(tf.reduce_mean((x @ weight)[:, :7] ** 2))
            return tape.gradient(loss, weight)

        def step(x):
            optimizer.apply_gradients([(gradient(x), weight)])

        loop = tf.function(lambda x: strategy.run(step, (x,)))
        batch, = strategy.split((x,))
        loop(batch)
        moved = np.zeros_like(start)
        moved[:, :7] = x.T @ (x @ start)[:, :7] * 2 / (rows * 7)
        np.testing.assert_allclose(weight.numpy(), start - moved, atol=1e-6)
        made = [each for each in loop.get_concrete_function(batch).graph.get_operations()
                if each.outputs and each.outputs[0].shape == start.shape]
        self.assertLen([each for each in made if each.type == "MatMul"], 1)
        self.assertEmpty([each for each in made if each.type in ("AddN", "SelectV2")])

    def test_what_a_tower_without_rows_has_in_place_of_rows_does_not_cross(self):
        """Else a weight is NaN after a last batch of a few rows: of none, a mean is NaN."""
        strategy = strategy_with(True)
        start, x = np.ones([300, 310], "f") / 300, np.random.rand(2, 5, 300).astype("f")
        weight, optimizer = descending(strategy, start)
        with strategy.scope():
            steps = tf.Variable(5, trainable=False)

        def step(x):
            with tf.GradientTape() as tape:  # steps in the place where rows are elsewhere
                means = tf.nn.relu(tf.reduce_mean(x[:, :steps], 0))
                loss = tf.reduce_sum((means @ weight)[:, :7] ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

        with self.assertWarns(towerstrategy.TowerWarning):
            tf.function(lambda x: strategy.run(step, (x,)))(strategy.split(x))
        moved = np.zeros_like(start)
        moved[:, :7] = sum(row.T @ (row @ start)[:, :7] * 2 for row in x)
        np.testing.assert_allclose(weight.numpy(), start - moved, rtol=1e-4, atol=1e-6)

    @wide.some(3, lambda fn: fn, tf.function, in_branch, in_loop)
    def test_convolutions_on_a_tower_without_rows(self, nested):
        """Else oneDNN's kernels fail, or return wrong shapes, for a last batch of a few rows."""
        strategy, start = strategy_with(True), np.random.rand(3, 3, 2, 4).astype("f")
        weight, optimizer = descending(strategy, start)

        def gradient(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layers(x))
            return tape.gradient(loss, weight)

        @nested
        def layers(x):
            y = tf.nn.bias_add(tf.nn.conv2d(x, weight, 1, "VALID"), tf.ones([4]))
            return tf.reduce_mean(tf.nn.max_pool2d(tf.nn.relu(y), 2, 2, "VALID"), [1, 2, 3])

        @tf.function(reduce_retracing=True)
        def loop(x):
            strategy.run(lambda x: optimizer.apply_gradients([(gradient(x), weight)]), (x,))

        for rows in (2, 6, 5, 1):  # known while tracing, and open
            x = np.random.rand(rows, 6, 6, 2).astype("f")
            wanted = weight.numpy() - gradient(x).numpy()
            loop(strategy.split(x))
            np.testing.assert_allclose(weight.numpy(), wanted, atol=1e-5)
        self.assertEmpty(strategy.extended.own_trace_reasons)

    @parameterized.parameters(tf.function, in_branch, in_loop)
    def test_what_nested_functions_draw(self, nested):
        """Else each tower is traced, for minutes in a large model, or all towers draw the same."""
        strategy = strategy_with(True)
        dropout = nested(lambda x: tf.nn.dropout(tf.ones_like(x), 0.5))
        outer = tf.function(lambda x: dropout(x) + 0. * x)
        parts, = strategy.split((tf.ones([90, 40]),))
        run = tf.function(lambda x: strategy.run(outer, (x,)))
        drawn = [value.numpy() for _ in range(2)
                 for value in strategy.experimental_local_results(run(parts))]
        self.assertLen({each.tobytes() for each in drawn}, 2 * len(DEVICES))
        for each in drawn:
            self.assertBetween(np.count_nonzero(each) / each.size, .4, .6)
        self.assertEmpty(strategy.extended.own_trace_reasons)

    def test_what_nested_functions_write(self):
        """Else a write in a nested function is lost, or seen too early."""
        def fn(x, total):
            @tf.function
            def add(x):
                before = tf.identity(total)
                total.assign_add(tf.reduce_sum(x))
                return before
            return add(x), add(x), tf.identity(total)

        for trace_once in (True, False):
            strategy = strategy_with(trace_once)
            with strategy.scope():
                total = tf.Variable(0., synchronization=tf.VariableSynchronization.ON_READ,
                                    aggregation=tf.VariableAggregation.SUM)
            results = results_of(strategy, lambda x, total=total: fn(x, total))
            self.assertEqual(np.array(results).T.tolist(), [
                [0., part, 2 * part] for part in (6., 22., 38.)])
            self.assertEqual(float(total.read_value()), 132.)

    def test_what_apply_gradients_returns(self):
        """Else each tower is traced where a step's last line is ``return apply_gradients(...)``."""
        strategy = strategy_with(True)
        weight, optimizer = descending(strategy, tf.zeros([]))
        loop = tf.function(lambda x: strategy.run(
            lambda x: optimizer.apply_gradients([(tf.reduce_sum(x), weight)]), (x,)))
        self.assertEqual(int(loop(strategy.split(ROWS))), 1)
        self.assertEmpty(strategy.extended.own_trace_reasons)

    def test_optimizer_in_a_branch_at_a_sync_point(self):
        """Else each tower is traced where a legacy optimizer scales the loss."""
        strategy = strategy_with(True)
        with strategy.scope():
            weight = tf.Variable(0.)
            optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
                tf_keras.optimizers.legacy.SGD(1.))

        @tf.function
        def loop(x):
            strategy.run(lambda x: optimizer.apply_gradients([(tf.reduce_sum(x), weight)]), (x,))

        loop(strategy.split(ROWS))
        self.assertEqual(weight.numpy(), -66.)
        self.assertEmpty(strategy.extended.own_trace_reasons)

    def test_halves_are_added_up_in_float32(self):
        """Else a gradient that crosses as a half loses the parts of small batches."""
        strategy = strategy_with(True)
        weight, optimizer = descending(strategy, tf.zeros([2]))

        def step(x):
            gradient = tf.cast(tf.cast(tf.reduce_sum(x, 0), tf.bfloat16), tf.float32)
            optimizer.apply_gradients([(gradient, weight)])

        batch, = strategy.split((tf.constant([[256., 1.], [1., 2.], [1., 4.]]),))
        tf.function(lambda x: strategy.run(step, (x,)))(batch)
        self.assertEqual(weight.numpy().tolist(), [-258., -7.])

    def test_gradients_that_are_the_same_on_all_towers(self):
        """Else a gradient that is no tensor of the step, or merged already, is an error."""
        strategy = strategy_with(True)
        weight, optimizer = descending(strategy, tf.zeros([2]))

        def step(x):
            optimizer.apply_gradients([(tf.constant([1., 2.]), weight)])
            optimizer.apply_gradients([(outside, weight)])
            total = context().all_reduce("SUM", tf.reduce_sum(x, 0))
            optimizer.apply_gradients([(total / 3., weight)])

        outside, (batch,) = tf.constant([3., 4.]), strategy.split((ROWS,))
        tf.function(lambda x: strategy.run(step, (x,)))(batch)
        self.assertEqual(weight.numpy().tolist(), [-42., -54.])
        self.assertEmpty(strategy.extended.own_trace_reasons)


class RandomTest(parameterized.TestCase):

    @parameterized.named_parameters(
        ("stateful", lambda x: tf.random.uniform(tf.shape(x), seed=3)),
        ("in_function", lambda x: tf.function(lambda: tf.random.uniform([4], seed=3))()),
        ("keras", lambda x, seeds=[]: keras.random.uniform(tf.shape(x), seed=_seeds(seeds))))
    def test_towers_draw_differently(self, draw):
        """Else dropout hides the same units on every tower."""
        tf.random.set_seed(1)
        strategy = strategy_with(True)
        draws = results_of(strategy, draw)
        self.assertLen({np.round(values, 6).tobytes() for values in draws}, len(DEVICES))


def _seeds(kept):
    """One seed generator, made outside of the trace."""
    if not kept:
        with tf.init_scope():
            kept.append(keras.random.SeedGenerator(7))
    return kept[0]


class LocalVariablesTest(parameterized.TestCase):

    def test_sync_points_read_all_parts(self):
        """Else a metric that is read at a sync point misses what other towers have just added."""
        strategy = strategy_with(True)
        with strategy.scope():
            total = tf.Variable(0., synchronization=tf.VariableSynchronization.ON_READ,
                                aggregation=tf.VariableAggregation.SUM)

        def fn(x):
            total.assign_add(tf.reduce_sum(x))
            before = context().merge_call(lambda strategy: strategy.extended.read_var(total))
            total.assign_add(1.)
            return before

        run = tf.function(lambda parts: strategy.run(fn, (parts,)))
        for number in range(20):
            before, = set(map(float, strategy.experimental_local_results(
                run(strategy.split(ROWS)))))
            self.assertEqual(before, 66. * (number + 1) + 3 * number)
        self.assertEmpty(strategy.extended.own_trace_reasons)


class StepsAsideTest(parameterized.TestCase):
    """A reason each for tracing every tower, with the right result all the same."""

    @parameterized.named_parameters(
        ("python_number", lambda x: x * context().tower, "Python number"),
        ("python_device", lambda x: x + len(context().devices[0]), "Python number"),
        ("random_in_compiled_function", lambda x: tf.function(
            lambda: tf.random.uniform([2], seed=1) < 2., jit_compile=True)(),
         "XLA compiles"),
        ("tensor_array", lambda x: tf.TensorArray(tf.float32, 1).write(0, x[0]), "TensorArray"),
    )
    def test_reason(self, fn, reason):
        """Else tower 0's answer is given for every tower."""
        strategy = strategy_with(True)
        run = tf.function(lambda parts: [
            tf.identity(value.stack() if isinstance(value, tf.TensorArray) else value)
            for value in strategy.experimental_local_results(strategy.run(fn, (parts,)))],
            autograph=False)
        wanted = [np.asarray(value) for value in self._traced(fn)]
        for got, want in zip(run(strategy.split(ROWS)), wanted):
            np.testing.assert_array_equal(got, want)
        self.assertLen(strategy.extended.own_trace_reasons, 1)
        self.assertIn(reason, strategy.extended.own_trace_reasons[0])

    def _traced(self, fn):
        strategy = strategy_with(False)
        run = tf.function(lambda parts: [
            tf.identity(value.stack() if isinstance(value, tf.TensorArray) else value)
            for value in strategy.experimental_local_results(strategy.run(fn, (parts,)))],
            autograph=False)
        return run(strategy.split(ROWS))

    def test_module_that_holds_tensors(self):
        """Else what is handed on inside of a distribution is tower 0's, of a graph that is gone."""
        strategy = strategy_with(True)

        def distribution(x):
            made = tf.Module()
            made.mean = tf.reduce_mean(x)
            return made

        run = tf.function(lambda parts: [
            tf.identity(made.mean) for made in strategy.experimental_local_results(
                strategy.run(distribution, (parts,)))], autograph=False)
        self.assertLen(set(map(float, run(strategy.split(ROWS)))), len(DEVICES))
        self.assertIn("hands on a Module", strategy.extended.own_trace_reasons[0])

    def test_a_number_of_rows_that_has_to_be_known(self):
        """Else a shape known for tower 0 alone is built into every tower."""
        strategy = strategy_with(True)
        sums = results_of(strategy, lambda x: tf.reduce_sum(x) / x.shape[0], tf.range(7.))
        self.assertEqual([float(value) for value in sums], [1., 3.5, 5.5])
        self.assertIn("number of rows", strategy.extended.own_trace_reasons[0])

    def test_static_shapes_that_differ_in_more_than_rows(self):
        """Else a shape known for tower 0 alone is built into every tower."""
        strategy = strategy_with(True)
        values = strategy.experimental_distribute_values_from_function(
            lambda context: tf.ones([2, context.replica_id_in_sync_group + 1]))
        sums = tf.function(lambda: strategy.run(tf.reduce_sum, (values,)), autograph=False)()
        self.assertEqual([float(value) for value in sums.values], [2., 4., 6.])
        self.assertIn("static shape", strategy.extended.own_trace_reasons[0])

    def test_values_that_are_no_tensors(self):
        """Else a Python value of tower 0 stands in for everybody's."""
        strategy = strategy_with(True)
        names = strategy.experimental_distribute_values_from_function(
            lambda value_context: f"tower {value_context.replica_id_in_sync_group}")
        seen = []
        tf.function(lambda: strategy.run(seen.append, (names,)), autograph=False)()
        self.assertEqual(seen, ["tower 0", "tower 1", "tower 2"])
        self.assertIn("no tensor", strategy.extended.own_trace_reasons[0])

    def test_variables_made_in_a_trace_that_was_given_up(self):
        """Else they stay uninitialized, and the first step fails."""
        strategy = strategy_with(True)
        made = []

        def fn(x):
            if not made:
                made.append(tf.Variable(lambda: tf.fill([], 5.)))
            return made[0] + context().tower

        @tf.function(autograph=False)
        def run(parts):
            return strategy.experimental_local_results(strategy.run(fn, (parts,)))

        self.assertEqual([float(value) for value in run(strategy.split(ROWS))], [5., 6., 7.])

    def test_variables_made_while_tracing(self):
        """Else a model built by its first step is left without its weights."""
        strategy = strategy_with(True)
        made = []

        def fn(x):
            if not made:
                made.append(tf.Variable(lambda: tf.fill([], 5.)))
                made.append(tf.Variable(1., synchronization=tf.VariableSynchronization.ON_READ,
                                        aggregation=tf.VariableAggregation.SUM))
            made[1].assign_add(1.)
            return made[0] * tf.reduce_sum(x)

        @tf.function(autograph=False)
        def run(parts):
            return strategy.experimental_local_results(strategy.run(fn, (parts,)))

        self.assertEqual([float(value) for value in run(strategy.split(ROWS))], [30., 110., 190.])
        self.assertEqual([float(part) for part in made[1].values], [2., 2., 2.])
