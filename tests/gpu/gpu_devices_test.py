"""Where operations run and what memory takes, on two GPU towers, or two that stand for them."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy

pytestmark = pytest.mark.wide
ARE_GPUS = bool(tf.config.list_physical_devices("GPU"))
TOWERS = ["GPU:0", "GPU:1"] if ARE_GPUS else ["CPU:1", "CPU:2"]
ONE = "GPU:0" if ARE_GPUS else "CPU:0"  # where TensorFlow works by itself
WIDTH, LAYERS = 2048, 4
WEIGHTS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)  # bytes
SLACK = WEIGHTS // 10


def held(device):
    gc.collect()
    return tf.config.experimental.get_memory_info(device)["current"]


def name_of(device):
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}"


def device_of(variable):
    return name_of((variable if callable(variable.value) else variable.value).device)


def model_of(library, strategy):
    """A model whose optimizer has two slots a weight; made, not trained."""
    with strategy.scope():
        layers = [library.layers.Dense(WIDTH, use_bias=True) for _ in range(LAYERS)]
        model = library.Sequential([library.Input([WIDTH]), *layers])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return model


class PlacementTest(parameterized.TestCase):

    @parameterized.product(library=(keras, tf_keras), merge_device=("cpu", TOWERS[1], "balanced"))
    def test_variables(self, library, merge_device):
        """Else the weights are on another GPU than the one that was asked for."""
        model = model_of(library, towerstrategy.TowerStrategy(TOWERS, merge_device))
        found = set(map(device_of, model.trainable_variables))
        wanted = {"cpu": ["CPU:0"], "balanced": TOWERS}.get(merge_device, [merge_device])
        self.assertEqual(found, set(wanted))

    def test_each_tower_computes_on_its_own_gpu(self):
        """Else one GPU does the work of both."""
        strategy = towerstrategy.TowerStrategy(TOWERS)
        parts = strategy.split(tf.ones([4, 8]))
        results = strategy.run(lambda x: tf.matmul(x, x, transpose_a=True), args=(parts,))
        places = [name_of(value.backing_device)
                  for value in strategy.experimental_local_results(results)]
        self.assertEqual(places, TOWERS)

    def test_no_operation_falls_back_to_the_cpu(self):
        """Else each step crosses to the host and back in the middle of a tower's work."""
        strategy = towerstrategy.TowerStrategy(TOWERS, TOWERS[0])
        tf.config.set_soft_device_placement(False)
        self.addCleanup(tf.config.set_soft_device_placement, True)
        step = tf.function(lambda x: strategy.run(
            lambda x: tf.reduce_sum(tf.nn.relu(tf.matmul(x, x, transpose_a=True))), args=(x,)))
        step(strategy.split(tf.ones([4, 8])))


class InputTest(parameterized.TestCase):

    def test_batches_lie_on_the_gpus(self):
        """Else each step waits until its batch has crossed from the host."""
        strategy = towerstrategy.TowerStrategy(TOWERS)
        rows = tf.data.Dataset.from_tensor_slices(
            (np.arange(20.), np.arange(20).astype("int32"), list("abcdefghij" * 2)))
        found = []
        for numbers, words, letters in strategy.experimental_distribute_dataset(
                rows.batch(6), None if ARE_GPUS else tf.distribute.InputOptions()):
            self.assertEqual([name_of(part.backing_device) for part in numbers.values], TOWERS)
            for others in (words, letters):
                self.assertIn("CPU:0", others.values[0].backing_device)
            found += [number for part in numbers.values for number in part.numpy().tolist()]
        self.assertEqual(found, list(range(20)))

    @parameterized.product(library=(keras, tf_keras), steps=(1, 3))
    def test_keras(self, library, steps):
        """Else fit, evaluate or predict fails on prefetched batches, or sees other rows."""
        x = np.random.default_rng(0).normal(size=[37, 4]).astype("float32")
        results = []
        for scope in (towerstrategy.TowerStrategy(TOWERS).scope(), tf.device(ONE)):
            library.utils.set_random_seed(1)
            with scope:
                model = library.Sequential([library.layers.Input([4]), library.layers.Dense(1)])
                model.compile("adam", "mse", steps_per_execution=steps)
            logs = model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
            results.append((logs.history["loss"], model.evaluate(x, x[:, :1], verbose=0),
                            model.predict(x, batch_size=8, verbose=0)))
        for found, wanted in zip(*results):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpus(1)
