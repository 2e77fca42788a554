"""benchmarks one_gpu: what is measured in a few minutes is measured at the first try."""

import json
import pathlib
import tempfile
from unittest import mock

import pytest
from absl.testing import absltest

from benchmarks import gpus, links, one_gpu

pytestmark = pytest.mark.wide

CPU = one_gpu.Options("cpu", seconds=0, quick=True)


class OneGpuTest(absltest.TestCase):

    def test_what_tells_most_comes_first(self):
        """Else the time is up before anything is known of XLA on a large model."""
        found = one_gpu.cells(one_gpu.CASES, list(one_gpu.SETUPS))
        self.assertEqual([str(cell) for cell in found[:6]], [
            "resnet50 none", "resnet50 none_plain", "resnet50 tower", "resnet50 tower_plain",
            "resnet50 mirrored", "transformer none"])
        self.assertLen(set(found), len(found))
        self.assertEqual(str(found[-1]), "resnet50 tower mixed_float16")

    def test_a_failure_is_shown_and_the_rest_is_measured(self):
        """Else one error ends the only minutes on a GPU that there are."""
        todo = [one_gpu.Cell("mlp", "tower", "no policy"), one_gpu.Cell("mlp"),
                one_gpu.Cell("mlp", "halves_balanced")]
        with tempfile.TemporaryDirectory() as folder:
            one_gpu.main(todo, CPU, 600, 300, pathlib.Path(folder), "here")
            path = pathlib.Path(folder) / "one_gpu.json"
            found = one_gpu.read(path)
            self.assertEqual(json.loads(path.read_text())["options"]["device"], "cpu")
        self.assertEqual(list(found), todo)
        self.assertIn("no policy", found[todo[0]]["error"])
        self.assertIn("Traceback", found[todo[0]]["log"])
        for cell in todo[1:]:
            self.assertGreater(found[cell]["steps"], 9, found[cell])
            self.assertFalse(found[cell]["xla"])
        text = one_gpu.format_table(found, [one_gpu.Cell("embedding")])
        self.assertIn("mlp halves_balanced", text)
        self.assertIn("no policy failed: ValueError", text)
        self.assertIn("the time was up: embedding none", text)

    def test_ends_in_time(self):
        """Else a process that hangs takes all the time with it, and is still there."""
        todo = [one_gpu.Cell("mlp"), one_gpu.Cell("mlp", "tower")]
        self.assertEmpty(list(one_gpu.measure_all(todo, CPU, 1, 300)))
        (_, figures), *_ = one_gpu.measure_all(todo[:1], CPU, 300, 0.1)
        self.assertIn("no end after", figures["error"])

    def test_constants_beside_those_of_the_simulation(self):
        """Else links.py keeps its estimates though they were measured."""
        text = one_gpu.format_constants({
            "to the GPU, GB/s": 41.5, "an operation on the GPU, us": 4., "group 5 failed": "why"},
            "H100")
        self.assertRegex(text, r"to the GPU, GB/s +41\.50 +50\.00")
        self.assertRegex(text, rf"on the GPU, us +4\.00 +{1e6 * links.LAUNCH['GPU']:.2f}")
        self.assertRegex(text, "group 5 failed +why")
        self.assertEqual(one_gpu.gpu_kind({one_gpu.Cell("mlp"): {"gpu": "Tesla V100-SXM2"}}),
                         "V100")

    def test_beside_the_simulation(self):
        """Else what was measured is compared with a step that is simulated on the host."""
        found = {one_gpu.Cell("mlp"): {"step_ms": 1., "gpu_step_peak_mb": 500.},
                 one_gpu.Cell("mlp", "none_plain"): {"error": "why"}}
        with mock.patch.object(gpus.Simulation, "factor", lambda self, gpu: 1.):
            text = one_gpu.format_comparison(found, "H100")
        self.assertRegex(text, r"mlp +none +1\.00 +0\.\d\d +\d\.\d\d +500 +-")
        self.assertRegex(text, r"mlp +none_plain +- +1\.\d\d +- +- +4\d\d")
