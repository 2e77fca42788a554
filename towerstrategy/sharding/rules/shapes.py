"""Rules for shapes and sizes: numbers of rows, known for the batch and for each tower.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  A number of rows stays a
:class:`Size` as long as the towers' numbers add up to the batch's; else it is the batch's number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import is_plain
from towerstrategy.sharding.rules.entries import NoSize, entries_of, outputs_of
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, once, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    Axes,
    ListOf,
    Sharded,
    Size,
    Sizes,
    Spec,
    has_known_rows,
    in_one_piece,
)


@rule("Shape", "ShapeN")
def shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A tower's part of a sum has the shape of the sum."""
    if any(isinstance(spec, ListOf) for spec in specs):
        return None
    dtype = op.outputs[0].dtype
    gives: list[Spec] = [dataclasses.replace(
        spec.size, known=None if tensor.shape.rank is None else tuple(tensor.shape.as_list()))
        if isinstance(spec, Sharded) else REPLICATED for spec, tensor in zip(specs, op.inputs)]
    return Plan(
        specs, gives, whole=lambda m: [m.shape(index, dtype) if isinstance(spec, Sharded) else None
                                       for index, spec in enumerate(specs)],
        part=lambda m, tower: [m.own_shape(index, tower, dtype) for index in range(len(specs))])


@rule("Size")
def size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, static = specs[0], op.inputs[0].shape
    if not isinstance(spec, Sharded):
        return None if isinstance(spec, ListOf) else Plan(specs, [REPLICATED])
    sizes: list[Any] = [None] if static.rank is None else [
        spec.times if dim == spec.dim else size for dim, size in enumerate(static)]
    result = Size(0, None if None in sizes else math.prod(map(int, sizes)), spec.group)

    def whole(m: Any) -> list[Any]:
        return [m.towers.size(result, op.outputs[0].dtype) if has_known_rows(result)
                else m.towers.add_up(m.copy([m.parts(0)], EACH)[0], m.towers.merge)]

    return Plan(specs, [result], whole=whole)


