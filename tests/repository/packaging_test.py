"""What importing the package does to those who do not use it, and what comes with it."""

import functools
import os
import pathlib
import subprocess
import sys

import pytest
from absl.testing import absltest, parameterized

import towerstrategy

ROOT = pathlib.Path(__file__).parents[2]

# What its import imports, whether there are hooks before and after a TowerStrategy trains, and what
# comes out, to the last bit, of trainings with no strategy before and after that.
PROGRAM = """
import sys
import tensorflow as tf
before = set(sys.modules)
import towerstrategy
new = {name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(*sorted(new))

import hashlib
import keras
import numpy as np
import tf_keras
from towerstrategy._keras.keras3 import hooks as keras3
from towerstrategy._keras.tf_keras import hooks as legacy

def hooked():
    return {hasattr(owner.__dict__[name], "_towerstrategy_original")
            for module in (keras3, legacy) for owner, name in module.HOOKS}

towerstrategy.split_cpu(2)
tf.config.experimental.enable_op_determinism()
x = np.random.RandomState(0).randint(0, 10, [12, 4])
y = x.sum(axis=1, keepdims=True).astype("float32")

def trained(kit):
    kit.utils.set_random_seed(1)
    model = kit.Sequential([
        kit.Input([4]), kit.layers.Embedding(10, 3), kit.layers.BatchNormalization(),
        kit.layers.Dropout(0.5), kit.layers.Flatten(), kit.layers.Dense(1)])
    model.compile(kit.optimizers.Adam(0.01), "mse", metrics=["mae"], weighted_metrics=["mse"])
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False,
                        sample_weight=np.linspace(0.5, 1.5, 12))
    found = [*model.get_weights(), *(np.array(values) for values in history.history.values()),
             model.predict(x, verbose=0)]
    return hashlib.sha256(b"".join(part.tobytes() for part in found)).hexdigest()

for _ in range(2):
    print(*hooked())
    print(*map(trained, (keras, tf_keras)))
    strategy = towerstrategy.TowerStrategy(["CPU:0", "CPU:1"])
    for kit in (keras, tf_keras):
        with strategy.scope():
            model = kit.Sequential([kit.Input([2]), kit.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(np.ones([3, 2]), np.ones([3, 1]), verbose=0)
"""


@functools.cache
def printed() -> list[str]:
    """The lines that the program printed in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True,
                          text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout.splitlines()


@pytest.mark.wide
class ImportTest(absltest.TestCase):

    def test_imports_nothing_but_itself(self):
        """Else a program that uses no Keras pays for importing one (TensorFlow imports its own)."""
        self.assertEqual(printed()[0], "towerstrategy")

    def test_no_hook_stays(self):
        """Else an import, or a strategy, changes the Keras of those who wanted nothing."""
        self.assertEqual(printed()[1::2], ["False", "False"])

    def test_other_trainings_are_the_same_to_the_last_bit(self):
        """Else a process that has had a TowerStrategy trains differently without one."""
        before, after = printed()[2::2]
        self.assertEqual(before, after)
        self.assertLen(set(before.split()), 2)


class PackageTest(parameterized.TestCase):

    def test_type_hints_are_declared(self):
        """Else type checkers ignore the hints."""
        self.assertTrue((ROOT / "towerstrategy" / "py.typed").exists())
        self.assertIn("py.typed", (ROOT / "setup.cfg").read_text())

    def test_version_has_one_place(self):
        """Else the package says another version than its metadata."""
        self.assertRegex(towerstrategy.__version__, r"^\d+\.\d+\.\d+")
        self.assertIn("version = attr: towerstrategy._version.__version__",
                      (ROOT / "setup.cfg").read_text())


if __name__ == "__main__":
    absltest.main()
