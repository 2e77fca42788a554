"""The examples of other libraries, and that of R, run as they are.

`make test-libraries` installs what they need. An example whose library is not there is skipped and
says so.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from absl.testing import parameterized

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
NEEDS = {
    "agents.py": ["tf_agents", "gym"],
    "applications.py": [],
    "graphs.py": ["spektral"],
    "hub.py": ["keras_hub", "tensorflow_text"],
    "keras_features.py": [],
    "orbit_loop.py": ["orbit"],
    "preprocessing.py": ["sklearn"],
    "probability.py": ["tensorflow_probability", "tf_keras"],
    "ranking.py": ["keras_rs"],
    "recommenders.py": ["tensorflow_recommenders", "tf_keras"],
    "scikit_learn.py": ["scikeras"],
    "sonnet_loop.py": ["sonnet"],
    "trials.py": ["optuna", "optuna_integration", "tensorflow_datasets"],
    "tuner.py": ["keras_tuner", "tensorboard"],
}
TRACKERS = ("tensorboard", "wandb", "mlflow")
WITH_TF_KERAS = (("applications.py", "MobileNetV3Small"), ("orbit_loop.py",), ("preprocessing.py",))


class LibrariesTest(parameterized.TestCase):

    def run_example(self, command, needs, **environment):
        """Runs an example, which ends with an error where it does not find what it promises."""
        missing = [name for name in needs if importlib.util.find_spec(name) is None]
        if missing:
            self.skipTest(f"not installed: {', '.join(missing)} (make test-libraries installs it)")
        folder = self.enter_context(tempfile.TemporaryDirectory())
        path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": path, "TF_USE_LEGACY_KERAS": "0", **environment})
        self.assertEqual(done.returncode, 0, done.stdout[-3000:] + done.stderr[-3000:])
        print(done.stdout)

    def test_every_example_is_here(self):
        """Lost otherwise: an example that nobody has run since it was written."""
        there = {path.name for path in (EXAMPLES / "libraries").glob("*.py")} - {"common.py"}
        self.assertEqual(set(NEEDS), there)

    @parameterized.parameters(*NEEDS)
    def test_with_keras(self, example):
        """Lost otherwise: what users have built on Keras 3 and on TensorFlow."""
        self.run_example([sys.executable, str(EXAMPLES / "libraries" / example)], NEEDS[example])

    @parameterized.parameters(*WITH_TF_KERAS)
    def test_with_tf_keras(self, example, *arguments):
        """Lost otherwise: the same for those who stay with Keras 2."""
        self.run_example([sys.executable, str(EXAMPLES / "libraries" / example), *arguments],
                         [*NEEDS[example], "tf_keras"], TF_USE_LEGACY_KERAS="1")

    @parameterized.parameters(EXAMPLES / "xception.R", EXAMPLES.parent / "docs" / "r.md")
    def test_r(self, path):
        """Lost otherwise: R, where Keras users knew multi_gpu_model first."""
        rscript = shutil.which("Rscript")
        if rscript is None:
            self.skipTest("not installed: Rscript (apt-get install r-base-core r-cran-reticulate)")
        has_reticulate = 'quit(status = !requireNamespace("reticulate", quietly = TRUE))'
        if subprocess.run([rscript, "-e", has_reticulate], check=False).returncode:
            self.skipTest("not installed: reticulate (apt-get install r-cran-reticulate)")
        if path.suffix == ".md":
            blocks = re.findall(r"^```r\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
            self.assertNotEmpty(blocks)
            path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()), "page.R")
            path.write_text("\n".join(blocks))
        self.run_example([rscript, str(path)], [], RETICULATE_PYTHON=sys.executable)

    @parameterized.parameters(*TRACKERS)
    def test_trackers(self, tracker):
        """Lost otherwise: the curves that people look at while they train."""
        self.run_example([sys.executable, str(EXAMPLES / "trackers.py"), tracker], [tracker])
