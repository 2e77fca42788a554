"""towers: what ``strategy.run`` does, and what a tower can do in its replica context.

Most tests do the same with ``MirroredStrategy`` and compare; those that cannot say why.
"""

import collections
import threading
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.ops import op_selector

import towerstrategy
import wide
from peers import mirrored, outcome, per_replica, plain, two_towers

Pair = collections.namedtuple("Pair", "left right")


def context():
    return tf.distribute.get_replica_context()


def number():
    """This replica's id + 1, as a float."""
    return tf.cast(context().replica_id_in_sync_group + 1, tf.float32)


def gradient_of(reduced):
    """The gradient of a replica's ``reduced(x * x)`` times its number with respect to its x."""
    x = tf.ones([2]) * number()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = reduced(x * x) * number()
    return tape.gradient(y, x)


RUNS = {
    "eagerly": lambda strategy, fn, args=(), kwargs=None: strategy.run(fn, args, kwargs),
    "in_function": lambda strategy, fn, args=(), kwargs=None: tf.function(
        lambda *args, **kwargs: strategy.run(fn, args, kwargs))(*args, **(kwargs or {})),
    "of_function": lambda strategy, fn, args=(), kwargs=None: strategy.run(
        tf.function(fn), args, kwargs),
}
everywhere = parameterized.named_parameters((name, run) for name, run in RUNS.items())


def sparse(row, rows=3):
    return tf.IndexedSlices(tf.ones([1, 2]) * number(), tf.reshape(row, [1]),
                            tf.constant([rows, 2]))


REPLICA_FUNCTIONS = {
    "replica_id": lambda: context().replica_id_in_sync_group,
    "replicas": lambda: (context().num_replicas_in_sync, context().strategy.num_replicas_in_sync),
    "sum": lambda: context().all_reduce("sum", number()),
    "mean": lambda: context().all_reduce(tf.distribute.ReduceOp.MEAN, number()),
    "sum_of_ints": lambda: context().all_reduce("SUM", tf.cast(number(), tf.int32)),
    "mean_of_ints": lambda: context().all_reduce("MEAN", tf.cast(number(), tf.int32)),
    "sum_of_halves": lambda: context().all_reduce("SUM", tf.cast(number(), tf.float16)),
    "mean_of_complex": lambda: context().all_reduce("MEAN", tf.cast(number(), tf.complex64)),
    "sum_of_nest": lambda: context().all_reduce("SUM", {"a": number(), "b": [(number() * 2,)]}),
    "sum_with_options": lambda: context().all_reduce(
        "SUM", number(), tf.distribute.experimental.CommunicationOptions(bytes_per_pack=8)),
    "sum_of_slices": lambda: context().all_reduce(
        "SUM", sparse(context().replica_id_in_sync_group)),
    "mean_of_slices": lambda: context().all_reduce("MEAN", sparse(tf.constant(1))),
    "sum_of_slices_and_dense": lambda: context().all_reduce(
        "SUM", [sparse(tf.constant(1)), number()]),
    "gather": lambda: context().all_gather(tf.ones([int(number()) if tf.executing_eagerly()
                                                    else tf.cast(number(), tf.int32), 2]), axis=0),
    "gather_columns": lambda: context().all_gather(tf.ones([2, 1]) * number(), axis=1),
    "gather_last": lambda: context().all_gather(tf.ones([2, 1]) * number(), axis=-1),
    "gather_bools": lambda: context().all_gather(tf.reshape(number() > 1., [1]), axis=0),
    "gather_strings": lambda: context().all_gather(
        tf.reshape(tf.strings.as_string(number()), [1]), axis=0),
    "gather_nest": lambda: context().all_gather(
        {"a": tf.reshape(number(), [1]), "b": (tf.ones([1, 2]),)}, axis=0),
    "gather_slices": lambda: context().all_gather(sparse(tf.constant(1)), axis=0),
    "gradient_of_sum": lambda: gradient_of(lambda x: context().all_reduce("SUM", x)),
    "gradient_of_mean": lambda: gradient_of(lambda x: context().all_reduce("MEAN", x)),
    "gradient_of_gather": lambda: gradient_of(
        lambda x: tf.reduce_sum(context().all_gather(x, 0) * [1., 2., 3., 4.])),
    "merge_call": lambda: context().merge_call(
        lambda strategy, value: strategy.reduce("SUM", value, axis=None), args=(number(),)),
    "merge_call_returns_nothing": lambda: context().merge_call(lambda strategy: None),
    "merge_call_returns_its_argument": lambda: context().merge_call(
        lambda strategy, value: value, args=(number(),)),
    "merge_call_calls_replicas": lambda: context().merge_call(
        lambda strategy, value: strategy.extended.call_for_each_replica(
            lambda x: context().all_reduce("SUM", x), args=(value,)), args=(number(),)),
    "merge_call_fails": lambda: context().merge_call(lambda strategy: 1 / 0),
    "a_string": lambda: "text",
    "nothing": lambda: None,
    "named_tuple": lambda: Pair(number(), [None, {"a": number() * 2}]),
    "ragged": lambda: tf.ragged.range(tf.cast(number(), tf.int32)),
    "sparse": lambda: tf.sparse.to_dense(tf.sparse.from_dense([number()])),
    "run_in_run": lambda: tf.distribute.get_strategy().run(lambda: 1),
    "reduce_in_run": lambda: tf.distribute.get_strategy().reduce("SUM", 1., axis=None),
    "gather_in_run": lambda: tf.distribute.get_strategy().gather(tf.ones([1]), axis=0),
    "scope_in_run": lambda: tf.distribute.get_strategy().scope().__enter__(),
    "sum_in_cond": lambda: tf.cond(number() > 0., lambda: context().all_reduce("SUM", number()),
                                   lambda: 0.),
    "sum_in_nested_function": lambda: tf.function(
        lambda: context().all_reduce("SUM", number()))(),
}


