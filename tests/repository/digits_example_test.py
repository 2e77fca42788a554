"""examples/digits.py: what `make demo` runs, in small."""

import importlib
import pathlib
import sys
import tempfile

import keras
import matplotlib.image
import pytest
import tf_keras
from absl.testing import parameterized

import towerstrategy

pytestmark = pytest.mark.wide

EXAMPLES = str(pathlib.Path(__file__).resolve().parents[2] / "examples")


def _module(name):
    sys.path.insert(0, EXAMPLES)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(EXAMPLES)


class DigitsTest(parameterized.TestCase):

    @parameterized.named_parameters(("keras", keras), ("tf_keras", tf_keras))
    def test_trains_as_on_one_device_and_loads_without_the_strategy(self, which):
        """Else the first thing that a newcomer runs ends in a complaint."""
        digits = _module("digits")
        x, y, x_test, _ = digits.digits()
        strategy = towerstrategy.TowerStrategy(["CPU:1", "CPU:2", "CPU:3"], merge_device="CPU:0")
        which.utils.set_random_seed(1)
        towers, alone, difference = digits.train_twins(which, strategy, x[:87], y[:87], epochs=1)
        self.assertLess(difference, digits.MAX_WEIGHT_DIFFERENCE)
        self.assertAlmostEqual(towers["loss"][0], alone["loss"][0], places=5)

        with strategy.scope():
            model = digits.network(which)
        model.fit(x[:60], y[:60], batch_size=digits.BATCH, verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "digits.keras"
            reloaded = digits.reload_difference(which, model, path, x_test[:50])
        self.assertLess(reloaded, digits.MAX_PREDICTION_DIFFERENCE)

        flow = digits.flow_of(strategy, model, x, y)
        self.assertEqual(flow.rows, [17, 17, 16])
        self.assertEqual((flow.towers, flow.merge), (["CPU:1", "CPU:2", "CPU:3"], "CPU:0"))
        weights = digits.bytes_of(model.trainable_variables)
        self.assertEqual(flow.gradient_bytes, weights)
        self.assertGreater(flow.state_bytes, 3 * weights)  # the weights and Adam's two slots


class PictureTest(parameterized.TestCase):

    @parameterized.parameters(1, 2, 8, 12)
    def test_draws_any_number_of_towers(self, towers):
        """Else the demo fails, or draws a picture nobody can read, on a machine with more GPUs."""
        picture = _module("digits_picture")
        flow = picture.Flow([4] * towers, 260, [f"GPU:{number}" for number in range(towers)],
                            "CPU:0", 181_160, 544_560)
        history = {name: [0.5, 0.7] for name in ("accuracy", "val_accuracy", "loss")}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "digits.png"
            picture.draw(path, flow, history, history, history, 1e-6)
            height, width = matplotlib.image.imread(path).shape[:2]
        self.assertEqual(width, 1560)
        self.assertGreater(height, 600)
