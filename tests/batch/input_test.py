"""Datasets: what the towers get, and every way to iterate.

Most checks do the same with ``MirroredStrategy`` and compare.
"""

import os
import tempfile
import warnings
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
import wide
from peers import mirrored, outcome, plain, two_towers
from towerstrategy.batch import iterators

Dataset = tf.data.Dataset
InputOptions = tf.distribute.InputOptions
PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA


class Pair(tf.experimental.BatchableExtensionType):
    left: tf.Tensor
    right: tf.Tensor


def batches(rows, size, **kwargs):
    return Dataset.range(rows).batch(size, **kwargs)


def local(strategy, element):
    return [plain(part) for part in strategy.experimental_local_results(element)]


def read(strategy, dataset):
    """All elements of a distributed dataset, each a list of the towers' parts."""
    return [local(strategy, element) for element in dataset]


def unknown_sizes():
    def sizes():
        yield np.arange(3, dtype=np.float32)
        yield np.arange(4, dtype=np.float32)

    return Dataset.from_generator(sizes, output_signature=tf.TensorSpec([None], tf.float32))


DATASETS = {
    "even": lambda: batches(8, 4),
    "last_batch_of_one": lambda: batches(9, 4),
    "odd_batches": lambda: batches(5, 3),
    "drop_remainder": lambda: batches(9, 4, drop_remainder=True),
    "empty": lambda: batches(0, 4),
    "nest": lambda: Dataset.from_tensor_slices(
        {"a": [1., 2., 3.], "b": ([[1, 2], [3, 4], [5, 6]],)}).batch(2),
    "strings": lambda: Dataset.from_tensor_slices(["a", "b", "c"]).batch(2),
    "ragged": lambda: Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3], [4]])).batch(2),
    "unknown_sizes": unknown_sizes,
}


def total(strategy, element):
    return strategy.reduce("SUM", strategy.run(tf.reduce_sum, (element,)), axis=None)


