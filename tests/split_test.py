"""split: every row reaches one tower, in order, evenly, in eager code and in pipelines."""

import tensorflow as tf
from absl.testing import parameterized

from towerstrategy import split


class DealTest(parameterized.TestCase):

    @parameterized.product(rows=[0, 1, 2, 3, 7, 8, 9, 100], towers=[1, 2, 3, 5, 8])
    def test_deals_all_rows_in_order_within_one(self, rows, towers):
        """Else rows are lost, doubled, or one tower works while the others wait."""
        starts, sizes = split.deal(rows, towers)
        self.assertEqual(sum(sizes), rows)
        self.assertLessEqual(max(sizes) - min(sizes), 1)
        self.assertEqual(sizes, sorted(sizes, reverse=True))
        self.assertEqual(starts, [sum(sizes[:tower]) for tower in range(towers)])

    @parameterized.product(rows=[0, 1, 5, 8])
    def test_tensors_deal_as_ints(self, rows):
        """Else a pipeline splits differently from eager code."""
        starts, sizes = split.deal(tf.constant(rows, tf.int64), 4)
        wanted = split.deal(rows, 4)
        self.assertEqual(([int(s) for s in starts], [int(s) for s in sizes]), wanted)
