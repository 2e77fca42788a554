"""The towers' gradients -> one a variable, where the variable lives.

Goes in: for each variable one gradient a tower, or None.  Comes out: the sum over the towers that
have rows, and over all machines.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.machines import meeting
from towerstrategy.merge import factors, merging, relays
from towerstrategy.merge import shares as shares_lib
from towerstrategy.merge.shares import Value
from towerstrategy.placement import homes as homes_lib

# What hands on the rows that slices name, or some of them; what names each once.
_SAME_ROWS = frozenset({"Identity", "Reshape", "Cast", "StopGradient", "ExpandDims", "Squeeze",
                        "StridedSlice"})
_DISTINCT = frozenset({"Unique", "UniqueV2", "Range"})


def gradients(per_variable: Sequence[Sequence[Value] | None], devices: Sequence[str],
              shares: shares_lib.Shares, silenced: bool = False, from_factors: bool = False,
              towers: Sequence[str] = (), micro_batches: int = 1,
              may_relay: bool = False) -> list[Value | None]:
    """Sums each variable's gradients where the variable lives.

    A tower without rows adds nothing, even where its gradient is NaN.  The usual case, every tower
    with rows, pays one predicate a step for that on a single machine.

    Args:
      per_variable: for each variable its gradients, one a tower, or None (no gradient).
      devices: for each variable the device to sum on.
      shares: the shares of this step's batch.
      silenced: whether the gradients of towers without rows are zero of themselves.
      from_factors: whether to make dense layers' gradients once, see :mod:`factors`.
      towers: the devices of the towers.
      micro_batches: how many of the gradients are of one tower, one after another.
      may_relay: whether large gradients meet in pieces, see :mod:`relays`.

    Returns:
      One gradient or None a variable.
    """
    present = {index: values for index, values in enumerate(per_variable) if values is not None}
    relayed = _relayed(present, devices, towers) if may_relay else frozenset()

    def filled(value: Value, tower: int) -> Value:
        return merging.without_empty(value, tower, shares)

    def added(index: int, keep_empty: bool) -> Value:
        values = present[index]
        add = merging.total if keep_empty else functools.partial(merging.filled_here, shares=shares)
        if micro_batches > 1 and _are_dense(values):
            kept = values if keep_empty else [
                filled(value, replica) for replica, value in enumerate(values)]
            values, add = _running(kept, towers, micro_batches), merging.total
        if index in relayed:
            return relays.total(values, towers, devices[index], add)
        return add(values)

    def summed(keep_empty: bool) -> list[Value]:
        rows = {device: factors.Factors(None if keep_empty else filled) for device in set(devices)}
        results = []
        for index, values in present.items():
            with tf.device(devices[index]):
                made = _from_factors(rows[devices[index]], values, shares) if from_factors else None
                results.append(added(index, keep_empty) if made is None else made)
        return results

    if silenced or not shares.may_be_empty:
        merged = summed(keep_empty=True)
    elif isinstance(shares.all_filled, bool) or tf.executing_eagerly():
        merged = summed(keep_empty=bool(shares.all_filled))
    elif micro_batches > 1 or shares.workers is not None:
        # A branch over all gradients would wait for, and hold, all of them: none could leave early.
        merged = summed(keep_empty=False)
    else:
        merged = tf.cond(shares.all_filled, lambda: summed(True), lambda: summed(False))
        merged = list(merged) if isinstance(merged, (list, tuple)) else [merged]
    if shares.workers is not None:
        merged = shares.workers.sum(merged)
    result: list[Value | None] = [None] * len(per_variable)
    for index, value in zip(present, merged):
        with tf.device(devices[index]):
            result[index] = merging.once_each(value) if all(
                map(_has_no_repeats, present[index])) else value
    return result


def agreed_gradients(per_variable: Sequence[Sequence[Value] | None], devices: Sequence[str],
                     shares: shares_lib.Shares) -> list[Value | None]:
    """As :func:`gradients`, of gradients that were merged before: see :func:`agreed`."""
    result: list[Value | None] = []
    for values, device in zip(per_variable, devices):
        with tf.device(device):
            result.append(None if values is None else merging.agreed(values, shares))
    return result


def _are_dense(values: Sequence[Value]) -> bool:
    return not any(isinstance(value, tf.IndexedSlices) for value in values)


def _relayed(present: Mapping[int, Sequence[Value]], devices: Sequence[str],
             towers: Sequence[str]) -> Collection[int]:
    """Which of the gradients are summed in pieces by the towers."""
    if tf.executing_eagerly():
        return frozenset()
    dense = {index: values[0] for index, values in present.items()
             if _are_dense(values) and all(value.shape.is_fully_defined() for value in values)}
    chosen = relays.chosen([devices[index] for index in dense],
                           [homes_lib.size_of(value) for value in dense.values()], towers)
    return frozenset(index for index, is_chosen in zip(dense, chosen) if is_chosen)


class OnceEach(tf.IndexedSlices):
    """Slices of which it is known that they name each row once."""


def told(value: Value | None, uniques: Sequence[tf.Tensor]) -> Value | None:
    """``value``, as :class:`OnceEach` where its rows are those of one of ``uniques``."""
    if not isinstance(value, tf.IndexedSlices) or not any(
            np.array_equal(value.indices, unique) for unique in uniques):
        return value
    return OnceEach(value.values, value.indices, value.dense_shape)


def _has_no_repeats(value: Value) -> bool:
    """Whether a tower's slices name each row once, as those of a lookup of sparse rows do.

    So would those of the whole batch, and a Keras 3 optimizer squares each slice by itself: so do
    the positions of a sequence, which are the same for all rows.  Eager tensors do not tell; what
    was :func:`told` does.
    """
    if not isinstance(value, tf.IndexedSlices) or _tf.is_eager(value.indices):
        return isinstance(value, OnceEach)
    rows = _named_rows(value.indices)
    if not _tf.is_eager(rows) and rows.value_index == 0 and rows.op.type in _DISTINCT:
        return True
    known = tf.get_static_value(rows)
    return known is not None and np.unique(known).size == known.size


def _named_rows(indices: tf.Tensor) -> tf.Tensor:
    """What ``indices``, or some of it, was made of: the same numbers in another shape or place."""
    while not _tf.is_eager(indices):
        operation = indices.op
        if operation.type in _SAME_ROWS:
            indices = operation.inputs[0]
        elif operation.type == "SelectV2" and _counts_from_the_end(*operation.inputs):
            indices = operation.inputs[2]
        elif operation.type == "Placeholder":
            outer = [outer for outer, inner in _tf.captures_of(indices.graph) if inner is indices]
            if not outer:
                break
            indices = outer[0]
        else:
            break
    return indices


def _counts_from_the_end(is_negative: tf.Tensor, moved: tf.Tensor, indices: tf.Tensor) -> bool:
    """Whether a choice between these is what Keras 3 makes of indices, some negative perhaps."""
    return (is_negative.op.type == "Less" and moved.op.type == "AddV2"
            and is_negative.op.inputs[0] is indices and moved.op.inputs[0] is indices)


def _running(values: Sequence[Value], towers: Sequence[str], micro_batches: int) -> list[Value]:
    """One sum a tower, to which each micro-batch's gradient is added as it comes."""
    sums = []
    for tower, device in enumerate(towers):
        first, *others = values[tower * micro_batches:(tower + 1) * micro_batches]
        # A stage's gradients are added up on the stage's device.
        with tf.device(first.device or device):
            for value in others:
                first = first + value
        sums.append(first)
    return sums


def _from_factors(rows: factors.Factors, values: Sequence[Any], shares: shares_lib.Shares) -> Any:
    """The sum of ``values``, or, for several machines to make it, the product that it is."""
    if shares.workers is not None and shares.workers.takes_products:
        product = rows.product(values)
        if product is not None and product.size >= meeting.LARGE:
            return product
    return rows.total(values)