class ElementTest(parameterized.TestCase):

    @parameterized.parameters(*DATASETS)
    def test_as_mirrored(self, name):
        """Else towers get other rows than replicas did, or other specs."""
        results = []
        for strategy in (two_towers(), mirrored()):
            distributed = strategy.experimental_distribute_dataset(DATASETS[name]())
            specs = tf.nest.map_structure(lambda spec: [repr(part) for part in spec._value_specs],
                                          distributed.element_spec)
            results.append((read(strategy, distributed), specs))
        self.assertEqual(*results)

    def test_fewer_rows_than_towers(self):
        """Else rows of a small batch are lost or doubled."""
        strategy = towerstrategy.TowerStrategy(4)
        distributed = strategy.experimental_distribute_dataset(batches(6, 4))
        self.assertEqual(read(strategy, distributed), [[[0], [1], [2], [3]], [[4], [5], [], []]])

    def test_a_generator_is_read_once(self):
        """Else a pipeline with state feeds different data to each tower (as R rebatchers do)."""
        count = iter(range(100))

        def numbers():
            while True:
                yield next(count)

        dataset = Dataset.from_generator(
            numbers, output_signature=tf.TensorSpec([], tf.int32)).batch(4)
        strategy = two_towers()
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        self.assertEqual(local(strategy, next(iterator)), [[0, 1], [2, 3]])

    def test_unbatched(self):
        """Else a forgotten batch() ends in an IndexError."""
        strategy = two_towers()
        for dataset, component in ((Dataset.range(4), "its elements are scalars"),
                                   (Dataset.zip((batches(8, 4), Dataset.range(2))),
                                    "component 1 of its elements is a scalar")):
            with self.assertRaisesRegex(
                    ValueError, f"not batched: {component}.*dataset.batch"):
                strategy.experimental_distribute_dataset(dataset)

    def test_unbatched_of_unknown_rank(self):
        """Else scalars that only show while the pipeline runs end in a message about slices."""
        dataset = Dataset.range(2).map(lambda x: tf.ensure_shape(
            tf.numpy_function(lambda y: y, [x], tf.int64), None))
        strategy = two_towers()
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "no first .batch. dimension"):
            read(strategy, strategy.experimental_distribute_dataset(dataset))

    def test_not_a_dataset(self):
        """Else a list ends in an AttributeError."""
        strategy = two_towers()
        with self.assertRaisesRegex(TypeError, "must be a tf.data.Dataset, but got.*list"):
            strategy.experimental_distribute_dataset([1, 2])
        with self.assertRaisesRegex(TypeError, "dataset_fn must return a tf.data.Dataset"):
            strategy.distribute_datasets_from_function(lambda context: [1, 2])

    def test_seeded_shuffles_of_what_is_zipped(self):
        """Else a run on towers gets other batches of a shuffled dataset than one device does."""
        series = Dataset.from_tensors(tf.range(20)).repeat()  # as Keras makes windows of a series
        places = Dataset.range(16).map(lambda i: i + tf.range(4, dtype=tf.int64))
        windows = Dataset.zip((series, places)).map(tf.gather)
        shuffled = [lambda seed=seed: Dataset.range(16).shuffle(16, seed=seed) for seed in (1, 2)]
        for make in (lambda: windows.shuffle(16, seed=1).batch(4),
                     lambda: windows.shuffle(16, seed=1).batch(4).map(lambda x: (x, x[:, 0])),
                     lambda: Dataset.zip(tuple(make().batch(3).prefetch(1) for make in shuffled)),
                     lambda: Dataset.zip((shuffled[0]().batch(2), shuffled[1]().batch(3))).take(4),
                     lambda: Dataset.zip((shuffled[0]().batch(2, drop_remainder=True),
                                          shuffled[1]().batch(4, drop_remainder=True)))):
            orders = []
            for strategy in (None, two_towers()):
                tf.random.set_seed(3)
                dataset = make()
                if strategy is None:
                    orders.append([[np.asarray(leaf) for leaf in tf.nest.flatten(element)]
                                   for element in dataset])
                    continue
                orders.append([[np.concatenate(strategy.experimental_local_results(leaf))
                                for leaf in tf.nest.flatten(element)]
                               for element in strategy.experimental_distribute_dataset(dataset)])
            tf.nest.map_structure(np.testing.assert_array_equal, *orders)

    def test_what_is_zipped_in_a_function(self):
        """Else an error about a tensor of another graph, as its sizes are looked for too early."""
        strategy = two_towers()

        @tf.function
        def total():
            result = 0.
            for x, y in strategy.experimental_distribute_dataset(
                    Dataset.zip((batches(8, 4), batches(8, 4)))):
                result += tf.cast(strategy.reduce(
                    "SUM", strategy.run(lambda x, y: tf.reduce_sum(x + y), (x, y)), axis=None),
                    tf.float32)
            return result

        self.assertEqual(total(), 56)

    def test_sparse_batches_that_are_zipped(self):
        """Else an AttributeError: these datasets hold their batch size as a number."""
        strategy, rows = two_towers(), Dataset.from_tensor_slices(tf.ones([5, 3])).map(tf.identity)
        zipped = Dataset.zip((rows.sparse_batch(4, [3]), rows.batch(4)))
        counts = [[part.shape[0] for part in strategy.experimental_local_results(dense)]
                  for _, dense in strategy.experimental_distribute_dataset(zipped)]
        self.assertEqual(counts, [[2, 2], [1, 0]])

    def test_ragged_rows_of_one_length(self):
        """Else the pipeline fails, as it cannot run the assertions of their slices."""
        rows = tf.RaggedTensor.from_uniform_row_length(tf.ragged.constant(
            [[i] * (i % 3) for i in range(14)]), 2)
        strategy = two_towers()
        for batch, parts in zip(Dataset.from_tensor_slices(rows).batch(4),
                                strategy.experimental_distribute_dataset(
                                    Dataset.from_tensor_slices(rows).batch(4)), strict=True):
            self.assertEqual(tf.concat(strategy.experimental_local_results(parts), 0).to_list(),
                             batch.to_list())

    def test_one_trace_for_all_batches(self):
        """Else the last, smaller batch traces the step again."""
        strategy, traces = two_towers(), []

        @tf.function
        def step(iterator):
            traces.append(iterator)
            return total(strategy, next(iterator))

        iterator = iter(strategy.experimental_distribute_dataset(batches(9, 4)))
        self.assertEqual([plain(step(iterator)) for _ in range(3)], [6, 22, 8])
        self.assertLen(traces, 1)