@rule("Rank")
def rank(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return None if isinstance(specs[0], ListOf) else Plan(specs, [REPLICATED])


def _entries(tensor: tf.Tensor, spec: Spec) -> Any:
    """The values in a tensor, see :func:`entries_of`; a :class:`Size` for a number of rows."""
    known = spec.known if isinstance(spec, Size) else _known_axes(spec) \
        if isinstance(spec, Axes) else None
    entries = entries_of(tensor) if known is None else np.array(known, object)
    if isinstance(spec, Size) and entries is not None and spec.at < entries.size:
        entries.flat[spec.at] = spec.moved(0)
    return entries


def static_sizes(op: Op, index: int, spec: Spec) -> list[Any] | None:
    """The sizes in an input that is a shape: ints, None if unknown, a :class:`Size` for rows."""
    entries = _entries(op.inputs[index], spec)
    return None if entries is None or entries.ndim != 1 else list(entries)


@rule("BroadcastGradientArgs")
def broadcast_gradient_args(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The axes over which gradients of a broadcast are summed, whatever the number of rows.

    The whole batch's shapes are compared.  A dimension that has rows in both shapes is no axis; one
    that has rows in one shape and size 1 in the other is an axis of the other.  TensorFlow also
    sums over dimensions of size 1 in both shapes, such as the rows of a batch of one row.  That
    would be wrong here, as the other towers have no rows.
    """
    first, second = (static_sizes(op, index, spec) for index, spec in enumerate(specs))
    if first is None or second is None:
        return None
    gives = [_axes(first, second), _axes(second, first)]
    values = [_known_axes(gives[0]), _known_axes(gives[1])]

    def whole(m: Any) -> list[Any]:
        dtype = op.outputs[0].dtype
        if values[0] is None or values[1] is None:
            outputs = m.copy([m.whole(0), m.whole(1)], HOST)
            return [_completed(m, output, axes) for output, axes in zip(outputs, gives)]
        return [m.constant(np.asarray(value, np.int64), dtype, None) for value in values]

    return Plan(specs, gives, whole=whole)


def _axes(shape: list[Any], other: list[Any]) -> Axes:
    """The axes for one operand of a broadcast, which has this shape."""
    missing = max(len(other) - len(shape), 0)
    others = [1] * (len(shape) - len(other)) + other[missing:]
    return Axes((*[True] * missing, *map(_is_reduced, shape, others)))


def _is_reduced(size: Any, other: Any) -> bool | None:
    """Whether a dimension of one size is broadcast against one of another size; None if unknown."""
    if isinstance(size, Size):
        return None if isinstance(other, Size) and size.group != other.group else False
    return None if size is None or size == 1 and other is None else size == 1 and other != 1


def _completed(m: Any, computed: Any, axes: Axes) -> Any:
    """The axes that are known, and of the other dimensions those that TensorFlow computes."""
    def those(dims: Callable[[bool | None], bool]) -> Any:
        return m.constant([dim for dim, reduced in enumerate(axes.reduced) if dims(reduced)],
                          m.op.outputs[0].dtype, HOST)

    others = m.make("ListDiff", [computed, those(lambda reduced: reduced is not None)], HOST)
    return m.make("ConcatV2", [those(bool), others, m.constant(0, tf.int32, HOST)], HOST)


def _known_axes(axes: Axes) -> list[int] | None:
    """The axes as a list; None unless all are known."""
    return None if None in axes.reduced else [
        dim for dim, reduced in enumerate(axes.reduced) if reduced]


def computed_sizes(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan of an op that moves entries of shapes, or computes others from them.

    The numbers of rows among the inputs are looked for in the outputs. An output without one is the
    same for all towers.
    """
    inputs = list(map(_entries, op.inputs, specs))
    try:
        outputs = outputs_of(op.operation, inputs)
    except NoSize:
        return None
    takes = [spec if isinstance(spec, Size) else REPLICATED for spec in specs]
    gives: list[Spec] = []
    for entries in outputs:
        indices = [] if entries is None else [
            at for at, entry in enumerate(entries.flat) if isinstance(entry, Size)]
        if entries is not None and 1 < len(indices) == entries.size:
            return Plan([REPLICATED] * len(specs), [Sizes(tuple(entries.flat))])
        if entries is None or len(indices) > 1 or not indices and any(
                each is None for each in inputs):
            return None
        gives.append(_moved_size(entries, indices[0]) if indices else REPLICATED)
    return Plan(takes, gives)


def _moved_size(entries: Any, at: int) -> Size:
    """The spec of a shape with these entries, of which ``at`` is a :class:`Size`."""
    size = entries.flat[at].moved(at)
    return size if entries.ndim != 1 else dataclasses.replace(size, known=tuple(
        None if index == at else entry for index, entry in enumerate(entries)))


def extreme_of_sizes(op: Op, sizes: Sizes) -> Plan | None:
    """The plan of the maximum or minimum of equal numbers of rows."""
    size, dtype = sizes.each[0], op.outputs[0].dtype
    if len({*sizes.each}) > 1 or not has_known_rows(size) or op.out_rank() != 0:
        return None
    return Plan([REPLICATED] * 2, [size], alone=0, make=lambda m: [
        m.each(lambda tower: m.towers.size(size, dtype, tower))])


@rule("DynamicStitch", "BroadcastArgs", "ConcatOffset")
def of_shapes(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A gradient's shape, where summed dimensions have size 1; a broadcast's; places of inputs."""
    return computed_sizes(op, specs) if any(isinstance(spec, Size) for spec in specs) \
        and all(map(is_plain, specs)) else None


@rule("Range", light=True, size=1)
def range_(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The numbers of the rows: each tower's begin where the numbers of the tower before end."""
    limit = specs[1]
    if not isinstance(limit, Size) or any(isinstance(specs[at], Size) for at in (0, 2)) \
            or [op.value(0), op.value(2)] != [0, 1]:
        return None
    if not in_one_piece(limit):  # a tower's rows do not have consecutive numbers
        return dataclasses.replace(once(op), gives=[limit.shards(0)])

    def make(m: Any) -> list[list[Any]]:
        ranges = m.copy([m.parts(0), m.parts(1), m.parts(2)], EACH)[0]
        return [m.make("AddV2", [ranges, m.offsets(1, op.outputs[0].dtype)], EACH)]

    # In strategy.run a tower numbers its own rows from 0, for use with its own rows.
    return Plan(specs, [limit.shards(0)], make=make, alone=0)
