"""The wheel, as someone gets it who has none of this repository.

Takes some minutes: TensorFlow is installed into an empty environment. ``PYTHONS`` names the Pythons
to do that with, such as what ``.ci/pythons`` finds; without it, this one alone does.
"""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

from absl.testing import absltest, parameterized

ROOT = pathlib.Path(__file__).parent.parent.parent
PYTHONS = os.environ.get("PYTHONS", sys.executable).split()


class WheelTest(parameterized.TestCase):

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = pathlib.Path(cls.enter_context(tempfile.TemporaryDirectory()))
        source = cls.folder / "source"
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(
            ".venv*", ".git", "build", "dist", "out", "*.egg-info", "*_cache", "__pycache__"))
        cls.run_in(source, [sys.executable, "-m", "build", "--outdir", str(cls.folder / "dist"),
                            str(source)])
        cls.sdist, = (cls.folder / "dist").glob("*.tar.gz")
        cls.wheel, = (cls.folder / "dist").glob("*.whl")

    @classmethod
    def run_in(cls, folder: pathlib.Path, command: list[str], **variables: str) -> str:
        """Runs a command that must succeed; what it printed."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= variables
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False,
                              env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2"})
        if done.returncode:
            raise AssertionError(f"{command} failed:\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}")
        return done.stdout

    def test_package_index_would_take_it(self):
        """Else a release is refused on upload."""
        self.run_in(self.folder, [sys.executable, "-m", "twine", "check", "--strict",
                                  str(self.sdist), str(self.wheel)])

    def test_holds_the_package_and_nothing_else(self):
        """Else users get our tests as a top-level package, or no type hints."""
        with zipfile.ZipFile(self.wheel) as wheel:
            names = wheel.namelist()
        package = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("towerstrategy/**/*.py")}
        self.assertContainsSubset(package | {"towerstrategy/py.typed"}, names)
        tops = {name.split("/")[0] for name in names}
        self.assertEqual({top for top in tops if not top.endswith(".dist-info")}, {"towerstrategy"})
        with tarfile.open(self.sdist) as sdist:
            inside = {name.partition("/")[2] for name in sdist.getnames()}
        self.assertContainsSubset({"README.md", "LICENSE", "setup.cfg", "setup.py"}, inside)

    def test_is_the_same_when_built_again(self):
        """Else nobody can check that the wheel they got was made of the source they see."""
        made = []
        for number in range(2):
            copy = self.folder / f"again{number}"
            shutil.copytree(self.folder / "source", copy, ignore=shutil.ignore_patterns(
                "build", "*.egg-info"))
            for path in copy.rglob("*"):
                os.utime(path, (1e9 + number, 1e9 + number))
            self.run_in(copy, [sys.executable, "-m", "build", "--wheel", "--outdir",
                               str(copy / "dist"), str(copy)],
                        SOURCE_DATE_EPOCH="1700000000", PYTHONHASHSEED=str(number))
            wheel, = (copy / "dist").glob("*.whl")
            made.append(wheel.read_bytes())
        self.assertEqual(hashlib.sha256(made[0]).digest(), hashlib.sha256(made[1]).digest())

    @parameterized.parameters(*zip(PYTHONS))
    def test_readme_runs_in_an_empty_environment(self, base):
        """Else what works in this repository fails for whoever installs the package."""
        home = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.run_in(self.folder, [base, "-m", "venv", str(home)])
        python = str(home / "bin" / "python")
        self.run_in(self.folder, [python, "-m", "pip", "install", "--quiet", str(self.wheel)])
        elsewhere = home / "elsewhere"
        elsewhere.mkdir()
        for path in (ROOT / "README.md", ROOT / "tests" / "repository" / "code_blocks.py"):
            shutil.copy(path, elsewhere)
        printed = self.run_in(elsewhere, [python, "code_blocks.py", "README.md"])
        self.assertIn("README.md: ran", printed)
        where = self.run_in(elsewhere, [python, "-c",
                                        "import towerstrategy; print(towerstrategy.__file__)"])
        self.assertStartsWith(where, str(home))
        table = self.run_in(elsewhere, [python, str(ROOT / ".ci" / "licences.py"), "towerstrategy",
                                        "sbom.json"])
        there = {part["name"]: part for part in
                 json.loads((elsewhere / "sbom.json").read_text())["components"]}
        self.assertContainsSubset({"towerstrategy", "tensorflow", "keras", "numpy"}, there)
        self.assertEqual(there["towerstrategy"]["licenses"], [{"license": {"name": "Apache-2.0"}}])
        self.assertNotIn("tf-keras", there)  # an extra's
        self.assertLen(table.splitlines(), len(there) + 2)
        print(self.run_in(elsewhere, [python, "--version"]).strip(), printed.strip())

    @parameterized.parameters(([],), (["--editable"],))
    def test_installs_from_the_folder(self, options):
        """Else `pip install .` or `pip install -e .`, which the README names, does not work."""
        home = self.folder / f"plain{len(options)}"
        venv.create(home, with_pip=True)
        python = str(home / "bin" / "python")
        self.run_in(self.folder, [python, "-m", "pip", "install", "--quiet", "--no-deps", *options,
                                  str(self.folder / "source")])
        found = self.run_in(self.folder, [python, "-c", (
            "import importlib.metadata, importlib.util\n"
            "print(importlib.metadata.version('towerstrategy'))\n"
            "print(importlib.util.find_spec('towerstrategy').origin)")])
        version, origin = found.split()
        self.assertIn(f'"{version}"', (ROOT / "towerstrategy" / "_version.py").read_text())
        self.assertStartsWith(origin, str(self.folder / "source" if options else home))


if __name__ == "__main__":
    absltest.main()
