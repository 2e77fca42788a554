"""stacked: small gradients of one shape cross together, and each variable gets its own."""

import collections

import keras
import numpy as np
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide
from towerstrategy.merge import stacked

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]


def trained(kit, strategy):
    """The weights after a few steps, and the kinds of the operations on tower 1."""
    with strategy.scope() if strategy else tf.device(None):
        layers = [kit.layers.Dense(4, activation="tanh", kernel_initializer=kit.initializers.
                                   GlorotUniform(seed=number)) for number in range(4)]
        model = kit.Sequential([kit.Input([4]), *layers, kit.layers.Dense(1, "tanh",
                                kernel_initializer="ones")])
        model.compile(kit.optimizers.SGD(.1), "mse")
    rows = np.random.RandomState(0).rand(7, 4).astype("float32")
    data = tf.data.Dataset.from_tensors((rows, rows[:, :1])).repeat(3)
    kinds = collections.Counter()
    if strategy is None:
        model.fit(data, verbose=0)
        return model.get_weights(), kinds
    step = tf.function(lambda one: strategy.run(model.train_step, (one,)), autograph=False)
    for batch in strategy.experimental_distribute_dataset(data):
        step(batch)
    graph = step.get_concrete_function(batch).graph.as_graph_def()
    kinds.update(node.op for function in graph.library.function for node in function.node_def
                 if node.device.endswith("CPU:2"))
    return model.get_weights(), kinds


class StacksTest(parameterized.TestCase):

    @wide.product(kit=[keras, tf_keras], merge=["cpu", "CPU:1", "balanced"])
    def test_training(self, kit, merge):
        """Else a layer takes another's gradient, or each small one crosses by itself."""
        weights, kinds = trained(kit, towerstrategy.TowerStrategy(DEVICES, merge))
        for found, expected in zip(weights, trained(kit, None)[0], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        self.assertGreaterEqual(kinds["Pack"], 2, "kernels and biases")

    def test_which_are_stacked(self):
        """Else one that is large, sparse, alone or none is stacked with others."""
        with tf.Graph().as_default():
            small, other, large = tf.ones([2, 3]), tf.ones([3]), tf.ones([stacked.LARGEST])
            sparse = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0]), tf.constant([2, 3]))
            unknown = tf.compat.v1.placeholder(tf.float32, [None, 3])
            gradients = [small, None, large, small + 1, large, sparse, other, small + 2, unknown,
                         small + 3, unknown]
            homes = ["/device:CPU:0"] * 9 + ["/device:CPU:1"] * 2
            stacks = stacked.Stacks(gradients, homes, alone=[7])
            put, places = stacks.put(gradients, homes)
            self.assertEqual([index for index, value in enumerate(put) if value is None],
                             [0, 1, 3])
            self.assertEqual([value.shape for value in put[len(gradients):]], [[2, 2, 3]])
            self.assertEqual(places, [*homes, homes[0]])
            apart = stacks.apart(put)
            self.assertEqual([value is None for value in apart],
                             [value is None for value in gradients])
            sums = [tf.reduce_sum(apart[index]) for index in (0, 3)]
            with tf.compat.v1.Session() as session:
                self.assertEqual(session.run(sums), [6., 12.])

    def test_large_stacks_leave_in_parts(self):
        """Else the first gradients wait for the last of a large model's."""
        with tf.Graph().as_default():
            gradients = [tf.ones([2**14]) for _ in range(2 * stacked.LARGEST // 2**16 + 1)]
            homes = ["/device:CPU:0"] * len(gradients)
            put, _ = stacked.Stacks(gradients, homes).put(gradients, homes)
            self.assertEqual([value.shape.as_list() for value in put if value is not None],
                             [[2**14], *[[stacked.LARGEST // 2**16, 2**14]] * 2])
