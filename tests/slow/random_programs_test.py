"""Hundreds of random programs, on towers beside one device; the draws are others every time."""

import random

from absl.testing import parameterized

from tests.parity import fuzz
from tests.sharding import random_programs

PROGRAMS = 150  # for each number of towers


class RandomProgramsTest(parameterized.TestCase):

    @parameterized.parameters(2, 3)
    def test_towers_have_one_devices_results(self, towers):
        """Else operations whose rules are right give a wrong number where they meet."""
        strategy = fuzz.strategy_of(towers)
        first = random.randrange(10**9)
        for seed in range(first, first + PROGRAMS):
            program = random_programs.drawn(seed)
            with self.subTest(seed=seed):
                self.assertEmpty([*random_programs.differences(program, strategy, (9, 7, 2))])
