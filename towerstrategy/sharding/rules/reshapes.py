"""Reshapes: where the rows are behind them, and a tower's shape.

Goes in: an operation.  Comes out: its plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.entries import (
    ONE,
    Quotient,
    dimensions_in,
    quotient,
    sizes_of,
)
from towerstrategy.sharding.rules.registry import EACH, Op, Plan
from towerstrategy.sharding.spec import REPLICATED, Sharded, Size, Spec


def reshape(op: Op, spec: Spec, target: Spec) -> Plan | None:
    """Its plan, where what is reshaped has rows."""
    if not isinstance(spec, Sharded):
        return None
    known = shapes.static_sizes(op, 1, REPLICATED)
    after = _after(op, known)
    if after is None:
        return None
    before: list[Any] | None = sizes_of(op.inputs[0])
    for at, dim in enumerate(dimensions_in(op.inputs[1], op.inputs[0]) if before else ()):
        if dim not in (None, spec.dim) and after[at] is None:
            before[dim] = after[at] = f"that of {dim}"  # type: ignore[index]
    found = _reshaped(before, after, spec, target)
    if found is None:
        return None
    if found == spec and _are_one(before, after, spec.dim):
        return Plan([spec, target], [spec], passes=True)
    if isinstance(target, Size):
        left = _left_over(spec, found, before, after, known)
        plan = _to_size(op, spec, target, found, left)
        sizes = [-1 if at == found.dim else left.get(at, size)
                 for at, size in enumerate(after)]
        if plan is not None and plan.make is None and all(
                isinstance(size, int) and size for size in sizes):
            plan.sizes = sizes
        return plan
    if known is not None and known[found.dim] == -1:
        return Plan([spec, REPLICATED], [found])
    return Plan([spec, REPLICATED], [found],
                make=lambda m: _reshape(m, found.dim), alone=0)


def _left_over(spec: Sharded, found: Sharded, before: Sequence[Any] | None, after: Sequence[Any],
               known: Sequence[Any] | None) -> dict[int, int | None]:
    """Where a shape that counts the rows asks for what is left over, -1: how much that is."""
    left = [at for at, size in enumerate(known or ()) if size == -1 and at != found.dim]
    own = [spec.times, spec.blocks, *(
        size for at, size in enumerate(before or [None]) if at != spec.dim)]
    asked = [size for at, size in enumerate(after) if at not in (*left, found.dim)]
    over = quotient(own, [found.times, found.blocks, *asked])
    return dict.fromkeys(left, int(over.known) if over is not None and not over.times else None)


def _to_size(op: Op, spec: Sharded, target: Size, found: Sharded,
             left: dict[int, int | None]) -> Plan | None:
    """Where the shape counts the rows.

    What is left over TensorFlow works out of the sizes that are not 0. Of a tower without rows
    that is wrong if an example has other sizes next to it before than after; so it is told.
    """
    if not left or spec.times == found.times is not None:
        return Plan([spec, target], [found])
    (place, size), = left.items()
    if size is None:
        return None

    return Plan([spec, target], [found], alone=0, make=lambda m: m.copy(
        [m.parts(0), _with_size(m, place, size)], EACH))


def _are_one(before: Sequence[Any] | None, after: Sequence[Any] | None, rows: int = -1) -> bool:
    """Whether these are the same sizes, all known but that of the rows."""
    if before is None or after is None or len(before) != len(after):
        return False
    return all(at == rows or size is not None and size == other
               for at, (size, other) in enumerate(zip(before, after)))


def changes_nothing(op: Op) -> bool:
    """Whether it gives what it is given, all sizes being known."""
    return _are_one(sizes_of(op.inputs[0]), _after(op, shapes.static_sizes(op, 1, REPLICATED)))


def _reshaped(before: Sequence[Any] | None, after: Sequence[Any], spec: Sharded,
              target: Spec) -> Sharded | None:
    """Where the rows are behind a reshape.

    What is in front of them stays there, or makes blocks of rows, or is made of some of these; what
    is behind them and is not behind them afterwards is put together with them, or the other way.

    Args:
      before, after: the sizes, so far as they are known.
      spec: where they are before.
      target: the shape that is asked for.
    """
    if isinstance(target, Size) and target.group == spec.group and spec.dim == target.at == 0:
        return dataclasses.replace(spec, times=target.times)
    if before is None:
        return None
    for at in [target.at] if isinstance(target, Size) else range(len(after)):
        front = quotient(before[:spec.dim], after[:at])
        behind = quotient([spec.times, *before[spec.dim + 1:]], after[at + 1:])
        found = _of_quotients(spec, at, front, behind)
        if isinstance(target, Size):
            same_times = behind is not None and not behind.times and behind.known == target.times
            if target.group == spec.group and (front == ONE or same_times):
                # All else is in front of the rows, as before, or behind them.
                return dataclasses.replace(spec, dim=at, times=target.times)
            if found is not None and found.one_block == target.one_block \
                    and found.blocks * (found.times or 0) == target.blocks * (target.times or 0):
                return found
        elif found is not None and (after[at] is None or isinstance(after[at], int)
                                    and before[spec.dim] is not None):
            return found
    return None


def _of_quotients(spec: Sharded, at: int, front: Quotient | None, behind: Quotient | None
                  ) -> Sharded | None:
    """The rows in dimension ``at``; None where some would be taken apart.

    Args:
      spec: where they are before.
      at: the dimension.
      front: of the sizes in front, before and after.
      behind: of those behind, before and after, times the positions that an example has before.
    """
    if front is None or behind is None or front.times:
        return None
    count = front.known * spec.blocks
    if count.denominator > 1 or behind.known.denominator > 1 or behind.times and front != ONE:
        return None
    return dataclasses.replace(spec, dim=at, group=spec.some(int(count)),
                               times=None if behind.times else int(behind.known))


def _after(op: Op, known: Sequence[Any] | None) -> list[Any] | None:
    """The sizes that are asked for; None where they are known when the step runs only."""
    rank = op.outputs[0].shape.rank
    if rank is None:
        return None
    static = op.outputs[0].shape.as_list()
    if known is None or len(known) != rank:
        return static
    return [size if size is not None else own if own is None or own >= 0 else None
            for size, own in zip(static, known)]


def _reshape(m: Any, dim: int) -> Any:
    """Each tower's reshape: its rows are whatever is left where the batch's would be."""
    static = m.op.outputs[0].shape
    others = [size for at, size in enumerate(static) if at != dim]
    shape = m.constant([-1 if at == dim else size for at, size in enumerate(static)],
                       m.op.inputs[1].dtype, EACH) if None not in others and 0 not in others \
        else _with_size(m, dim, -1)
    return m.copy([m.parts(0), shape], EACH)


def _with_size(m: Any, dim: int, size: int) -> Any:
    """Each tower's shape, with ``size`` in one place."""
    mask = np.arange(m.op.outputs[0].shape.rank) == dim
    return m.make("SelectV2", [m.constant(mask, tf.bool, EACH), m.constant(
        size, m.op.inputs[1].dtype, EACH), m.parts(1)], EACH)
