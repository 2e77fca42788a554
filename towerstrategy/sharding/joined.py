"""The spec of a tensor that has several sources: the branches, or the iterations of a loop.

Goes in: the sources' specs.  Comes out: one spec, and whether each can be redistributed to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.spec import (
    REPLICATED,
    SUM,
    ListOf,
    OptionalOf,
    Partial,
    Replicated,
    Row,
    RowList,
    Sharded,
    Spec,
    can_be_cut,
    of_batch,
)


def can_become(spec: Spec, wanted: Spec) -> bool:
    """Whether a tensor with ``spec`` can be redistributed to ``wanted``."""
    if spec == wanted:
        return True
    if isinstance(spec, RowList) and not isinstance(wanted, RowList):
        return spec.is_new and can_become(REPLICATED, wanted)
    if isinstance(wanted, Replicated):
        return not isinstance(spec, (ListOf, Row))
    if isinstance(wanted, Sharded):
        return spec == wanted.given or can_be_cut(wanted) and not isinstance(spec, ListOf)
    if isinstance(wanted, Partial):
        return wanted == SUM and not isinstance(spec, ListOf)
    if isinstance(wanted, ListOf):
        return isinstance(spec, (ListOf, Replicated))
    return isinstance(wanted, Row) and isinstance(spec, (Replicated, Row))


def branch_output(condition: Any, specs: Sequence[Spec],
                  empty: Callable[[int, Spec | None], bool]) -> Spec:
    """The spec of an output of branches.

    Args:
      condition: identifies the branches' condition.
      specs: the output's spec in each branch.
      empty: whether the output of a branch, by number, is a list without entries, or with entries
        of a spec; then each tower can have a list of its own.
    """
    specs = [dataclasses.replace(spec, is_new=False, zeros=False) if isinstance(spec, RowList)
             else spec for spec in specs]
    if all(spec == specs[0] for spec in specs):
        return specs[0]
    if any(isinstance(spec, RowList) for spec in specs):
        return REPLICATED
    lists = [spec for spec in specs if isinstance(spec, ListOf)]
    if lists:
        element = next((each.element for each in lists if each.element is not None), None)
        kept = tuple(spec.element if isinstance(spec, ListOf) else None if empty(number, element)
                     else REPLICATED for number, spec in enumerate(specs))
        if {*kept} <= {element, None}:
            return dataclasses.replace(lists[0], element=element)
        are_optionals = all(isinstance(each, OptionalOf) for each in lists)
        return OptionalOf(None, (condition, kept)) if are_optionals else REPLICATED
    is_sum = SUM in specs and all(isinstance(spec, Replicated) or spec == SUM for spec in specs)
    return SUM if is_sum else REPLICATED


def branch_input(condition: Any, number: int, spec: Spec) -> Spec:
    """The spec of an input in one branch; branches of the same condition may have made it."""
    source = spec.by_branch if isinstance(spec, OptionalOf) else None
    return OptionalOf(source[1][number]) if source and source[0] == condition else spec


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
    if isinstance(before, ListOf) or isinstance(after, ListOf):
        known = [spec for spec in (before, after)
                 if isinstance(spec, ListOf) and spec.element is not None]
        return known[-1] if known else ListOf()
    if isinstance(after, Sharded) and before == after.uncounted:
        return before
    if isinstance(before, Replicated):
        if isinstance(after, Partial):
            return after if after.reduction == "sum" else REPLICATED
        if isinstance(after, Sharded) and of_batch(after) and tensor.shape.rank is not None:
            # It may start with other rows than the batch's, and has these if there is no iteration;
            # one row may broadcast.  AutoGraph starts what is first set in the loop with no rows.
            size = tensor.shape[after.dim]
            if size is not None and (size == result.shape[after.dim] or not is_read and size != 1):
                return after if size in (0, result.shape[after.dim]) else after.uncounted
    if before == SUM and isinstance(after, Replicated):
        return before
    return REPLICATED
