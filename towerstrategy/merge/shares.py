"""Shares: how much of the global batch each tower has.

Goes in: the towers' row counts, as numbers if they are known while tracing, else as tensors.  Comes
out: each tower's rows divided by all rows, and whether it has any rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.batch import rows as rows_lib, sub_batches

Value = Any  # tf.Tensor or tf.IndexedSlices


class Shares:
    """How much of the global batch each tower has.

    A tower's share is its rows divided by all rows, a float64 scalar (NumPy's if the row counts are
    known while tracing); 0 if there are no rows at all.

    Args:
      rows: the row counts of the towers of all machines.
      workers: the workers of all machines, or None with a single machine.
      counted: whether ``rows`` are the rows of a batch; if not, they only give equal shares.
      fed: the static row counts of this machine's towers in the split batch, None where unknown;
        None if there is no split batch.

    Attributes:
      counted, workers, fed: the arguments.
      are_known: whether all row counts are known while tracing.
      each: the shares of this machine's towers.
      filled: whether each of this machine's towers has rows: NumPy's bools or scalar bool tensors.
    """

    def __init__(self, rows: Sequence[rows_lib.Rows], workers: Any = None,
                 counted: bool = False, fed: Sequence[int | None] | None = None) -> None:
        self._rows = list(rows)
        self.workers, self.counted, self.fed = workers, counted, fed
        self.are_known = all(isinstance(count, int) for count in self._rows)
        if self.are_known:
            total = max(sum(self._rows), 1)
            # NumPy's, because tf.cast first converts a Python float to float32.
            self.each = [np.float64(count / total) for count in self.here]
        else:
            total = tf.cast(tf.maximum(tf.reduce_sum(self.counts(), 0), 1), tf.float64)
            self.each = [tf.cast(count, tf.float64) / total for count in self.here]
        self.filled = [np.bool_(count > 0) if isinstance(count, int) else count > 0
                       for count in self.here]

    @classmethod
    def of_batch(cls, batches: sub_batches.SubBatches,
                 workers: Any = None) -> Shares:
        """The shares of the towers in a split batch."""
        return cls(sub_batches.row_counts(batches), workers, True,
                   [rows_lib.known_rows(part) for part in batches.values])

    @classmethod
    def of_counts(cls, counts: tf.Tensor, workers: Any = None) -> Shares:
        """The shares for the row counts of all towers, a vector."""
        known = tf.get_static_value(counts)
        return cls(tf.unstack(counts) if known is None else known.tolist(), workers, True)

    # About the towers of all machines.

    @property
    def are_equal(self) -> bool:
        """Whether all towers are known to have equally many rows."""
        return self.are_known and len(set(self._rows)) == 1

    @property
    def number(self) -> int:
        """How many towers there are, on all machines."""
        return len(self._rows)

    def counts(self) -> tf.Tensor:
        """The row counts of all towers, an int64 vector."""
        return rows_lib.vector(self._rows)

    @property
    def may_be_empty(self) -> bool:
        """Whether some tower has, or may have, no rows."""
        return not self.are_known or min(self._rows) == 0

    # About this machine's towers.

    @property
    def here(self) -> list[rows_lib.Rows]:
        """The row counts of this machine's towers."""
        if self.workers is None:
            return self._rows
        return self._rows[self.workers.here]

    def in_words(self, tower: int) -> str:
        """The row count of ``tower`` in words, for errors; "" if unknown."""
        if not self.counted or not self.are_known:
            return ""
        return f"{self.here[tower] or 'none'} of the batch's {sum(self._rows)} rows"

    # Over all machines.

    def across(self, value: Value) -> Value:
        """The sum over all machines, from the sum over this machine's towers."""
        return value if self.workers is None else self.workers.sum([value])[0]

    def firsts(self, value: Value) -> Value:
        """The value of the first machine's first tower, from this machine's first tower's value."""
        if self.workers is None:
            return value
        if isinstance(value, tf.IndexedSlices):
            return self.workers.sum([slices_if(self.workers.is_chief, value)])[0]
        return self.workers.chiefs([value])[0]


def slices_if(filled: Any, value: tf.IndexedSlices) -> tf.IndexedSlices:
    """``value`` if ``filled`` (a bool or a scalar bool tensor), else no slices."""
    if not tf.is_tensor(filled) and filled:
        return value
    count = tf.where(filled, tf.shape(value.indices)[0], 0)
    return tf.IndexedSlices(value.values[:count], value.indices[:count], value.dense_shape)
