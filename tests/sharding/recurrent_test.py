"""LSTM and GRU on GPU towers, whose kernels are cuDNN's: each tower's rows, one device's result.

There is no GPU here: functions stand for the kernels, see :mod:`emulated`.
"""

import collections
import warnings

import emulated
import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from benchmarks import on_gpus

KITS = {"keras": keras, "tf_keras": tf_keras}
TOWERS = 3
ROWS = (8, 2)  # of the second batch a tower has none
LAYERS = 4
KERNELS = "CudnnRNNV3", "CudnnRNNBackpropV3"


def layers_of(kit, name):
    """Four layers that each take a kernel."""
    layers = kit.layers
    if name == "plain":
        return [layer for kind in (layers.LSTM, layers.GRU) for layer in (
            kind(4, return_sequences=True), kind(3, return_sequences=True, go_backwards=True))]
    return [layers.Embedding(9, 4, mask_zero=True),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.Bidirectional(layers.GRU(3))]


def batch_of(name, rows):
    draw = np.random.RandomState(rows)
    words = np.sort(draw.randint(1, 8, [rows, 5]) * (draw.rand(rows, 5) < .7))[:, ::-1]
    words[:, 0] += 1
    words = words[:, ::-1] if name == "left" else words
    x = draw.rand(rows, 5, 2).astype("float32") if name == "plain" else words.astype("int32")
    return tf.constant(x), tf.constant(draw.rand(rows, 2), tf.float32)


def model_of(kit, name):
    kit.utils.set_random_seed(2)
    shape, dtype = ([5, 2], "float32") if name == "plain" else ([5], "int32")
    model = kit.Sequential([kit.Input(shape, dtype=dtype), *layers_of(kit, name),
                            kit.layers.Flatten(), kit.layers.Dense(2)])
    model.compile(kit.optimizers.SGD(.5), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def emulation_of(function):
    """What a function that cannot run here does and gives, with functions for its kernels."""
    graph = emulated.with_kernels(function.graph)
    wrapped = tf.compat.v1.wrap_function(
        lambda: tf.import_graph_def(graph.as_graph_def(), name=""), [])
    outputs = [wrapped.graph.get_tensor_by_name(tensor.name) for tensor in function.graph.outputs]
    effects = [wrapped.graph.get_operation_by_name(operation.name)
               for operation in function.graph.control_outputs]
    pruned = wrapped.prune([tensor.name for tensor in function.graph.inputs], (outputs, effects))
    return lambda *batch: pruned(
        *tf.nest.flatten(batch, expand_composites=True), *function.captured_inputs)


def trained(kit, name):
    """A model that has trained on one device."""
    model = model_of(kit, name)
    for rows in ROWS:
        model.train_on_batch(*batch_of(name, rows))
    return model


def on_towers(kit, name):
    """A strategy, and a model in its scope."""
    strategy = towerstrategy.TowerStrategy(on_gpus.towers(TOWERS))
    with strategy.scope():
        return strategy, model_of(kit, name)


def replica_step(strategy, model):
    """A step for ``strategy.run``."""
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = strategy.scale_loss(tf.reduce_mean((model(x, training=True) - y) ** 2))
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    return step


class RecurrentTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        # Else TensorFlow takes half of the time to optimize functions that run twice.
        before = tf.config.optimizer.get_experimental_options()
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        self.addCleanup(tf.config.optimizer.set_experimental_options, {
            "disable_meta_optimizer": False, **before})

    def assert_same(self, model, other):
        for wanted, found in zip(model.get_weights(), other.get_weights()):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

    # Keras 3 refuses sequences that are padded on the left.
    @wide.parameters(wide=[("keras", "masked")], rest=[
        ("tf_keras", "masked"), ("keras", "plain"), ("tf_keras", "plain"), ("tf_keras", "left")])
    def test_towers(self, kit, name):
        """LSTM and GRU on several GPUs would be done by one of them, or without cuDNN."""
        kit = KITS[kit]
        model = trained(kit, name)
        with on_gpus.tracing(cudnn=True):
            strategy, own = on_towers(kit, name)
            with strategy.scope():
                batches = [batch_of(name, rows) for rows in ROWS]
                step = strategy.function(lambda x, y: own.train_step((x, y)), [
                    tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in batches[0]])
                function = step.get_concrete_function(*strategy.split(batches[0]))
                placed = collections.Counter(
                    (node.op, device) for node, device in on_gpus.nodes(
                        function.graph.as_graph_def()) if node.op in KERNELS)
                self.assertEqual(placed, {(kernel, f"GPU:{tower}"): LAYERS
                                          for kernel in KERNELS for tower in range(TOWERS)})
                run = emulation_of(function)
                for batch in batches:
                    run(*strategy.split(batch))
        self.assert_same(model, own)

    @wide.parameters(wide=["plain"], rest=["masked"])
    def test_towers_of_a_loop(self, name):
        """A loop with tf_keras on several GPUs would end with an error at a small last batch."""
        model = trained(tf_keras, name)
        with on_gpus.tracing(cudnn=True):
            strategy, own = on_towers(tf_keras, name)
            step = replica_step(strategy, own)
            function = tf.function(lambda x, y: strategy.run(step, (x, y)), reduce_retracing=True)
            for batch in map(batch_of, [name] * 2, ROWS):
                batch = strategy.split(batch)
                concrete = function.get_concrete_function(*batch)
                found = {node.op for each in concrete.graph.as_graph_def().library.function
                         for node in each.node_def}
                self.assertContainsSubset(KERNELS, found)
                emulation_of(concrete)(*batch)
        self.assert_same(model, own)

    def test_right_code_is_not_warned_of(self):
        """Who has a loop of his own would be told that it is wrong, on GPUs alone."""
        with on_gpus.tracing(cudnn=True), warnings.catch_warnings():
            warnings.simplefilter("error", towerstrategy.TowerWarning)
            strategy, model = on_towers(keras, "plain")
            step = replica_step(strategy, model)
            function = tf.function(lambda x, y: strategy.run(step, (x, y)))
            graph = function.get_concrete_function(
                *strategy.split(batch_of("plain", 6))).graph.as_graph_def()
        found = collections.Counter(node.op for each in graph.library.function
                                    for node in each.node_def)
        self.assertEqual([found[kernel] for kernel in KERNELS], [TOWERS * LAYERS] * 2)


if __name__ == "__main__":
    absltest.main()
