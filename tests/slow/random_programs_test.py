"""Hundreds of random programs, on towers beside one device; the draws are others every time."""

import random

from absl.testing import parameterized

import towerstrategy
from tests.sharding import random_programs

PROGRAMS = 300


class RandomProgramsTest(parameterized.TestCase):

    @parameterized.parameters(2, 3)
    def test_towers_have_one_devices_results(self, towers):
        """Else operations whose rules are right give a wrong number where they meet."""
        strategy = towerstrategy.TowerStrategy(
            [f"CPU:{tower + 1}" for tower in range(towers)], "CPU:0")
        first = random.randrange(10**9)
        for seed in range(first, first + PROGRAMS // 2):
            program = random_programs.drawn(seed)
            with self.subTest(seed=seed):
                self.assertEmpty([*random_programs.differences(program, strategy, (9, 7, 2))])