class IterationTest(parameterized.TestCase):

    def test_everywhere(self):
        """Else one of the documented ways to iterate fails or gives other rows."""
        strategy = two_towers()
        distributed = strategy.experimental_distribute_dataset(batches(5, 2))

        @tf.function
        def loop(dataset):
            result = tf.constant(0, tf.int64)
            for element in dataset:
                result += total(strategy, element)
            return result

        @tf.function
        def captured():
            result = tf.constant(0, tf.int64)
            for element in distributed:
                result += total(strategy, element)
            return result

        @tf.function
        def optionals(iterator):
            result = tf.constant(0, tf.int64)
            element = iterator.get_next_as_optional()
            while element.has_value():
                result += total(strategy, element.get_value())
                element = iterator.get_next_as_optional()
            return result

        @tf.function
        def two_steps(iterator):
            result = tf.constant(0, tf.int64)
            for _ in tf.range(2):
                result += total(strategy, next(iterator))
            return result

        self.assertEqual(
            [plain(f) for f in (loop(distributed), loop(iter(distributed)), captured(),
                                captured(), optionals(iter(distributed)),
                                two_steps(iter(distributed)))], [10] * 5 + [6])
        self.assertEqual(sum(plain(total(strategy, element)) for element in distributed), 10)

    def test_ends(self):
        """Else loops do not end, or end with the wrong exception."""
        strategy = two_towers()
        iterator = iter(strategy.experimental_distribute_dataset(batches(2, 2)))
        next(iterator)
        with self.assertRaises(StopIteration):
            next(iterator)
        with self.assertRaises(tf.errors.OutOfRangeError):
            iterator.get_next()
        self.assertFalse(plain(iterator.get_next_as_optional().has_value()))

    def test_infinite(self):
        """Else a repeated dataset is read to its end before the first step."""
        strategy = two_towers()
        distributed = strategy.experimental_distribute_dataset(batches(4, 4).repeat())
        iterator = iter(distributed)
        for _ in range(3):
            self.assertEqual(local(strategy, next(iterator)), [[0, 1], [2, 3]])
        self.assertEqual(distributed.cardinality, tf.data.INFINITE_CARDINALITY)

    @wide.product(prefetched=[False, True], as_iterator=[False, True], endless=[
        lambda batches: [number for number, _ in enumerate(batches)],
        lambda batches: list(zip(batches, batches)),
        lambda batches: list(zip(range(10**6), batches)),
        lambda batches: list(map(tf.shape, batches)),
        lambda batches: list(filter(None, batches)),
        lambda batches: [None for _ in batches],
        lambda batches: list(iter(batches))])
    def test_python_loops_in_functions_end(self, prefetched, as_iterator, endless):
        """Else Python's loops over distributed batches in a tf.function trace for ever."""
        distributed = two_towers().experimental_distribute_dataset(
            batches(4, 4), InputOptions(experimental_fetch_to_device=prefetched))
        distributed = iter(distributed) if as_iterator else distributed
        # Whatever is in the loop is traced a thousand times else.
        with mock.patch.object(iterators, "_TOO_MANY", 10):
            for traced in (lambda: tf.function(endless)(distributed),
                           tf.function(lambda: endless(distributed))):
                with self.assertRaisesRegex(NotImplementedError, "plain `for batch in dataset:`"):
                    traced()

    def test_python_loops_of_known_length(self):
        """Else a loop that does end is refused in a tf.function, or warned of."""
        strategy = two_towers()
        distributed = strategy.experimental_distribute_dataset(batches(12, 4))

        @tf.function
        def three(iterator):
            firsts = [number + strategy.gather(batch, 0)[0]
                      for number, batch in zip(range(2), iterator)]
            for _ in range(1):
                firsts.append(strategy.gather(next(iterator), 0)[0])
            return firsts

        with warnings.catch_warnings():
            warnings.simplefilter("error", towerstrategy.TowerWarning)
            self.assertEqual(plain(three(iter(distributed))), [0, 5, 8])
        self.assertLen(list(enumerate(distributed)), 3)

    def test_many_batches_in_one_function_are_logged(self):
        """Else whoever traces for an hour does not know why."""
        distributed = two_towers().experimental_distribute_dataset(batches(4, 4).repeat())
        unrolled = tf.function(lambda taken: [next(taken) for _ in range(100)][-1])
        with self.assertLogs("towerstrategy", "WARNING") as logged:
            unrolled(iter(distributed))
        self.assertRegex(logged.output[0], "100 batches.*plain `for")

    def test_iterator_by_its_public_spec(self):
        """Else a function whose signature says tf.data.IteratorSpec refuses what it took before."""
        strategy = two_towers()
        first = iter(strategy.experimental_distribute_dataset(batches(4, 4)))
        total = tf.function(lambda taken: tf.reduce_sum(strategy.gather(next(taken), 0)),
                            input_signature=[tf.data.IteratorSpec(first.element_spec)])
        self.assertEqual(plain(total(first)), 6)

    def test_types(self):
        """Else Keras and libraries do not see that the data is distributed already."""
        strategy = two_towers()
        distributed = strategy.experimental_distribute_dataset(batches(4, 4))
        self.assertIsInstance(distributed, tf.distribute.DistributedDataset)
        self.assertIsInstance(iter(distributed), tf.distribute.DistributedIterator)
        self.assertEqual(iter(distributed).element_spec, distributed.element_spec)
        self.assertLen(distributed, 1)

    def test_specs_as_signatures(self):
        """Else element_spec and the iterator's spec cannot be an input_signature."""
        strategy = two_towers()
        distributed = strategy.experimental_distribute_dataset(batches(4, 2))
        iterator = iter(distributed)

        def first(iterator):
            return strategy.run(lambda x: x + 1, (next(iterator),))

        def plus_one(element):
            return strategy.run(lambda x: x + 1, (element,))

        by_iterator = tf.function(first, input_signature=[iterator._type_spec])
        by_element = tf.function(plus_one, input_signature=[distributed.element_spec])
        self.assertEqual(local(strategy, by_iterator(iterator)), [[1], [2]])
        self.assertEqual([local(strategy, by_element(element)) for element in distributed],
                         [[[1], [2]], [[3], [4]]])

    @parameterized.parameters(True, False)
    def test_checkpoint(self, grouped):
        """Else training that is resumed reads its data from the start (MirroredStrategy cannot)."""
        strategy = two_towers()
        distributed = (
            strategy.distribute_datasets_from_function(lambda _: batches(8, 1)) if grouped
            else strategy.experimental_distribute_dataset(batches(8, 2)))
        iterator = iter(distributed)
        next(iterator)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(iterator=iterator).save(os.path.join(folder, "c"))
            other = iter(distributed)
            tf.train.Checkpoint(iterator=other).restore(path)
        self.assertEqual(local(strategy, next(other)), [[2], [3]])


