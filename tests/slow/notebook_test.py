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

    def test_is_kept_without_outputs(self):
        """Else a reader sees numbers of another version, and each run is a change of the file."""
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
            self.assertEmpty(cell.get("outputs", []))
            self.assertIsNone(cell.get("execution_count"))

    @parameterized.parameters("0", "1")
    def test_runs_and_shows(self, legacy):
        """Else the first thing that somebody with Jupyter or Colab opens stops at an error."""
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        nbclient.NotebookClient(
            notebook, timeout=600, kernel_name="python3",
            resources={"metadata": {"path": folder}}).execute(
                env={**os.environ, "PYTHONPATH": path, "TF_USE_LEGACY_KERAS": legacy})
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
