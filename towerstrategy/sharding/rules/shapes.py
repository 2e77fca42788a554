"""Shapes and sizes: numbers of rows, known for the batch and for each tower.

Goes in: an operation.  Comes out: its plan.  A number that counts rows stays a :class:`Size` as
long as the towers' add up to the batch's; else the batch's is meant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules.entries import entries_of, outputs_of
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    Axes,
    ListOf,
    Replicated,
    Sharded,
    Size,
    Sizes,
    Spec,
)


def _size_of(spec: Sharded, shape: tf.TensorShape) -> Size:
    known = None if shape.rank is None else tuple(shape.as_list())
    return Size(spec.dim, spec.times, spec.group, known)


@rule("Shape", "ShapeN")
def shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if any(isinstance(spec, ListOf) for spec in specs):
        return None
    gives: list[Spec] = [_size_of(spec, tensor.shape) if isinstance(spec, Sharded)
                         else REPLICATED for spec, tensor in zip(specs, op.inputs)]

    def whole(m: Any) -> list[Any]:
        dtype = op.outputs[0].dtype
        return [m.shape(index, dtype) if isinstance(spec, Sharded)
                else m.make("Shape", [m.part(index, 0)], 0, out_type=dtype)
                for index, spec in enumerate(specs)]

    if op.type == "Shape" and not isinstance(specs[0], Sharded):
        return Plan(specs, [REPLICATED])  # a part of a sum has the sum's shape
    return Plan(specs, gives, whole=whole, part=lambda m, tower: [
        m.own_shape(index, tower, op.outputs[0].dtype) for index in range(len(specs))])


@rule("Size")
def size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, static = specs[0], op.inputs[0].shape
    if not isinstance(spec, Sharded):
        return None if isinstance(spec, ListOf) else Plan(specs, [REPLICATED])
    times = None if static.rank is None else _times(static.as_list(), spec.dim, spec)

    def whole(m: Any) -> list[Any]:
        dtype = op.outputs[0].dtype
        if times is None or spec.group:
            return [m.towers.add_up(m.copy([m.parts(0)], EACH)[0], m.towers.merge)]
        return [m.make("Mul", [m.towers.total(dtype), m.constant(times, dtype, None)], None)]

    return Plan(specs, [Size(0, times, spec.group)], whole=whole)


@rule("Rank")
def rank(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return None if isinstance(specs[0], ListOf) else Plan(specs, [REPLICATED])


def _entries(tensor: tf.Tensor, spec: Spec) -> Any:
    known = spec.known if isinstance(spec, Size) else None
    return entries_of(tensor) if known is None else np.array(known, object)


def static_sizes(op: Op, index: int, spec: Spec) -> list[Any] | None:
    """The numbers of a shape: ints, None where unknown, the :class:`Sharded` where rows are."""
    entries = _entries(op.inputs[index], spec)
    if entries is None or entries.ndim != 1:
        return None
    known = list(entries)
    if isinstance(spec, Size) and spec.at < len(known):
        known[spec.at] = spec.shards(0)
    return known


def _of_one_rank(op: Op, specs: Sequence[Spec]) -> list[list[Any]]:
    """The sizes of shapes that are broadcast, with ones in front; none where not known."""
    sizes = [static_sizes(op, index, spec) for index, spec in enumerate(specs)]
    known = [each for each in sizes if each is not None]
    rank = max(map(len, known), default=0)
    return [[1] * (rank - len(each)) + each for each in known] if len(known) == len(sizes) else []


@rule("BroadcastGradientArgs")
def broadcast_gradient_args(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Over which axes to sum; which of them does not depend on how many rows there are.

    The whole batch's shapes are compared.  A dimension with rows in both shapes is in neither;
    one with rows beside a 1 is in the other.  TensorFlow sums over what is 1 in both shapes, too,
    as are rows where the batch has one: not so here, as other towers have none.
    """
    sizes = _of_one_rank(op, specs)
    if not sizes:
        return None
    (first, second), lengths = sizes, [tensor.shape[0] for tensor in op.inputs]
    gives = [_axes(first, second, len(first) - lengths[0]),
             _axes(second, first, len(first) - lengths[1])]
    values = [_known_axes(gives[0]), _known_axes(gives[1])]

    def whole(m: Any) -> list[Any]:
        dtype = op.outputs[0].dtype
        if values[0] is None or values[1] is None:
            found = m.copy([m.whole(0), m.whole(1)], HOST)
            return [m.make("ListDiff", [axes, m.constant(
                [dim for dim, summed in enumerate(given.reduced) if summed is False], dtype, HOST)],
                HOST) for axes, given in zip(found, gives)]
        return [m.constant(np.asarray(value, np.int64), dtype, None) for value in values]

    return Plan(specs, gives, whole=whole)