class OptionsTest(parameterized.TestCase):

    @parameterized.parameters((None, ["CPU:0", "CPU:0"]), (True, ["CPU:1", "CPU:2"]),
                              (False, ["CPU:0", "CPU:0"]))
    def test_fetch_to_device(self, fetch, wanted):
        """Else parts that were asked to be on the devices are not there when the step starts."""
        strategy = two_towers()
        options = None if fetch is None else InputOptions(experimental_fetch_to_device=fetch)
        for distributed in (
                strategy.experimental_distribute_dataset(batches(4, 4), options),
                strategy.distribute_datasets_from_function(lambda _: batches(4, 2), options)):
            for element in (next(iter(distributed)), iter(distributed).get_next()):
                self.assertEqual([part.device[-5:] for part in element.values], wanted)
                self.assertEqual(local(strategy, element), [[0, 1], [2, 3]])

    def test_fetch_to_one_device(self):
        """Else one tower's batches stay behind, or absent components (None) fail."""
        strategy = towerstrategy.TowerStrategy(["CPU:1"])
        dataset = batches(4, 4).map(lambda x: (x, None))
        x, nothing = next(iter(strategy.experimental_distribute_dataset(dataset, InputOptions())))
        self.assertEqual((plain(x), x.device[-5:], nothing), ([0, 1, 2, 3], "CPU:1", None))

    def test_pipeline_a_tower(self):
        """Else PER_REPLICA pipelines read the same rows, or drop some when lengths differ."""
        strategy, seen = two_towers(), []

        def make(context):
            seen.append((context.num_input_pipelines, context.input_pipeline_id,
                         context.num_replicas_in_sync))
            return Dataset.range(6).shard(2, context.input_pipeline_id).take(
                3 - context.input_pipeline_id).batch(1)

        options = InputOptions(experimental_replication_mode=PER_REPLICA)
        distributed = strategy.distribute_datasets_from_function(make, options)
        self.assertEqual(seen, [(2, 0, 2), (2, 1, 2)])
        self.assertEqual(read(strategy, distributed), [[[0], [1]], [[2], [3]], [[4], []]])
        with self.assertRaisesRegex(NotImplementedError, "only supported in `distribute_datasets"):
            strategy.experimental_distribute_dataset(batches(4, 4), options)

    def test_buffer_size(self):
        """Else the number of elements held ready cannot be chosen."""
        strategy = two_towers()
        options = InputOptions(experimental_per_replica_buffer_size=5)
        distributed = strategy.experimental_distribute_dataset(batches(4, 4), options)
        self.assertEqual(read(strategy, distributed), [[[0, 1], [2, 3]]])
        self.assertEqual(plain(distributed.dataset._buffer_size), 5)

    def test_refused(self):
        """Else an option that has no effect is taken in silence."""
        strategy = two_towers()
        for options, error, message in (
                (InputOptions(experimental_place_dataset_on_device=True), ValueError,
                 "place_dataset_on_device=True needs experimental_replication_mode=PER_REPLICA"),
                ("x", TypeError, "must be None or a tf.distribute.InputOptions")):
            with self.assertRaisesRegex(error, message):
                strategy.experimental_distribute_dataset(batches(4, 4), options)
            with self.assertRaisesRegex(error, message):
                strategy.distribute_datasets_from_function(lambda _: batches(4, 4), options)


