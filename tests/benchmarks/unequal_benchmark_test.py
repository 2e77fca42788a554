"""benchmarks unequal: what is told of shares is what was dealt and timed."""

import dataclasses
import json
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import towerstrategy
from benchmarks import unequal

pytestmark = pytest.mark.wide


class MeasureTest(parameterized.TestCase):

    def test_the_slow_tower_works_more_often(self):
        """Else towers are compared that are alike, or the work changes what is trained."""
        x = np.random.RandomState(0).randn(6, 4).astype("float32")
        strategy = towerstrategy.TowerStrategy(list(unequal.TOWERS), shares=[2, 1])
        layer, products = unequal._repeating_layer(keras, 3, 4), [0, 0]

        def counted(*args, **kwargs):
            products[tf.distribute.get_replica_context().tower] += 1
            return matmul(*args, **kwargs)

        matmul = tf.matmul
        with mock.patch.object(tf, "matmul", counted):
            parts = strategy.run(layer, (strategy.split(x),))
        np.testing.assert_array_equal(strategy.gather(parts, 0), x)
        self.assertEqual(products, [4, 12])

    def test_shares_of_equal_towers(self):
        """Else a choice is timed with other rows than the table says, or not at all."""
        found = unequal.measure(keras, 1, rounds=2, steps=4, small=True)
        self.assertSequenceEqual(list(found), ["'measured'", "None"])
        self.assertEqual(found["None"].rows, [48, 48])
        for mine in found.values():
            self.assertEqual(sum(mine.rows), 96)
            self.assertGreater(mine.all_s * 1e3, 2 * 4 * mine.step_ms * .5)
            self.assertGreater(mine.cpu_s, 0)
        told = [{**dataclasses.asdict(each), "holds": each.holds}
                for each in unequal.verdicts(found, found)]
        json.dumps(told)  # what was measured for half an hour is written in the end


class VerdictsTest(parameterized.TestCase):

    def _found(self, step_ms, rows=(48, 48), cpu_s=1.):
        return unequal.Figures(list(rows), step_ms, step_ms / 1e3, cpu_s)

    def test_targets(self):
        """Else a target is called reached that is not."""
        slowed = {"'measured'": self._found(11.5, (70, 26)), "None": self._found(20.),
                  "[3.0, 1.0]": self._found(10., (72, 24)), "[2.0, 1.0]": self._found(12.)}
        equal = {"'measured'": self._found(10.05), "None": self._found(10.)}
        best, apart, wall, cpu = unequal.verdicts(slowed, equal)
        self.assertIn("[3.0, 1.0]", best.what)
        self.assertAlmostEqual(best.measured, 1.15)
        self.assertEqual([each.holds for each in (best, apart, wall, cpu)],
                         [False, True, True, True])
        equal["'measured'"] = dataclasses.replace(equal["'measured'"], rows=[49, 47], cpu_s=1.02)
        self.assertEqual([each.holds for each in unequal.verdicts(slowed, equal)],
                         [False, False, True, False])

    def test_shown(self):
        """Else the table leaves out what the best was chosen of."""
        slowed = {"'measured'": self._found(11.), "None": self._found(22.)}
        first, second = unequal.format_table(slowed).splitlines()[-2:]
        self.assertIn("0.500", first)
        self.assertIn("48+48", second)

    def test_both_sides_are_tried(self):
        """Else the best fixed shares are not among those that "measured" is held against."""
        tried = [shares[0] for shares in unequal.choices(3)[2:]]
        self.assertLess(min(tried), 3)
        self.assertGreater(max(tried), 3)
        self.assertIn(3., tried)
