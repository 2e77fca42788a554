"""TensorFlow's other parts with variables and steps of TowerStrategy.

Lookup tables, generators, modules, checkpoints, SavedModel, summaries, the profiler, check_numerics
and mixed precision, with ``MirroredStrategy`` beside them where it has a result.
"""

import contextlib
import copy
import os
import pathlib
import tempfile
import threading

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import wide
from peers import mirrored, per_replica, plain, two_towers
from towerstrategy import TowerStrategy
from towerstrategy.variables import one_copy

IN_TURN = wide.turns(("keras", keras), ("tf_keras", tf_keras))
Aggregation = tf.VariableAggregation


class Counting(tf.Module):
    """A module with a weight, a step counter and a tower-local count of rows."""

    def __init__(self):
        super().__init__(name="counting")
        self.w = tf.Variable(tf.ones([2, 1]), name="w")
        self.rows = tf.Variable(0., trainable=False, name="rows", aggregation=Aggregation.SUM,
                                synchronization=tf.VariableSynchronization.ON_READ)
        self.steps = tf.Variable(0, trainable=False, name="steps", dtype=tf.int64,
                                 aggregation=Aggregation.ONLY_FIRST_REPLICA)

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def __call__(self, x):
        self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return x @ self.w


def counted(strategy):
    """A module that has seen two rows, one a replica, and three steps."""
    with strategy.scope():
        module = Counting()
    strategy.run(lambda x: module(x), (per_replica(strategy, [[1., 2.]], [[3., 4.]]),))
    module.w.assign(tf.ones([2, 1]) * 5.)
    module.steps.assign(3)
    return module


def state(module):
    return [plain(v.read_value()) for v in (module.w, module.rows, module.steps)]


STATE = [[[5.], [5.]], 2., 3]


class FolderTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)
        self.folder = self._folder.name


class TableTest(parameterized.TestCase):

    def lookups(self, strategy, make):
        with strategy.scope():
            table = make()
        step = tf.function(lambda words: strategy.run(table.lookup, (words,)))
        words = per_replica(strategy, ["a", "b"], ["c", "none"])
        batches = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).map(table.lookup).batch(2))
        return [plain(value) for value in (
            step(words), strategy.run(table.lookup, (words,)), table.lookup(tf.constant("b")),
            table.size(), [strategy.experimental_local_results(batch) for batch in batches])]

    @parameterized.parameters("static", "mutable", "vocabulary")
    def test_lookup(self, kind):
        """Else text models cannot be trained: their vocabulary is a table."""
        def static():
            return tf.lookup.StaticHashTable(
                tf.lookup.KeyValueTensorInitializer(["a", "b", "c"], [1, 2, 3]), -1)

        def mutable():
            table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int32, -1)
            table.insert(["a", "b"], [1, 2])
            return table

        def vocabulary():
            return tf.lookup.StaticVocabularyTable(tf.lookup.KeyValueTensorInitializer(
                ["a", "b", "c"], tf.constant([0, 1, 2], tf.int64)), 1)

        make = {"static": static, "mutable": mutable, "vocabulary": vocabulary}[kind]
        self.assertEqual(self.lookups(two_towers(), make), self.lookups(mirrored(), make))

    def test_insert_in_towers(self):
        """Else what one tower adds to a table is lost."""
        strategy = two_towers()
        with strategy.scope():
            table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.int32, -1)

        def replica(key):
            table.insert(tf.reshape(key, [1]), tf.reshape(key * 10, [1]))

        tf.function(lambda keys: strategy.run(replica, (keys,)))(per_replica(strategy, 1, 2))
        self.assertEqual(plain(table.lookup(tf.constant([1, 2, 3]))), [10, 20, -1])


def drawing_apart():
    return TowerStrategy(["CPU:1", "CPU:2"], "CPU:0", draws="per tower")