class MemoryTest(parameterized.TestCase):

    @parameterized.parameters(keras, tf_keras)
    def test_merge_device_cpu_takes_no_gpu_memory(self, library):
        """Else who is short of GPU memory gains nothing by merging on the CPU."""
        before = [held(device) for device in TOWERS]
        model = model_of(library, towerstrategy.TowerStrategy(TOWERS, "cpu"))
        model.train_on_batch(np.ones([8, WIDTH], "float32"), np.ones([8, WIDTH], "float32"))
        for device, was in zip(TOWERS, before):
            self.assertLess(held(device) - was, SLACK)
        self.assertGreater(len(model.weights), 0)  # the model is still there

    @parameterized.parameters(keras, tf_keras)
    def test_one_copy_on_a_gpu(self, library):
        """Else weights and slots are there twice, as with MirroredStrategy."""
        before = [held(device) for device in TOWERS]
        model = model_of(library, towerstrategy.TowerStrategy(TOWERS, "GPU:0"))
        model.train_on_batch(np.ones([8, WIDTH], "float32"), np.ones([8, WIDTH], "float32"))
        grown = [held(device) - was for device, was in zip(TOWERS, before)]
        self.assertBetween(grown[0], 3 * WEIGHTS - SLACK, 3 * WEIGHTS + SLACK)
        self.assertLess(grown[1], SLACK)
        self.assertGreater(len(model.weights), 0)

    def test_balanced(self):
        """Else one GPU is full while the other has room."""
        before = [held(device) for device in TOWERS]
        model = model_of(keras, towerstrategy.TowerStrategy(TOWERS, "balanced"))
        grown = [held(device) - was for device, was in zip(TOWERS, before)]
        self.assertLess(max(grown), 1.2 * sum(grown) / 2)
        self.assertGreater(sum(grown), 3 * WEIGHTS - SLACK)
        self.assertGreater(len(model.weights), 0)


class CompiledTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        # Its rounding differs between XLA's products and cuBLAS', by more than these tests allow.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        self.addCleanup(tf.config.experimental.enable_tensor_float_32_execution, True)

    def test_a_compiled_function_in_a_tower(self):
        """Else XLA cannot be used on GPU towers at all."""
        strategy = towerstrategy.TowerStrategy(TOWERS)
        work = tf.function(lambda x: tf.reduce_sum(tf.tanh(x) * x), jit_compile=True)
        step = tf.function(lambda x: strategy.run(lambda x: work(x), args=(x,)))
        x = tf.random.normal([6, 5])
        results = strategy.experimental_local_results(step(strategy.split(x)))
        np.testing.assert_allclose(sum(map(float, results)), float(work(x)), rtol=1e-5)

    def test_one_tower(self):
        """Else a single GPU trains more slowly with the strategy than without."""
        x, y = np.ones([8, 4], "float32"), np.ones([8, 1], "float32")
        losses = []
        for scope in (towerstrategy.TowerStrategy(TOWERS[:1]).scope(), tf.device(ONE)):
            keras.utils.set_random_seed(1)
            with scope:
                model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
                model.compile("sgd", "mse", jit_compile=True)
            losses.append(model.fit(x, y, verbose=0).history["loss"])
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)

    @parameterized.parameters(1, 2)
    def test_by_default(self, towers):
        """Else Keras 3 compiles a step on a GPU, and none of the same model on GPU towers."""
        with towerstrategy.TowerStrategy(TOWERS[:towers]).scope():
            model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
            model.compile("adam", "mse")
        model.fit(np.ones([8, 4], "f"), np.ones([8, 1], "f"), batch_size=4, epochs=2, verbose=0)
        self.assertEqual(bool(model.jit_compile), ARE_GPUS)

    @parameterized.parameters(keras, tf_keras)
    def test_models(self, library):
        """Else jit_compile=True on GPU towers trains differently than without, or not at all."""
        x, y = np.random.RandomState(0).rand(10, 4).astype("f"), np.ones([10, 1], "f")
        losses = []
        for jit_compile in (True, False):
            library.utils.set_random_seed(1)
            with towerstrategy.TowerStrategy(TOWERS).scope():
                model = library.Sequential([
                    library.Input([4]), library.layers.Dense(8, "tanh"),
                    library.layers.Dropout(.5, seed=2), library.layers.Dense(1)])
                model.compile("sgd", "mse", jit_compile=jit_compile)
            losses.append(model.fit(x, y, batch_size=4, epochs=2, shuffle=False,
                                    verbose=0).history["loss"])
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


class MixedPrecisionTest(parameterized.TestCase):

    @parameterized.parameters(keras, tf_keras)
    def test_float16(self, library):
        """Else GPUs multiply in float32, or an overflow reaches the weights."""
        with towerstrategy.TowerStrategy(TOWERS).scope():
            layer = library.layers.Dense(64, dtype="mixed_float16")
            model = library.Sequential([library.Input([64]), layer])
            scaling = library.optimizers if library is keras else library.mixed_precision
            model.compile(scaling.LossScaleOptimizer(library.optimizers.SGD(0.01)), "mse")
        x = np.random.default_rng(0).normal(size=[20, 64]).astype("float32")
        losses = model.fit(x, x, batch_size=8, epochs=8, verbose=0).history["loss"]
        self.assertEqual(model.predict(x, verbose=0).dtype, np.float16)
        self.assertLess(losses[-1], losses[0])
