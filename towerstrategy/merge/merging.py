"""The towers' values -> one value: sum, mean, extreme and concatenation, dense and sparse.

Goes in: a tensor or ``tf.IndexedSlices`` per tower, and the towers' :class:`shares.Shares`.  Comes
out: one tensor or slices, on the current device.  Slices stay slices, in the towers' order, which
is the order of a single device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib
from towerstrategy.merge import shares as shares_lib
from towerstrategy.merge.shares import Value


def total(values: Sequence[Value]) -> Value:
    """The sum of the towers' values, on the current device."""
    if len(values) == 1:
        return values[0]
    if any(isinstance(value, tf.IndexedSlices) for value in values):
        return _tf.add_slices(values)
    if values[0].dtype == tf.bool:
        raise TypeError("a sum of bool values is not defined: cast them to an integer first.")
    if values[0].dtype == tf.string:
        raise TypeError("a sum of string values is not defined.")
    return tf.add_n(list(values))


def divided(value: Value, count: int | None) -> Value:
    """``value / count``, a float64 for integers; ``value`` itself if ``count`` is None."""
    return value if count is None else _map(lambda values: values / count, value)


def _map(fn: Callable[[tf.Tensor], tf.Tensor], value: Value) -> Value:
    """``fn`` applied to a tensor, or to the values of slices."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(fn(value.values), value.indices, value.dense_shape)
    return fn(value)


def mean(values: Sequence[Value], shares: shares_lib.Shares) -> Value:
    """The mean of the towers' values, weighted by the towers' shares.

    Where all towers have the same element, the mean is exactly this element.  Towers without rows
    do not count, whatever their values.
    """
    if shares.workers is None and not shares.may_be_empty and _are_identical(values):
        return values[0]
    values = without_empty(values, shares)
    weighted = shares.across(total(list(map(_times, values, shares.each))))
    if shares.workers is not None or isinstance(weighted, tf.IndexedSlices):
        return weighted
    base = first_of_filled(values, shares)
    agree = functools.reduce(tf.logical_and, [
        (value == base) | ~shares.filled[tower] for tower, value in enumerate(values)])
    return tf.where(agree, base, weighted)


def _are_identical(values: Sequence[Value]) -> bool:
    """Whether all towers have the same tensor objects."""
    first, *others = ([id(part) for part in tf.nest.flatten(value, expand_composites=True)]
                      for value in values)
    return all(parts == first for parts in others)


EXTREMES = {"max": (tf.maximum, tf.reduce_max), "min": (tf.minimum, tf.reduce_min)}


def extreme(rule: str, values: Sequence[Value], shares: shares_lib.Shares) -> Value:
    """The largest, or smallest, of the values of the towers with rows, element by element."""
    base = first_of_filled(values, shares)
    parts = [tf.where(filled, value, base) for filled, value in zip(shares.filled, values)] \
        if shares.may_be_empty else values
    return extreme_of_parts(rule, parts, shares.workers)


def extreme_of_parts(rule: str, parts: Sequence[Value], workers: Any) -> Value:
    """The largest, or smallest, of ``parts``, of all machines, element by element."""
    pick, pick_rows = EXTREMES[rule]
    here = functools.reduce(pick, parts)
    return here if workers is None else pick_rows(workers.gather(here[tf.newaxis]), 0)


def first_of_filled(values: Sequence[Value], shares: shares_lib.Shares) -> Value:
    """The value of this machine's first tower with rows; of its first tower if none has rows."""
    if not shares.may_be_empty:
        return values[0]
    first = values[0]
    for tower in reversed(range(len(values))):
        first = tf.where(shares.filled[tower], values[tower], first)
    return first


def concat(values: Sequence[Value], axis: int) -> Any:
    """The towers' values concatenated along ``axis``, on the current device.

    Raises:
      ValueError: ``axis`` is out of range, or the values are scalars.
      TypeError: the values are of a user's type, such as a ``tf.experimental.ExtensionType``.
    """
    values = [value if isinstance(value, (tf.Tensor, _tf.CompositeTensor))
              else tf.convert_to_tensor(value) for value in values]
    if not (rows_lib.has_rows(values[0]) or isinstance(values[0], (tf.Variable, tf.IndexedSlices))):
        raise TypeError(f"the towers' values, each a {type(values[0]).__name__}, cannot be "
                        "concatenated, as their rows are not known: make them of tensors.")
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
    return _map(lambda part: part * tf.cast(share, part.dtype), value)


def without_empty(values: Sequence[Value], shares: shares_lib.Shares) -> list[Value]:
    """The towers' values; zeros for towers without rows."""
    return list(map(kept, shares.filled, values) if shares.may_be_empty else values)


def kept(filled: Any, value: Value) -> Value:
    """``value`` if ``filled`` (a bool or a scalar bool tensor), else zeros."""
    return _map(lambda part: tf.where(filled, part, tf.zeros_like(part)), value)


def numbers(parts: Sequence[Any]) -> list[Any]:
    """``parts``; an empty vector becomes 0 if the others are scalars: Keras 3's loss of no rows."""
    ranks = {getattr(getattr(part, "shape", None), "rank", None) for part in parts}
    return [tf.reduce_sum(part) if ranks == {0, 1} and part.shape == [0] else part
            for part in parts]


def gradients(per_variable: Sequence[Sequence[Value | None] | None], devices: Sequence[str],
              shares: shares_lib.Shares, rules: Sequence[str]) -> list[Value | None]:
    """Merges each variable's gradients on its device.

    A tower without rows adds nothing, even if its gradient is NaN.

    Args:
      per_variable: for each variable, the towers' gradients (a tower may have None), or None.
      devices: for each variable, the device to merge on.
      shares: the shares of this step's batch.
      rules: for each variable, "sum", "agreed" (a mean) or "max"; or "total": each tower has this
        machine's sum already.
    """

    def merge(rule: str, values: Sequence[Value | None]) -> Value:
        # In eager code a tower may have no gradient: without rows, a loop over rows never runs.
        first = next(value for value in values if value is not None)
        if rule == "total":
            return first
        full = [kept(False, first) if value is None else value for value in values]
        if rule == "sum":
            return total(without_empty(full, shares))
        if rule == "agreed":
            return first if _are_identical(full) else mean(full, shares)
        return extreme(rule, full, shares)

    merged: list[Value | None] = []
    for values, device, rule in zip(per_variable, devices, rules):
        with tf.device(device):
            merged.append(None if values is None else merge(rule, values))
    if shares.workers is None:
        return merged
    summed = shares.workers.sum([value if rule in ("sum", "total") else None
                                 for value, rule in zip(merged, rules)])
    return [one if one is not None else other for one, other in zip(summed, merged)]