def _axes(own: Sequence[Any], other: Sequence[Any], missing: int) -> Axes:
    reduced: list[bool | None] = []
    for dim, (mine, its) in enumerate(zip(own, other)):
        if dim < missing:
            reduced.append(True)
        elif isinstance(mine, Sharded) or isinstance(its, Sharded):
            both = isinstance(mine, Sharded) and isinstance(its, Sharded)
            if both and not mine.goes_with(its):
                reduced.append(None)
            elif isinstance(mine, Sharded):
                reduced.append(False)
            else:
                reduced.append({1: True, None: None}.get(mine, False))
        elif mine is None or its is None and mine == 1:
            reduced.append(None)
        else:
            reduced.append(mine == 1 and its != 1)
    return Axes(tuple(reduced))


def _known_axes(axes: Axes) -> list[int] | None:
    if None in axes.reduced:
        return None
    return [dim for dim, reduced in enumerate(axes.reduced) if reduced]


def moved(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Entries of shapes, moved about: sliced, packed, put together, taken apart, transposed.

    What counts rows is marked, and looked for in what comes out. Where it is not, the towers'
    numbers are the batch's.
    """
    inputs = []
    for tensor, spec in zip(op.inputs, specs):
        entries = _entries(tensor, spec)
        if isinstance(spec, Size) and entries is not None:
            entries.flat[spec.at] = spec
        inputs.append(entries)
    gives: list[Spec] = []
    for entries in outputs_of(op.operation, inputs):
        places = [] if entries is None else [
            at for at, entry in enumerate(entries.flat) if isinstance(entry, Size)]
        if entries is not None and len(places) > 1 and len({*entries.flat}) == 1:
            return Plan([REPLICATED] * len(specs), [Sizes(entries.flat[0].moved(0))])
        if entries is None or len(places) > 1 or not places and any(
                each is None for each in inputs):
            return None
        gives.append(entries.flat[places[0]].moved(places[0]) if places else REPLICATED)
    return Plan([spec if isinstance(spec, Size) else REPLICATED for spec in specs], gives)


def product_of_size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """How many entries a shape has."""
    spec = specs[0]
    if not isinstance(spec, Size) or op.out_rank() != 0 or op.rank(0) not in (0, 1):
        return None
    if op.rank(0) == 0:  # a single size, as of an axis that is no list
        return Plan([spec, REPLICATED], [spec])
    known = static_sizes(op, 0, spec)
    times = None if known is None else _times(known, spec.at, spec)
    return Plan([spec, REPLICATED], [Size(0, times, spec.group)])


def one_of_sizes(op: Op, spec: Size | Sizes) -> Plan | None:
    """The largest, or smallest, of some numbers of rows that are alike."""
    size = spec.each if isinstance(spec, Sizes) else spec
    if op.out_rank() != 0 or isinstance(spec, Size) and op.inputs[0].shape != [1]:
        return None
    if isinstance(spec, Size):
        return Plan([spec, REPLICATED], [size.moved(0)])
    if size.group or not size.times:
        return None
    dtype = op.outputs[0].dtype
    return Plan([REPLICATED] * 2, [size], alone=0, make=lambda m: [m.make("Mul", [
        m.each(lambda tower: m.towers.count(tower, dtype)), m.constant(size.times, dtype, HOST)],
        HOST)])


def _times(sizes: Sequence[Any], rows: int, spec: Sharded | Size) -> int | None:
    """Entries an example has in a tensor of these sizes; None if unknown."""
    others = [size for at, size in enumerate(sizes) if at != rows]
    known = spec.times is not None and None not in others
    return math.prod(map(int, [spec.times, *others])) if known else None


@rule("DynamicStitch")
def dynamic_stitch(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The shape that a gradient takes with summed dimensions of size 1."""
    return moved(op, specs) if all(isinstance(spec, (Size, Replicated)) for spec in specs) else None


@rule("BroadcastArgs")
def broadcast_args(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The shape of a broadcast: rows beside rows, or beside a 1."""
    wide = [{*pair} - {1} for pair in zip(*_of_one_rank(op, specs))]
    rows = [at for at, pair in enumerate(wide) if any(isinstance(one, Sharded) for one in pair)]
    given = [spec for spec in specs if isinstance(spec, Size)]
    if len(rows) != 1 or len(wide[rows[0]]) > 1 or not given[0].times:
        return None
    return Plan([spec if isinstance(spec, Size) else REPLICATED for spec in specs],
                [given[0].moved(rows[0])])


@rule("Range")
def range_(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The numbers of the rows: each tower's start where the one before ends."""
    limit = specs[1]
    if not isinstance(limit, Size) or any(isinstance(specs[at], Size) for at in (0, 2)):
        return None
    if limit.blocks > 1:  # whose numbers are not those of the towers one after another
        return None
    if op.value(0) is None or int(op.value(0)) or op.value(2) is None or int(op.value(2)) != 1:
        return None

    def make(m: Any) -> list[list[Any]]:
        offsets = [m.earlier(1, op.outputs[0].dtype)]
        for count in m.parts(1)[:-1]:
            offsets.append(m.make("AddV2", [offsets[-1], count], None))
        own = m.copy([m.parts(0), m.parts(1), m.parts(2)], EACH)[0]
        return [m.make("AddV2", [own, offsets], EACH)]

    # Alone, a tower names its own rows.
    return Plan(specs, [limit.shards(0)], make=make, alone=0)
