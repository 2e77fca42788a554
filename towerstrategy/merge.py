"""R results -> one, on the merge device: sum, mean and concatenation, dense and sparse.

Goes in: what the towers computed, one tensor or ``tf.IndexedSlices`` a tower, and the towers'
:class:`Shares`.  Comes out: one tensor or ``tf.IndexedSlices`` on the device asked for.  Sparse
gradients stay sparse: rows of the towers are put behind one another in the towers' order, which is
the order a single device would have produced.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy import factors, machines, split

Value = Any  # tf.Tensor or tf.IndexedSlices

# Bytes of a tower's value.  Stacking copies it; of small ones, the number of operations counts.
LARGEST_STACKED = 2**16


class Shares:
    """How much of the global batch each tower has.

    A tower's share is its rows over all rows, a float64 scalar (NumPy's where the row counts are
    known while tracing).  The shares of a batch sum to 1; without any rows all are 0.

    With several machines ``rows`` are those of the towers of all workers; towers are still counted
    from this worker's first, and what this module merges with shares is merged over all workers.

    Args:
      rows: the rows of each tower.
      stand_ins: whether a tower without rows works on a stand-in.
      workers: where the workers meet, or None for a single machine.
    """

    def __init__(self, rows: Sequence[split.Rows], stand_ins: bool = False,
                 workers: machines.Machines | None = None) -> None:
        self._rows = list(rows)
        self._stand_ins = stand_ins
        self._workers = workers
        self._first = workers.first if workers is not None else 0
        self._counted = False
        self._fed: list[int | None] | None = None
        self._known = all(isinstance(count, int) for count in self._rows)

    @classmethod
    def equal(cls, towers: int, workers: machines.Machines | None = None) -> Shares:
        """The shares when no rows are known: every tower counts the same."""
        return cls([1] * (towers if workers is None else workers.replicas), False, workers)

    @classmethod
    def of_batch(cls, batches: split.SubBatches,
                 workers: machines.Machines | None = None) -> Shares:
        """The shares of a batch that was split."""
        shares = cls(split.row_counts(batches), isinstance(batches, split.StandInSubBatches),
                     workers)
        shares._counted = True
        shares._fed = [split.known_rows(part) for part in batches.values]
        return shares

    @classmethod
    def of_counts(cls, counts: tf.Tensor, stand_ins: bool,
                  workers: machines.Machines | None = None) -> Shares:
        """The shares of a batch of which the rows of all towers are ``counts``, a vector."""
        known = tf.get_static_value(counts)
        shares = cls(tf.unstack(counts) if known is None else known.tolist(), stand_ins, workers)
        shares._counted = True
        return shares

    @property
    def counted(self) -> bool:
        """Whether these are the rows of a batch; else they only say that all count the same."""
        return self._counted

    @property
    def are_equal(self) -> bool:
        """Whether all towers are known to have as many rows."""
        return self._known and len(set(self._rows)) == 1

    @property
    def has_stand_ins(self) -> bool:
        """Whether a tower without rows, if there is one, works on a stand-in."""
        return self._stand_ins

    @property
    def number(self) -> int:
        """How many towers there are, on all machines."""
        return len(self._rows)

    def counts(self) -> tf.Tensor:
        """The rows of all towers, an int64 vector."""
        return tf.stack([tf.cast(count, tf.int64) for count in self._rows])

    def fed(self, tower: int) -> Any:
        """How many rows, stand-ins counted, ``tower`` is known to have been given.

        None where that is known while it runs alone, False where nothing was noted.
        """
        return self._fed[tower] if self._fed is not None else False

    def told(self, tower: int) -> str:
        """The rows of ``tower`` in words, for errors; nothing where they are not known."""
        if not self._counted or not self._known:
            return ""
        return f"{self._rows[self._first + tower]} of the batch's {self._total} rows"

    def static_rows(self, tower: int) -> int | None:
        """The rows that ``tower`` works on; 0 where only the step knows, None without a batch."""
        if not self._counted:
            return None
        return max(self._rows[self._first + tower], 1) if self._known else 0

    @property
    def workers(self) -> machines.Machines | None:
        """Where the workers meet; None with a single machine."""
        return self._workers

    @property
    def stand_ins(self) -> bool:
        """Whether a tower without rows works on a stand-in, which must not count."""
        return self._stand_ins and self.may_be_empty

    @property
    def may_be_empty(self) -> bool:
        """Whether some tower has, or may turn out to have, no rows."""
        return not self._known or min(self._rows) == 0

    @functools.cached_property
    def _total(self) -> Any:
        if self._known:
            return sum(self._rows)
        return tf.add_n([tf.cast(count, tf.int64) for count in self._rows])

    @functools.cached_property
    def _shares(self) -> list[Any]:
        if self._known:
            # NumPy's float64: tf.cast makes a float32 of a Python float first.
            return [np.float64(count / max(self._total, 1)) for count in self._rows]
        total = tf.cast(tf.maximum(self._total, 1), tf.float64)
        return [tf.cast(count, tf.float64) / total for count in self._rows]

    @functools.cached_property
    def _filled(self) -> list[Any]:
        return [count > 0 for count in self._rows]

    @functools.cached_property
    def _all_filled(self) -> Any:
        # Rows are dealt in order, so the last tower is the first to run out; groups may differ.
        return tf.reduce_all(tf.stack(self._here(self._filled)))

    @functools.cached_property
    def _share_column(self) -> Any:
        return tf.stack(self._here(self._shares))

    @functools.cached_property
    def _filled_column(self) -> Any:
        return tf.stack(self._here(self._filled))

    def _here(self, values: list[Any]) -> list[Any]:
        """Of one value a tower, those of this worker's."""
        if self._workers is None:
            return values
        return values[self._first:self._first + self._workers.towers]

    def prepare(self) -> Shares:
        """Makes the tensors now, in the current graph and on the current device."""
        if not self._known:
            self._shares, self._filled, self._all_filled  # noqa: B018
            self._share_column, self._filled_column  # noqa: B018
        return self

    def weigh(self, stacked: tf.Tensor) -> tf.Tensor:
        """The towers' values, stacked, each times its share; 0 for a tower without rows."""
        shape = [-1] + [1] * (stacked.shape.rank - 1)
        if self.may_be_empty:
            filled = self._filled_column if not self._known else self._here(self._filled)
            stacked = tf.where(tf.reshape(filled, shape), stacked, tf.zeros([], stacked.dtype))
        share = self._share_column if not self._known else np.stack(self._here(self._shares))
        return stacked * tf.reshape(tf.cast(share, stacked.dtype), shape)

    def of(self, tower: int) -> Any:
        """The share of ``tower``."""
        return self._shares[self._first + tower]

    def rows(self, tower: int) -> split.Rows:
        """The rows of ``tower``."""
        return self._rows[self._first + tower]

    def filled(self, tower: int) -> Any:
        """Whether ``tower`` has rows: a bool or a scalar bool tensor."""
        return self._filled[self._first + tower]

    @property
    def filled_count(self) -> Any:
        """How many towers, on all machines, have rows: a scalar int32 tensor."""
        return tf.add_n([tf.cast(filled, tf.int32) for filled in self._filled])

    def across(self, value: Value) -> Value:
        """The sum over the machines of what the towers of each have summed to."""
        return value if self._workers is None else self._workers.sum_one(value)

    def firsts(self, value: Value) -> Value:
        """The value of the first tower of the first machine, given this machine's first tower's."""
        if self._workers is None:
            return value
        if isinstance(value, tf.IndexedSlices):
            return self._workers.sum_one(slices_if(self._workers.is_chief, value))
        return self._workers.chiefs([value])[0]

    @property
    def all_filled(self) -> Any:
        """Whether every tower has rows: a bool or a scalar bool tensor."""
        return min(self._here(self._rows)) > 0 if self._known else self._all_filled


