"""split: batches that no tower or not each one has rows of.

That every row reaches one tower, in order, is tried by ``parity/fuzz.py``.
"""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from towerstrategy.batch import datasets as datasets_lib, sub_batches


def kinds(rows):
    """A batch of ``rows`` rows with a component of each kind."""
    numbers = tf.range(rows)
    return {
        "dense": tf.stack([numbers, numbers * 2], 1),
        "halves": tf.cast(numbers, tf.float16),
        "bools": numbers % 2 == 0,
        "strings": tf.strings.as_string(numbers),
        "ragged": tf.RaggedTensor.from_row_lengths(tf.range(rows * (rows - 1) // 2), numbers),
        "sparse": tf.sparse.from_dense(tf.reshape(numbers, [rows, 1])),
        "nothing": None,
    }


class SplitBatchTest(parameterized.TestCase):

    def test_rows_that_differ_while_running(self):
        """Else features and labels that do not belong together are trained on."""
        dataset = tf.data.Dataset.from_generator(
            lambda: [(np.ones(3, np.float32), np.ones(2, np.float32))],
            output_signature=(tf.TensorSpec([None]), tf.TensorSpec([None])))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "same number of rows"):
            list(datasets_lib.split_dataset(dataset, 2))


    def test_sparse_columns_stay_known(self):
        """Else a model that is built by its first batch does not know how large its kernel is."""
        rows = tf.sparse.from_dense(tf.reshape(tf.range(20.), [5, 4]))
        for batches in (tf.data.Dataset.from_tensor_slices(rows).batch(3),
                        tf.data.Dataset.from_tensors(rows)):
            spec = datasets_lib.split_dataset(batches, 2).element_spec
            self.assertEqual([part.shape[1:] for part in spec._component_specs], [[4], [4]])


class GroupTest(parameterized.TestCase):

    def test_components_of_every_kind(self):
        """Else a missing tower's empty batch has another structure than the others'."""
        batch = {name: part for name, part in kinds(2).items() if part is not None}
        dataset = tf.data.Dataset.from_tensors(batch).repeat(3)
        _, last = datasets_lib.group_datasets([dataset], 2)
        for name, component in last.items():
            counts = [int(count) for count in sub_batches.row_counts(component)]
            self.assertEqual(counts, [2, 0], name)