class FromFunctionTest(parameterized.TestCase):

    def test_as_mirrored(self):
        """Else a dataset function gives towers other batches."""
        def result(strategy):
            distributed = strategy.distribute_datasets_from_function(
                lambda context: batches(8, context.get_per_replica_batch_size(4)))
            return read(strategy, distributed)

        self.assertEqual(result(two_towers()), result(mirrored()))
        self.assertEqual(
            outcome(lambda: two_towers().distribute_datasets_from_function(
                lambda context: batches(8, context.get_per_replica_batch_size(5)))), "ValueError")

    def test_incomplete_last_group(self):
        """Else the last batches are lost."""
        strategy = two_towers()
        distributed = strategy.distribute_datasets_from_function(lambda _: batches(5, 2))
        self.assertEqual(read(strategy, distributed), [[[0, 1], [2, 3]], [[4], []]])
        self.assertEqual(distributed.cardinality, 2)

    @parameterized.product(
        mode=[tf.distribute.InputReplicationMode.PER_WORKER, PER_REPLICA],
        one_value=[True, False])
    def test_absent_components(self, mode, one_value):
        """Else inputs without targets (None), which one device takes, fail in the pipeline."""
        strategy = two_towers()
        dataset = Dataset.range(3) if one_value else batches(3, 1)
        distributed = strategy.distribute_datasets_from_function(
            lambda _: dataset.map(lambda x: (None, {"x": x, "y": None})),
            InputOptions(experimental_replication_mode=mode))
        elements = list(distributed)
        self.assertLen(elements, 3 if mode is PER_REPLICA else 1 if one_value else 2)
        for nothing, named in elements:
            self.assertIsNone(nothing)
            self.assertIsNone(named["y"])
        self.assertEqual(local(strategy, elements[0][1]["x"]),
                         ([0, 0] if one_value else [[0], [0]]) if mode is PER_REPLICA
                         else [0, 1] if one_value else [[0], [1]])

    @parameterized.parameters(tf.distribute.InputReplicationMode.PER_WORKER, PER_REPLICA)
    def test_sequences_of_no_rows(self, mode):
        """Else a tower whose data has ended gets sequences of no length, on which kernels fail."""
        dataset = Dataset.from_generator(lambda: [np.zeros([2, 5])] * 3,
                                         output_signature=tf.TensorSpec([None, None]))
        *_, last = two_towers().distribute_datasets_from_function(
            lambda context: dataset.skip(context.input_pipeline_id),
            InputOptions(experimental_replication_mode=mode))
        self.assertEqual([part.shape.as_list() for part in last.values], [[2, 5], [0, 5]])

    def test_single_values_have_no_share(self):
        """Else values that are no batches are counted by their first dimension."""
        strategy = two_towers()
        distributed = strategy.distribute_datasets_from_function(
            lambda _: Dataset.from_tensor_slices(([1., 2.], [[1., 2., 3.], [4., 5., 6.]])))
        (element,) = distributed
        mean = strategy.run(lambda x, y: tf.distribute.get_replica_context().all_reduce("MEAN", x),
                            element)
        self.assertEqual(plain(mean), ("per replica", [1.5, 1.5]))

    def test_values_of_a_users_type(self):
        """Else graphs, or whatever else a program puts into a type, cannot be given to towers."""
        def total(strategy):
            def step(pair):
                return strategy.run(lambda each: tf.reduce_sum(each.left * each.right), [pair])

            distributed = strategy.distribute_datasets_from_function(
                lambda _: Dataset.from_tensor_slices(Pair(tf.range(8), tf.range(8))).batch(2))
            return [plain(strategy.reduce("SUM", step(pair), None)) for pair in distributed]

        self.assertEqual(total(two_towers()), total(mirrored()))
        with self.assertRaisesRegex(TypeError, "each a Pair, cannot be concatenated"):
            two_towers().gather(two_towers().run(lambda: Pair([1, 2], [3, 4])), 0)

    def test_one_tower(self):
        """Else one tower gets wrapped values that plain code cannot use."""
        strategy = towerstrategy.TowerStrategy(["CPU:1"])
        for distributed in (
                strategy.experimental_distribute_dataset(batches(3, 2)),
                strategy.distribute_datasets_from_function(lambda _: batches(3, 2))):
            self.assertEqual([plain(element) for element in distributed], [[0, 1], [2]])
