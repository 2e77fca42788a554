"""The harness itself: it sees differences where there are some."""

import pathlib
import tempfile
from unittest import mock

import keras
import numpy as np
from absl.testing import absltest, parameterized

import wide
from towerstrategy.sharding import values

from . import cases, kept, product, runner


class HarnessTest(parameterized.TestCase):

    @parameterized.parameters(
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.0], [1.0, 2.2], 0.2 / 2.2),
        ([2e-7], [1e-7], 1e-7 / runner.FLOOR),
        ([1.0], [1.0, 1.0], float("inf")),
        ([float("nan")], [float("nan")], float("inf")),
        ([1], [1.0], float("inf")))
    def test_difference(self, got, wanted, difference):
        """Else the table shows agreement that is none."""
        self.assertAlmostEqual(runner.difference([np.array(got)], [np.array(wanted)]), difference)

    def test_a_missing_log_is_a_difference(self):
        """Else a metric that the towers do not report goes unnoticed."""
        self.assertEqual(runner.difference({"loss": 1.0}, {"loss": 1.0, "mae": 2.0}), float("inf"))

    @wide.parameters(
        ("batches/a remainder", values.Towers, "total",
         lambda towers, *dtype: towers.count(0, *dtype)),
        wide=[("weights/sample_weight", values.Towers, "add_up",
               lambda towers, parts, *_: parts[0])])
    def test_a_wrong_rule_is_found_out(self, name, module, function, wrong):
        """Else all the other tests may pass whatever a strategy does."""
        with mock.patch.object(module, function, wrong):
            found = runner.compare(cases.CASES[name], keras, runner.Towers(3))
        self.assertGreater(found.worst, 1e-3)

    def test_what_is_kept(self):
        """Else hours of the product start anew, or count what other code found."""
        path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "kept")
        item = ("a case", "keras", [runner.Towers(3)], False)
        found = product.Found("a case", "keras", 1e-7, "R=3", "")
        kept.Kept(path, product.Found).add(item, found)
        with path.open("a") as file:
            file.write('["a line that was cut')
        self.assertEqual(kept.Kept(path, product.Found).get(item), found)
        self.assertIsNone(kept.Kept(path, product.Found).get((*item[:3], True)))
        with mock.patch.object(kept, "_state", lambda: "other code"):
            self.assertIsNone(kept.Kept(path, product.Found).get(item))

    def test_every_exception_has_a_reason(self):
        """Else a case that cannot be exact is dropped in silence."""
        for case in cases.CASES.values():
            if case.bound > 1e-5 or len(case.keras) < 2:
                self.assertNotEmpty(case.reason, case.name)

    def test_the_core_has_all_cases_and_towers(self):
        """Else a case, or a choice of towers, is never run by ``make test`` or ``test-all``."""
        self.assertCountEqual([case.name for case, _, _ in runner.core()], cases.CASES)
        core = [item for item in runner.core() if not item[0].wide]
        self.assertEqual({towers for _, _, towers in core}, set(runner.CORE_TOWERS))
        optimizers = {keras for case, keras, _ in core if case.name.startswith("optimizers/")}
        self.assertEqual(optimizers, {cases.KERAS_3, cases.TF_KERAS})


if __name__ == "__main__":
    absltest.main()
