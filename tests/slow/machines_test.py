"""Every case of machines_workers on clusters of several shapes."""

import tempfile

import numpy as np
from absl.testing import parameterized

from tests.machines import machines_workers

NOT_OF_ONE_DEVICE = ("counted", "random_start", "ends_early", "sharded", "unseeded")


class ClusterTest(parameterized.TestCase):

    @parameterized.parameters((2, 2), (4, 1))
    def test_as_on_one_device(self, workers, towers):
        """Else a result depends on how many machines there are, or on how many towers each has."""
        cases = [case for case in machines_workers.CASES
                 if not case.startswith(NOT_OF_ONE_DEVICE)]
        with tempfile.TemporaryDirectory() as folder:
            machines_workers.run(workers, towers, folder, cases, seconds=1200)
            for case in cases:
                seen = [machines_workers.results(folder, case, worker)
                        for worker in range(workers)]
                expected = machines_workers.expected(case)
                for name, value in seen[0].items():
                    for other in seen[1:]:
                        np.testing.assert_array_equal(value, other[name], f"{case}: {name}")
                    if not name.startswith(("eager_", "graph_", "replicas")):
                        np.testing.assert_allclose(value, expected[name], 1e-5, 1e-6,
                                                   err_msg=f"{case}: {name}")