class ReplicaFunctionTest(parameterized.TestCase):

    @wide.product(name=list(REPLICA_FUNCTIONS), run=list(RUNS))
    def test_as_mirrored(self, name, run):
        """Else code moved from MirroredStrategy gets other numbers, other errors or none."""
        results = [outcome(RUNS[run], strategy, REPLICA_FUNCTIONS[name])
                   for strategy in (two_towers(), mirrored())]
        self.assertEqual(*results)

    @everywhere
    def test_sum_of_mixed_dtypes(self, run):
        """Else a metric's count and its sum cannot be reduced together, as in MirroredStrategy."""
        result = run(two_towers(), lambda: context().all_reduce(
            "SUM", [number(), tf.cast(number(), tf.int32)]))
        self.assertEqual(plain(result), [("per replica", [3., 3.]), ("per replica", [3, 3])])

    @parameterized.parameters(True, False)
    def test_start_of_a_deep_model_that_synchronizes(self, trace_once):
        """Else each all-reduce costs a walk through all of the graph before it, and a network with
        50 synchronized layers takes minutes to start."""
        strategy = two_towers()
        strategy.extended.trace_once = trace_once

        def deep():
            x = number()
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                for _ in range(20):
                    y = context().all_reduce("MEAN", tf.tanh(y)) + y
            return tape.gradient(y, x)

        walk, walked = op_selector.get_backward_walk_ops, []

        def counted(*args, **kwargs):
            walked.append(len(walk(*args, **kwargs)))
            return walk(*args, **kwargs)

        with mock.patch.object(op_selector, "get_backward_walk_ops", counted):
            RUNS["in_function"](strategy, deep)
        self.assertNotEmpty(walked)
        self.assertLess(max(walked), 10)

    @everywhere
    def test_sum_of_bools_says_what_to_do(self, run):
        """Else a bool sum ends in a message about AddN."""
        with self.assertRaisesRegex(TypeError, "bool.*cast them to an integer"):
            run(two_towers(), lambda: context().all_reduce("SUM", number() > 1.))

    @everywhere
    def test_gather_of_scalars_says_what_is_wrong(self, run):
        """Else a missing dimension ends in a message about ConcatV2."""
        with self.assertRaisesRegex(ValueError, "rank 0 cannot be gathered"):
            run(two_towers(), lambda: context().all_gather(number(), axis=0))

    def test_nested_run_is_tensorflows_error(self):
        """Else a run inside a run hangs or runs R * R times."""
        strategy = two_towers()
        with self.assertRaisesRegex(RuntimeError, "requires being in cross-replica context"):
            strategy.run(lambda: strategy.run(lambda: 1))

    def test_collective_in_cond_explains(self):
        """Else a collective in control flow ends without TensorFlow's explanation."""
        for name in ("sum_in_cond", "sum_in_nested_function"):
            with self.assertRaisesRegex(RuntimeError, "`merge_call` called while defining a new"):
                RUNS["in_function"](two_towers(), REPLICA_FUNCTIONS[name])

    @everywhere
    def test_merge_call_groups(self, run):
        """Else merge functions see other values than under MirroredStrategy."""
        seen = []

        def merge(strategy, *args, **kwargs):
            seen.append((tf.distribute.in_cross_replica_context(), tf.nest.map_structure(
                lambda leaf: isinstance(leaf, tf.distribute.DistributedValues), (args, kwargs))))
            return len(args)

        def replica():
            args = (number(), 3, None, {"a": number(), "b": "x"})
            return context().merge_call(merge, args=args, kwargs={"c": [number()]})

        self.assertEqual(plain(run(two_towers(), replica)), 4)
        self.assertEqual(
            seen[0], (True, ((True, False, False, {"a": True, "b": False}), {"c": [True]})))

    def test_different_numbers_of_merge_calls(self):
        """Else towers that do not meet wait for each other for ever."""
        strategy = two_towers()

        def replica():
            if context().replica_id_in_sync_group == 0:
                context().merge_call(lambda strategy: None)

        with self.assertRaisesRegex(RuntimeError, "different number of.*tower"):
            strategy.run(replica)
        self.assertEqual(plain(strategy.run(number)), ("per replica", [1., 2.]))

    def test_devices(self):
        """Else a tower's work is not on its device."""
        strategy = towerstrategy.TowerStrategy(["CPU:2", "CPU:1"], "CPU:0")
        devices = strategy.run(lambda: tf.identity(number()).device[-5:])
        self.assertEqual(plain(devices), ("per replica", ["CPU:2", "CPU:1"]))
        merged = strategy.run(lambda: context().merge_call(
            lambda strategy: tf.ones([]).device[-5:]))
        self.assertEqual(plain(merged), "CPU:0")


