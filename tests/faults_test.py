"""What goes wrong while training: errors in one tower, in a merge, in the data, and Ctrl-C."""

import contextlib
import re
import signal
import threading
import time

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import small_models
import wide
from peers import plain, two_towers

ROWS, SICK = 16, 6  # of the first batch of 8 rows, row 6 is in tower 1


def context():
    return tf.distribute.get_replica_context()


def in_a_tower():
    return hasattr(context(), "shares")


def told(error):
    return str(error) + " ".join(getattr(error, "__notes__", []))


def data(value=99.):
    x = np.random.RandomState(0).rand(ROWS, 3).astype("f")
    x[SICK] = value
    return x, x.sum(1, keepdims=True)


def python_error(x):
    if in_a_tower() and context()._replica_id == 1:
        raise ValueError("broken")
    return x


def python_error_after_meeting(x):
    if in_a_tower():
        context().all_reduce("SUM", tf.reduce_sum(x))
    return python_error(x)


def kernel_error(x):
    """Fails where a row is large: only tower 1 has one."""
    large = tf.boolean_mask(x, tf.reshape(x, [tf.shape(x)[0], -1])[:, 0] > 50.)
    with tf.control_dependencies([tf.ensure_shape(tf.size(large), [])]):
        return x + tf.reduce_sum(tf.ensure_shape(large, [0, *x.shape[1:]]))


def python_error_in_step(x):
    if not tf.distribute.in_cross_replica_context():
        raise ValueError("broken")
    return x


def error_of_a_tower(x):
    """Fails where a row is no number, by an operation that each tower does with its rows."""
    return tf.debugging.check_numerics(tf.where(x > 50., np.nan, x), "broken")


def merge_error(x):
    if in_a_tower():
        context().merge_call(lambda strategy: 1 / 0)
    return x


def eagerly(strategy, fn, *args):
    return strategy.run(fn, args)


def in_function(strategy, fn, *args):
    return tf.function(lambda *inner: strategy.run(fn, inner))(*args)


def of_function(strategy, fn, *args):
    return strategy.run(tf.function(fn), args)


class _Leaves(parameterized.TestCase):
    """Each test leaves no thread behind."""

    def setUp(self):
        super().setUp()
        self.before = threading.enumerate()

    def tearDown(self):
        left = [thread for thread in threading.enumerate()
                if thread not in self.before and not isinstance(thread, threading._DummyThread)]
        self.assertEmpty(left)
        super().tearDown()


class LoopTest(_Leaves):

    @wide.product(2, fn=[python_error, python_error_after_meeting, kernel_error, merge_error],
                  run=[eagerly, in_function, of_function], copied=[True, False])
    def test_error(self, fn, run, copied):
        """Else an error does not say which tower it is of, or makes the strategy useless."""
        strategy = two_towers()
        strategy.extended.trace_once = copied
        with strategy.scope():
            total = tf.Variable(0., aggregation=tf.VariableAggregation.SUM)

        def step(x):
            x = fn(x)
            total.assign_add(tf.reduce_sum(x))
            return x

        parts = strategy.split(data()[0][:8])
        error = ZeroDivisionError if fn is merge_error else (
            ValueError if fn is not kernel_error else tf.errors.InvalidArgumentError)
        # Autograph raises an error of its own in place of one that it cannot make anew.
        with self.assertRaises((error, Exception) if fn is merge_error else error) as caught:
            run(strategy, step, parts)
        wanted = "on the merge device CPU:0" if fn is merge_error else "tower.1.*CPU.2"
        self.assertRegex(told(caught.exception).replace("\n", " "), wanted)
        self.assertEqual(plain(total.read_value()), 0.)
        run(strategy, lambda x: total.assign_add(tf.reduce_sum(x)), strategy.split(np.ones(4, "f")))
        self.assertEqual(plain(total.read_value()), 4.)

    @parameterized.parameters(in_function, of_function)
    def test_assertion(self, run):
        """Else an assertion that fails in tower 1 is said to have failed in tower 0."""
        def step(x):
            for _ in tf.range(2):
                tf.debugging.assert_less(x, 50., message="too large")
            return x

        strategy = two_towers()
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "too large") as caught:
            run(strategy, step, strategy.split(data()[0][:8]))
        self.assertEqual(set(re.findall(r"{{node (tower_\d_CPU_\d)", str(caught.exception))),
                         {"tower_1_CPU_2"})
        self.assertEmpty(strategy.extended.own_trace_reasons)

    @parameterized.parameters(keras, tf_keras)
    def test_assertions_of_keras_cost_no_trace(self, kit):
        """Else a metric that checks its values makes each tower's start-up cost a trace."""
        strategy = two_towers()
        with strategy.scope():
            model = small_models.make(kit, "functional")
            model.compile("sgd", "mse", metrics=[kit.metrics.AUC(), kit.metrics.Precision()])
        model.train_on_batch(np.ones([4, 3]), np.ones([4, 1]))
        self.assertEmpty(strategy.extended.own_trace_reasons)

    def test_interrupt(self):
        """Else Ctrl-C waits for a tower that has long to go, or leaves its thread behind."""
        # A process that a script starts in the background ignores Ctrl-C from its start.
        self.addCleanup(signal.signal, signal.SIGINT,
                        signal.signal(signal.SIGINT, signal.default_int_handler))
        strategy = two_towers()
        going = []

        def forever():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while True:
                going.append(1)
                time.sleep(.01)

        strategy.extended.trace_once = False
        for run in (eagerly, in_function) * 10:  # it may come just before a wait begins
            with self.assertRaises(KeyboardInterrupt):
                run(strategy, forever)
        count = len(going)
        self.assertEqual(plain(strategy.run(lambda: 1)), 1)
        self.assertLen(going, count)

    @parameterized.parameters(False, True)
    def test_dataset(self, in_function):
        """Else an error in the data is lost, or keeps the data's thread."""
        def rows():
            yield np.ones([4, 3], "f")
            raise ValueError("the generator broke")

        strategy = two_towers()
        distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.from_generator(
            rows, output_signature=tf.TensorSpec([4, 3])))

        def read():
            for batch in distributed:
                strategy.run(lambda x: x, (batch,))

        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "the generator broke"):
            (tf.function(read) if in_function else read)()
        self.assertEqual(plain(strategy.run(lambda: 1)), 1)


