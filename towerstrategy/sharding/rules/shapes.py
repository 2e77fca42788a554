"""Rules for shapes and sizes: numbers of rows, known for the batch and for each tower.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  A number of rows stays a
:class:`Size` as long as the towers' numbers add up to the batch's; else it is the batch's number.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules.entries import entries_of, outputs_of
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, once, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    Axes,
    ListOf,
    Replicated,
    Sharded,
    Size,
    Sizes,
    Spec,
    has_known_rows,
    in_one_piece,
)


@rule("Shape", "ShapeN")
def shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if any(isinstance(spec, ListOf) for spec in specs):
        return None
    gives: list[Spec] = [dataclasses.replace(
        spec.size, known=None if tensor.shape.rank is None else tuple(tensor.shape.as_list()))
        if isinstance(spec, Sharded) else REPLICATED for spec, tensor in zip(specs, op.inputs)]

    def whole(m: Any) -> list[Any]:
        dtype = op.outputs[0].dtype
        return [m.shape(index, dtype) if isinstance(spec, Sharded)
                else m.make("Shape", [m.part(index, 0)], 0, out_type=dtype)
                for index, spec in enumerate(specs)]

    if op.type == "Shape" and not isinstance(specs[0], Sharded):
        return Plan(specs, [REPLICATED])  # a tower's part of a sum has the shape of the sum
    return Plan(specs, gives, whole=whole, part=lambda m, tower: [
        m.own_shape(index, tower, op.outputs[0].dtype) for index in range(len(specs))])


@rule("Size")
def size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, static = specs[0], op.inputs[0].shape
    if not isinstance(spec, Sharded):
        return None if isinstance(spec, ListOf) else Plan(specs, [REPLICATED])
    result = Size(0, None if static.rank is None else _entries_an_example(
        static.as_list(), spec.dim, spec), spec.group)

    def whole(m: Any) -> list[Any]:
        return [m.towers.size(result, op.outputs[0].dtype) if has_known_rows(result)
                else m.towers.add_up(m.copy([m.parts(0)], EACH)[0], m.towers.merge)]

    return Plan(specs, [result], whole=whole)


@rule("Rank")
def rank(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return None if isinstance(specs[0], ListOf) else Plan(specs, [REPLICATED])


def _entries(tensor: tf.Tensor, spec: Spec) -> Any:
    """The values that are known in a tensor of integers, see :func:`entries_of`."""
    known = spec.known if isinstance(spec, Size) else _known_axes(spec) \
        if isinstance(spec, Axes) else None
    return entries_of(tensor) if known is None else np.array(known, object)


def static_sizes(op: Op, index: int, spec: Spec) -> list[Any] | None:
    """The sizes in an input that is a shape: ints, None if unknown, a :class:`Sharded` for rows."""
    entries = _entries(op.inputs[index], spec)
    if entries is None or entries.ndim != 1:
        return None
    sizes = list(entries)
    if isinstance(spec, Size) and spec.at < len(sizes):
        sizes[spec.at] = spec.shards(0)
    return sizes


def _shapes_of_one_rank(op: Op, specs: Sequence[Spec]) -> list[list[Any]]:
    """The input shapes, with ones in front up to a common rank; [] if one is unknown."""
    sizes = [static_sizes(op, index, spec) for index, spec in enumerate(specs)]
    known = [each for each in sizes if each is not None]
    rank = max(map(len, known), default=0)
    return [[1] * (rank - len(each)) + each for each in known] if len(known) == len(sizes) else []


@rule("BroadcastGradientArgs")
def broadcast_gradient_args(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The axes over which gradients of a broadcast are summed, whatever the number of rows.

    The whole batch's shapes are compared.  A dimension that has rows in both shapes is no axis; one
    that has rows in one shape and size 1 in the other is an axis of the other.  TensorFlow also
    sums over dimensions of size 1 in both shapes, such as the rows of a batch of one row.  That
    would be wrong here, as the other towers have no rows.
    """
    sizes = _shapes_of_one_rank(op, specs)
    if not sizes:
        return None
    (first, second), lengths = sizes, [tensor.shape[0] for tensor in op.inputs]
    gives = [_axes(first, second, len(first) - lengths[0]),
             _axes(second, first, len(first) - lengths[1])]
    values = [_known_axes(gives[0]), _known_axes(gives[1])]

    def whole(m: Any) -> list[Any]:
        dtype = op.outputs[0].dtype
        if values[0] is None or values[1] is None:
            outputs = m.copy([m.whole(0), m.whole(1)], HOST)
            return [_completed(m, output, axes) for output, axes in zip(outputs, gives)]
        return [m.constant(np.asarray(value, np.int64), dtype, None) for value in values]

    return Plan(specs, gives, whole=whole)


def _axes(shape: Sequence[Any], other: Sequence[Any], missing: int) -> Axes:
    """The axes for one operand of a broadcast; ``missing`` ones were put in front of its shape."""
    reduced: list[bool | None] = []
    for dim, (size, other_size) in enumerate(zip(shape, other)):
        if dim < missing:
            reduced.append(True)
        elif isinstance(size, Sharded) or isinstance(other_size, Sharded):
            both = isinstance(size, Sharded) and isinstance(other_size, Sharded)
            if both and size.group != other_size.group:
                reduced.append(None)
            elif isinstance(size, Sharded):
                reduced.append(False)
            else:
                reduced.append({1: True, None: None}.get(size, False))
        elif size is None or other_size is None and size == 1:
            reduced.append(None)
        else:
            reduced.append(size == 1 and other_size != 1)
    return Axes(tuple(reduced))


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


