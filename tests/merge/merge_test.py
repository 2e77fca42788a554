"""merge: sums and concatenations of the towers' values, and the shares they count by.

What numbers come out is tried by ``parity/fuzz.py``; here is the rest.
"""

import tensorflow as tf
from absl.testing import parameterized

from peers import plain
from towerstrategy.merge import merging, shares as shares_lib


def slices(values, indices, rows=4):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices),
                            tf.constant([rows, len(values[0])]))


def of_rows(*rows, known=True):
    """Shares of towers with so many rows; ``known`` while tracing or not."""
    return shares_lib.Shares([count if known else tf.constant(count, tf.int64) for count in rows])


class SharesTest(parameterized.TestCase):

    def test_equal(self):
        """Else values that are no batches count differently on the towers."""
        shares = shares_lib.Shares([1] * 4)
        self.assertEqual([float(shares.each[tower]) for tower in range(4)], [.25] * 4)
        self.assertFalse(shares.may_be_empty)

    def test_known_shares_keep_the_precision_of_float64(self):
        """Else float64 training is as far from one device as float32 training (1e-8, not 1e-16)."""
        shares = shares_lib.Shares([13, 13, 12, 12])
        for tower, rows in enumerate([13, 13, 12, 12]):
            self.assertEqual(float(tf.cast(shares.each[tower], tf.float64)), rows / 50)
        ones = [tf.ones([], tf.float64)] * 4
        self.assertAlmostEqual(float(merging.mean(ones, shares)), 1, delta=1e-15)


class ReduceTest(parameterized.TestCase):

    @parameterized.product(known=[True, False])
    def test_empty_towers_count_for_nothing(self, known):
        """Else a NaN of a tower without rows reaches the weights."""
        shares = of_rows(3, 0, known=known)
        kept = [shares_lib.slices_if(filled, slices([[1.]], [1])) for filled in shares.filled]
        self.assertEqual([part.values.shape[0] for part in kept], [1, 0])

    def test_slices_stay_sparse_and_in_order(self):
        """Else an embedding's gradient becomes as large as its table, or rows change places."""
        parts = [slices([[1.], [2.]], [3, 0]), slices([[4.]], [3])]
        merged = merging.total(parts)
        self.assertIsInstance(merged, tf.IndexedSlices)
        self.assertEqual((plain(merged.values), plain(merged.indices)),
                         ([[1.], [2.], [4.]], [3, 0, 3]))
        self.assertEqual(plain(merging.divided(merged, 2).values), [[.5], [1.], [2.]])
        self.assertEqual(plain(merging.mean(parts, of_rows(1, 3)).values),
                         [[.25], [.5], [3.]])

    def test_dense_beside_sparse(self):
        """Else a table used both as embedding and as output layer cannot be trained."""
        for dtype in (tf.int32, tf.int64):
            rows = tf.IndexedSlices(tf.constant([[1.]]), tf.constant([1], dtype),
                                    tf.constant([2, 1], dtype))
            merged = merging.total([rows, tf.constant([[10.], [20.]])])
            self.assertEqual(plain(tf.convert_to_tensor(merged)), [[10.], [21.]])


class GradientsTest(parameterized.TestCase):

    @parameterized.product(rows=[(2, 2), (3, 0)], known=[True, False], traced=[True, False])
    def test_sums_of_filled_towers(self, rows, known, traced):
        """Else a step with an empty tower is wrong, or one without pays for it."""
        def merged(empty):
            shares = of_rows(*rows, known=known)
            dense = [tf.constant([1., 2.]), empty]
            sparse = [slices([[1.]], [1]), slices([[2.]], [0])]
            result = merging.gradients([dense, None, sparse], ["CPU:0", "CPU:0", "CPU:1"], shares,
                                       ["sum"] * 3)
            self.assertIsNone(result[1])
            return result[0], tf.convert_to_tensor(result[2])

        filled = rows[1] > 0
        empty = tf.constant([10., 20.] if filled else [float("nan")] * 2)
        dense, sparse = (tf.function(merged) if traced else merged)(empty)
        self.assertEqual(plain(dense), [11., 22.] if filled else [1., 2.])
        self.assertEqual(plain(sparse), [[2. if filled else 0.], [1.], [0.], [0.]])

    def test_on_the_devices_asked_for(self):
        """Else gradients meet on another device than their variable's."""
        values = [tf.constant([1.]), tf.constant([2.])]
        merged = merging.gradients([values, values], ["CPU:1", "CPU:2"],
                                   shares_lib.Shares([1] * 2), ["sum"] * 2)
        self.assertEqual([value.device[-5:] for value in merged], ["CPU:1", "CPU:2"])


class ConcatTest(parameterized.TestCase):

    def test_kinds(self):
        """Else outputs that are ragged or sparse cannot be gathered."""
        dense = [tf.constant([[1], [2]]), tf.constant([[3]])]
        ragged = [tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[4]])]
        self.assertEqual(plain(merging.concat(dense, 0)), [[1], [2], [3]])
        self.assertEqual(plain(merging.concat(ragged, 0)), [[1], [2, 3], [4]])
        sparse = merging.concat([tf.sparse.from_dense(part) for part in dense], 0)
        self.assertEqual(plain(tf.sparse.to_dense(sparse)), [[1], [2], [3]])
