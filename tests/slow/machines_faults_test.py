"""Workers that are killed, stopped, cut off or told of something else: clear errors, no hang.

`machines_faults.py` runs the cases; a worker that it had to kill has status None here.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np
from absl.testing import parameterized

from tests.extras.machines import machines_workers
from tests.slow import machines_faults as faults

SCRIPT = pathlib.Path(faults.__file__)


def can_make_namespaces():
    """Whether this process may make network namespaces."""
    if not shutil.which("ip"):
        return False
    try:
        with faults.namespaces(1):
            return True
    except subprocess.CalledProcessError:
        return False


class FaultsTest(parameterized.TestCase):

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_case(self, case):
        """The exit statuses of the workers, and what those said that ended by themselves."""
        done = subprocess.run([sys.executable, str(SCRIPT), str(self.folder), case],
                              env=machines_workers.environment(), capture_output=True, text=True,
                              check=False, timeout=2 * faults.LIMIT)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        statuses = {int(worker): status for worker, status in
                    json.loads((self.folder / f"{case}.json").read_text()).items()}
        said = {worker: json.loads(path.read_text()) for worker in statuses
                if (path := self.folder / f"{case}_{worker}.json").exists()}
        for worker, report in said.items():
            print(f"{case}, worker {worker}: {report.get('error')} after {report['after']} s")
        return statuses, said

    def assert_ended(self, case, gone, named):
        """All workers but ``gone`` end with an error that names worker ``named``."""
        statuses, said = self.run_case(case)
        for worker in range(faults.WORKERS):
            if worker == gone:
                continue
            self.assertEqual(statuses[worker], 1, f"worker {worker} of {statuses}")
            self.assertRegex(said[worker]["message"], f"task:{named}\\b")
        return said

    @parameterized.parameters(("killed", 1), ("chief_killed", 0), ("stopped", 1))
    def test_gone(self, case, gone):
        """Else the machines that are left wait, and are paid for, until somebody looks."""
        said = self.assert_ended(case, gone, gone)
        self.assertEqual({report["error"] for report in said.values()}, {"UnavailableError"})

    def test_cut_off(self):
        """Else a pulled cable hangs the training on every machine."""
        if not can_make_namespaces():
            self.skipTest("this process may not make network namespaces")
        said = self.assert_ended("cut_off", 1, 1)
        self.assertRegex(said[1]["message"], "task:[02]\\b")
        self.assertEqual({report["error"] for report in said.values()}, {"UnavailableError"})

    def test_started_again(self):
        """Else a worker that comes back hangs, or trains with those that have its old life."""
        _, said = self.run_case("started_again")
        self.assertLen(said, faults.WORKERS)
        for worker, report in said.items():
            self.assertIn("error", report)
            if worker != 1:
                self.assertRegex(report["message"], r"task:1\b")

    def test_raises(self):
        """Else a mistake that shows on one machine alone hangs the others."""
        said = self.assert_ended("raises", 2, 2)
        self.assertEqual(said[2]["error"], "KeyError")

    @parameterized.parameters("never_comes", "port_taken")
    def test_start(self, case):
        """Else a worker that cannot start leaves the others waiting for ever."""
        said = self.assert_ended(case, 1, 1)
        for worker in (0, 2):
            self.assertEqual(said[worker]["error"], "RuntimeError")
            self.assertIn("no answer from worker 1", said[worker]["message"])
            self.assertNotIn("worker 2", said[worker]["message"])
        if case == "port_taken":
            self.assertEqual(said[1]["error"], "RuntimeError")
            self.assertIn("cannot listen on its port", said[1]["message"])

    @parameterized.parameters("ends_first", "stopped_at_the_end")
    def test_end(self, case):
        """Else a worker that has done its part fails because another has ended."""
        statuses, said = self.run_case(case)
        for worker, report in said.items():
            self.assertEqual((statuses[worker], report.get("error")), (0, None))
        self.assertGreaterEqual(len(said), 2)

    @parameterized.parameters(
        ("other_addresses", "ValueError", "given the same cluster"),
        ("other_count", "RuntimeError", "given the same cluster"))
    def test_told_otherwise(self, case, error, message):
        """Else workers train apart, or fail where nothing shows why."""
        statuses, said = self.run_case(case)
        self.assertEqual(set(statuses.values()), {1})
        for report in said.values():
            self.assertEqual(report["error"], error)
            self.assertIn(message, report["message"])

    def test_other_model(self):
        """Else workers sum the gradients of different models."""
        statuses, said = self.run_case("other_model")
        self.assertEqual(set(statuses.values()), {1})
        self.assertEqual(said[1]["error"], "ValueError")
        self.assertRegex(said[1]["message"], r"variable 'kernel' of shape \(3, 5\)")

    @parameterized.parameters(*faults.KITS)
    def test_goes_on_with_fewer(self, kit):
        """Else a machine that is lost for good takes what was trained with it."""
        _, wanted = self.run_case(f"uninterrupted-{kit}")
        _, lost = self.run_case(f"interrupted_four-{kit}")
        self.assertLen(lost, 3)
        for report in lost.values():
            self.assertRegex(report["message"], r"task:1\b")
        _, resumed = self.run_case(f"resumed-{kit}")
        self.assertLen(resumed, faults.WORKERS)
        for report in resumed.values():
            self.assertEqual(report["result"]["began"], [2, 3])
            for weight, want in zip(report["result"]["weights"], wanted[0]["result"]):
                np.testing.assert_allclose(weight, want, 1e-5, 1e-6)

    @parameterized.parameters(*faults.KITS)
    def test_resumes(self, kit):
        """Else a machine that fails takes the training with it, or spoils it silently."""
        statuses, _ = self.run_case(f"interrupted-{kit}")
        self.assertEqual(statuses, {0: 1, 1: -9, 2: 1})
        _, resumed = self.run_case(f"resumed-{kit}")
        _, whole = self.run_case(f"uninterrupted-{kit}")
        for worker in range(faults.WORKERS):
            self.assertEqual(resumed[worker]["result"]["began"], [2, 3])
            for own, expected in zip(resumed[worker]["result"]["weights"],
                                     whole[worker]["result"], strict=True):
                np.testing.assert_array_equal(own, expected)
