"""examples/towers.ipynb, run from top to bottom in a kernel of its own."""

import os
import pathlib
import re
import tempfile

from absl.testing import absltest, parameterized

try:
    import nbclient
    import nbformat
except ModuleNotFoundError:
    nbclient = None

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "towers.ipynb"


@absltest.skipIf(nbclient is None, 'not installed: pip install ".[notebook]" (make test-site does)')
class NotebookTest(parameterized.TestCase):

    def assert_kept(self, cells):
        """Checks that the file has what running has shown; times differ."""
        kinds, losses = [], []
        for each in (cells, nbformat.read(NOTEBOOK, as_version=4).cells):
            outputs = [output for cell in each for output in cell.get("outputs", [])
                       if output.get("name") != "stderr"]
            kinds.append([sorted(output.get("data", {})) for output in outputs
                          if output.output_type != "stream"])
            losses.append(re.search(r"test loss: (\S+) on towers, (\S+) on", "".join(
                output.get("text", "") for output in outputs)).groups())
        self.assertEqual(*kinds)
        for one, other in zip(*losses):
            self.assertAlmostEqual(float(one), float(other), delta=1e-4)

    @parameterized.parameters("0", "1")
    def test_runs_and_shows(self, legacy):
        """Else the first thing that somebody with Jupyter opens stops at an error, or the outputs
        that a reader sees in it are those of another version."""
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3",
            resources={"metadata": {"path": folder}}).execute(
                env={**os.environ, "PYTHONPATH": path, "TF_USE_LEGACY_KERAS": legacy})
        if legacy == "0":
            self.assert_kept(notebook.cells)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        pages = [output.data["text/html"] for output in outputs
                 if "text/html" in output.get("data", {})]
        self.assertLen(pages, 2)
        for page in pages:
            self.assertIn("<caption>TowerStrategy: 4 towers, merge device CPU:0</caption>", page)
        self.assertLen([output for output in outputs if "image/png" in output.get("data", {})], 1)
        printed = "".join(output.get("text", "") for output in outputs)
        self.assertIn("Epoch 6/6", printed)
        difference = re.search(r"largest difference of a weight: (\S+)", printed)
        self.assertLess(float(difference[1]), 1e-4)
        self.assertLess(float(outputs[-1].data["text/plain"]), 1e-5)  # the loaded model


if __name__ == "__main__":
    absltest.main()
