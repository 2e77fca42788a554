"""Shapes and sizes: numbers of rows, known for the batch and for each tower.

Goes in: an operation.  Comes out: its plan.  A number that counts rows stays a :class:`Size` as
long as the towers' add up to the batch's; else the batch's is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import HOST, Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Axes, ListOf, Partial, Sharded, Size, Spec


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
    return Plan(specs, gives, whole=whole)


@rule("Size")
def size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, static = specs[0], op.inputs[0].shape
    if not isinstance(spec, Sharded):
        return None if isinstance(spec, ListOf) else Plan(specs, [REPLICATED])
    times = None
    if static.rank is not None and spec.times is not None:
        others = [number for dim, number in enumerate(static) if dim != spec.dim]
        times = None if None in others else spec.times * int(np.prod(others, dtype=np.int64))

    def whole(m: Any) -> list[Any]:
        dtype = op.outputs[0].dtype
        parts = m.each(lambda tower: m.copy([m.part(0, tower)], tower)[0])
        if times is None or spec.group:
            return [m.towers.add_up(parts, m.towers.merge)]
        return [m.make("Mul", [m.towers.total(dtype), m.constant(times, dtype, None)], None)]

    return Plan(specs, [Size(0, times, spec.group)], whole=whole)


@rule("Rank")
def rank(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return None if isinstance(specs[0], ListOf) else Plan(specs, [REPLICATED])


def static_sizes(op: Op, index: int, spec: Spec) -> list[Any] | None:
    """The numbers of a shape: ints, None where unknown, the :class:`Sharded` where rows are."""
    known = _partial_value(op.inputs[index])
    if isinstance(spec, Size) and spec.known is not None:
        known = list(spec.known)
    if known is None:
        return None
    if isinstance(spec, Size) and spec.at < len(known):
        known[spec.at] = spec.shards(0)
    return known


def _partial_value(tensor: tf.Tensor) -> list[Any] | None:
    """The entries of a vector so far as they are known."""
    if tensor.shape.rank != 1 or tensor.shape[0] is None:
        return None
    known = entries_of(tensor)
    if known is not None and any(entry is not None for entry in known):
        return list(known)
    shape = _as_shape(tensor)
    return None if shape.rank is None else shape.as_list()


def _as_shape(tensor: tf.Tensor) -> tf.TensorShape:
    return _tf.value_as_shape(tensor)


@rule("BroadcastGradientArgs")
def broadcast_gradient_args(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Over which axes to sum; which of them does not depend on how many rows there are.

    The whole batch's shapes are compared.  A dimension with rows in both shapes is in neither;
    one with rows beside a 1 is in the other.  TensorFlow sums over what is 1 in both shapes, too,
    as are rows where the batch has one: not so here, as other towers have none.
    """
    sizes = [static_sizes(op, index, spec) for index, spec in enumerate(specs)]
    if sizes[0] is None or sizes[1] is None:
        return None
    rank = max(len(sizes[0]), len(sizes[1]))
    first, second = ([1] * (rank - len(size)) + size for size in sizes if size is not None)
    gives = [_axes(first, second, rank - len(sizes[0])), _axes(second, first, rank - len(sizes[1]))]
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


def position_in_slice(op: Op, at: int) -> int | None:
    """Where entry ``at`` of a vector is in a strided slice of it; -1: nowhere, None: unknown."""
    values = [op.value(index) for index in (1, 2, 3)]
    length = op.inputs[0].shape[0]
    if op.rank(0) != 1 or length is None or any(
            value is None or len(value) != 1 for value in values):
        return None
    if op.attr("ellipsis_mask") or op.attr("new_axis_mask"):
        return None
    begin, end, step = (int(value[0]) for value in values)
    if op.attr("shrink_axis_mask"):
        return 0 if begin % length == at else -1
    taken = list(range(length))[slice(None if op.attr("begin_mask") else begin,
                                      None if op.attr("end_mask") else end, step)]
    return taken.index(at) if at in taken else -1


def slice_of_size(op: Op, spec: Size) -> Plan | None:
    """A strided slice of a shape."""
    at = position_in_slice(op, spec.at)
    if at is None:
        return None
    takes: list[Spec] = [spec, REPLICATED, REPLICATED, REPLICATED]
    if at < 0:  # the towers' numbers are the batch's
        return Plan(takes, [REPLICATED])
    return Plan(takes, [spec.moved(at)])


