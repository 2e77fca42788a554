"""The towers' gradients -> one a variable, where the variable lives.

Goes in: for each variable one gradient a tower, or None.  Comes out: the sum over the towers that
have rows, and over all machines.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import merging, shares as shares_lib
from towerstrategy.merge.shares import Value


def gradients(per_variable: Sequence[Sequence[Value] | None], devices: Sequence[str],
              shares: shares_lib.Shares, towers: Sequence[str] = (),
              micro_batches: int = 1) -> list[Value | None]:
    """Sums each variable's gradients where the variable lives.

    A tower without rows adds nothing, even where its gradient is NaN.

    Args:
      per_variable: for each variable its gradients, one a tower, or None (no gradient).
      devices: for each variable the device to sum on.
      shares: the shares of this step's batch.
      towers: the devices of the towers.
      micro_batches: how many of the gradients are of one tower, one after another.

    Returns:
      One gradient or None a variable.
    """
    merged: list[Value | None] = []
    for values, device in zip(per_variable, devices):
        with tf.device(device):
            kept = [merging.without_empty(_crossed(value), tower, shares)
                    for tower, value in enumerate(values or ())]
            if micro_batches > 1 and kept and _are_dense(kept):
                kept = _running(kept, towers, micro_batches)
            merged.append(merging.total(kept) if kept else None)
    return merged if shares.workers is None else shares.workers.sum(merged)


def complete(values: Sequence[Value | None]) -> Sequence[Value]:
    """``values`` of the towers, zeros where one has none: in eager code not all of them come to it,
    such as one without rows in a loop over these.
    """
    there = next(value for value in values if value is not None)
    return [merging.kept(False, there) if value is None else value for value in values]


def agreed_gradients(per_variable: Sequence[Sequence[Value] | None], devices: Sequence[str],
                     shares: shares_lib.Shares) -> list[Value | None]:
    """As :func:`gradients`, of gradients that were merged before: see :func:`agreed`."""
    result: list[Value | None] = []
    for values, device in zip(per_variable, devices):
        with tf.device(device):
            result.append(None if values is None else merging.agreed(values, shares))
    return result


def _crossed(value: Value) -> Value:
    """``value`` on the current device, cast there if it is a wider copy of a half."""
    half = _tf.half_of(value)
    return value if half is None else tf.cast(half, value.dtype)


def _are_dense(values: Sequence[Value]) -> bool:
    return not any(isinstance(value, tf.IndexedSlices) for value in values)


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
