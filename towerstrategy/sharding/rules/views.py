"""Operations that move entries about: reshapes, transposes, slices, concatenations, padding.

Goes in: an operation.  Comes out: its plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules import blocks, shapes
from towerstrategy.sharding.rules.elementwise import is_plain, one_sharded
from towerstrategy.sharding.rules.entries import sizes_of
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, ListOf, Partial, Sharded, Size, Spec


@rule("Reshape", light=True)
def reshape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, target = specs
    if isinstance(spec, Partial):
        return Plan([spec, REPLICATED], [spec])
    if isinstance(spec, Size):
        return shapes.moved(op, specs)
    if not isinstance(spec, Sharded):
        return None
    found = _reshaped(op, spec, target)
    if found is None:
        return None
    if isinstance(target, Size):
        return Plan(specs, [found])
    known = shapes.static_sizes(op, 1, target)
    if known is not None and known[found.dim] == -1:
        return Plan([spec, REPLICATED], [found])
    return Plan([spec, REPLICATED], [found],
                make=lambda m: [m.each(lambda tower: _reshape(m, tower, found.dim))], alone=0)


def _reshaped(op: Op, spec: Sharded, target: Spec) -> Sharded | None:
    """Where the rows are behind a reshape.

    A dimension of rows stays one where what is in front of it is the same before and after, and
    where what it is put together with, or taken from, comes behind it.
    """
    before, after = sizes_of(op.inputs[0]), _after(op)
    if after is None:
        return None
    if isinstance(target, Size):
        if target.group != spec.group:
            return None
        # All else is in front of the rows, as before, or behind them.
        if spec.dim == target.at == 0 or before is not None and _same(
                before[:spec.dim], after[:target.at]):
            return dataclasses.replace(spec, dim=target.at, times=target.times)
        return None
    place = None
    if before is not None:
        place = next((at for at in range(len(after))
                      if _same(before[:spec.dim], after[:at]) and after[at] != 1
                      and all(isinstance(size, int) and size > 0 for size in after[at + 1:])),
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


def _after(op: Op) -> list[Any] | None:
    """The sizes that are asked for; None where they are known when the step runs only."""
    known = shapes.static_sizes(op, 1, REPLICATED)
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


@rule("ExpandDims", light=True)
def expand_dims(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, rank = specs[0], op.rank(0)
    axes = op.axes(1, None if rank is None else rank + 1)
    if isinstance(spec, Partial):
        return Plan([spec, REPLICATED], [spec])
    if isinstance(spec, Size):
        return shapes.moved(op, specs)
    if not isinstance(spec, Sharded) or axes is None:
        return None
    return Plan([spec, REPLICATED], [spec.at(spec.dim + (axes[0] <= spec.dim))])


@rule("Squeeze", light=True)
def squeeze(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, rank, static = specs[0], op.rank(0), op.inputs[0].shape
    if isinstance(spec, Partial):
        return Plan([spec], [spec])
    if isinstance(spec, Size):
        return shapes.moved(op, specs)
    if not isinstance(spec, Sharded) or rank is None:
        return None
    axes = [axis % rank for axis in op.attr("squeeze_dims")]
    if not axes:  # all of size 1: unknown ones may be
        if static.rank is None or None in [s for at, s in enumerate(static) if at != spec.dim]:
            return None
        axes = [at for at, s in enumerate(static) if s == 1 and at != spec.dim]
        return None  # and the rows', where a tower has one
    if spec.dim in axes:
        return None
    return Plan([spec], [spec.at(spec.dim - sum(axis < spec.dim for axis in axes))])


@rule("Transpose", "ConjugateTranspose", light=True)
def transpose(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, order = specs[0], op.value(1)
    if isinstance(spec, Partial):
        return Plan([spec, REPLICATED], [spec])
    if isinstance(spec, Size):
        return shapes.moved(op, specs)
    if not isinstance(spec, Sharded) or order is None:
        return None
    return Plan([spec, REPLICATED], [spec.at([int(axis) for axis in order].index(spec.dim))])


def _side_by_side(op: Op, specs: Sequence[Spec], inputs: int, rank: int | None
                  ) -> tuple[list[Spec], Sharded] | None:
    """Inputs of one shape: what each is to be, and where the rows are."""
    spec = one_sharded(specs[:inputs])
    if spec is None or rank is None or any(
            isinstance(spec, ListOf) for spec in specs[:inputs]):
        return None
    return [spec] * inputs, spec


@rule("ConcatV2")
def concat(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if any(isinstance(spec, Size) for spec in specs) and all(map(is_plain, specs)):
        return shapes.moved(op, specs)
    if all(spec == SUM for spec in specs[:-1]):
        return Plan([*specs[:-1], REPLICATED], [SUM])
    axes = op.axes(len(specs) - 1, op.out_rank())
    found = _side_by_side(op, specs, len(specs) - 1, op.out_rank())
    if found is None or axes is None:
        return None
    if axes[0] != found[1].dim:
        return Plan([*found[0], REPLICATED], [found[1]])
    several = blocks.behind_each_other(found[1], len(specs) - 1)
    return Plan(specs, [several]) if several and set(specs[:-1]) == {found[1]} else None


@rule("Pack")
def pack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if any(isinstance(spec, Size) for spec in specs) and all(map(is_plain, specs)):
        return shapes.moved(op, specs)
    if all(spec == SUM for spec in specs):
        return Plan(specs, [SUM])
    found, rank = _side_by_side(op, specs, len(specs), op.out_rank()), op.out_rank()
    if found is None or rank is None:
        return None
    spec = found[1]
    return Plan(found[0], [spec.at(spec.dim + (op.attr("axis") % rank <= spec.dim))])


@rule("Unpack")
def unpack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, rank = specs[0], op.rank(0)
    if isinstance(spec, Size):
        return shapes.moved(op, specs)
    if spec == SUM:
        return Plan(specs, [SUM] * len(op.outputs))
    if not isinstance(spec, Sharded) or rank is None:
        return None
    axis = op.attr("axis") % rank
    if axis == spec.dim:
        return None
    return Plan([spec], [spec.at(spec.dim - (axis < spec.dim))] * len(op.outputs))


@rule("Split", "SplitV")
def split(op: Op, specs: Sequence[Spec]) -> Plan | None:
    value, axis = (1, 0) if op.type == "Split" else (0, 2)
    spec, axes = specs[value], op.axes(axis, op.rank(value))
    if isinstance(spec, Size):
        return shapes.moved(op, specs)
    if not isinstance(spec, Sharded) or axes is None:
        return None
    takes: list[Spec] = [REPLICATED] * len(specs)
    takes[value] = spec
    if axes[0] == spec.dim:
        part = blocks.part(spec, len(op.outputs)) if op.type == "Split" else None
        return Plan(takes, [part] * len(op.outputs)) if part else None
    return Plan(takes, [spec] * len(op.outputs))


@rule("StridedSlice")
def strided_slice(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if isinstance(spec, Size):
        return shapes.moved(op, specs)
    if not isinstance(spec, Sharded):
        return None
    place = sliced(op, spec.dim, op.rank(0))
    if place is not None:
        return Plan([spec, REPLICATED, REPLICATED, REPLICATED], [spec.at(place)])
    return blocks.strided_slice(op, spec, specs) or _first_rows(op, spec)


def _first_rows(op: Op, spec: Sharded) -> Plan | None:
    """A strided slice that keeps some first positions: they are among each tower's first ones."""
    begin, end, steps = (op.value(index) for index in (1, 2, 3))
    masks = any(op.attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis", "end"))
    if begin is None or end is None or steps is None or masks or len(begin) <= spec.dim \
            or spec.blocks > 1 \
            or steps[spec.dim] != 1 or end[spec.dim] <= 0 \
            or not op.attr("begin_mask") >> spec.dim & 1 and begin[spec.dim] != 0:
        return None

    def make(maker: Any) -> list[Any]:
        limits = [maker.whole(index) for index in (1, 2, 3)]
        first = maker.each(lambda tower: maker.copy([maker.part(0, tower), *limits], tower)[0])
        rows = maker.make("ConcatV2", [*first, maker.constant(spec.dim, tf.int32, None)], None,
                          N=len(first)) if len(first) > 1 else first[0]
        kept = np.eye(spec.dim + 1, dtype=int)[spec.dim]
        limits = [maker.constant(numbers, tf.int32, None)
                  for numbers in (0 * kept, end[spec.dim] * kept, 0 * kept + 1)]
        others = (1 << spec.dim) - 1  # their masks
        rows = maker.make("StridedSlice", [rows, *limits], None, begin_mask=others,
                          end_mask=others)
        return [[rows] * len(first)]

    return Plan([spec, REPLICATED, REPLICATED, REPLICATED], [REPLICATED], make)


def sliced(op: Op, dim: int, rank: int | None, begin: int = 1) -> int | None:
    """Where a dimension that is taken whole is behind a strided slice; None if it is not."""
    count = op.inputs[begin].shape[0] if op.inputs[begin].shape.rank == 1 else None
    if rank is None or count is None:
        return None
    masks = {name: op.attr(f"{name}_mask")
             for name in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")}
    steps = op.value(begin + 2)
    named = sum(not (masks["new_axis"] | masks["ellipsis"]) >> at & 1 for at in range(count))
    source = target = 0
    for at in range(count):
        bit = 1 << at
        if masks["ellipsis"] & bit:
            skipped = rank - named
            if source <= dim < source + skipped:
                return target + dim - source
            source, target = source + skipped, target + skipped
        elif masks["new_axis"] & bit:
            target += 1
        else:
            if source == dim:
                whole = masks["begin"] & bit and masks["end"] & bit and not masks[
                    "shrink_axis"] & bit
                return target if whole and steps is not None and steps[at] == 1 else None
            source, target = source + 1, target + (not masks["shrink_axis"] & bit)
    return target + dim - source


@rule("StridedSliceGrad")
def strided_slice_grad(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size, gradient = specs[0], specs[4]
    if not isinstance(size, Size) or not isinstance(gradient, Sharded) \
            or op.inputs[0].shape.rank != 1:
        return None
    if sliced(op, size.at, op.inputs[0].shape[0]) == gradient.dim:
        if (gradient.times, gradient.group) != (size.times, size.group):
            return None
        return Plan([size, REPLICATED, REPLICATED, REPLICATED, gradient], [size.shards(size.at)])
    plan = blocks.strided_slice(op, size.shards(size.at), specs[:-1])
    if plan is None or plan.gives != [gradient]:
        return None
    return Plan([size, *plan.takes[1:], gradient], [size.shards(size.at)])


@rule("Slice")
def slice_(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if isinstance(specs[0], Size):
        return shapes.moved(op, specs)
    return blocks.slice_(op, specs[0], specs) if isinstance(specs[0], Sharded) else None


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, padding = specs[0], op.value(1)
    if not isinstance(spec, Sharded) or padding is None or padding[spec.dim].any():
        return None
    return Plan([spec, *[REPLICATED] * (len(specs) - 1)], [spec],
                padded=op.type in ("MirrorPad", "MirrorPadGrad"))


@rule("Fill")
def fill(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size, value = specs
    if not isinstance(size, Size) or not is_plain(value):
        return None
    return Plan([size, REPLICATED], [size.shards(size.at)])


@rule("BroadcastTo", light=True)
def broadcast_to(op: Op, specs: Sequence[Spec]) -> Plan | None:
    value, size = specs
    if not isinstance(size, Size):
        return None
    rank, out = op.rank(0), op.out_rank()
    sharded = size.shards(size.at)
    if isinstance(value, Sharded):
        if rank is None or out is None or value != sharded.at(size.at - (out - rank)):
            return None
        return Plan([value, size], [sharded])
    if not is_plain(value):
        return None
    if rank is None or out is None:
        return None
    dim = size.at - (out - rank)
    if dim < 0 or op.inputs[0].shape[dim] == 1:
        return Plan([REPLICATED, size], [sharded])
    return Plan([dataclasses.replace(sharded, dim=dim, broadcast=True), size], [sharded])


@rule("Tile", light=True)
def tile(op: Op, specs: Sequence[Spec]) -> Plan | None:
    value, times = specs
    if isinstance(value, Sharded):
        known = op.value(1)
        if known is None:
            sizes = shapes.static_sizes(op, 1, times)
            if isinstance(times, Size) or sizes is None or sizes[value.dim] != 1:
                return None
        elif int(known[value.dim]) != 1:
            several = blocks.behind_each_other(value, int(known[value.dim]))
            return Plan([value, REPLICATED], [several]) if several else None
        return Plan([value, REPLICATED], [value])
    if isinstance(times, Size) and is_plain(value) and times.times is not None:
        own = op.inputs[0].shape[times.at] if op.rank(0) is not None else None
        if own == 1:
            return Plan([REPLICATED, times], [times.shards(times.at)])
    return None


@rule("OneHot", light=True)
def one_hot(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, rank = specs[0], op.rank(0)
    if not isinstance(spec, Sharded) or rank is None:
        return None
    axis = op.attr("axis") % (rank + 1)
    return Plan([spec, *[REPLICATED] * 3], [spec.at(spec.dim + (axis <= spec.dim))])
