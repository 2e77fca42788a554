"""What is said of versions and requirements elsewhere is what setup.cfg and ``_version`` say."""

import configparser
import pathlib
import re

from absl.testing import parameterized

import towerstrategy

ROOT = pathlib.Path(__file__).parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
PYTHONS = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
REQUIRED = SETUP["options"]["install_requires"].split()


class VersionsTest(parameterized.TestCase):

    @parameterized.parameters("CITATION.cff", "conda/recipe.yaml")
    def test_version(self, path):
        """Else a release is cited, or uploaded, under another's number."""
        said = re.search(r'^ *version: "?([\d.]+)"?$', (ROOT / path).read_text(), re.MULTILINE)
        self.assertEqual(said[1], towerstrategy.__version__)

    def test_conda_asks_for_what_pip_asks_for(self):
        """Else conda installs a TensorFlow or a Keras that the package does not work with."""
        recipe = (ROOT / "conda" / "recipe.yaml").read_text()
        oldest = re.search(r'python_min: "(.*)"', recipe)[1]
        asked = re.search(r"^  run:\n((?:    - .*\n)+)", recipe, re.MULTILINE)[1]
        asked = asked.replace("${{ python_min }}", oldest).replace("    - ", "").replace(" ", "")
        self.assertCountEqual(
            asked.split(), [*REQUIRED, f"python{SETUP['options']['python_requires']}"])

    @parameterized.parameters("docker/Dockerfile", "docker/gpu.Dockerfile")
    def test_images_install_what_is_there(self, path):
        """Else `docker build` fails, or the image has a Python that was not tested."""
        lines = (ROOT / path).read_text()
        self.assertIn(re.search(r"^FROM python:(.*)-slim$", lines, re.MULTILINE)[1], PYTHONS)
        copied = {name for line in re.findall(r"^COPY (.*) \S+$", lines, re.MULTILINE)
                  for name in line.split()}
        self.assertEqual({f"!{name}" for name in copied},
                         set(re.findall("!.*", (ROOT / ".dockerignore").read_text())))
        for name in copied:
            self.assertTrue((ROOT / name).exists(), name)
        self.assertContainsSubset(re.findall(r"\[(\w+)\]", lines),
                                  SETUP["options.extras_require"])

    def test_badges(self):
        """Else the first thing that a visitor reads is wrong."""
        tensorflow = re.fullmatch(r"tensorflow>=([\d.]+),<2\.(\d+)", REQUIRED[0])
        keras = re.fullmatch(r"keras>=([\d.]+)", REQUIRED[1])
        for badge in (f"Python-{PYTHONS[0]}_to_{PYTHONS[-1]}", f"Keras-{keras[1]}_or_newer",
                      f"TensorFlow-{tensorflow[1]}_to_2.{int(tensorflow[2]) - 1}",
                      f"licence-{SETUP['metadata']['license'].replace('-', '--')}"):
            self.assertIn(f"https://img.shields.io/badge/{badge}-",
                          (ROOT / "README.md").read_text())
