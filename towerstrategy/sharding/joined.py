"""What a tensor is that is one of several: what branches give, what a loop's turns make of it.

Goes in: specs of the several.  Comes out: the spec of the one, and whether each can become that.
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
    Sharded,
    Spec,
)


def can_become(spec: Spec, wanted: Spec) -> bool:
    """Whether what is of ``spec`` can be redistributed to ``wanted``."""
    if spec == wanted:
        return True
    if isinstance(wanted, Replicated):
        return not isinstance(spec, ListOf)
    if isinstance(wanted, Sharded):
        if isinstance(spec, Sharded) and spec == dataclasses.replace(wanted, broadcast=False):
            return True
        return not wanted.one_block and not isinstance(spec, ListOf)
    if isinstance(wanted, Partial):
        return wanted == SUM and not isinstance(spec, ListOf)
    if isinstance(wanted, ListOf):
        return isinstance(spec, (ListOf, Replicated))
    return False


def of_branches(condition: Any, specs: Sequence[Spec],
                empty: Callable[[int, Spec | None], bool]) -> Spec:
    """What branches give that give these.

    Args:
      condition: what stands for the branches' condition.
      specs: what each of them gives.
      empty: whether that of a branch is a list that no tower needs to have as its own, for entries
        of a spec.
    """
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    lists = [spec for spec in specs if isinstance(spec, ListOf)]
    if lists:
        element = next((each.element for each in lists if each.element is not None), None)
        of = tuple(spec.element if isinstance(spec, ListOf) else None if empty(number, element)
                   else REPLICATED for number, spec in enumerate(specs))
        if {*of} <= {element, None}:
            return dataclasses.replace(lists[0], element=element)
        are_optionals = all(isinstance(each, OptionalOf) for each in lists)
        return OptionalOf(None, (condition, of)) if are_optionals else REPLICATED
    sums = SUM in specs and all(isinstance(spec, Replicated) or spec == SUM for spec in specs)
    return SUM if sums else REPLICATED


def in_branch(condition: Any, number: int, spec: Spec) -> Spec:
    """What a branch is given, of which others of the same condition may have made it."""
    made = spec.by_branch if isinstance(spec, OptionalOf) else None
    return OptionalOf(made[1][number]) if made is not None and made[0] == condition else spec


def turned(before: Spec, after: Spec, tensor: tf.Tensor) -> Spec:
    """What a loop's variable is to be that was ``before`` and is ``after`` behind the body."""
    if before == after or isinstance(after, Replicated) and isinstance(before, Replicated):
        return before
    if isinstance(before, ListOf) or isinstance(after, ListOf):
        known = [spec for spec in (before, after)
                 if isinstance(spec, ListOf) and spec.element is not None]
        return known[-1] if known else ListOf()
    if isinstance(before, Replicated):
        if isinstance(after, Partial):
            return after if after.reduction == "sum" else REPLICATED
        if isinstance(after, Sharded) and not after.group and tensor.shape.rank is not None \
                and tensor.shape[after.dim] != 1:
            return after
    if before == SUM and isinstance(after, Replicated):
        return before
    return REPLICATED