class GeneratorTest(FolderTest):

    def draw(self, strategy, generator, in_function=True):
        def draw():
            return strategy.run(lambda: generator.normal([4]))

        values = (tf.function(draw) if in_function else draw)()
        parts = strategy.experimental_local_results(values)
        return [tuple(part.numpy().tolist()) for part in parts]

    @parameterized.product(make=[drawing_apart, two_towers], in_scope=[True, False],
                           in_function=[False, True])
    def test_towers_draw_differently(self, make, in_scope, in_function):
        """Else every tower adds the same noise, where tf.distribute promises a stream a replica."""
        strategy = make()
        with strategy.scope() if in_scope else contextlib.nullcontext():
            generator = tf.random.Generator.from_seed(7)
        draws = [part for _ in range(3) for part in self.draw(strategy, generator, in_function)]
        self.assertLen(set(draws), 6)

    def test_same_as_mirrored_in_kind(self):
        """Else a generator made in the scope lacks methods there."""
        for strategy in (drawing_apart(), mirrored()):
            with strategy.scope():
                generator = tf.random.Generator.from_seed(7)
                self.assertLen(generator.split(2), 2)
                generator.skip(3)
                generator.reset_from_seed(3)
            self.assertLen(set(self.draw(strategy, generator)), 2)

    def test_checkpoint(self):
        """Else resumed training draws other numbers."""
        strategy = two_towers()
        with strategy.scope():
            generator = tf.random.Generator.from_seed(7)
        self.draw(strategy, generator)
        checkpoint = tf.train.Checkpoint(generator=generator)
        path = checkpoint.save(os.path.join(self.folder, "c"))
        first = self.draw(strategy, generator)
        checkpoint.restore(path)
        self.assertEqual(self.draw(strategy, generator), first)

    def test_seeds_from_outside_a_generator(self):
        """Else tf.random draws the same on every tower."""
        strategy = drawing_apart()
        for fn in (lambda: tf.random.normal([4]), tf.function(lambda: tf.random.normal([4]))):
            first, second = strategy.experimental_local_results(strategy.run(fn))
            self.assertNotAllEqual(first, second)

    def assertNotAllEqual(self, first, second):
        self.assertFalse(np.array_equal(first, second))


class ModuleTest(FolderTest):

    def test_variables(self):
        """Else a module's variables are not found, or are wrappers."""
        module = counted(two_towers())
        self.assertEqual([v.name for v in module.trainable_variables], ["w:0"])
        self.assertLen(module.variables, 3)
        self.assertEqual(state(module), STATE)

    def test_deepcopy(self):
        """Else a target network shares its weights with the trained one."""
        module = counted(two_towers())
        copied = copy.deepcopy(module)
        copied.w.assign(tf.zeros([2, 1]))
        copied.rows.assign(0.)
        self.assertEqual(state(module), STATE)
        self.assertIsInstance(copied.w, one_copy.TowerVariable)

    @parameterized.named_parameters(
        ("to_plain", two_towers, None), ("to_towers", two_towers, two_towers),
        ("from_mirrored", mirrored, two_towers), ("to_mirrored", two_towers, mirrored))
    def test_checkpoint_moves(self, source, target):
        """Else a checkpoint is tied to the strategy that wrote it."""
        path = tf.train.Checkpoint(module=counted(source())).save(os.path.join(self.folder, "c"))
        names = [name for name, _ in tf.train.list_variables(path) if "VARIABLE_VALUE" in name]
        self.assertLen(names, 3 + 1)  # and save_counter
        if target is None:
            module = Counting()
        else:
            with target().scope():
                module = Counting()
        tf.train.Checkpoint(module=module).restore(path).assert_consumed()
        self.assertEqual(state(module), STATE)

    def test_deferred_restore(self):
        """Else a model built after restoring starts from its initial weights."""
        path = tf.train.Checkpoint(module=counted(two_towers())).save(
            os.path.join(self.folder, "c"))
        root = tf.train.Checkpoint()
        root.restore(path)
        with two_towers().scope():
            root.module = Counting()
        self.assertEqual(state(root.module), STATE)

    def test_checkpoint_manager(self):
        """Else old checkpoints are not removed or the latest is not found."""
        with two_towers().scope():
            module = Counting()
        manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(module=module), self.folder, max_to_keep=2)
        for step in range(3):
            module.steps.assign(step)
            manager.save()
        module.steps.assign(9)
        self.assertLen(manager.checkpoints, 2)
        manager.restore_or_initialize()
        self.assertEqual(plain(module.steps), 2)

    @parameterized.named_parameters(("towers", two_towers), ("mirrored", mirrored))
    def test_saved_model(self, make):
        """Else a module cannot be served, or its files hold a copy a tower."""
        module = counted(make())
        tf.saved_model.save(module, self.folder)
        loaded = tf.saved_model.load(self.folder)
        self.assertEqual(plain(loaded(tf.ones([3, 2]))), [[10.]] * 3)
        self.assertEqual(plain(loaded.w), [[5.], [5.]])
        self.assertEqual(plain(loaded.rows), 5.)
        # Loaded in a scope its variables are the strategy's.
        strategy = two_towers()
        with strategy.scope():
            loaded = tf.saved_model.load(self.folder)
        self.assertIsInstance(loaded.w, one_copy.TowerVariable)
        result = strategy.run(lambda x: loaded(x), (per_replica(strategy, [[1., 2.]], [[3., 4.]]),))
        self.assertEqual(plain(result), ("per replica", [[[15.]], [[35.]]]))
        self.assertEqual(plain(loaded.rows.read_value()), 4.)


