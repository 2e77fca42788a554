"""Small tensors that cross between devices together, and those that may not."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from towerstrategy import TowerStrategy
from towerstrategy.sharding import transfers
from towerstrategy.sharding.builder import Builder, Ref

TOWERS = ["CPU:1", "CPU:2", "CPU:3"]
DEVICES = [f"/job:localhost/replica:0/task:0/device:{name}" for name in ("CPU:0", *TOWERS)]


def crossings(graph):
    """The tensors that cross from one device to another, once for each of these."""
    return {(tensor.name, operation.device) for operation in graph.get_operations()
            for tensor in operation.inputs
            if tensor.device and operation.device and tensor.device != operation.device}


def chain(builder, length, devices):
    """Scalars, each made of the one before it, on each of two devices in turn."""
    refs = [builder.constant(1., tf.float32, devices[0])]
    for place in range(length):
        refs.append(builder.make("Neg", [refs[-1]], devices[(place + 1) % 2]))
    for ref in refs:
        builder.note_shape(ref, tf.TensorShape([]))
    return refs


class PackingTest(parameterized.TestCase):

    def test_weights_and_gradients(self):
        """Else each of a deep model's small weights is sent by itself to each tower, and back."""
        layers = 12
        x = np.random.default_rng(0).standard_normal([7, 8])

        def train(strategy, function):
            with strategy.scope():
                weights = [tf.Variable(np.eye(8) * (1 + .1 * layer)) for layer in range(layers)]

            @function
            def step(x):
                with tf.GradientTape() as tape:
                    y = x
                    for weight in weights:
                        y = tf.tanh(y @ weight)
                    loss = tf.reduce_mean(y ** 2)
                for weight, gradient in zip(weights, tape.gradient(loss, weights)):
                    weight.assign_sub(.1 * gradient)
                return loss

            return weights, step

        strategy = TowerStrategy(TOWERS, "CPU:0")
        weights, step = train(strategy, strategy.function)
        parts, = strategy.split((tf.constant(x),))
        expected, one = train(tf.distribute.get_strategy(), tf.function)
        np.testing.assert_allclose(step(parts), one(tf.constant(x)), 1e-12)
        for weight, value in zip(weights, expected):
            np.testing.assert_allclose(weight, value, 1e-12)
        found = crossings(step.get_concrete_function(parts).graph)
        self.assertLess(len(found), 2 * layers)  # of 2 * 3 * 12

    def test_what_depends_on_what_crossed(self):
        """Else a step waits for itself and never runs."""
        graph = tf.Graph()
        builder = Builder(graph)
        refs = chain(builder, 9, DEVICES[:2])
        transfers.pack(builder)
        builder.finish()
        self.assertEmpty([op for op in graph.get_operations() if op.type == "Pack"])
        with tf.compat.v1.Session(graph=graph) as session:
            self.assertEqual(session.run(builder.tensor(refs[-1])), -1)

    @parameterized.parameters((3, tf.float32, 3, 1), (2, tf.float32, 3, 0), (3, tf.int32, 3, 0),
                              (3, tf.float32, 2**15, 0))
    def test_what_is_packed(self, count, dtype, length, packs):
        """Else shapes go by way of a GPU's memory, or large tensors are copied to be sent."""
        graph = tf.Graph()
        builder = Builder(graph)
        made: list[Ref] = []
        for number in range(count):
            ref = builder.constant(np.full([length], number), dtype, DEVICES[0])
            builder.note_shape(ref, tf.TensorShape([length]))
            made += [builder.make("Neg", [ref], device) for device in DEVICES[1:]]
        transfers.pack(builder)
        builder.finish()
        types = [operation.type for operation in graph.get_operations()]
        self.assertEqual(types.count("Pack"), packs)
        self.assertEqual(types.count("Unpack"), 3 * packs)
        with tf.compat.v1.Session(graph=graph) as session:
            values = session.run([builder.tensor(ref) for ref in made])
        self.assertEqual([value[0] for value in values],
                         [-(place // 3) for place in range(3 * count)])


if __name__ == "__main__":
    absltest.main()
