"""_requirements: what pip is told and what an import says are the same."""

import configparser
import importlib
import pathlib
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from towerstrategy import _requirements

SETUP = pathlib.Path(__file__).parents[2] / "setup.cfg"


class RequirementsTest(parameterized.TestCase):

    @parameterized.parameters("2.15.1", "2.9.0", "1.15.5", "2.15.0-rc1")
    def test_older_tensorflow(self, version):
        """Else somebody with an old TensorFlow reads about a name that is missing in it."""
        sentence = f"^towerstrategy needs TensorFlow 2.16 or later, but the one .* is {version}.$"
        with mock.patch.object(tf, "__version__", version), \
                self.assertRaisesRegex(ImportError, sentence):
            importlib.reload(_requirements)

    @parameterized.parameters("2.16.1", "2.21.0", "2.22.0-dev20261101", "3.0.0")
    def test_others(self, version):
        """Else a TensorFlow that would do is refused."""
        _requirements.check(version)

    def test_pip_is_told_the_same(self):
        """Else pip installs beside a TensorFlow that the package then refuses."""
        setup = configparser.ConfigParser()
        setup.read(SETUP)
        asked = setup["options"]["install_requires"].split()[0]
        self.assertStartsWith(asked, f"tensorflow>={'.'.join(map(str, _requirements.OLDEST))},<")
