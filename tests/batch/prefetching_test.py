"""Batches that lie on the towers' devices before the step asks for them.

Logical CPU devices stand for GPUs: their memory is the host's, but all else is as it is there.
"""

import gc
import os
import subprocess
import sys
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide
from benchmarks import on_gpus, traffic
from peers import mirrored, plain
from tests.placement.placement_test import function_in
from towerstrategy import _tensorflow
from towerstrategy.batch import iterators, prefetching
from towerstrategy.extras.report import tower_report
from towerstrategy.placement import devices as devices_lib

Dataset = tf.data.Dataset
InputOptions = tf.distribute.InputOptions
PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA
ON_HOST = InputOptions(experimental_fetch_to_device=False)
TOWERS = ["CPU:1", "CPU:2", "CPU:3"]


def gpus():
    """Within, CPU towers have a memory of their own."""
    return mock.patch.object(devices_lib.Placement, "towers_on_host", False)


def rows(count, size):
    """Batches of every kind of component."""
    numbers = np.arange(count)
    return Dataset.from_tensor_slices({
        "x": (numbers * 1.5, np.stack([numbers, -numbers], 1).astype("int32")),
        "s": [str(number) for number in numbers],
        "r": tf.ragged.constant([[number] * (number % 3) for number in numbers]),
        "p": tf.sparse.from_dense(np.diag(numbers + 1))}).batch(size)


def several():
    """Elements of the strategy's own making: a pipeline, and one a tower."""
    return {
        "even": lambda s, o: s.experimental_distribute_dataset(rows(12, 6), o),
        "remainder": lambda s, o: s.experimental_distribute_dataset(rows(11, 4), o),
        "fewer_than_towers": lambda s, o: s.experimental_distribute_dataset(rows(5, 4), o),
        "empty": lambda s, o: s.experimental_distribute_dataset(rows(1, 1).skip(1), o),
        "grouped": lambda s, o: s.distribute_datasets_from_function(lambda _: rows(7, 2), o),
        "absent": lambda s, o: s.distribute_datasets_from_function(
            lambda _: rows(7, 2).map(lambda batch: (None, batch["x"])), o),
        "pipelines": lambda s, o: s.distribute_datasets_from_function(
            lambda context: rows(4 - context.input_pipeline_id, 1),
            o._replace(experimental_replication_mode=PER_REPLICA)),
        "single_values": lambda s, o: s.distribute_datasets_from_function(
            lambda _: Dataset.from_tensor_slices(([1., 2., 3.], [[1, 2], [3, 4], [5, 6]])), o),
    }


def contents(element):
    """All values of an element, without where they are."""
    return [value.numpy().tolist() if hasattr(value, "numpy") else value
            for value in tf.nest.flatten(element, expand_composites=True)]


def places(leaf):
    return [part.device[-5:] for part in leaf.values]