def branches(x):
    total = tf.constant(0)
    for index in tf.range(x):
        total += index
        if total > 100:
            break
    while total < 5:
        total += 1
    return context().all_reduce("SUM", total)


class RunTest(parameterized.TestCase):

    @everywhere
    def test_arguments(self, run):
        """Else a replica gets another's values, or plain values are changed."""
        def replica(x, y, *, k=None, m=None):
            return {"x": x + 1., "y": y, "k": [k["a"] * 2, k["b"]], "m": m}

        def call(strategy):
            return run(strategy, replica, (per_replica(strategy, 1., 2.), None),
                       {"k": {"a": per_replica(strategy, 3, 4), "b": tf.constant(7.)}, "m": (1,)})

        results = [outcome(call, strategy) for strategy in (two_towers(), mirrored())]
        self.assertEqual(*results)
        self.assertIsInstance(results[0], dict)

    @parameterized.parameters("in_function", "of_function")
    def test_autograph(self, run):
        """Else Python control flow on tensors fails in replica functions."""
        results = [plain(RUNS[run](strategy, branches, (per_replica(strategy, 3, 5),)))
                   for strategy in (two_towers(), mirrored())]
        self.assertEqual(*results)
        self.assertEqual(results[0], ("per replica", [15, 15]))

    def test_run_in_control_flow(self):
        """Else steps cannot run in a loop or behind a condition of one tf.function."""
        def steps(strategy):
            @tf.function
            def many(count):
                total = tf.constant(0.)
                for _ in tf.range(count):
                    if total < 20.:
                        total += strategy.reduce("SUM", strategy.run(
                            lambda: context().all_reduce("SUM", number())), axis=None)
                return total

            return many(tf.constant(10))

        self.assertEqual(plain(steps(two_towers())), 24.)
        self.assertEqual(plain(steps(mirrored())), 24.)

    def test_different_structures(self):
        """Else towers that return different things lose some of them silently."""
        def call(strategy):
            return strategy.run(lambda: [0] * int(number()))

        self.assertEqual(outcome(call, two_towers()), "AssertionError")
        self.assertEqual(outcome(call, mirrored()), "AssertionError")

    def test_one_trace_a_function(self):
        """Else a tf.function given to run is traced again at each call."""
        traces = []

        @tf.function
        def replica(x):
            traces.append(x)
            return x * 2

        strategy = two_towers()
        for step in range(4):
            replica_values = per_replica(strategy, float(step), 2.)
            strategy.run(replica, (replica_values,))
            if step == 0:
                first = len(traces)
        self.assertLen(traces, first)

    def test_method_that_is_a_function(self):
        """Else tf.functions that are methods cannot be given to run."""
        class Model(tf.Module):

            @tf.function
            def step(self, x):
                return x * 2.

        strategy, model = two_towers(), Model()
        result = strategy.run(model.step, (per_replica(strategy, 1., 2.),))
        self.assertEqual(plain(result), ("per replica", [2., 4.]))

    def test_concrete_function(self):
        """Else a concrete function cannot be the replica function."""
        double = tf.function(lambda x: x * 2.).get_concrete_function(tf.TensorSpec([]))
        strategy = two_towers()
        result = strategy.run(double, (per_replica(strategy, 1., 2.),))
        self.assertEqual(plain(result), ("per replica", [2., 4.]))

    def test_threads(self):
        """Else a program that runs steps from several Python threads mixes them up or hangs."""
        strategy = two_towers()
        with strategy.scope():
            counter = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)
        results = {}

        def work(index):
            def replica():
                counter.assign_add(1.)
                return context().all_reduce("SUM", number() * index)

            results[index] = plain(strategy.run(tf.function(replica)))
            results[-index - 1] = plain(strategy.run(replica))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(4):
            wanted = "per replica", [3. * index, 3. * index]
            self.assertEqual((results[index], results[-index - 1]), (wanted, wanted))
        self.assertEqual(counter.numpy(), 16.)


