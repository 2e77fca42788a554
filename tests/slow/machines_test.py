"""Every case of machines_workers on clusters of several shapes."""

from absl.testing import parameterized

from tests.extras.machines import machines_workers

NOT_OF_ONE_DEVICE = ("counted", "random_start", "ends_early", "sharded", "unseeded")
OF_TWO = "handed"  # deals its rows to two workers
CASES = [case for case in machines_workers.CASES if not case.startswith(NOT_OF_ONE_DEVICE)]


class TwoOfTwoTest(machines_workers.ClusterTestCase):
    workers, towers, cases, seconds = 2, 2, CASES, 1200

    @parameterized.parameters(*CASES)
    def test_as_on_one_device(self, case):
        """Else a result depends on how many machines there are."""
        self.assert_as_on_one_device(case)


class FourOfOneTest(machines_workers.ClusterTestCase):
    cases = [case for case in CASES if not case.startswith(OF_TWO)]
    workers, towers, seconds = 4, 1, 1200

    @parameterized.parameters(*cases)
    def test_as_on_one_device(self, case):
        """Else a result depends on machines of a single tower each."""
        self.assert_as_on_one_device(case)


class TwoOfOneTest(machines_workers.ClusterTestCase):
    workers, towers, cases, seconds = 2, 1, CASES, 1200

    @parameterized.parameters(*CASES)
    def test_as_on_one_device(self, case):
        """Else two machines of one tower each, the least cluster, train another model."""
        self.assert_as_on_one_device(case)