class ObserverTest(FolderTest):

    def test_summaries_are_written_once(self):
        """Else TensorBoard shows each point once a tower."""
        strategy = two_towers()
        writer = tf.summary.create_file_writer(self.folder)

        def replica(x):
            tf.summary.write("x", x, step=1)

        values = per_replica(strategy, 1., 2.)
        with writer.as_default():
            strategy.run(replica, (values,))
            tf.function(lambda values: strategy.run(replica, (values,)))(values)
            strategy.run(tf.function(replica), (values,))
        writer.flush()
        (path,) = pathlib.Path(self.folder).iterdir()
        written = [tf.make_ndarray(value.tensor).item()
                   for event in tf.compat.v1.train.summary_iterator(str(path))
                   for value in event.summary.value]
        self.assertEqual(written, [1.] * 3)

    def test_profiler(self):
        """Else a training cannot be profiled."""
        strategy = two_towers()
        with tf.profiler.experimental.Profile(self.folder):
            strategy.run(tf.function(lambda x: x * 2.), (per_replica(strategy, 1., 2.),))
        self.assertNotEmpty(list(pathlib.Path(self.folder).rglob("*.xplane.pb")))

    def test_check_numerics(self):
        """Else a NaN in a tower is not found."""
        strategy = two_towers()
        tf.debugging.enable_check_numerics()
        try:
            with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "Log"):
                strategy.run(tf.function(tf.math.log), (per_replica(strategy, 1., -1.),))
            strategy.run(tf.function(tf.math.log), (per_replica(strategy, 1., 2.),))
        finally:
            tf.debugging.disable_check_numerics()

    @IN_TURN
    def test_two_threads_train(self, library):
        """Else two models cannot be trained at once, on one strategy or on two."""
        x = np.random.default_rng(0).normal(size=[9, 4]).astype("float32")

        def train(strategy, results):
            with strategy.scope():
                model = library.Sequential([
                    library.layers.Input([4]), library.layers.Dense(3, kernel_initializer="ones"),
                    library.layers.BatchNormalization(),
                    library.layers.Dense(1, kernel_initializer="ones")])
                model.compile("adam", "mse")
            history = model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, shuffle=False)
            results.append(history.history["loss"])

        strategy, other = two_towers(), TowerStrategy(["CPU:3", "CPU:4"], "CPU:5")
        results = []
        threads = [threading.Thread(target=train, args=(one, results))
                   for one in (strategy, strategy, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        train(strategy, results)
        self.assertLen(results, 4)
        for losses in results[:3]:
            np.testing.assert_allclose(losses, results[3], rtol=1e-5)
