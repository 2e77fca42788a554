"""The spec of a tensor that has several sources: the branches, or the iterations of a loop.

Goes in: the sources' specs.  Comes out: one spec, and whether each can be redistributed to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules import row_loops, scaling
from towerstrategy.sharding.spec import (
    REPLICATED,
    ROW,
    SUM,
    ByBranch,
    InRow,
    ListOf,
    Partial,
    Replicated,
    Row,
    Sharded,
    Size,
    Spec,
    can_be_cut,
    has_known_rows,
    of_batch,
)


def can_become(spec: Spec, wanted: Spec) -> bool:
    """Whether a tensor with ``spec`` can be redistributed to ``wanted``."""
    if spec == wanted:
        return True
    if isinstance(spec, ListOf):
        return isinstance(wanted, ListOf)
    if isinstance(wanted, Replicated):
        return not isinstance(spec, Row)
    if isinstance(wanted, Size):  # a shape of all rows
        return isinstance(spec, (Replicated, Size)) and has_known_rows(wanted)
    if isinstance(wanted, Sharded):
        return spec == wanted.given or not isinstance(spec, Row) and can_be_cut(wanted)
    if isinstance(wanted, Partial):
        return wanted == SUM
    if isinstance(wanted, ListOf):
        return isinstance(spec, Replicated)
    return isinstance(wanted, Row) and isinstance(spec, (Replicated, Row)) \
        or isinstance(spec, Sharded) and wanted == InRow(spec)


def branch_output(condition: Any, tensors: Sequence[tf.Tensor], specs: Sequence[Spec],
                  empty: Callable[[tf.Tensor, Spec | None], bool]) -> Spec:
    """The spec of an output of branches.

    Args:
      condition: identifies the branches' condition.
      tensors, specs: the output in each branch, and its spec there.
      empty: whether a tensor is a list without entries, or with entries of a spec; then each tower
        can have a list of its own.
    """
    specs = [dataclasses.replace(spec, zeros=False) if isinstance(spec, ListOf) else spec
             for spec in specs]
    if all(spec == specs[0] for spec in specs):
        return specs[0]
    in_row = next((spec for spec in specs if isinstance(spec, InRow)), None)
    if in_row is not None and all(spec == in_row or spec == in_row.shards and scaling.is_zero(
            tensor) for tensor, spec in zip(tensors, specs)):
        return in_row
    if all(map(row_loops.is_one_devices, specs)) and any(isinstance(spec, Row) for spec in specs):
        return ROW
    lists = [spec for spec in specs if isinstance(spec, ListOf)]
    if any(spec.rows for spec in lists):
        return REPLICATED
    if lists:
        element = next((each.element for each in lists if each.element is not None), None)
        kept = tuple(spec.element if isinstance(spec, ListOf) else None if empty(tensor, element)
                     else REPLICATED for tensor, spec in zip(tensors, specs))
        return ListOf(element if {*kept} <= {element, None} else ByBranch(condition, kept))
    is_sum = SUM in specs and all(isinstance(spec, Replicated) or spec == SUM for spec in specs)
    return SUM if is_sum else REPLICATED


def branch_input(condition: Any, number: int, spec: Spec) -> Spec:
    """The spec of an input in one branch; branches of the same condition may have made it."""
    kept = spec.element if isinstance(spec, ListOf) else None
    return ListOf(kept.specs[number]) if isinstance(kept, ByBranch) \
        and kept.condition == condition else spec


def loop_variable(before: Spec, after: Spec, tensor: tf.Tensor, result: tf.Tensor,
                  is_read: bool) -> Spec:
    """The spec of a loop variable that starts an iteration as ``before`` and ends as ``after``.

    Args:
      before, after: its specs.
      tensor: what it is before the loop.
      result: what it is after an iteration.
      is_read: whether an iteration reads it before it sets it.
    """
    if before == after or isinstance(after, Replicated) and isinstance(before, Replicated):
        return before
    lists = [spec for spec in (before, after) if isinstance(spec, ListOf)]
    if lists:
        return REPLICATED if lists[-1].rows else next(
            (spec for spec in reversed(lists) if spec.element is not None), ListOf())
    if isinstance(before, Sharded) and isinstance(after, Sharded) \
            and before.uncounted == after.uncounted:
        return before.uncounted
    if isinstance(before, Replicated):
        if isinstance(after, Partial):
            return after if after.reduction == "sum" else REPLICATED
        if isinstance(after, Sharded) and can_be_cut(after) and tensor.shape.rank is not None:
            # It may start with other rows than the batch's, and has these if there is no iteration;
            # one row may broadcast.  AutoGraph starts what is first set in the loop with no rows.
            size = tensor.shape[after.dim]
            if size is not None and (size == result.shape[after.dim] or of_batch(after)
                                     and not is_read and size != 1):
                return after if size in (0, result.shape[after.dim]) else after.uncounted
    if before == SUM and isinstance(after, Replicated):
        return before
    if row_loops.is_one_devices(before) and row_loops.is_one_devices(after):
        return ROW
    return REPLICATED


def loop_variables(first: Sequence[Spec], tensors: Sequence[tf.Tensor],
                   results: Sequence[tf.Tensor], are_read: Sequence[bool],
                   before: Sequence[Spec], after: Sequence[Spec]) -> list[Spec]:
    """:func:`loop_variable` of all variables of a loop, whose specs before it are ``first``."""
    now = [loop_variable(*each) for each in zip(before, after, tensors, results, are_read)]
    if any(isinstance(spec, Replicated) and not isinstance(was, (Replicated, ListOf))
           for was, spec in zip(before, now)):  # the lists' entries change with it
        now = [start if isinstance(spec, ListOf) else spec for start, spec in zip(first, now)]
    return now