def values_of(value: Any) -> list[Value]:
    """The towers' values of a per-replica value."""
    return list(value.values)


def total(values: Sequence[Value]) -> Value:
    """The sum of the towers' values, on the current device."""
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, tf.IndexedSlices) for value in values):
        return _behind_one_another(values)
    if values[0].dtype == tf.bool:
        raise TypeError("a sum of bool values is not defined: cast them to an integer first.")
    if values[0].dtype == tf.string:
        raise TypeError("a sum of string values is not defined.")
    return tf.add_n(list(values))


def mean(values: Sequence[Value]) -> Value:
    """The plain mean of the towers' values, on the current device; of integers, as float64."""
    return divided(total(values), len(values))


def divided(value: Value, count: int) -> Value:
    """``value / count``; of integers, as float64."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values / count, value.indices, value.dense_shape)
    return value / count


def weighted_mean(values: Sequence[Value], shares: Shares) -> Value:
    """The mean of the towers' values, each counted by its tower's share; empty towers count for
    nothing, whatever they computed."""
    if _are_small(values):
        return shares.across(tf.reduce_sum(shares.weigh(tf.stack(list(values))), 0))
    return shares.across(total([_times(_without_empty(value, tower, shares), shares.of(tower))
                                for tower, value in enumerate(values)]))


def agreed(values: Sequence[Value], shares: Shares) -> Value:
    """What the towers agree on, exactly; where they differ, the mean by share of rows."""
    first = values[0]
    if all(_is_same(value, first) for value in values):
        return first
    sparse = any(isinstance(value, tf.IndexedSlices) for value in values)
    if sparse or shares.workers is not None or not first.dtype.is_floating:
        return weighted_mean(values, shares)
    base = first_of_filled(values, shares)
    return base + weighted_mean([value - base for value in values], shares)


def _is_same(value: Value, other: Value) -> bool:
    if isinstance(value, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        return value.values is other.values and value.indices is other.indices
    return value is other


def largest(values: Sequence[Value], shares: Shares) -> Value:
    """Element by element the largest of the values of the towers that have rows."""
    base = first_of_filled(values, shares)
    here = functools.reduce(tf.maximum, [
        tf.where(shares.filled(tower), value, base) if shares.may_be_empty else value
        for tower, value in enumerate(values)])
    if shares.workers is None:
        return here
    return tf.reduce_max(shares.workers.gather(here[tf.newaxis]), 0)


def first_of_filled(values: Sequence[Value], shares: Shares) -> Value:
    """The value of the first of this machine's towers that has rows; tower 0's if none has."""
    if not shares.may_be_empty:
        return values[0]
    found = values[0]
    for tower in reversed(range(len(values))):
        found = tf.where(shares.filled(tower), values[tower], found)
    return found


def _are_small(values: Sequence[Value]) -> bool:
    """Whether these are small dense float values of one known shape."""
    first = values[0]
    return not any(isinstance(value, tf.IndexedSlices) for value in values) \
        and first.dtype.is_floating and first.shape.is_fully_defined() \
        and all(value.shape == first.shape for value in values) \
        and first.shape.num_elements() * first.dtype.size <= LARGEST_STACKED


def mean_of_filled(values: Sequence[Value], shares: Shares) -> Value:
    """The plain mean of the values of the towers that have rows."""
    summed = total_of_filled(values, shares)
    return summed / tf.cast(tf.maximum(shares.filled_count, 1), summed.dtype)


def total_of_filled(values: Sequence[Value], shares: Shares) -> Value:
    """The sum of the values of the towers that have rows."""
    return shares.across(_filled_here(values, shares))


def filled_slices(value: tf.IndexedSlices, tower: int, shares: Shares) -> tf.IndexedSlices:
    """``value``, or no slices at all where ``tower`` has no rows."""
    return slices_if(shares.filled(tower), value)


def slices_if(filled: Any, value: tf.IndexedSlices) -> tf.IndexedSlices:
    """``value``, or no slices at all where not ``filled`` (a bool or a scalar bool tensor)."""
    if isinstance(filled, bool) and filled:
        return value
    count = tf.where(filled, tf.shape(value.indices)[0], 0)
    return tf.IndexedSlices(value.values[:count], value.indices[:count], value.dense_shape)


def gradients(per_variable: Sequence[Sequence[Value] | None], devices: Sequence[str],
              shares: Shares, silenced: bool = False,
              from_factors: bool = False) -> list[Value | None]:
    """Sums each variable's gradients where the variable lives.

    A tower without rows adds nothing, even where its gradient is NaN.  The usual case, every tower
    with rows, pays one predicate a step for that.

    Args:
      per_variable: for each variable its gradients, one a tower, or None (no gradient).
      devices: for each variable the device to sum on.
      shares: the shares of this step's batch.
      silenced: whether the gradients of towers without rows are zero of themselves.
      from_factors: whether to make dense layers' gradients once, see :mod:`factors`.

    Returns:
      One gradient or None a variable.
    """
    present = {index: values for index, values in enumerate(per_variable) if values is not None}

    def filled(value: Value, tower: int) -> Value:
        return _without_empty(value, tower, shares)

    def summed(keep_empty: bool) -> list[Value]:
        rows = {device: factors.Factors(None if keep_empty else filled) for device in set(devices)}
        results = []
        for index, values in present.items():
            with tf.device(devices[index]):
                made = _from_factors(rows[devices[index]], values, shares) if from_factors else None
                if made is None:
                    made = total(values) if keep_empty else _filled_here(values, shares)
                results.append(made)
        return results

    if silenced or not shares.may_be_empty:
        merged = summed(keep_empty=True)
    elif isinstance(shares.all_filled, bool) or tf.executing_eagerly():
        merged = summed(keep_empty=bool(shares.all_filled))
    else:
        merged = tf.cond(shares.all_filled, lambda: summed(True), lambda: summed(False))
        merged = list(merged) if isinstance(merged, (list, tuple)) else [merged]
    if shares.workers is not None:
        merged = shares.workers.sum(merged)
    result: list[Value | None] = [None] * len(per_variable)
    for index, value in zip(present, merged):
        result[index] = value
    return result


def agreed_gradients(per_variable: Sequence[Sequence[Value] | None], devices: Sequence[str],
                     shares: Shares) -> list[Value | None]:
    """As :func:`gradients`, of gradients that were merged before: see :func:`agreed`."""
    result: list[Value | None] = []
    for values, device in zip(per_variable, devices):
        with tf.device(device):
            result.append(None if values is None else agreed(values, shares))
    return result


def _from_factors(rows: factors.Factors, values: Sequence[Any], shares: Shares) -> Any:
    """The sum of ``values``, or, for several machines to make it, the product that it is."""
    if shares.workers is not None and shares.workers.takes_products:
        product = rows.product(values)
        if product is not None and product.size >= machines.LARGE:
            return product
    return rows.total(values)


def concat(values: Sequence[Value], axis: int) -> Any:
    """The towers' values put behind one another along ``axis``, on the current device.

    Raises:
      ValueError: ``axis`` is out of range, or the values are scalars.
    """
    rank = values[0].shape.rank
    if rank == 0:
        raise ValueError("values of rank 0 cannot be gathered: there is no axis to put them behind "
                         f"one another along (axis={axis}).")
    if rank is not None and not -rank <= axis < rank:
        raise ValueError(f"axis={axis} is out of range for values of rank {rank}.")
    if isinstance(values[0], tf.SparseTensor):
        return tf.sparse.concat(axis=axis, sp_inputs=list(values))
    return tf.concat(list(values), axis=axis)


def reduce(op: Any, values: Sequence[Value]) -> Value:
    """``tf.distribute.ReduceOp`` SUM or MEAN over the towers' values, on the current device."""
    return mean(values) if op == _tf.ReduceOp.MEAN else total(values)