class ElementTest(parameterized.TestCase):

    # An iterator of TensorFlow's over several devices takes a tenth of a second to be made.
    @wide.some(6, *several())
    def test_same_elements(self, case):
        """Else what is prefetched has other rows, specs or row counts than what is not."""
        strategy = towerstrategy.TowerStrategy(TOWERS, "CPU:0")
        found = []
        for options in (ON_HOST, InputOptions()):
            distributed = several()[case](strategy, options)
            iterator = iter(distributed)
            elements = [(type(tf.nest.flatten(element)[0]).__name__, contents(element))
                        for element in iterator]
            found.append((distributed.element_spec, iterator.element_spec, elements))
        self.assertIsInstance(iterator, prefetching.PrefetchedIterator)
        self.assertEqual(*found)

    def test_where_parts_are(self):
        """Else a step waits for its batch, or a string, which no GPU holds, is sent to one, or an
        int32 that kernels take from the host.
        """
        with gpus():
            strategy = towerstrategy.TowerStrategy(TOWERS, "CPU:0")
            distributed = strategy.experimental_distribute_dataset(
                rows(12, 6).map(lambda batch: (batch, None)))
        iterator = iter(distributed)
        for element in (next(iterator), iterator.get_next_as_optional().get_value()):
            batch, nothing = element
            self.assertEqual(places(batch["x"][0]), TOWERS)
            self.assertEqual(places(batch["x"][1]), ["CPU:0"] * 3)
            self.assertEqual([part.values.device[-5:] for part in batch["p"].values], TOWERS)
            self.assertEqual([part.values.device[-5:] for part in batch["r"].values], ["CPU:0"] * 3)
            self.assertEqual(places(batch["s"]), ["CPU:0"] * 3)
            self.assertIsNone(nothing)

    @parameterized.parameters(*tf.distribute.InputReplicationMode)
    def test_single_values_move(self, mode):
        """Else a dataset of single values, one a tower, stays on the host against its options."""
        strategy = towerstrategy.TowerStrategy(TOWERS, "CPU:0")
        options = InputOptions(experimental_fetch_to_device=True,
                               experimental_replication_mode=mode)
        for element in strategy.distribute_datasets_from_function(
                lambda _: Dataset.from_tensor_slices(np.arange(6.)), options):
            self.assertEqual(places(element), TOWERS)

    def test_one_tower(self):
        """Else a single GPU waits for its batches, or gets wrapped values."""
        with gpus():
            strategy = towerstrategy.TowerStrategy(["CPU:1"])
            distributed = strategy.experimental_distribute_dataset(rows(3, 2))
        batch, last = distributed
        self.assertEqual(batch["x"][0].device[-5:], "CPU:1")
        self.assertEqual([plain(batch["x"][0]), plain(last["s"])], [[0, 1.5], [b"2"]])

    def test_host_towers_pay_nothing(self):
        """Else CPU towers copy batches that are in their memory already."""
        strategy = towerstrategy.TowerStrategy(TOWERS, "CPU:0")
        for dataset in (strategy.experimental_distribute_dataset(rows(4, 2)),
                        strategy.distribute_datasets_from_function(lambda _: rows(4, 2))):
            self.assertIsInstance(iter(dataset), iterators.TowerIterator)

    @parameterized.parameters(0, 3)
    def test_buffer_size(self, size):
        """Else more, or less, is fetched ahead than was asked for; or 0 hangs."""
        strategy = towerstrategy.TowerStrategy(TOWERS[:2], "CPU:0")
        options = InputOptions(experimental_per_replica_buffer_size=size)
        distributed = strategy.experimental_distribute_dataset(Dataset.range(8).batch(2), options)
        with mock.patch.object(_tensorflow, "over_devices",
                               wraps=_tensorflow.over_devices) as made:
            elements = [places(element) for element in distributed]
        self.assertEqual(made.call_args.args[2], size)
        self.assertEqual(elements, [TOWERS[:2]] * 4)


class IterationTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self.enter_context(gpus())
        # The loops here take all the data, so that iterators in graphs are safe on any machine.
        self.enter_context(mock.patch.object(prefetching, "threads", lambda: 99))
        self.strategy = towerstrategy.TowerStrategy(TOWERS, "CPU:0")
        self.dataset = self.strategy.experimental_distribute_dataset(Dataset.range(10).batch(4))

    def total(self, element):
        return self.strategy.reduce("SUM", self.strategy.run(tf.reduce_sum, (element,)), axis=None)

    @pytest.mark.wide
    def test_everywhere(self):
        """Else one of the documented ways to iterate fails, ends early or sees other rows."""

        @tf.function
        def loop(dataset):
            result = tf.constant(0, tf.int64)
            for element in dataset:
                result += self.total(element)
            return result

        @tf.function
        def captured():
            return loop(self.dataset)

        @tf.function
        def optionals(iterator):
            result = tf.constant(0, tf.int64)
            element = iterator.get_next_as_optional()
            while element.has_value():
                result += self.total(element.get_value())
                element = iterator.get_next_as_optional()
            return result

        @tf.function
        def two_steps(iterator):
            result = tf.constant(0, tf.int64)
            for _ in tf.range(2):
                result += self.total(next(iterator))
            return result

        dataset = self.dataset
        self.assertEqual(
            [plain(found) for found in (
                loop(dataset), captured(), captured(), optionals(iter(dataset)),
                optionals(iter(dataset)), two_steps(iter(dataset)))], [45] * 5 + [28])
        self.assertEqual(optionals.experimental_get_tracing_count(), 1)
        # Towers' streams that had not ended when the graph's iterator went took all threads.
        self.assertEqual([plain(captured()) for _ in range(100)], [45] * 100)

    @pytest.mark.wide
    def test_for_over_an_iterator(self):
        """Else a loop over an iterator made outside of its tf.function sees other rows, or none."""

        @tf.function
        def passed(iterator):
            result = tf.constant(0, tf.int64)
            for element in iterator:
                result += self.total(element)
            return result

        @tf.function
        def made_inside():
            return passed(iter(self.dataset))

        @tf.function
        def left(iterator):
            first = rest = tf.constant(0, tf.int64)
            for element in iterator:
                first += self.total(element)
                if first > 0:
                    break
            for element in iterator:
                rest += self.total(element)
            return first * 100 + rest

        @tf.function
        def between(iterator):
            result = self.total(next(iterator))
            for element in iterator:
                result += 100 * self.total(element) + 10000 * self.total(iterator.get_next())
            return result

        @tf.function
        def read_twice(iterator):
            one = iterator.get_next_as_optional()
            result = 100 * self.total(one.get_value())
            for element in iterator:
                result += self.total(element)
            return result + 10000 * self.total(one.get_value())

        kept = iter(self.dataset)

        @tf.function
        def captured():
            result = tf.constant(0, tf.int64)
            for element in kept:
                result += self.total(element)
            return result

        found = [passed(iter(self.dataset)), made_inside(), left(iter(self.dataset)),
                 between(iter(self.dataset)), read_twice(iter(self.dataset)), captured(),
                 captured(), tf.autograph.to_graph(passed.python_function)(iter(self.dataset))]
        self.assertEqual([plain(value) for value in found],
                         [45, 45, 639, 172206, 60639, 45, 0, 45])
        self.assertFalse(kept._once)

    def test_ends(self):
        """Else loops do not end, or end with the wrong exception."""
        iterator = iter(self.dataset)
        self.assertIsInstance(iterator, tf.distribute.DistributedIterator)
        self.assertLen(list(iterator), 3)
        with self.assertRaises(StopIteration):
            next(iterator)
        with self.assertRaises(tf.errors.OutOfRangeError):
            iterator.get_next()
        self.assertFalse(plain(iterator.get_next_as_optional().has_value()))
        with self.assertRaises(tf.errors.OutOfRangeError):
            tf.function(lambda iterator: self.total(next(iterator)))(iterator)

    def test_signature(self):
        """Else the iterator's spec cannot be an input_signature, or each epoch traces anew."""
        step = tf.function(lambda iterator: self.total(next(iterator)),
                           input_signature=[iter(self.dataset)._type_spec])
        self.assertEqual([plain(step(iter(self.dataset))) for _ in range(2)], [6, 6])

    @wide.some(2, True, False)
    def test_failing_pipeline(self, traced):
        """Else an error of the pipeline is lost, or towers train on parts of different batches."""
        def checked(number):
            with tf.control_dependencies([tf.debugging.assert_none_equal(
                    number, tf.constant(5, tf.int64), message="row five")]):
                return tf.identity(number)

        dataset = Dataset.range(40).map(checked).batch(3)
        iterator = iter(self.strategy.experimental_distribute_dataset(dataset))
        take = lambda iterator: self.total(next(iterator))  # noqa: E731
        take = tf.function(take) if traced else take
        self.assertEqual(plain(take(iterator)), 3)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "row five"):
            take(iterator)
        for _ in range(3):
            with self.assertRaisesRegex(tf.errors.OpError, "has failed before.*ignore_err"):
                take(iterator)
        # A loop over the rest of the data asks so: no value is its end.
        there = lambda iterator: iterator.get_next_as_optional().has_value()  # noqa: E731
        @tf.function
        def loop(iterator):
            for element in iterator:
                self.total(element)

        for ask in (there, tf.function(there), loop):
            with self.assertRaisesRegex(tf.errors.OpError, "has failed before"):
                ask(iterator)
        iterator = iter(self.strategy.experimental_distribute_dataset(dataset))
        for message in ("row five", "has failed before"):
            with self.assertRaisesRegex(tf.errors.OpError, message):
                loop(iterator)

    def test_checkpoint(self):
        """Else an iterator seems to be saved, and training resumes elsewhere in the data."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "c")
            with self.assertRaisesRegex(ValueError, "trackable"):
                tf.train.Checkpoint(iterator=iter(self.dataset))
            on_host = self.strategy.experimental_distribute_dataset(
                Dataset.range(10).batch(4), ON_HOST)
            iterator = iter(on_host)
            next(iterator)
            saved = tf.train.Checkpoint(iterator=iterator).save(path)
            other = iter(on_host)
            tf.train.Checkpoint(iterator=other).restore(saved)
        self.assertEqual(plain(self.total(next(other))), 22)

    @pytest.mark.wide
    def test_dropped_in_the_middle(self):
        """Else each epoch that is left early leaves a thread, and data, behind."""
        endless = self.strategy.experimental_distribute_dataset(Dataset.range(4).batch(4).repeat())
        counts = []
        for _ in range(4):
            next(iter(endless))
            gc.collect()
            counts.append(len(os.listdir("/proc/self/task")))
        self.assertLess(counts[-1] - counts[0], 3)


class LifetimeTest(parameterized.TestCase):

    def test_devices_parts_are_not_tuned(self):
        """Else each is one more thread that may sleep for a minute when the iterator is to end."""
        with gpus():
            strategy = towerstrategy.TowerStrategy(TOWERS, "CPU:0")
            iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(8).batch(4)))
            next(iterator)
        tuned = [part._dataset.options().autotune.enabled
                 for part in iterator._streams._device_iterators]
        self.assertEqual(tuned, [False] * 4)

    @pytest.mark.wide
    def test_exit_in_the_middle(self):
        """Else who leaves data early hangs, crashes at the end or gets the first batch for ever."""
        program = """
