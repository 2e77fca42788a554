"""Large tensors cross between the halves of many GPUs once; results stay one device's.

Towers are logical CPU devices that stand for GPUs.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide
from benchmarks import gpus, on_gpus
from towerstrategy.sharding import relays

pytestmark = pytest.mark.wide

WIDTH = 600
RANDOM = np.random.default_rng(0)


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
            if source.sizes[index] >= relays.LEAST and source.device in group \
                    and group.get(each.device, group[source.device]) != group[source.device]:
                found.add((number, index, each.device))
    return len(found)


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
        found = []
        for strategy in (None, towerstrategy.TowerStrategy(on_gpus.towers(towers), merge)):
            with on_gpus.tracing():
                model = dense(library)
                if strategy is not None:
                    with strategy.scope():
                        model = dense(library)
                model.compile("sgd", "mse", jit_compile=False)
                model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
            found.append(model.get_weights())
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
