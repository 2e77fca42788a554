"""Nested functions and control flow in towers: values and writes of the call, not of the trace."""

import tempfile

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
import wide

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]
ROWS = np.random.RandomState(0).randn(23, 3).astype("float32")


def context():
    return tf.distribute.get_replica_context()


def strategy_with(trace_once=True, devices=3):
    strategy = towerstrategy.TowerStrategy(DEVICES[:devices], merge_device="CPU:0")
    strategy.extended.trace_once = trace_once
    return strategy


def modes(test):
    """Every way in which towers run: one trace, a trace each, eagerly."""
    return parameterized.named_parameters(
        ("once", True, True), ("each", False, True), ("eager", True, False))(test)


def stepper(fn, in_function):
    return tf.function(fn) if in_function else fn


class ValuesOfTheCallTest(parameterized.TestCase):

    @modes
    def test_losses_in_a_helper(self, trace_once, in_function):
        """Else the last, smaller batch counts with the first batch's shares, silently."""
        strategy = strategy_with(trace_once)
        loss_of = keras.losses.MeanSquaredError()
        helper = tf.function(lambda x: loss_of(x[:, :1], x[:, 1:2]))

        def run(batch):
            losses = strategy.run(lambda x: helper(x), args=(batch,))
            return strategy.reduce("SUM", losses, axis=None)

        run = stepper(run, in_function)
        dataset = tf.data.Dataset.from_tensor_slices(ROWS).batch(8)
        with strategy.scope():
            got = [float(run(batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
        wanted = [np.mean((x[:, 0] - x[:, 1]) ** 2) for x in (ROWS[:8], ROWS[8:16], ROWS[16:])]
        np.testing.assert_allclose(got, wanted, rtol=1e-6)

    @modes
    def test_gradients_through_a_helper(self, trace_once, in_function):
        """Else the gradient of the last batch is that of other shares."""
        strategy = strategy_with(trace_once)
        loss_of = keras.losses.MeanSquaredError()
        with strategy.scope():
            v = tf.Variable([[1.], [2.], [3.]])
        helper = tf.function(lambda x: loss_of(x[:, :1], x @ v))
        inner = tf.function(lambda x: helper(x) * 1.)

        def tower(x):
            with tf.GradientTape() as tape:
                loss = inner(x)
            return context().all_reduce("SUM", tape.gradient(loss, v))

        run = stepper(lambda batch: strategy.run(tower, args=(batch,)), in_function)
        for rows in (8, 7, 2, 8):
            x = tf.constant(ROWS[:rows])
            with tf.GradientTape() as tape:
                loss = loss_of(x[:, :1], x @ v)
            got = strategy.experimental_local_results(run(strategy.split(x)))[0]
            np.testing.assert_allclose(got, tape.gradient(loss, v), rtol=1e-5)

    @modes
    def test_number_share_and_rows(self, trace_once, in_function):
        """Else what a helper knows of its tower is another tower's, or another batch's."""
        strategy = strategy_with(trace_once)

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def helper(x):
            number = tf.cast(context().replica_id_in_sync_group, tf.float64)
            in_branch = tf.cond(tf.shape(x)[0] >= 0, lambda: context().share, lambda: number)
            return [number, context().share, in_branch,
                    tf.cast(context().filled, tf.float64)]

        run = stepper(lambda batch: strategy.run(lambda x: helper(x), args=(batch,)), in_function)
        for rows in (8, 7, 2, 8):
            sizes = [rows // 3 + (tower < rows % 3) for tower in range(3)]
            got = run(strategy.split(tf.constant(ROWS[:rows])))
            got = np.array([strategy.experimental_local_results(part) for part in got])
            shares = np.array(sizes) / rows
            np.testing.assert_allclose(got, [[0, 1, 2], shares, shares, np.array(sizes) > 0])

    def test_outside_of_towers(self):
        """Else a helper that towers have used is wrong, or fails, on one device."""
        strategy = strategy_with()
        loss_of = keras.losses.MeanSquaredError()
        helper = tf.function(lambda x: loss_of(x[:, :1], x[:, 1:2]))
        strategy.run(lambda x: helper(x), args=(strategy.split(tf.constant(ROWS[:8])),))
        wanted = np.mean((ROWS[:8, 0] - ROWS[:8, 1]) ** 2)
        np.testing.assert_allclose(helper(tf.constant(ROWS[:8])), wanted, rtol=1e-6)

    def test_saved(self):
        """Else a module whose functions towers have used cannot be saved."""
        strategy = strategy_with()

        class Module(tf.Module):
            @tf.function(input_signature=[tf.TensorSpec([None, 3])])
            def scaled(self, x):
                return x * tf.cast(tf.distribute.get_replica_context().share
                                   if tf.distribute.has_strategy() else 1., tf.float32)

        module = Module()
        strategy.run(lambda x: module.scaled(x), args=(strategy.split(tf.constant(ROWS[:8])),))
        with tempfile.TemporaryDirectory() as path:
            tf.saved_model.save(module, path)
            loaded = tf.saved_model.load(path)
        np.testing.assert_allclose(loaded.scaled(tf.constant(ROWS[:2])), ROWS[:2])

    @modes
    def test_seeds(self, trace_once, in_function):
        """Else towers that share a helper's trace draw the same numbers."""
        strategy = strategy_with(trace_once)
        with strategy.scope():
            dropout = keras.layers.Dropout(0.5, seed=1)
        helper = tf.function(lambda x: dropout(x, training=True))
        run = stepper(lambda batch: strategy.run(lambda x: helper(x), args=(batch,)), in_function)
        draws = []
        for _ in range(2):
            parts = run(strategy.split(tf.ones([6, 64])))
            draws += [np.asarray(part).tobytes()
                      for part in strategy.experimental_local_results(parts)]
        self.assertLen(set(draws), 6)


def in_branch(write):
    return lambda: tf.cond(tf.reduce_sum(tf.ones([2])) > 0., lambda: (write(), 1)[1], lambda: 0)


def in_loop(write):
    def body(i):
        with tf.control_dependencies([write()]):
            return (i + 1,)

    return lambda: tf.while_loop(lambda i: i < 1, body, (0,))


WHERE = {"branch": in_branch, "loop": in_loop, "function": lambda write: tf.function(
    lambda: (write(), 1)[1]), "function_in_branch": lambda write: in_branch(
        tf.function(lambda: (write(), 1)[1]))}


class WritesTest(parameterized.TestCase):

    @wide.product(where=[*WHERE], mode=["once", "each", "eager"])
    def test_a_variable_moved_from_its_own_value(self, where, mode):
        """Else target networks and moving statistics move once a tower, each time from there."""
        strategy = strategy_with(mode != "each")
        with strategy.scope():
            target, mean = tf.Variable(8.), tf.Variable([0., 0., 0.])
            steps = tf.Variable(0)

        def write(x):
            target.assign(.5 * target + 1.)
            mean.assign_add(.1 * (tf.reduce_mean(x, 0) - mean))
            with tf.control_dependencies([steps.assign_add(1)]):
                return tf.constant(0)

        def tower(x):
            before = steps.read_value()
            WHERE[where](lambda: write(x))()
            return before, steps.read_value(), target.read_value()

        run = stepper(lambda batch: strategy.run(tower, args=(batch,)), mode != "eager")
        wanted_target, wanted_mean = 8., np.zeros(3)
        for number, rows in enumerate((6, 8, 2)):
            seen = run(strategy.split(tf.constant(ROWS[:rows])))
            wanted_target = .5 * wanted_target + 1.
            wanted_mean = wanted_mean + .1 * (ROWS[:rows].mean(0) - wanted_mean)
            for value_, wanted in zip(seen, (number, number + 1, wanted_target)):
                parts = strategy.experimental_local_results(value_)
                self.assertEqual([np.asarray(part) for part in parts], [wanted] * len(parts))
            self.assertEqual(float(target), wanted_target)
            self.assertEqual(int(steps), number + 1)
            np.testing.assert_allclose(mean, wanted_mean, rtol=1e-5)

    @modes
    def test_several_calls_of_a_function_kept(self, trace_once, in_function):
        """Else the second call of a helper in a step starts from what was before the first."""
        strategy = strategy_with(trace_once)
        with strategy.scope():
            v = tf.Variable(0.)
        moved = tf.function(lambda x: v.assign(2. * v + tf.reduce_mean(x)))

        def tower(x):
            first, second = moved(x), moved(x)
            met = context().all_reduce("SUM", tf.reduce_sum(x))
            return first, second, met, v + 0., moved(x), v + 0.

        run = stepper(lambda batch: strategy.run(tower, args=(batch,)), in_function)
        for x, means in (([1., 2., 3., 4., 6.], [1.5, 3.5, 6.]),
                         ([1., 2., 3., 4., 6., 7.], [1.5, 3.5, 6.5])):
            before, shares = float(v), np.array([2, 2, len(x) - 4]) / len(x)
            parts = run(strategy.split(tf.constant(x)[:, tf.newaxis]))
            first = 2 * before + np.array(means)
            second = 2 * first + means
            together = np.dot(second, shares)
            third = 2 * together + means
            got = [strategy.experimental_local_results(part) for part in parts]
            for values, wanted in zip(got, (first, second, [sum(x)], [together], third, third)):
                np.testing.assert_allclose(np.broadcast_to(values, [3]),
                                           np.broadcast_to(wanted, [3]), rtol=1e-6)
            np.testing.assert_allclose(v, np.dot(third, shares), rtol=1e-6)

    @modes
    def test_a_tower_without_rows(self, trace_once, in_function):
        """Else the NaN that an empty tower computes in a helper moves the one copy."""
        strategy = strategy_with(trace_once)
        with strategy.scope():
            v = tf.Variable(0.)
        moved = tf.function(lambda x: v.assign_add(tf.reduce_mean(x)))
        run = stepper(lambda batch: strategy.run(lambda x: (moved(x), 1)[1], args=(batch,)),
                      in_function)
        run(strategy.split(tf.constant([[1.], [3.]])))
        self.assertEqual(float(v), 2.)


class Boxed:
    """An object of a user's that holds a tensor."""

    def __init__(self, value):
        self.value = value


class LeavingTest(parameterized.TestCase):

    @parameterized.parameters("once", "each")
    def test_a_tape_around_run(self, mode):
        """Else the gradient is None, or that of another term alone, where towers have traces."""
        strategy = strategy_with(mode == "once")
        with strategy.scope():
            v = tf.Variable(3.)

        @tf.function
        def step(parts):
            with tf.GradientTape() as tape:
                sums = strategy.run(lambda x: tf.reduce_sum(v * x), args=(parts,))
                loss = strategy.reduce("SUM", sums, axis=None) + v
            return tape.gradient(loss, v)

        self.assertEqual(float(step(strategy.split(tf.ones([5])))), 6.)

    def test_a_tape_around_an_eager_run(self):
        """Else the gradient is None, or that of another term alone, silently."""
        strategy = strategy_with()
        with strategy.scope():
            v = tf.Variable(3.)
        with tf.GradientTape(persistent=True) as tape:
            parts = strategy.split(tf.ones([5]))
            sums = strategy.run(lambda x: tf.reduce_sum(v * x), args=(parts,))
            loss = strategy.reduce("SUM", sums, axis=None) + v
            other = 2. * v
        self.assertEqual(float(loss), 18.)
        self.assertEqual(float(tape.gradient(other, v)), 2.)
        with self.assertRaisesRegex(RuntimeError, "Put the GradientTape into the function"):
            tape.gradient(loss, v)

    @parameterized.named_parameters(
        ("object", Boxed, lambda boxed: boxed.value),
        ("closure", lambda x: lambda: x, lambda made: made()))
    def test_tensors_inside_of_objects_meet(self, hold, take):
        """Else tower 0's tensor alone counts where the towers meet, silently."""
        strategy = strategy_with()

        def merged(strategy, held):
            return tf.add_n([take(one) for one in strategy.experimental_local_results(held)])

        @tf.function
        def step(parts):
            return strategy.run(lambda x: context().merge_call(
                merged, args=(hold(tf.reduce_sum(x)),)), args=(parts,))

        got = step(strategy.split(tf.range(6.)))
        self.assertEqual(float(strategy.experimental_local_results(got)[0]), 15.)
        self.assertIn("cannot be looked up", strategy.extended.own_trace_reasons[0])


class CompiledTest(parameterized.TestCase):

    @modes
    def test_reads_variables_of_another_device(self, trace_once, in_function):
        """Else a compiled helper in a replica function, which README recommends, fails."""
        strategy = strategy_with(trace_once)
        with strategy.scope():
            v, table = tf.Variable([[1.], [2.], [3.]]), tf.Variable(np.eye(3, dtype="float32"))

        @tf.function(jit_compile=True)
        def forward(x):
            return tf.reduce_sum(x @ v) + tf.reduce_sum(tf.gather(table, [0, 2]) * 2.)

        @tf.function(jit_compile=True)
        def both(x):
            with tf.GradientTape() as tape:
                loss = forward(x)
            return tape.gradient(loss, [v, table])

        def tower(x):
            with tf.GradientTape() as tape:
                loss = forward(x)
            outside = tape.gradient(loss, [v, table])
            return [context().all_reduce("SUM", [tf.convert_to_tensor(part) for part in parts])
                    for parts in (outside, both(x))]

        run = stepper(lambda batch: strategy.run(tower, args=(batch,)), in_function)
        for step in range(2):
            for gradients in run(strategy.split(tf.constant(ROWS[:6]))):
                got = [strategy.experimental_local_results(part)[0] for part in gradients]
                np.testing.assert_allclose(got[0][:, 0], ROWS[:6].sum(0), rtol=1e-5)
                np.testing.assert_allclose(got[1], 6. * np.array([[1.], [0.], [1.]]) * np.ones(3))
            v.assign_add(tf.ones_like(v) * (step + 1.))
        sums = stepper(lambda batch: strategy.run(lambda x: forward(x), args=(batch,)), in_function)
        got = sums(strategy.split(tf.ones([3, 3])))
        self.assertEqual([float(part) for part in strategy.experimental_local_results(got)],
                         [19.] * 3)


class RawTest(parameterized.TestCase):
    """Writes past a variable's own methods, as TensorFlow 1's functions do."""

    @parameterized.product(
        write=[lambda v: tf.compat.v1.scatter_add(v, [1], [[2., 4., 6.]]),
               lambda v: tf.compat.v1.scatter_sub(v, [0], [[-1., 0., 1.]]),
               lambda v: tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=tf.ones([2, 3])),
               lambda v: tf.raw_ops.AssignVariableOp(resource=v.handle, value=3 * v)],
        once=[True, False])
    def test_on_which_the_towers_agree(self, write, once):
        """Else it is done once a tower."""
        strategy = towerstrategy.TowerStrategy(3)
        strategy.extended.trace_once = once
        with strategy.scope():
            v = tf.Variable(tf.ones([2, 3]))
        alone = tf.Variable(tf.ones([2, 3]))

        @tf.function
        def step(x):
            def replica(x):
                write(v)
                return tf.reduce_sum(x) + v

            return strategy.run(replica, (x,))

        for _ in range(2):
            step(strategy.split(tf.range(7.)))
            write(alone)
        np.testing.assert_allclose(v.numpy(), alone.numpy(), rtol=1e-6)

    def test_of_a_sum(self):
        """Else what a variable with aggregation=SUM is to get is guessed."""
        strategy = towerstrategy.TowerStrategy(2)
        with strategy.scope():
            v = tf.Variable([1., 2.], aggregation=tf.VariableAggregation.SUM)

        @tf.function
        def step():
            strategy.run(lambda: tf.compat.v1.scatter_add(v, [0], [1.]))

        with self.assertRaisesRegex(RuntimeError, "not by the variable's own methods"):
            step()
