"""R results -> one, on the merge device: sum, mean and concatenation, dense and sparse.

Goes in: what the towers computed, one tensor or ``tf.IndexedSlices`` a tower, and the towers'
:class:`shares.Shares`.  Comes out: one of them, on the device asked for.  Slices stay slices, in
the towers' order, which is that of a single device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import shares as shares_lib
from towerstrategy.merge.shares import Value


def total(values: Sequence[Value]) -> Value:
    """The sum of the towers' values, on the current device."""
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, tf.IndexedSlices) for value in values):
        return _concatenated(values)
    if values[0].dtype == tf.bool:
        raise TypeError("a sum of bool values is not defined: cast them to an integer first.")
    if values[0].dtype == tf.string:
        raise TypeError("a sum of string values is not defined.")
    return tf.add_n(list(values))


def divided(value: Value, count: int | None) -> Value:
    """``value / count``, of integers as float64; ``value`` itself where that is None."""
    return value if count is None else _changed(lambda values: values / count, value)


def _changed(change: Callable[[tf.Tensor], tf.Tensor], value: Value) -> Value:
    """What ``change`` makes of a tensor; of slices it changes the values."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(change(value.values), value.indices, value.dense_shape)
    return change(value)


def mean(values: Sequence[Value], shares: shares_lib.Shares) -> Value:
    """The mean of the towers' values, each counted by its tower's share of rows.

    What the towers agree on it is exactly, element by element; empty towers count for nothing,
    whatever they computed.
    """
    if shares.workers is None and not shares.may_be_empty and _are_one(values):
        return values[0]
    values = without_empty(values, shares)
    weighted = shares.across(total(list(map(_times, values, shares.each))))
    if shares.workers is not None or isinstance(weighted, tf.IndexedSlices):
        return weighted
    base = first_of_filled(values, shares)
    agree = functools.reduce(tf.logical_and, [
        (value == base) | ~shares.filled[tower] for tower, value in enumerate(values)])
    return tf.where(agree, base, weighted)


def _are_one(values: Sequence[Value]) -> bool:
    """Whether all towers have the same tensors."""
    first, *others = ([id(part) for part in tf.nest.flatten(value, expand_composites=True)]
                      for value in values)
    return all(parts == first for parts in others)


EXTREMES = {"max": (tf.maximum, tf.reduce_max), "min": (tf.minimum, tf.reduce_min)}


def extreme(rule: str, values: Sequence[Value], shares: shares_lib.Shares) -> Value:
    """Element by element the largest, or smallest, of the values of the towers that have rows.

    ``values`` are one a tower; what stands behind these counts in any case.
    """
    towers = len(shares.here)
    base = first_of_filled(values[:towers], shares)
    kept = [tf.where(shares.filled[tower], value, base) if shares.may_be_empty else value
            for tower, value in enumerate(values[:towers])]
    return extreme_of_parts(rule, [*kept, *values[towers:]], shares.workers)


def extreme_of_parts(rule: str, parts: Sequence[Value], workers: Any) -> Value:
    """The same, where all of ``parts`` count, over all machines."""
    pick, pick_rows = EXTREMES[rule]
    here = functools.reduce(pick, parts)
    return here if workers is None else pick_rows(workers.gather(here[tf.newaxis]), 0)


def first_of_filled(values: Sequence[Value], shares: shares_lib.Shares) -> Value:
    """The value of the first of this machine's towers that has rows; tower 0's if none has."""
    if not shares.may_be_empty:
        return values[0]
    found = values[0]
    for tower in reversed(range(len(values))):
        found = tf.where(shares.filled[tower], values[tower], found)
    return found


def filled_slices(values: Sequence[tf.IndexedSlices],
                  shares: shares_lib.Shares) -> list[tf.IndexedSlices]:
    """The towers' slices, none at all of a tower that has no rows."""
    return list(map(shares_lib.slices_if, shares.filled, values))


