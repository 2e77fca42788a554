"""Workers with different numbers of towers, and different shares: the same as one device."""

import numpy as np
from absl.testing import absltest, parameterized

from tests.extras.machines import machines_workers

# Three towers in all, of which the first has half of every batch.
SHARES = [[3, 1], [2]]
CASES = ["uneven-keras", "on_batch-tf_keras", "loop-tf_keras", "embedded-tf_keras", "kinds",
         "measured-keras", "slowed-keras", "sharded"]


class UnequalMachinesTest(machines_workers.ClusterTestCase):
    workers, towers, cases = len(SHARES), SHARES, CASES

    @parameterized.parameters("uneven-keras", "on_batch-tf_keras", "loop-tf_keras",
                              "embedded-tf_keras", "measured-keras", "slowed-keras")
    def test_as_on_one_device(self, case):
        """Else old and new machines together train another model than one of them."""
        self.assert_as_on_one_device(case)

    def test_every_kind_of_value(self):
        """Else strings, ragged and sparse values of other machines are an error, or garbled."""
        seen = self.seen("kinds")
        for name, value in machines_workers.expected("kinds").items():
            np.testing.assert_array_equal(seen[name], value, name)

    def test_measured(self):
        """Else machines deal by different shares, and rows are trained on twice or never."""
        first, second, third = self.seen("measured-keras")["units"]
        self.assertBetween(first / second, 1.5, 2.5)
        self.assertBetween(first / third, 2.5, 4)

    def test_a_slower_worker(self):
        """Else a worker with a slower processor holds the others up in every step."""
        slow, fast = self.seen("slowed-keras")["units"]
        self.assertGreater(fast, 1.5 * slow)

    def test_sharding(self):
        """Else rows of a worker's own files are lost where its towers have unequal shares."""
        self.assert_sharded()


if __name__ == "__main__":
    absltest.main()