def moved_sizes(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan of an op that moves entries of shapes: slices, packs, concatenates, transposes.

    The spec itself is put in place of each number of rows in the inputs, and looked for in the
    outputs. An output without one is the same for all towers.
    """
    inputs = []
    for tensor, spec in zip(op.inputs, specs):
        entries = _entries(tensor, spec)
        if isinstance(spec, Size) and entries is not None:
            entries.flat[spec.at] = spec
        inputs.append(entries)
    gives: list[Spec] = []
    for entries in outputs_of(op.operation, inputs):
        indices = [] if entries is None else [
            at for at, entry in enumerate(entries.flat) if isinstance(entry, Size)]
        if entries is not None and 1 < len(indices) == entries.size:
            return Plan([REPLICATED] * len(specs), [Sizes(tuple(
                entry.moved(0) for entry in entries.flat))])
        if entries is None and op.type == "ConcatV2":
            size = _in_front(inputs, specs)
            return None if size is None else Plan(
                [spec if isinstance(spec, Size) else REPLICATED for spec in specs], [size])
        if entries is None or len(indices) > 1 or not indices and any(
                each is None for each in inputs):
            return None
        gives.append(_moved_size(entries, indices[0]) if indices else REPLICATED)
    return Plan([spec if isinstance(spec, Size) else REPLICATED for spec in specs], gives)


def _in_front(inputs: Sequence[Any], specs: Sequence[Spec]) -> Size | None:
    """The number of rows in a concatenation with a vector of unknown length that comes behind."""
    known = itertools.takewhile(lambda entries: entries is not None, inputs[:-1])
    rows = [(at, entry) for at, entry in enumerate(itertools.chain.from_iterable(known))
            if isinstance(entry, Size)]
    alone = len(rows) == 1 == sum(isinstance(spec, Size) for spec in specs)
    return rows[0][1].moved(rows[0][0]) if alone else None


def _moved_size(entries: Any, at: int) -> Size:
    """The spec of a shape with these entries, of which ``at`` is a :class:`Size`."""
    size = entries.flat[at].moved(at)
    return size if entries.ndim != 1 else dataclasses.replace(size, known=tuple(
        None if index == at else entry for index, entry in enumerate(entries)))


def product_of_size(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan of the product of a shape's sizes: the number of entries of a tensor."""
    spec = specs[0]
    if not isinstance(spec, Size) or op.out_rank() != 0 or op.rank(0) not in (0, 1):
        return None
    if op.rank(0) == 0:  # a scalar: nothing is reduced
        return Plan([spec, REPLICATED], [spec])
    sizes = static_sizes(op, 0, spec)
    times = None if sizes is None else _entries_an_example(sizes, spec.at, spec)
    return Plan([spec, REPLICATED], [Size(0, times, spec.group)])


def extreme_of_sizes(op: Op, spec: Size | Sizes) -> Plan | None:
    """The plan of the maximum or minimum of equal numbers of rows."""
    size = spec.each[0] if isinstance(spec, Sizes) else spec
    if op.out_rank() != 0 or op.inputs[0].shape != [1] if isinstance(spec, Size) \
            else len({*spec.each}) > 1:
        return None
    if isinstance(spec, Size):
        return Plan([spec, REPLICATED], [size.moved(0)])
    if not has_known_rows(size):
        return None
    dtype = op.outputs[0].dtype
    return Plan([REPLICATED] * 2, [size], alone=0, make=lambda m: [
        m.each(lambda tower: m.towers.size(size, dtype, tower))])


def _entries_an_example(sizes: Sequence[Any], rows: int, spec: Sharded | Size) -> int | None:
    """How many entries an example of a tensor of these sizes has; None if unknown."""
    others = [size for at, size in enumerate(sizes) if at != rows]
    known = spec.times is not None and None not in others
    return math.prod(map(int, [spec.times, *others])) if known else None


@rule("DynamicStitch")
def dynamic_stitch(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The shape of a gradient whose summed dimensions are kept, with size 1."""
    moves = all(isinstance(spec, (Size, Replicated)) for spec in specs)
    return moved_sizes(op, specs) if moves else None


@rule("BroadcastArgs")
def broadcast_args(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The shape of a broadcast of rows against rows, or against size 1."""
    pairs = [{*pair} - {1} for pair in zip(*_shapes_of_one_rank(op, specs))]
    rows = [at for at, pair in enumerate(pairs) if any(isinstance(one, Sharded) for one in pair)]
    sizes = [spec for spec in specs if isinstance(spec, Size)]
    if len(rows) != 1 or len(pairs[rows[0]]) > 1 or not sizes[0].times:
        return None
    return Plan([spec if isinstance(spec, Size) else REPLICATED for spec in specs],
                [sizes[0].moved(rows[0])])


@rule("Range")
def range_(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The numbers of the rows: each tower's begin where the numbers of the tower before end."""
    limit = specs[1]
    if not isinstance(limit, Size) or any(isinstance(specs[at], Size) for at in (0, 2)):
        return None
    if op.value(0) is None or int(op.value(0)) or op.value(2) is None or int(op.value(2)) != 1:
        return None
    if not in_one_piece(limit):  # a tower's rows do not have consecutive numbers
        return dataclasses.replace(once(op), gives=[limit.shards(0)])

    def make(m: Any) -> list[list[Any]]:
        ranges = m.copy([m.parts(0), m.parts(1), m.parts(2)], EACH)[0]
        return [m.make("AddV2", [ranges, m.offsets(1, op.outputs[0].dtype)], EACH)]

    # In strategy.run a tower numbers its own rows from 0, for use with its own rows.
    return Plan(specs, [limit.shards(0)], make=make, alone=0)