import os, tensorflow as tf, towerstrategy
child = os.fork()  # which has few threads
assert not child or os.waitpid(child, 0)[1] == 0
tf.config.threading.set_inter_op_parallelism_threads(8 if child else 2)
towers = towerstrategy.split_cpu(4)[1:]
strategy = towerstrategy.TowerStrategy(towers, "CPU:0")
batches = strategy.experimental_distribute_dataset(
    tf.data.Dataset.range(8).batch(4).repeat(), tf.distribute.InputOptions())
kept = iter(batches)
for batch in batches:
    break

@tf.function
def three_steps():
    iterator = iter(batches)

    def step(number, total):
        parts = strategy.run(tf.reduce_sum, (next(iterator),))
        return number + 1, total + strategy.reduce("SUM", parts, axis=None)

    return tf.while_loop(lambda number, _: number < 3, step, (0, tf.constant(0, tf.int64)))[1]

print(int(three_steps()), flush=True)
print(next(kept).values[1].device[-5:], flush=True)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              timeout=240, check=False)
        self.assertEqual((done.returncode, done.stdout.split()), (0, ["34", "CPU:2"] * 2),
                         done.stderr[-2000:])


def trained(library, steps, fetched, report=None):
    """What fit, evaluate and predict gave, and how many iterators prefetched."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=[37, 5]).astype("float32"), random.normal(size=[37, 1])
    library.utils.set_random_seed(1)
    made, iterate = [], prefetching.iterate

    def counted(*args):
        made.append(args)
        return iterate(*args)

    with mock.patch.object(devices_lib.Placement, "towers_on_host", not fetched), \
            mock.patch.object(prefetching, "iterate", counted):
        with towerstrategy.TowerStrategy(TOWERS[:2], "CPU:0").scope():
            model = library.Sequential([
                library.Input([5]), library.layers.Dense(7, "tanh"), library.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps)
        logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0,
                         validation_data=(x[:5], y[:5]), callbacks=[report] if report else None)
        results = (logs.history, model.evaluate(x, y, batch_size=8, verbose=0),
                   model.predict(x, batch_size=8, verbose=0), model.get_weights())
    return tf.nest.flatten(results), len(made)


class KerasTest(parameterized.TestCase):

    @wide.parameters(wide=[(keras, 3), (tf_keras, 3)])
    def test_fit_evaluate_predict(self, library, steps):
        """Else Keras' steps wait for their batches on GPUs, or train on other rows."""
        (expected, none), (found, some) = (trained(library, steps, fetched)
                                           for fetched in (False, True))
        self.assertEqual(none, 0)
        self.assertGreaterEqual(some, 4)
        for wanted, value in zip(expected, found, strict=True):
            np.testing.assert_allclose(value, wanted, 1e-6)

    @pytest.mark.wide
    def test_report(self):
        """Else TowerReport counts rows that were fetched and never trained on, or none at all."""
        results = []
        for fetched in (False, True):
            report = tower_report.TowerReport()
            found, made = trained(keras, 1, fetched, report)
            results.append(found)
            self.assertEqual(made > 0, fetched)
            with self.subTest(fetched=fetched):
                self.assertEqual([epoch.rows for epoch in report.epochs], [(19, 18)] * 2)
        for wanted, value in zip(*results, strict=True):
            np.testing.assert_allclose(value, wanted, 1e-6)


