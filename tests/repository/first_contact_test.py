"""What a newcomer runs before anything is set up: the example's shell script, and make."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).parents[2]
# Answers to everything with its own name: a Python that has all that the script asks for.
STANDS_FOR_PYTHON = "#!/bin/sh\necho this is {}\n"


class TwoMachinesTest(parameterized.TestCase):
    """Which Python examples/two_machines.sh takes."""

    def setUp(self):
        super().setUp()
        self.root = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        (self.root / "examples").mkdir()
        shutil.copy(ROOT / "examples" / "two_machines.sh", self.root / "examples")
        self.make("bin/python", "active")
        self.make("bin/python3", "python3")

    def make(self, path, name):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STANDS_FOR_PYTHON.format(name))
        path.chmod(0o755)

    def run_script(self, **variables):
        return subprocess.run(
            ["sh", str(self.root / "examples" / "two_machines.sh")], capture_output=True, text=True,
            check=False, env={"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", **variables})

    @parameterized.parameters(
        ({}, "venv"), ({"VIRTUAL_ENV": "/somewhere"}, "active"),
        ({"CONDA_PREFIX": "/somewhere"}, "active"), ({"PYTHON": "python3"}, "python3"))
    def test_takes(self, variables, wanted):
        """Else it fails after `make demo` with "No module named tensorflow"."""
        self.make(".venv/bin/python", "venv")
        done = self.run_script(**variables)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(set(done.stdout.splitlines()), {f"this is {wanted}"})

    def test_without_an_environment(self):
        """Else it fails where the package is installed for the machine's own Python."""
        self.assertIn("this is python3", self.run_script().stdout)

    def test_says_what_is_missing(self):
        """Else a traceback of two processes is all that a newcomer is told."""
        bare = self.root / "bare"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
        done = self.run_script(PYTHON=str(bare / "bin" / "python"))
        self.assertEqual(done.returncode, 1)
        self.assertIn("is not installed", done.stderr)
        self.assertIn("make demo", done.stderr)
        self.assertNotIn("Traceback", done.stderr)


class MakeTest(parameterized.TestCase):

    @parameterized.parameters(([], "python3"), (["python3.11"], "python3.11"))
    def test_takes_the_python_that_is_there(self, more, wanted):
        """Else the first command fails on every machine without Python 3.11."""
        folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        for name in ["python3", *more]:
            (folder / name).write_text(STANDS_FOR_PYTHON.format(name))
            (folder / name).chmod(0o755)
        for name in ("sh", "make"):
            (folder / name).symlink_to(shutil.which(name))
        done = subprocess.run(["make", "-n", "demo", "VENV=none"], cwd=ROOT, capture_output=True,
                              text=True, check=False, env={"PATH": str(folder)})
        self.assertIn(f"|| {wanted} -m venv none", done.stdout, done.stderr)


if __name__ == "__main__":
    absltest.main()
