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
KERNELS = "CudnnRNNV3", "CudnnRNNBackpropV3"


def layers_of(kit, name):
    """Layers of which each takes a kernel, and how many there are."""
    layers = kit.layers
    if name == "masked":  # tf_keras has a loop for these
        return [layers.Embedding(9, 4, mask_zero=True),
                layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
                layers.Bidirectional(layers.GRU(3))], 4 * (kit is keras)
    kinds = layers.LSTM, layers.GRU
    return [layer for kind in kinds for layer in (
        kind(4, return_sequences=True), kind(3, return_sequences=True, go_backwards=True))], 4


def batch_of(name, rows):
    draw = np.random.RandomState(rows)
    words = np.sort(draw.randint(1, 8, [rows, 5]) * (draw.rand(rows, 5) < .7))[:, ::-1]
    words[:, 0] += 1
    x = words.astype("int32") if name == "masked" else draw.rand(rows, 5, 2).astype("float32")
    return tf.constant(x), tf.constant(draw.rand(rows, 2), tf.float32)


def model_of(kit, name):
    kit.utils.set_random_seed(2)
    layers, kernels = layers_of(kit, name)
    shape, dtype = ([5], "int32") if name == "masked" else ([5, 2], "float32")
    model = kit.Sequential([kit.Input(shape, dtype=dtype), *layers, kit.layers.Flatten(),
                            kit.layers.Dense(2)])
    model.compile(kit.optimizers.SGD(.5), "mse")
    model.optimizer.build(model.trainable_variables)
    return model, kernels


def run_emulated(function, *batch):
    """What a function that cannot run here does and gives, with functions for its kernels."""
    graph = emulated.with_kernels(function.graph)
    wrapped = tf.compat.v1.wrap_function(
        lambda: tf.import_graph_def(graph.as_graph_def(), name=""), [])
    outputs = [wrapped.graph.get_tensor_by_name(tensor.name) for tensor in function.graph.outputs]
    effects = [wrapped.graph.get_operation_by_name(operation.name)
               for operation in function.graph.control_outputs]
    pruned = wrapped.prune([tensor.name for tensor in function.graph.inputs], (outputs, effects))
    return pruned(*tf.nest.flatten(batch, expand_composites=True), *function.captured_inputs)


class RecurrentTest(parameterized.TestCase):

    @wide.parameters(("keras", "masked"), ("tf_keras", "plain"),
                     wide=[("keras", "plain"), ("tf_keras", "masked")])
    def test_towers(self, kit, name):
        """LSTM and GRU on several GPUs would be done by one of them, or without cuDNN."""
        kit = KITS[kit]
        model, _ = model_of(kit, name)
        for rows in ROWS:
            model.train_on_batch(*batch_of(name, rows))
        with on_gpus.tracing():
            strategy = towerstrategy.TowerStrategy(on_gpus.towers(TOWERS))
            with strategy.scope():
                own, kernels = model_of(kit, name)

                @strategy.function
                def step(x, y):
                    return own.train_step((x, y))

                for rows in ROWS:
                    parts = strategy.split(batch_of(name, rows))
                    function = step.get_concrete_function(*parts)
                    placed = collections.Counter(
                        (operation.type, operation.device) for operation
                        in function.graph.get_operations() if operation.type in KERNELS)
                    self.assertLen(placed, 2 * TOWERS * bool(kernels))
                    self.assertEqual(set(placed.values()), {kernels} - {0})
                    run_emulated(function, *parts)
        for one, other in zip(model.get_weights(), own.get_weights()):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)

    def test_right_code_is_not_warned_of(self):
        """Who has a loop of his own would be told that it is wrong, on GPUs alone."""
        with on_gpus.tracing(), warnings.catch_warnings():
            warnings.simplefilter("error", towerstrategy.TowerWarning)
            strategy = towerstrategy.TowerStrategy(on_gpus.towers(TOWERS))
            with strategy.scope():
                model, kernels = model_of(keras, "plain")

            def replica(x, y):
                with tf.GradientTape() as tape:
                    loss = strategy.scale_loss(tf.reduce_mean((model(x, training=True) - y) ** 2))
                variables = model.trainable_variables
                model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

            function = tf.function(lambda x, y: strategy.run(replica, (x, y)))
            graph = function.get_concrete_function(
                *strategy.split(batch_of("plain", 6))).graph.as_graph_def()
        found = collections.Counter(node.op for each in graph.library.function
                                    for node in each.node_def)
        self.assertEqual([found[kernel] for kernel in KERNELS], [TOWERS * kernels] * 2)


if __name__ == "__main__":
    absltest.main()
