"""The core of promise 1 on two GPU towers: every case, with the merge devices in turn.

Without a GPU two CPU devices stand for them, in some cases: those of ``tests/parity`` are there.
XLA compiles what Keras has it compile by default, on GPUs the steps of Keras 3.
"""

import pytest
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
from tests.parity import runner

pytestmark = [pytest.mark.wide, pytest.mark.rest]
ARE_GPUS = bool(tf.config.list_physical_devices("GPU"))
TOWERS = ["GPU:0", "GPU:1"] if ARE_GPUS else ["CPU:1", "CPU:2"]
MERGES = ("cpu", TOWERS[0], "balanced")
# cuDNN takes other algorithms for other numbers of rows, each with its own rounding; on a CPU the
# cases' own bounds hold, 1e-5 mostly.
ROUNDING = 1e-4
CASES = list(enumerate(runner.core()))[::1 if ARE_GPUS else 12]


class Gpus:
    """Stands in for ``runner.Towers``."""

    def __init__(self, merge):
        self.merge = merge

    def strategy(self, **options):
        return towerstrategy.TowerStrategy(TOWERS, self.merge, **options)


def _named(index, item):
    case, keras, _ = item
    merge = MERGES[index % len(MERGES)]
    return (f"_{index}_{case.name}_{keras}_{merge}".replace(" ", "_"), case, keras, merge)


class ParityTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        tf.config.experimental.enable_tensor_float_32_execution(False)

    @parameterized.named_parameters(_named(*item) for item in CASES)
    def test_towers_train_as_one_gpu(self, case, keras, merge):
        """Else a model trains differently because of how many GPUs there are."""
        found = runner.compare(case, runner.keras_module(keras), Gpus(merge),
                               jit_compile=ARE_GPUS and keras == "keras")
        bound = max(case.bound, ROUNDING) if ARE_GPUS else case.bound
        self.assertLessEqual(found.worst, bound, str(found))
