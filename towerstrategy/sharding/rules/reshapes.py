"""Reshapes: where the rows are behind them, and a tower's shape.

Goes in: an operation.  Comes out: its plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules import blocks, shapes
from towerstrategy.sharding.rules.entries import dimensions_in, sizes_of
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import REPLICATED, Sharded, Size, Spec


def reshape(op: Op, spec: Spec, target: Spec) -> Plan | None:
    """Its plan, where what is reshaped has rows."""
    if not isinstance(spec, Sharded):
        return None
    known = shapes.static_sizes(op, 1, REPLICATED)
    after = _after(op, known)
    before: list[Any] | None = sizes_of(op.inputs[0])
    if before is not None and after is not None:
        for at, dim in enumerate(dimensions_in(op.inputs[1], op.inputs[0])):
            if dim not in (None, spec.dim) and after[at] is None:
                before[dim] = after[at] = f"that of {dim}"
    found = None if after is None else _reshaped(before, after, spec, target) \
        or blocks.reshaped(spec, before, after, target)
    if found is None:
        return None
    if found == spec and _are_one(before, after, spec.dim):
        return Plan([spec, target], [spec], passes=True)
    if isinstance(target, Size):
        left = _left_over(spec, found, before, known)
        plan = _to_size(op, spec, target, found, left)
        sizes = [-1 if at == found.dim else left.get(at, size)
                 for at, size in enumerate(after or ())]
        if plan is not None and plan.make is None and all(
                isinstance(size, int) and size for size in sizes):
            plan.sizes = sizes
        return plan
    if known is not None and known[found.dim] == -1:
        return Plan([spec, REPLICATED], [found])
    return Plan([spec, REPLICATED], [found],
                make=lambda m: [m.each(lambda tower: _reshape(m, tower, found.dim))], alone=0)


def _left_over(spec: Sharded, found: Sharded, before: Sequence[Any] | None,
               known: Sequence[Any] | None) -> dict[int, int | None]:
    """Where a shape that counts the rows asks for what is left over, -1: how much that is."""
    left = [at for at, size in enumerate(known or ()) if size == -1 and at != found.dim]
    others = [size for at, size in enumerate(before or [None]) if at != spec.dim]
    asked = [size for at, size in enumerate(known or ()) if at not in (*left, found.dim)]
    if not spec.times or not found.times or not all(
            isinstance(size, int) and size for size in (*others, *asked)):
        return dict.fromkeys(left)
    return dict.fromkeys(left, math.prod(others) * spec.times * spec.blocks // (
        math.prod(asked) * found.times * found.blocks))


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

    def shape(m: Any, tower: int) -> Any:
        mask = np.arange(op.outputs[0].shape.rank) == place
        return m.make("SelectV2", [m.constant(mask, tf.bool, tower), m.constant(
            size, op.inputs[1].dtype, tower), m.part(1, tower)], tower)

    return Plan([spec, target], [found], make=lambda m: [m.each(
        lambda tower: m.copy([m.part(0, tower), shape(m, tower)], tower)[0])], alone=0)


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

    A dimension of rows stays one where what is in front of it is the same before and after, and
    where what it is put together with, or taken from, comes behind it.
    """
    if isinstance(target, Size):
        if target.group != spec.group:
            return None
        # All else is in front of the rows, as before, or behind them; so one of the two will do.
        if spec.dim == target.at == 0 or before is not None and (
                _same(before[:spec.dim], after[:target.at]) or _same(
                    [spec.times, *before[spec.dim + 1:]], [target.times, *after[target.at + 1:]])):
            return dataclasses.replace(spec, dim=target.at, times=target.times)
        return None
    place = None
    if before is not None:
        place = next((at for at in range(len(after))
                      if _same(before[:spec.dim], after[:at]) and after[at] != 1
                      and all(size is not None and size not in (-1, 0) for size in after[at + 1:])),
                     None)
        if place is not None and isinstance(after[place], int) and after[place] > 0 \
                and before[spec.dim] is None:
            return None  # a constant where the rows should be
    if place is None or before is None:
        return None
    times = _times(spec, before[spec.dim + 1:], after[place + 1:])
    if times == 0:
        return None
    return dataclasses.replace(spec, dim=place, times=times)


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


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether these sizes have one product."""
    if any(not isinstance(size, int) or size < 0 for size in (*first, *second)):
        return list(first) == list(second) and None not in first
    return int(np.prod(first, dtype=np.int64)) == int(np.prod(second, dtype=np.int64))


def _times(spec: Sharded, before: Sequence[Any], after: Sequence[Any]) -> int | None:
    """Positions a row has afterwards; None if unknown, 0 if rows would be taken apart."""
    before, named = list(before), [size for size in after if isinstance(size, str)]
    for size in named:
        if size not in before:
            return 0
        before.remove(size)
    after = [size for size in after if size not in named]
    unknown = [size for size in (*before, *after) if not isinstance(size, int) or size < 0]
    if unknown:
        known = int(np.prod([size for size in after if isinstance(size, int) and size > 0],
                            dtype=np.int64))
        have = int(np.prod([size for size in before if isinstance(size, int) and size > 0],
                           dtype=np.int64))
        more = sum(size is None for size in before) >= sum(size is None for size in after)
        return None if more and known and have % known == 0 else 0
    have, want = (int(np.prod(sizes, dtype=np.int64)) for sizes in (before, after))
    if have == want:
        return spec.times
    if want == 0 or spec.times is None:
        return None if want and have % want == 0 else 0
    return spec.times * have // want if spec.times * have % want == 0 else 0


def _reshape(m: Any, tower: int, dim: int) -> Any:
    """A tower's reshape: its rows are whatever is left where the batch's would be."""
    static, rank = m.op.outputs[0].shape, m.op.outputs[0].shape.rank
    dtype = m.op.inputs[1].dtype
    others = [size for at, size in enumerate(static) if at != dim]
    if None not in others and 0 not in others:
        shape = m.constant([-1 if at == dim else size for at, size in enumerate(static)], dtype,
                           tower)
    else:
        mask = np.arange(rank) == dim
        shape = m.make("SelectV2", [m.constant(mask, tf.bool, tower),
                                    m.constant(-1, dtype, tower), m.part(1, tower)], tower)
    return m.copy([m.part(0, tower), shape], tower)[0]
