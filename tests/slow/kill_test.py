"""``kill -9`` at random moments: each run that goes on ends as if it had not been killed."""

import json
import pathlib
import subprocess
import sys
import time

from absl.testing import parameterized

SCRIPT = pathlib.Path(__file__).with_name("kill_rounds.py")
SECONDS = 1800


class KillTest(parameterized.TestCase):

    @parameterized.parameters(("fit", "keras", 20), ("loop", "keras", 20), ("fit", "tf_keras", 5),
                              ("loop", "tf_keras", 5))
    def test_resumes(self, train, library, rounds):
        """Else a machine that fails takes the training of days with it, or spoils it silently."""
        seed = str(time.time_ns())
        done = subprocess.run([sys.executable, str(SCRIPT), train, library, str(rounds), seed],
                              capture_output=True, text=True, timeout=SECONDS, check=False)
        print(f"\n{train}, {library}, seed {seed}\n{done.stdout}")
        reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.assertLen(reports, rounds, done.stderr[-5000:])
        for report in reports:
            wanted = {**report, "unreadable": [], "resumed": True, "equal": True}
            self.assertEqual(report, wanted, done.stderr[-5000:])
