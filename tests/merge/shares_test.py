"""merge.Shares: a tower's part of the batch, as exact as the numbers it is multiplied with."""

import tensorflow as tf
from absl.testing import parameterized

from towerstrategy.merge import merging, shares as shares_lib


class SharesTest(parameterized.TestCase):

    def test_known_shares_keep_the_precision_of_float64(self):
        """Else float64 training is as far from one device as float32 training (1e-8, not 1e-16)."""
        shares = shares_lib.Shares([13, 13, 12, 12])
        for tower, rows in enumerate([13, 13, 12, 12]):
            self.assertEqual(float(tf.cast(shares.of(tower), tf.float64)), rows / 50)
        ones = [tf.ones([], tf.float64)] * 4
        self.assertAlmostEqual(float(merging.weighted_mean(ones, shares)), 1, delta=1e-15)
