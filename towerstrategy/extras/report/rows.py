"""How many rows each tower got, counted where the training takes its batches.

Goes in: a dataset of split batches, while it is iterated over.  Comes out: the same elements, and a
count that grows when an element is taken.  The count stands behind everything that reads ahead, so
that it holds what was trained on and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.extras.report import quiet


class RowCount:
    """The rows that each of this machine's ``towers``, from number ``first``, got from an iterator.
    """

    def __init__(self, towers: int, first: int) -> None:
        self._here, self._counted = slice(first, first + towers), True
        with tf.init_scope(), tf.device("CPU:0"):
            # Neither tf.Variable nor traced: it must not become a variable of the strategy.
            self._counts = _tf.ResourceVariable(tf.zeros([towers], tf.int64), trainable=False)

    def follow(self, dataset: tf.data.Dataset, rows_of: Callable[[Any], Any]) -> tf.data.Dataset:
        """``dataset``, counted when an element is taken from it; see :data:`iterators.Follow`."""

        def add(*element: Any) -> Any:
            rows = rows_of(element)
            if rows is None:
                self._counted = False
            else:  # of this machine's towers, or of all
                here = rows if rows.shape == self._counts.shape else rows[self._here]
                self._counts.assign_add(here, read_value=False)
            return element if len(element) > 1 else element[0]

        options = tf.data.Options()
        # A buffer after this one would count what nobody has taken.
        options.experimental_optimization.inject_prefetch = False
        return _tf.map_in_place(dataset, add).with_options(options)

    def read(self) -> list[int] | None:
        """The rows so far, by tower; None where the elements have no rows to be counted."""
        return self._counts.numpy().tolist() if self._counted else None


def followed(towers: int, first: int, dataset: tf.data.Dataset,
             rows_of: Callable[[Any], Any]) -> tuple[tf.data.Dataset, RowCount | None]:
    """What ``iterators.count_rows`` takes, of these towers: a dataset, counted, and its count."""
    with quiet.harmless("count the towers' rows"):
        count = RowCount(towers, first)
        return count.follow(dataset, rows_of), count
    return dataset, None