def concat(values: Sequence[Value], axis: int) -> Any:
    """The towers' values concatenated along ``axis``, on the current device.

    Raises:
      ValueError: ``axis`` is out of range, or the values are scalars.
    """
    values = [value if isinstance(value, (tf.Tensor, _tf.CompositeTensor))
              else tf.convert_to_tensor(value) for value in values]
    rank = values[0].shape.rank
    if rank == 0:
        raise ValueError("values of rank 0 cannot be gathered: there is no axis to put them behind "
                         f"one another along (axis={axis}).")
    if rank is not None and not -rank <= axis < rank:
        raise ValueError(f"axis={axis} is out of range for values of rank {rank}.")
    if isinstance(values[0], tf.SparseTensor):
        return tf.sparse.concat(axis=axis, sp_inputs=list(values))
    return tf.concat(list(values), axis=axis)


def _times(value: Value, share: Any) -> Value:
    return _changed(lambda part: part * tf.cast(share, part.dtype), value)


def without_empty(values: Sequence[Value], shares: shares_lib.Shares) -> list[Value]:
    """The towers' values, with zeros in place of those of towers that have no rows."""
    return list(map(kept, shares.filled, values) if shares.may_be_empty else values)


def kept(filled: Any, value: Value) -> Value:
    """``value``, or zeros where not ``filled`` (a bool or a scalar bool tensor)."""
    return _changed(lambda part: tf.where(filled, part, tf.zeros_like(part)), value)


def _concatenated(values: Sequence[Value]) -> tf.IndexedSlices:
    dtype = next(value.indices.dtype for value in values if isinstance(value, tf.IndexedSlices))
    sparse = [value if isinstance(value, tf.IndexedSlices) else _as_slices(value, dtype)
              for value in values]
    return tf.IndexedSlices(tf.concat([value.values for value in sparse], 0),
                            tf.concat([value.indices for value in sparse], 0),
                            sparse[0].dense_shape)


def _as_slices(value: tf.Tensor, dtype: tf.DType) -> tf.IndexedSlices:
    shape = tf.shape(value, out_type=dtype)
    return tf.IndexedSlices(value, tf.range(shape[0]), shape)


def numbers(parts: Sequence[Any]) -> list[Any]:
    """``parts``; Keras 3's loss of no rows, a vector of none, is zero where others are numbers."""
    ranks = {getattr(getattr(part, "shape", None), "rank", None) for part in parts}
    return [tf.reduce_sum(part) if ranks == {0, 1} and part.shape == [0] else part
            for part in parts]


def gradients(per_variable: Sequence[Sequence[Value | None] | None], devices: Sequence[str],
              shares: shares_lib.Shares, rules: Sequence[str] = ()) -> list[Value | None]:
    """Merges each variable's gradients where the variable lives.

    A tower without rows adds nothing, even where its gradient is NaN.

    Args:
      per_variable: for each variable its gradients, one a tower, or None (no gradient).
      devices: for each variable the device to merge on.
      shares: the shares of this step's batch.
      rules: for each variable "sum" (of all where there are none), "agreed" or "max"; "total" where
        each tower's is this machine's sum.
    """
    rules = rules or ["sum"] * len(devices)

    def merged_by(rule: str, values: Sequence[Value | None]) -> Value:
        # In eager code not all towers come to it, such as one without rows in a loop over these.
        there = next(value for value in values if value is not None)
        if rule == "total":
            return there
        full = [kept(False, there) if value is None else value for value in values]
        if rule == "sum":
            return total(without_empty(full, shares))
        if rule == "agreed":
            return there if _are_one(full) else mean(full, shares)
        return extreme(rule, full, shares)

    merged: list[Value | None] = []
    for values, device, rule in zip(per_variable, devices, rules):
        with tf.device(device):
            merged.append(None if values is None else merged_by(rule, values))
    if shares.workers is None:
        return merged
    summed = shares.workers.sum([value if rule in ("sum", "total") else None
                                 for value, rule in zip(merged, rules)])
    return [one if one is not None else other for one, other in zip(summed, merged)]
