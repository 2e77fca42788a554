"""What the partition of a step costs: its counts stay as they were recorded."""

import json

import pytest
from absl.testing import absltest, parameterized

import towerstrategy
import wide
from benchmarks import partition

DEVICES = towerstrategy.split_cpu(8)


class PartitionTest(parameterized.TestCase):

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        partition.partitioned("input", DEVICES[:2])  # the first in a process finds nothing cached

    @wide.parameters("input", wide=[name for name in partition.GUARDED if name != "input"])
    def test_no_count_has_risen(self, name):
        """Else steps and first steps grow slower from change to change, and nobody sees it."""
        kept = json.loads(partition.GUARD.read_text())
        if kept["versions"] != partition.versions():
            self.skipTest(f"recorded with {kept['versions']}, not {partition.versions()}")
        made = partition.partitioned(name, DEVICES[:partition.GUARDED_TOWERS], count_calls=True)
        self.assertEmpty(partition.increased({name: made.counts()}, kept["counts"]))

    @pytest.mark.wide
    def test_counts_lie_on_a_line(self):
        """Else steps of many towers take minutes to be made, and steps of few do not show it."""
        made = [partition.partitioned("input", DEVICES[:count], count_calls=True).counts()
                for count in (2, 4, 8)]
        for what, few in made[0].items():
            some, many = made[1][what], made[2][what]
            self.assertGreater(some, few, what)
            self.assertLessEqual(many - some, 2.02 * (some - few), what)

    def test_worse_counts_are_named(self):
        """Else the guard is silent about what it is for."""
        recorded = {"mlp": {"operations": 100, "crossings": 7}}
        within, higher = ({"mlp": {"operations": 101, "crossings": 7}},
                          {"mlp": {"operations": 100, "crossings": 8}})
        self.assertEmpty(partition.increased(within, recorded))
        self.assertEqual(partition.increased(higher, recorded), [("mlp", "crossings", 8, 7)])

    def test_parts_and_counts(self):
        """Else the table has columns of nothing."""
        made = {count: partition.partitioned("input", DEVICES[:count]) for count in (2, 4)}
        for mine in made.values():
            self.assertGreater(min(mine.seconds.values()), 0)
            self.assertSameElements(mine.seconds, ("trace", "propagate", "emit", "function"))
        self.assertLess(made[2].operations, made[4].operations)
        self.assertLess(made[2].crossing_bytes, made[4].crossing_bytes)
        lines = partition.format_table({("input", count): mine for count, mine in made.items()})
        self.assertLen(lines.splitlines(), 4)


if __name__ == "__main__":
    absltest.main()
