"""The examples that start workers do so."""

import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import unittest

from absl.testing import parameterized

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
SECONDS = 400


class LaunchersTest(parameterized.TestCase):

    def run_example(self, *command):
        """What the command prints; it and all that it started are killed after SECONDS."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path),
                       "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "-1",
                       "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        with subprocess.Popen(command, env=environment, start_new_session=True, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                output, _ = process.communicate(timeout=SECONDS)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        self.assertEqual(process.returncode, 0, output[-5000:])
        return output

    @parameterized.named_parameters(
        ("shell", "sh", str(EXAMPLES / "two_machines.sh")),
        ("ray", sys.executable, str(EXAMPLES / "ray_train.py")))
    def test_two_workers_of_two_towers(self, *command):
        """Else the first thing that somebody with two machines tries fails."""
        if "ray" in command[1] and not importlib.util.find_spec("ray"):
            raise unittest.SkipTest("ray is not installed: pip install -e '.[ray]'")
        output = self.run_example(*command)
        told = set(re.findall(r"4 towers, this .*'s first is number (\d): (loss .*)", output))
        self.assertEqual({number for number, _ in told}, {"0", "2"}, output[-5000:])
        self.assertLen({result for _, result in told}, 1)