class ErrorTest(parameterized.TestCase):

    @everywhere
    def test_python_error_names_the_tower(self, run):
        """Else nobody knows which of eight devices the error came from."""
        def replica(x):
            if context()._replica_id == 1:
                raise ValueError("broken")
            return x

        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:3"])
        with self.assertRaisesRegex(ValueError, "broken") as caught:
            run(strategy, replica, (per_replica(strategy, 1., 2.),))
        notes = " ".join(getattr(caught.exception, "__notes__", []))
        self.assertIn("tower 1 on CPU:3", notes + str(caught.exception))

    @parameterized.parameters("in_function", "of_function")
    def test_tensorflow_error_names_the_tower(self, run):
        """Else a failing kernel in a compiled step does not say on which tower it failed."""
        def replica(x):
            tf.debugging.assert_less(x, 2., message="too large")
            return x

        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:3"])
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "tower_1_CPU_3") as caught:
            RUNS[run](strategy, replica, (per_replica(strategy, 1., 2.),))
        self.assertIn("too large", str(caught.exception))

    def test_a_loss_of_no_rows_is_a_number(self):
        """Else an eager loop fails at its last batch, where it reduces the losses."""
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"])
        loss_object = tf.keras.losses.MeanSquaredError()
        losses = strategy.run(lambda y: loss_object(y, 2 * y), (strategy.split(tf.ones([2, 3])),))
        self.assertEqual(float(strategy.reduce("SUM", losses, axis=None)), 1.0)

    def test_an_error_of_a_tower_without_rows_says_so(self):
        """Else an operation that cannot work on no rows fails without a word of why."""
        @tf.function(reduce_retracing=True)
        def replica(x):
            return tf.raw_ops.EnsureShape(input=tf.shape(x)[:1] // tf.shape(x)[0], shape=[1])

        strategy = towerstrategy.TowerStrategy(3)
        for rows in (6, 9, 4):
            strategy.run(replica, (strategy.split(tf.range(rows)),))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "tower_2_CPU_2") as caught:
            strategy.run(replica, (strategy.split(tf.range(2)),))
        notes = " ".join(getattr(caught.exception, "__notes__", []))
        self.assertIn("tower 2 on CPU:2, which has none of the batch's 2 rows",
                      notes + str(caught.exception))

    def test_next_step_after_an_error(self):
        """Else one bad batch makes the strategy useless."""
        strategy = two_towers()
        with self.assertRaises(ZeroDivisionError):
            strategy.run(lambda: context().merge_call(lambda strategy: 1 / 0))
        self.assertEqual(plain(strategy.run(number)), ("per replica", [1., 2.]))

    def test_no_threads_are_left(self):
        """Else a long program runs out of threads."""
        strategy = two_towers()
        before = threading.active_count()
        for _ in range(3):
            strategy.run(tf.function(number))
            strategy.run(number)
            with self.assertRaises(ZeroDivisionError):
                strategy.run(lambda: context().merge_call(lambda strategy: 1 / 0))
        self.assertEqual(threading.active_count(), before)


class JitCompileTest(parameterized.TestCase):

    def test_one_tower_compiles(self):
        """Else a single tower loses XLA for nothing."""
        compiled = tf.function(lambda x: x + 1., jit_compile=True)
        strategy = towerstrategy.TowerStrategy(["CPU:0"])
        self.assertEqual(plain(strategy.run(compiled, (tf.constant(1.),))), 2.)

    def test_function_inside_a_tower_compiles(self):
        """Else one tower's work cannot be compiled for its own device."""
        compiled = tf.function(lambda x: x + 1., jit_compile=True)
        strategy = two_towers()
        result = RUNS["in_function"](strategy, lambda x: compiled(x),
                                     (per_replica(strategy, 1., 2.),))
        self.assertEqual(plain(result), ("per replica", [2., 3.]))
