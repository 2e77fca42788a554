"""The towers' gradients -> one a variable, where the variable lives.

Goes in: for each variable one gradient a tower, or None.  Comes out: the sum over the towers that
have rows, and over all machines, or what another rule makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import merging, shares as shares_lib
from towerstrategy.merge.shares import Value


def gradients(per_variable: Sequence[Sequence[Value | None] | None], devices: Sequence[str],
              shares: shares_lib.Shares, towers: Sequence[str] = (), micro_batches: int = 1,
              rules: Sequence[str] = ()) -> list[Value | None]:
    """Merges each variable's gradients where the variable lives.

    A tower without rows adds nothing, even where its gradient is NaN.

    Args:
      per_variable: for each variable its gradients, one a tower, or None (no gradient).
      devices: for each variable the device to merge on.
      shares: the shares of this step's batch.
      towers: the devices of the towers.
      micro_batches: how many of the gradients are of one tower, one after another.
      rules: for each variable "sum", as for all where there are none; "agreed", of gradients that
        the towers have merged themselves; or "max".

    Returns:
      One gradient or None a variable.
    """
    rules = rules or ["sum"] * len(devices)
    merged: list[Value | None] = []
    for values, device, rule in zip(per_variable, devices, rules):
        with tf.device(device):
            if values is None:
                merged.append(None)
            elif rule == "sum":
                merged.append(_sum(_complete(values), shares, towers, micro_batches))
            elif rule == "agreed":
                merged.append(merging.agreed(_complete(values), shares))
            else:
                merged.append(merging.extreme(rule, _complete(values), shares))
    if shares.workers is None:
        return merged
    summed = shares.workers.sum([value if rule == "sum" else None
                                 for value, rule in zip(merged, rules)])
    return [one if one is not None else other for one, other in zip(summed, merged)]


def _complete(values: Sequence[Value | None]) -> Sequence[Value]:
    """``values`` of the towers, zeros where one has none: in eager code not all of them come to it,
    such as one without rows in a loop over these.
    """
    there = next(value for value in values if value is not None)
    return [merging.kept(False, there) if value is None else value for value in values]


def _sum(values: Sequence[Value], shares: shares_lib.Shares, towers: Sequence[str],
         micro_batches: int) -> Value:
    kept = [merging.without_empty(_crossed(value), tower, shares)
            for tower, value in enumerate(values)]
    if micro_batches > 1 and not any(isinstance(value, tf.IndexedSlices) for value in kept):
        kept = _running(kept, towers, micro_batches)
    return merging.total(kept)


def _crossed(value: Value) -> Value:
    """``value`` on the current device, cast there if it is a wider copy of a half."""
    half = _tf.half_of(value)
    return value if half is None else tf.cast(half, value.dtype)


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
