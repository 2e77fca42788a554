"""split: every row reaches one tower, in order, evenly, in eager code and in pipelines."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from towerstrategy.batch import datasets as datasets_lib, rows as rows_lib, splitting, sub_batches


class DealTest(parameterized.TestCase):

    @parameterized.product(rows=[0, 1, 2, 3, 7, 8, 9, 100], towers=[1, 2, 3, 5, 8])
    def test_deals_all_rows_in_order_within_one(self, rows, towers):
        """Else rows are lost, doubled, or one tower works while the others wait."""
        starts, sizes = rows_lib.split_rows(rows, towers)
        self.assertEqual(sum(sizes), rows)
        self.assertLessEqual(max(sizes) - min(sizes), 1)
        self.assertEqual(sizes, sorted(sizes, reverse=True))
        self.assertEqual(starts, [sum(sizes[:tower]) for tower in range(towers)])

    @parameterized.product(rows=[0, 1, 5, 8])
    def test_tensors_deal_as_ints(self, rows):
        """Else a pipeline splits differently from eager code."""
        starts, sizes = rows_lib.split_rows(tf.constant(rows, tf.int64), 4)
        wanted = rows_lib.split_rows(rows, 4)
        self.assertEqual(([int(s) for s in starts], [int(s) for s in sizes]), wanted)


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


def whole(component):
    """The towers' parts behind one another, plain."""
    parts = list(component.values)
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.to_dense(tf.sparse.concat(0, parts)).numpy().tolist()
    joined = tf.concat(parts, 0)
    return joined.to_list() if isinstance(joined, tf.RaggedTensor) else joined.numpy().tolist()


def original(component):
    if isinstance(component, tf.SparseTensor):
        return tf.sparse.to_dense(component).numpy().tolist()
    return component.to_list() if isinstance(component, tf.RaggedTensor) \
        else component.numpy().tolist()


class SplitBatchTest(parameterized.TestCase):

    @parameterized.product(rows=[0, 1, 3, 8], towers=[2, 3, 5])
    def test_every_kind_of_component(self, rows, towers):
        """Else rows of ragged, sparse or string features reach the wrong tower."""
        batch = kinds(rows)
        dealt = splitting.split_batch(batch, towers)
        self.assertIsNone(dealt.pop("nothing"))
        for name, component in dealt.items():
            self.assertEqual(whole(component), original(batch[name]), name)
            self.assertEqual([int(count) for count in sub_batches.row_counts(component)],
                             rows_lib.split_rows(rows, towers)[1], name)

    @parameterized.product(rows=[1, 3, 8], towers=[1, 2, 5])
    def test_pipeline_splits_as_eager_code(self, rows, towers):
        """Else ``fit`` and a loop with ``split`` train on different sub-batches."""
        batch = {name: part for name, part in kinds(rows).items() if part is not None}
        dataset = tf.data.Dataset.from_tensors(batch)
        (element,) = datasets_lib.split_dataset(dataset, towers)
        wanted = splitting.split_batch(batch, towers)
        for name in batch:
            if towers == 1:
                self.assertEqual(original(element[name]), original(wanted[name]), name)
                continue
            self.assertEqual(whole(element[name]), whole(wanted[name]), name)
            self.assertEqual([int(count) for count in sub_batches.row_counts(element[name])],
                             rows_lib.split_rows(rows, towers)[1], name)

    @parameterized.product(rows=[0, 1, 2, 3, 6])
    def test_rows_known_while_running(self, rows):
        """Else a function splits otherwise than eager code."""
        dealt = tf.function(lambda batch: splitting.split_batch(batch, 4),
                            input_signature=[tf.TensorSpec([None], tf.int32)])
        component = dealt(tf.range(rows))
        self.assertEqual(whole(component), list(range(rows)))
        self.assertEqual([int(count) for count in sub_batches.row_counts(component)],
                         rows_lib.split_rows(rows, 4)[1])

    def test_rows_that_differ_while_running(self):
        """Else features and labels that do not belong together are trained on."""
        dataset = tf.data.Dataset.from_generator(
            lambda: [(np.ones(3, np.float32), np.ones(2, np.float32))],
            output_signature=(tf.TensorSpec([None]), tf.TensorSpec([None])))
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "same number of rows"):
            list(datasets_lib.split_dataset(dataset, 2))

    def test_elements_of_any_structure(self):
        """Else lists, dictionaries or named tuples of components change their shape."""
        for structure in ((tf.range(4), {"a": tf.range(4)}), {"a": (tf.range(4),)}, tf.range(4)):
            dataset = tf.data.Dataset.from_tensors(structure)
            (element,) = datasets_lib.split_dataset(dataset, 2)
            joined = tf.nest.map_structure(whole, element)
            wanted = tf.nest.map_structure(lambda part: part.numpy().tolist(), structure)
            self.assertEqual(joined, wanted)


class GroupTest(parameterized.TestCase):

    def test_components_of_every_kind(self):
        """Else a missing tower's empty batch has another structure than the others'."""
        batch = {name: part for name, part in kinds(2).items() if part is not None}
        dataset = tf.data.Dataset.from_tensors(batch).repeat(3)
        _, last = datasets_lib.group_dataset(dataset, 2)
        for name, component in last.items():
            counts = [int(count) for count in sub_batches.row_counts(component)]
            self.assertEqual(counts, [2, 0], name)
