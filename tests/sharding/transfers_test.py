"""What crosses between devices: small tensors together, large ones once between halves of GPUs.

Where towers stand for GPUs, they are logical CPU devices.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from benchmarks import gpus, on_gpus
from towerstrategy.sharding import transfers
from towerstrategy.sharding.builder import Builder, Ref

TOWERS = ["CPU:1", "CPU:2", "CPU:3"]
DEVICES = [f"/job:localhost/replica:0/task:0/device:{name}" for name in ("CPU:0", *TOWERS)]
WIDTH = 600
RANDOM = np.random.default_rng(0)


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

        strategy = towerstrategy.TowerStrategy(TOWERS, "CPU:0")
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


def dense(library):
    library.utils.set_random_seed(3)
    return library.Sequential([library.Input([WIDTH]), library.layers.Dense(WIDTH, "relu"),
                               library.layers.Dense(WIDTH)])


def crossing(operations, group):
    """How often large tensors go from a group of devices to another: as made, or handed on."""
    found = set()
    for each in operations:
        for number, index in each.inputs:
            source = operations[number]
            if source.sizes[index] >= transfers.LEAST and source.device in group \
                    and group.get(each.device, group[source.device]) != group[source.device]:
                found.add((number, index, each.device))
    return len(found)


def trained(library, strategy, x, y):
    """The weights of a model that is trained on batches of which the last has fewer rows."""
    with on_gpus.tracing():
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = dense(library)
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.wide
class RelaysTest(parameterized.TestCase):

    @parameterized.parameters((4, [2]), (7, [4, 2]))
    def test_crosses_once(self, towers, sizes):
        """Else each weight takes the slow way between switches once for each GPU behind it."""
        case = gpus.Case("dense", lambda: dense(keras), (WIDTH,), "float32", 2048)
        operations = gpus.traced(case, towers, "GPU:0").operations
        for size in sizes:  # of a group
            group = {f"GPU:{number}": number // size for number in range(towers)}
            weights = sums = 2 * max(group.values())
            self.assertEqual(crossing(operations, group), weights + sums)

    @wide.product(library=(keras, tf_keras), towers=(4, 7), merge=("balanced", "CPU:2"))
    def test_as_on_one_device(self, library, towers, merge):
        """Else a sum counts a tower twice, or leaves one out; the last batch has fewer rows."""
        x, y = RANDOM.normal(size=[2, 22, WIDTH]).astype("float32")
        found = [trained(library, strategy, x, y) for strategy in (
            None, towerstrategy.TowerStrategy(on_gpus.towers(towers), merge))]
        for one, other in zip(*found):
            np.testing.assert_allclose(one, other, atol=1e-6)

    def test_cpu_towers_have_one_memory(self):
        """Else CPU towers add up in two steps what costs one."""
        for stands_for_gpus in (True, False):
            with on_gpus.tracing() if stands_for_gpus else contextlib.nullcontext():
                strategy = towerstrategy.TowerStrategy(on_gpus.towers(4), "balanced")
                with strategy.scope():
                    model = dense(keras)
                x = tf.ones([8, WIDTH])
                step = strategy.function(lambda x, model=model: tf.reduce_sum(model(x), axis=0))
                graph = step.get_concrete_function(*strategy.split((x,))).graph
            names = [each.name for each in graph.get_operations()]
            self.assertEqual(any("half" in name for name in names), stands_for_gpus)


if __name__ == "__main__":
    absltest.main()