def _filled_here(values: Sequence[Value], shares: Shares) -> Value:
    """The sum of the values of this machine's towers that have rows."""
    # Other machines do not know which rows a stand-in stands for, so it must leave no slices.
    kept_ = [filled_slices(value, tower, shares)
             if isinstance(value, tf.IndexedSlices) and shares.workers is not None
             else _without_empty(value, tower, shares) for tower, value in enumerate(values)]
    return total(kept_)


def _times(value: Value, share: Any) -> Value:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_times(value.values, share), value.indices, value.dense_shape)
    return value * tf.cast(share, value.dtype)


def _without_empty(value: Value, tower: int, shares: Shares) -> Value:
    """``value``, or zeros where ``tower`` has no rows."""
    if not shares.may_be_empty:
        return value
    return kept(shares.filled(tower), value)


def kept(filled: Any, value: Value) -> Value:
    """``value``, or zeros where not ``filled`` (a bool or a scalar bool tensor)."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(kept(filled, value.values), value.indices, value.dense_shape)
    return tf.where(filled, value, tf.zeros_like(value))


def _behind_one_another(values: Sequence[Value]) -> tf.IndexedSlices:
    dtype = next(value.indices.dtype for value in values if isinstance(value, tf.IndexedSlices))
    sparse = [value if isinstance(value, tf.IndexedSlices) else _as_slices(value, dtype)
              for value in values]
    return tf.IndexedSlices(tf.concat([value.values for value in sparse], 0),
                            tf.concat([value.indices for value in sparse], 0),
                            sparse[0].dense_shape)


def _as_slices(value: tf.Tensor, dtype: tf.DType) -> tf.IndexedSlices:
    shape = tf.shape(value, out_type=dtype)
    return tf.IndexedSlices(value, tf.range(shape[0]), shape)
