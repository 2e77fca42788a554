"""The examples of multi_gpu_model run as they are, with both Keras versions."""

import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import parameterized

REPOSITORY = pathlib.Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (REPOSITORY / "examples").glob("multi_gpu_*.py")
                  if path.name != "multi_gpu_setting.py")


class ExamplesTest(parameterized.TestCase):

    @parameterized.product(example=EXAMPLES, legacy=["0", "1"])
    def test_runs_on_cpu_towers(self, example, legacy):
        """Lost otherwise: the first thing that somebody with old code tries."""
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "examples" / example), "--image-size", "71",
             "--classes", "4", "--samples", "5", "--towers", "3"],
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": path, "TF_USE_LEGACY_KERAS": legacy})
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