class FitTest(_Leaves):

    def fails(self, kit, fn, **options):
        """The error of a fit with a layer that calls ``fn``; the model trains afterwards."""
        class Sick(kit.layers.Layer):
            on = True

            def call(self, x):
                return fn(x) if self.on else x

        sick = Sick(name="sick")
        with two_towers().scope():
            model = kit.Sequential([kit.Input([3]), small_models.dense(kit, 2, "first"), sick,
                                    small_models.dense(kit, 1, "head")])
            model.compile("adam", "mse", **options)
        model.get_layer("first").set_weights([np.ones([3, 2]), np.zeros(2)])
        before = small_models.weights(model)
        x, y = data()
        with self.assertRaises(Exception) as caught:
            model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        for old, new in zip(before, small_models.weights(model)):
            np.testing.assert_array_equal(old, new)
        sick.on = False
        with model.distribute_strategy.scope():
            model.compile("adam", "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return caught.exception

    @wide.product(2, kit=[keras, tf_keras], run_eagerly=[False, True],
                  fault=[(python_error_in_step, "broken"), (kernel_error, "Shape of tensor"),
                         (error_of_a_tower, "broken : Tensor had NaN")])
    def test_error(self, kit, run_eagerly, fault):
        """Else nobody knows what failed, weights are half updated, or fit cannot go on."""
        error = self.fails(kit, fault[0], run_eagerly=run_eagerly)
        self.assertIsInstance(error, (ValueError, tf.errors.InvalidArgumentError))
        self.assertRegex(told(error), fault[1])
        if fault[0] is error_of_a_tower and not run_eagerly:
            self.assertIn("tower_1_CPU_2/", told(error))

    @parameterized.parameters(keras, tf_keras)
    def test_assertion(self, kit):
        """Else an assertion that nothing depends on ends the step with weights half updated."""
        def checks(x):
            tf.debugging.assert_less(x, 50., message="too large")
            return x

        self.assertIn("too large", str(self.fails(kit, checks)))

    @wide.some(2, tf_keras, keras)
    def test_assertion_at_the_end_of_data_of_unknown_size(self, kit):
        """Else steps are counted otherwise than on one device, so Adam and dropout differ."""
        def loss(y, predicted):
            tf.debugging.assert_less(tf.reduce_max(y), 1e9)
            return tf.reduce_mean((y - predicted) ** 2)

        counts, (x, y) = [], data()
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).filter(lambda *_: True)
        for strategy in (None, two_towers()):
            with strategy.scope() if strategy else contextlib.nullcontext():
                model = small_models.make(kit, "functional")
                model.compile(kit.optimizers.Adam(.01), loss)
            model.fit(rows, epochs=2, verbose=0)
            counts.append(int(model.optimizer.iterations.numpy()))
        self.assertEqual(counts[0], counts[1])

    @wide.product(kit=[keras, tf_keras], where=["callback", "dataset"])
    def test_error_beside_the_towers(self, kit, where):
        """Else an error in a callback or in the data is lost, or fit cannot be called again."""
        with two_towers().scope():
            model = small_models.make(kit, "functional")
            model.compile("sgd", "mse")
        x, y = data()
        callback = kit.callbacks.Callback()
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        if where == "callback":
            def broken(*_, **__):
                raise ValueError("broken callback")

            callback.on_train_batch_end = broken
        else:
            dataset = dataset.map(lambda x, y: (tf.debugging.check_numerics(
                tf.where(x > 50., np.nan, x), "broken dataset"), y))
        errors = ValueError, tf.errors.InvalidArgumentError
        with self.assertRaisesRegex(errors, f"broken {where}"):
            model.fit(dataset, callbacks=[callback], verbose=0)
        model.fit(x, y, batch_size=8, verbose=0)

    @wide.product(0, kit=[keras, tf_keras], value=[np.nan, np.inf])
    def test_numbers_that_are_none(self, kit, value):
        """Else NaN in one tower's rows is hidden, or stops a training that one device goes on."""
        results = []
        for strategy in (two_towers(), None):
            model = small_models.make(kit, "functional")
            model.compile(kit.optimizers.SGD(.1), "mse", metrics=["mae"])
            if strategy is not None:
                strategy.adopt(model)
            history = model.fit(*data(value), batch_size=8, shuffle=False, epochs=3, verbose=0,
                                callbacks=[kit.callbacks.TerminateOnNaN()]).history
            results.append((history, small_models.weights(model)))
        self.assertEqual(*(list(history) for history, _ in results))
        (history, weights), (wanted_history, wanted_weights) = results
        for name, values in wanted_history.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
        for values, wanted in zip(weights, wanted_weights):
            np.testing.assert_allclose(values, wanted, rtol=1e-5)