class TrafficTest(parameterized.TestCase):

    @parameterized.parameters((InputOptions(), 0), (ON_HOST, 4 * 6 * (16 + 3)))
    def test_bytes_of_the_batch_that_cross_in_the_step(self, options, expected):
        """Else each step on GPUs waits until its batch has come from the host."""
        batch = (np.ones([6, 16], "float32"), np.ones([6, 3], "float32"))
        with on_gpus.tracing():
            strategy = towerstrategy.TowerStrategy(on_gpus.towers(3), "CPU:0")
            with strategy.scope():
                model = keras.Sequential([keras.Input([16]), keras.layers.Dense(3)])
                model.compile("adam", "mse")
            model.train_on_batch(*batch)
            strategy.extended.keep_graphs = True
            iterator = iter(strategy.experimental_distribute_dataset(
                Dataset.from_tensors(batch), options))
            step = tf.function(lambda batches: strategy.run(model.train_step, (next(batches),)),
                               autograph=False)
            found = traffic.count(step.get_concrete_function(iterator), len(TOWERS),
                                  unknown_dimension=2, arguments=iterator)
        self.assertEqual(found.batch, expected)
        self.assertGreater(found.total, expected)

    @parameterized.parameters("steps_per_execution", "loop", "passed", "captured")
    def test_in_loops(self, kind):
        """Else each turn of a loop that TensorFlow runs brings its batch to the host and back."""
        batch = (np.ones([6, 16], "float32"), np.ones([6, 3], "float32"))
        with on_gpus.tracing():
            strategy = towerstrategy.TowerStrategy(on_gpus.towers(3), "CPU:0")
            strategy.extended.keep_graphs = True
            with strategy.scope():
                model = keras.Sequential([keras.Input([16]), keras.layers.Dense(3)])
                model.compile("adam", "mse", steps_per_execution=2)
            data = strategy.experimental_distribute_dataset(
                Dataset.from_tensors(batch).repeat(4))
            if kind == "steps_per_execution":
                model.fit(data, verbose=0)
                step, arguments = function_in(model.train_function), (iter(data).read_once(),)
            else:
                with strategy.scope():
                    model.optimizer.build(model.trainable_variables)
                kept = data if kind == "loop" else iter(data)

                @tf.function
                def step(batches=None):
                    for one in kept if batches is None else batches:
                        strategy.run(model.train_step, (one,))

                arguments = (kept,) if kind == "passed" else ()
            with mock.patch.object(prefetching, "threads", lambda: 8):
                function = step.get_concrete_function(*arguments)
        found = traffic.count(function, len(TOWERS), unknown_dimension=2,
                              arguments=arguments)
        self.assertGreater(found.total, 0)
        self.assertEqual(found.batch, 0)


class PlacedTest(parameterized.TestCase):

    @parameterized.parameters(
        (InputOptions(experimental_place_dataset_on_device=True), "PER_REPLICA"),
        (InputOptions(experimental_place_dataset_on_device=True,
                      experimental_replication_mode=PER_REPLICA), "fetch_to_device"))
    def test_refused_as_by_mirrored(self, options, named):
        """Else options that contradict each other are taken in silence."""
        for strategy in (towerstrategy.TowerStrategy(TOWERS[:2], "CPU:0"), mirrored()):
            with self.assertRaisesRegex(ValueError, named):
                strategy.distribute_datasets_from_function(lambda _: rows(4, 2), options)

    def test_each_pipeline_is_made_on_its_tower(self):
        """Else who places pipelines on devices, as with MirroredStrategy, cannot change over."""
        strategy, seen = towerstrategy.TowerStrategy(TOWERS[:2], "CPU:0"), []

        def make(context):
            seen.append(tf.zeros([]).device[-5:])
            return Dataset.range(4).shard(2, context.input_pipeline_id).batch(1)

        distributed = strategy.distribute_datasets_from_function(make, ON_HOST._replace(
            experimental_place_dataset_on_device=True, experimental_replication_mode=PER_REPLICA))
        self.assertEqual(seen, TOWERS[:2])
        self.assertEqual([contents(element) for element in distributed], [[[0], [1]], [[2], [3]]])
