"""Every operation that a step puts on a GPU has a GPU kernel, by TensorFlow's own registry.

Steps are traced on logical CPU devices that stand for GPUs.  An operation without a kernel would
run on the CPU in the middle of a GPU's work: its inputs cross and its result comes back.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide
from benchmarks import kernels, on_gpus
from tests.placement.placement_test import function_in

pytestmark = pytest.mark.wide

# What Keras places so on one device, too.
KERAS_OWN = {
    # indexed_slices_union_indices_and_values: which rows two sparse values have.
    "ScatterNd T=bool, Tindices=int32", "ScatterNd T=bool, Tindices=int64"}

RANDOM = np.random.default_rng(0)
ROWS = 10


def images(library):
    """Convolutions, batch norm of both kinds, dropout, clipping, metrics."""
    layers = library.layers
    model = library.Sequential([
        library.Input([8, 8, 3]), layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(), layers.Dropout(.2), layers.Conv2D(4, 3),
        layers.BatchNormalization(synchronized=True), layers.MaxPooling2D(2), layers.Dropout(.1),
        layers.Flatten(), layers.Dense(4, activation="softmax")])
    model.compile(library.optimizers.Adam(global_clipnorm=1.), "sparse_categorical_crossentropy",
                  metrics=["accuracy", library.metrics.SparseTopKCategoricalAccuracy(2)])
    return model, RANDOM.normal(size=[ROWS, 8, 8, 3]).astype("float32")


def words(library):
    """An embedding, a mask, an LSTM, sparse gradients, EMA, metrics with state."""
    layers = library.layers
    model = library.Sequential([
        library.Input([5], dtype="int32"), layers.Embedding(12, 6, mask_zero=True),
        layers.LSTM(4, dropout=.1), layers.Dense(1, activation="sigmoid")])
    model.compile(library.optimizers.RMSprop(momentum=.5, use_ema=True, clipnorm=1.),
                  "binary_crossentropy", metrics=["mae", library.metrics.AUC()])
    return model, RANDOM.integers(0, 12, [ROWS, 5]).astype("int32")


def half(library):
    """float16 with loss scaling, layer norm."""
    layers = library.layers
    model = library.Sequential([
        library.Input([6]), layers.Dense(5, activation="gelu", dtype="mixed_float16"),
        layers.Dropout(.1, dtype="mixed_float16"),
        layers.LayerNormalization(dtype="mixed_float16"), layers.Dense(1, dtype="float32")])
    scaling = (library.optimizers if library is keras else library.mixed_precision)
    model.compile(scaling.LossScaleOptimizer(library.optimizers.SGD(.1, momentum=.9)), "mse",
                  metrics=["mse"])
    return model, RANDOM.normal(size=[ROWS, 6]).astype("float32")


def traced(make, library, strategy):
    """The graph of a training step of ``make`` by ``strategy``; None: on one device."""
    with on_gpus.tracing():
        with strategy.scope() if strategy is not None else tf.device(None):
            model, x = make(library)
        if strategy is None:
            model.jit_compile = False
        rows = tf.data.Dataset.from_tensor_slices((x, RANDOM.integers(0, 2, [ROWS, 1]))).batch(7)
        model.fit(rows, verbose=0, shuffle=False)
        step = function_in(model.train_function)
        if strategy is None:
            return step.get_concrete_function(iter(rows)).graph.as_graph_def()
        with strategy.scope():
            batches = iter(strategy.experimental_distribute_dataset(rows))
            return step.get_concrete_function(batches).graph.as_graph_def()


class KernelsTest(parameterized.TestCase):

    @wide.product(1, 1, made=((images, tf_keras), (words, keras), (half, keras)),
                  merge_device=("cpu", "CPU:1", "balanced"))
    def test_on_a_gpu_by_our_choice(self, made, merge_device):
        """Else each step waits for values to cross to the CPU and back, unseen by any test here."""
        strategy = towerstrategy.TowerStrategy(on_gpus.towers(3), merge_device)
        placed = list(on_gpus.nodes(traced(*made, strategy)))
        self.assertEqual(strategy.extended.own_trace_reasons, [])
        on_gpu = [node for node, device in placed if device.startswith("GPU")]
        self.assertGreater(len(on_gpu), 300, "the steps' operations were not found")
        self.assertEmpty(set(kernels.missing(placed)) - KERAS_OWN)

    def test_keras_own(self):
        """Else an operation of ours is excused as one of Keras'."""
        alone = on_gpus.nodes(traced(words, keras, None), default_device="GPU:0")
        self.assertContainsSubset(KERAS_OWN, kernels.missing(alone))

    def test_registry(self):
        """Else the test above passes whatever the steps hold."""
        with tf.Graph().as_default() as graph:
            with tf.device("CPU:1"):
                for dtype in (tf.int64, tf.float32):
                    tf.split(tf.zeros([2, 3], dtype), 2)
            with tf.device("CPU:0"):
                tf.split(tf.zeros([2, 3], tf.int64), 2)
        found = kernels.missing(on_gpus.nodes(graph.as_graph_def()))
        self.assertEqual(found, {"Split T=int64": 1})
