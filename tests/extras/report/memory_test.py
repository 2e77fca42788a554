"""memory: what it says that devices hold is what they hold."""

import subprocess
import sys

import keras
import numpy as np
import tf_keras
from absl.testing import parameterized

import towerstrategy
import wide
from towerstrategy.placement import homes

TOWERS = ["CPU:1", "CPU:2", "CPU:3"]
# Prints what it is said to hold, and the most that the process held, in MiB.
TRAINING = """
import re, sys
import numpy as np, tensorflow as tf, towerstrategy
width, optimizer = int(sys.argv[1]), sys.argv[2]
with towerstrategy.TowerStrategy(towerstrategy.split_cpu(4)).scope():
    layers = [tf.keras.layers.Dense(width, "relu") for _ in range(4)]
    model = tf.keras.Sequential([tf.keras.Input([width]), *layers, tf.keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
line = towerstrategy.estimate_memory(model, 4)[-1]
model.fit(np.ones([64, width], "float32"), np.ones([64, 1]), batch_size=16, verbose=0)
peak = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print((line.weights + line.slots) / 2**20, line.total / 2**20, int(peak) / 2**10)
"""


def model_of(kit, optimizer="adam"):
    model = kit.Sequential([kit.Input([30]), kit.layers.Dense(20), kit.layers.BatchNormalization(),
                            kit.layers.Dense(40), kit.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=[])
    return model


class EstimateTest(parameterized.TestCase):

    @parameterized.parameters(keras, tf_keras)
    def test_tables_send_the_rows_that_are_looked_up(self, kit):
        """Else who has large embeddings is told that towers need twice what they do.

        Where a table is, the optimizer's update makes two of its size, one if it has no slots.
        """
        model = kit.Sequential([kit.Input([1]), kit.layers.Embedding(1000, 256),
                                kit.layers.Flatten(), kit.layers.Dense(1)])
        for optimizer, tables in (("adam", 2), ("sgd", 1 + (kit is tf_keras))):  # which has slots
            model.compile(optimizer, "mse")
            for line in towerstrategy.estimate_memory(model, 4):
                made = tables * 1000 * 256 * 4 if line.weights else 0
                self.assertBetween(line.step, made, made + 10_000, line)

    @wide.product(2, 3, kit=[keras, tf_keras], merge_device=["cpu", "CPU:1", "balanced"],
                  optimizer=["adam", "sgd"])
    def test_weights_and_slots_are_where_it_says(self, kit, merge_device, optimizer):
        """Else someone buys the wrong GPU, or merges on the one that is full."""
        before = towerstrategy.estimate_memory(model_of(kit, optimizer), 3)
        strategy = towerstrategy.TowerStrategy(TOWERS, merge_device)
        with strategy.scope():
            model = model_of(kit, optimizer)
        model.fit(np.ones([6, 30]), np.ones([6, 1]), verbose=0)
        self.assertEqual(towerstrategy.estimate_memory(model, 3), before)
        held = {}
        slots = model.optimizer.variables
        for variable in [*model.weights, *(slots() if callable(slots) else slots)]:
            value = getattr(variable, "value", variable)
            value = variable if callable(value) else value
            held[value.device] = held.get(value.device, 0) + homes.size_of(variable)
        lines = [line for line in before if line.way == merge_device.replace("CPU:1", "GPU:0")]
        # Small ones, the step's number among them, may be homed elsewhere.
        self.assertAlmostEqual(max(held.values()), lines[0].weights + lines[0].slots, delta=200)

    @wide.parameters(wide=["adam"], rest=["sgd"])
    def test_peak(self, optimizer):
        """Else what is said to be the most that a training holds is less than what it holds."""
        (held, most, peak), (held_small, most_small, peak_small) = (
            tuple(map(float, subprocess.run(
                [sys.executable, "-c", TRAINING, str(width), optimizer], capture_output=True,
                text=True, check=True).stdout.split())) for width in (2048, 32))
        self.assertBetween(peak - peak_small, held - held_small, most - most_small)

    def test_refused(self):
        """Else a table of zeros is believed."""
        model = keras.Sequential([keras.layers.Dense(1)])
        with self.assertRaisesRegex(ValueError, "compile it first"):
            towerstrategy.estimate_memory(model)
        model.compile("adam", "mse")
        with self.assertRaisesRegex(ValueError, "has no weights yet"):
            towerstrategy.estimate_memory(model)
        with self.assertRaisesRegex(ValueError, "towers must be at least 1, but got 0"):
            towerstrategy.estimate_memory(model, 0)
        with self.assertRaisesRegex(TypeError, "Keras or tf_keras model, but got 3"):
            towerstrategy.estimate_memory(3)