def pack_of_sizes(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Numbers put together to a shape, one of which counts rows."""
    sizes = [(index, spec) for index, spec in enumerate(specs) if isinstance(spec, Size)]
    shape = op.outputs[0].shape
    if len(sizes) != 1 or op.rank(0) not in (0, 1) or not shape.is_fully_defined():
        return None
    index, spec = sizes[0]
    place = (index,) if op.rank(0) == 0 else tuple(
        np.insert([spec.at], op.attr("axis") % 2, index))
    return Plan(_sizes_and_wholes(specs), [spec.moved(int(np.ravel_multi_index(place, shape)))])


def _sizes_and_wholes(specs: Sequence[Spec]) -> list[Spec]:
    return [spec if isinstance(spec, Size) else REPLICATED for spec in specs]


def transpose_of_size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Shapes, one beside the other; entries are counted in the order of memory."""
    spec, order, shape = specs[0], op.value(1), op.inputs[0].shape
    if not isinstance(spec, Size) or order is None or not shape.is_fully_defined():
        return None
    places = np.arange(shape.num_elements()).reshape(shape).transpose([int(at) for at in order])
    return Plan([spec, REPLICATED], [spec.moved(places.ravel().tolist().index(spec.at))])


def split_of_size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A shape in pieces."""
    spec, sizes = specs[0], op.value(1)
    if not isinstance(spec, Size) or sizes is None or op.rank(0) != 1 or (sizes < 0).any():
        return None
    gives: list[Spec] = []
    start = 0
    for size in sizes:
        inside = start <= spec.at < start + int(size)
        gives.append(spec.moved(spec.at - start) if inside else REPLICATED)
        start += int(size)
    return Plan([spec, REPLICATED, REPLICATED], gives)


def piece_of_size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A slice of a shape."""
    spec, begin, size = specs[0], op.value(1), op.value(2)
    if not isinstance(spec, Size) or begin is None or size is None or len(begin) != 1:
        return None
    at = spec.at - int(begin[0])
    takes: list[Spec] = [spec, REPLICATED, REPLICATED]
    inside = at >= 0 and (int(size[0]) < 0 or at < int(size[0]))
    return Plan(takes, [spec.moved(at) if inside else REPLICATED])


def concat_of_sizes(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Pieces of shapes put together, one of which counts rows."""
    sizes = [(index, spec) for index, spec in enumerate(specs[:-1]) if isinstance(spec, Size)]
    if len(sizes) != 1 or op.rank(0) != 1:
        return None
    index, spec = sizes[0]
    before = [op.inputs[number].shape[0] for number in range(index)]
    if None in before:
        return None
    return Plan(_sizes_and_wholes(specs), [spec.moved(sum(before) + spec.at)])


def product_of_size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """How many entries a shape has."""
    spec = specs[0]
    if not isinstance(spec, Size) or op.out_rank() != 0 or op.rank(0) != 1:
        return None
    known = static_sizes(op, 0, spec)
    times = None
    if known is not None and spec.times is not None:
        others = [number for at, number in enumerate(known) if at != spec.at]
        times = None if None in others else spec.times * int(np.prod(others, dtype=np.int64))
    return Plan([spec, REPLICATED], [Size(0, times, spec.group)])


@rule("DynamicStitch")
def dynamic_stitch(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The shape that a gradient takes with summed dimensions of size 1."""
    count = len(specs) // 2
    indices = [op.value(index) for index in range(count)]
    sizes = [(index, spec) for index, spec in enumerate(specs) if isinstance(spec, Size)]
    if any(value is None for value in indices) or len(sizes) != 1 or any(
            isinstance(spec, (Sharded, Partial, ListOf)) for spec in specs):
        return None
    index, spec = sizes[0]
    if index < count:
        return None
    place = int(np.ravel(indices[index - count])[spec.at])
    for later in range(index - count + 1, count):
        if place in np.ravel(indices[later]):  # written over
            return None
    return Plan(specs, [spec.moved(place)])


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
        dtype = op.outputs[0].dtype
        parts, offset = [], m.earlier(1, dtype)
        for tower in range(len(m.towers)):
            own = m.copy([m.part(0, tower), m.part(1, tower), m.part(2, tower)], tower)[0]
            parts.append(m.make("AddV2", [own, offset], tower))
            offset = m.make("AddV2", [offset, m.part(1, tower)], None)
        return [parts]

    return Plan(specs, [limit.shards(0)], make=make)
