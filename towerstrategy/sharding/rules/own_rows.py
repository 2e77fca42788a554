"""Rows that are named by number, as in ``tf.gather_nd(logits, tf.stack([tf.range(n), y], 1))``.

Goes in: an operation with indices.  Comes out: its plan, if each index names the very row that it
is in, or that ``tf.where`` has chosen: a tower needs no rows of others then, and counts its own
from its first one.  What indices name is read off the operations that made them, from ``tf.range``
or ``tf.where`` on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.elementwise import AS_IT_IS
from towerstrategy.sharding.rules.entries import dimensions_in, sizes_of
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, plan_of, rule
from towerstrategy.sharding.rules.scaling import is_zero
from towerstrategy.sharding.spec import REPLICATED, Chosen, Sharded, Size, Spec


class _Counted(NamedTuple):
    """Numbers of rows, or of chosen positions, in order."""

    at: Sharded = Sharded(0)  # where a row, or a chosen position, has its number, and how often
    chosen: str = ""  # "rows" or "positions": what has been chosen, if anything


def in_own_rows(op: Op, specs: Sequence[Spec], indices: int, batch: int, beside: Sequence[int] = (),
                column: int | None = None, into: bool = False) -> Plan | None:
    """The plan of an operation whose indices say nothing but the rows that they are in.

    Args:
      op: the operation.
      specs: the specs of its inputs.
      indices: which input these are.
      batch: the input whose rows they name, or the shape, or number, of rows that are made.
      beside: inputs of which an index has an entry each.
      column: where in the indices' last dimension rows are named; None: there is no such dimension.
      into: whether what is made has the rows that are named; else it is beside the indices.
    """
    spec, rows, tensor = specs[indices], specs[batch], op.inputs[indices]
    rows = rows.shards(rows.at) if isinstance(rows, Size) else rows
    if not isinstance(spec, Sharded):
        return None
    found = _counted(_unguarded(tensor, op.inputs[batch]), column)
    group = spec.group if isinstance(spec.group, Chosen) else None
    if found is None or found.at != Sharded(spec.dim, spec.times) \
            or bool(found.chosen) != bool(group):
        return None
    times = group.times if group and found.chosen == "positions" else 1
    if spec.group and not group or rows != Sharded(0, times) or times is None \
            or column is not None and (tensor.shape[-1] is None
                                       or tensor.shape.rank == spec.dim + 1):
        return None
    takes = [spec if index in beside else each if index in (indices, batch) else REPLICATED
             for index, each in enumerate(specs)]
    if any(isinstance(each, Sharded) and each != wanted for each, wanted in zip(specs, takes)):
        return None

    def make(m: Any) -> Any:
        given = [m.parts(index) for index in range(len(takes))]
        given[indices] = m.make("Sub", [given[indices], _first(
            m, times, tensor.dtype, column, tensor.shape[-1:])], EACH)
        return m.copy(given, EACH)

    return Plan(takes, [rows if into else spec], make=make, alone=0)


def _unguarded(indices: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """``i`` of ``where(rows > 1, i, 0)``, as ``tf.vectorized_map`` writes it, of as many rows."""
    if indices.op.type != "SelectV2":
        return indices
    condition, own, other = indices.op.inputs
    guards = condition.op.type == "Greater" and _tf.constant_value(other) == 0 \
        and _tf.constant_value(condition.op.inputs[1]) == 1 \
        and dimensions_in(condition.op.inputs[0], batch) == [0]
    return own if guards else indices


def _first(m: Any, times: int, dtype: tf.DType, column: int | None, columns: Any) -> Any:
    """The number of each tower's first position, of so many an example, in a column of several."""
    first = m.each(lambda tower: m.towers.offset(tower, dtype))
    if times != 1:
        first = m.make("Mul", [first, m.constant(times, dtype, HOST)], HOST)
    return first if column is None else m.each(
        lambda tower: m.towers.vector(tower, first[tower], column, columns[0], 0))


@rule("Where")
def where(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower chooses among its own positions, and says their numbers in the batch."""
    spec, shape = specs[0], op.inputs[0].shape
    if not isinstance(spec, Sharded) or spec.dim or spec.group or spec.times is None \
            or not shape.rank or spec.times > 1 < shape.rank:
        return None
    times, rank = spec.times, shape.rank
    group = op.notes.setdefault(("chosen", _mask(op)), Chosen(
        None if None in shape[1:] else times * math.prod(shape[1:])))
    return Plan(specs, [Sharded(0, 1, group)],
                make=lambda m: [m.make("AddV2", [m.copy([m.parts(0)], EACH)[0], _first(
                    m, times, tf.int64, 0, [rank])], EACH)], alone=0)


def _mask(op: Op) -> Any:
    """What chooses, of whatever shape: the same mask chooses the same."""
    mask = op.inputs[0]
    while mask.op.type in (*AS_IT_IS, "Reshape"):
        mask = mask.op.inputs[0]
    return _same(mask, 4)


def _same(tensor: tf.Tensor, depth: int) -> Any:
    """The same for what is computed alike, as ``y > 0`` where it is written twice."""
    op = Op(tensor.op)
    if not depth or op.is_stateful or op.type == "Placeholder":
        return tensor.name
    return (op.type, op.definition.attributes, tensor.value_index,
            *(_same(each, depth - 1) for each in op.inputs))


def _counted(tensor: tf.Tensor, column: int | None) -> _Counted | None:
    """Where it counts: its entry at position i of that dimension is i // times."""
    if tensor.dtype not in (tf.int32, tf.int64) or tensor.shape.rank is None:
        return None
    if column is not None and tensor.shape[-1] == 1:
        column = None
    make = _MADE.get(tensor.op.type)
    return None if make is None else make(tensor.op, column)


def _range(operation: tf.Operation, _: int | None) -> _Counted | None:
    start, _, step = map(_tf.constant_value, operation.inputs)
    return _Counted() if start == 0 and step == 1 else None


def _chosen(operation: tf.Operation, column: int | None) -> _Counted | None:
    if operation.inputs[0].shape.rank == 1:
        return _Counted(chosen="positions")
    return _Counted(chosen="rows") if column == 0 else None


def _moved(operation: tf.Operation, column: int | None) -> _Counted | None:
    """The numbers go where rows would, if columns stay the same."""
    op = Op(operation)
    found = _counted(op.inputs[0], _picked(op) if column is None else column)
    if found is None:
        return None
    if column is not None:
        before, after = (sizes_of(tensor) or [None] for tensor in (op.inputs[0], op.outputs[0]))
        if op.type == "StridedSlice" or before[-1] is None or before[-1] != after[-1]:
            return None
    plan = plan_of(op, [found.at, *[REPLICATED] * (len(op.inputs) - 1)])
    given = plan.gives[0] if plan is not None else REPLICATED
    return found._replace(at=given) if isinstance(given, Sharded) and not given.group else None


def _picked(op: Op) -> int | None:
    """The column that a slice takes of a matrix of places, as ``tf.where(mask)[:, 0]``."""
    if op.type != "StridedSlice" or op.rank(0) != 2:
        return None
    begin = op.value(1)
    one = op.attr("shrink_axis_mask") == 2 and not op.attr("new_axis_mask")
    return int(begin[1]) if one and begin is not None and begin.shape == (2,) else None


def _not_negative(operation: tf.Operation, column: int | None) -> _Counted | None:
    """As gradients of sums of segments take their numbers."""
    return _counted(operation.inputs[0], column) if is_zero(operation.inputs[1]) else None


def _packed(operation: tf.Operation, column: int | None) -> _Counted | None:
    last = operation.outputs[0].shape.rank - 1
    if column is None or operation.get_attr("axis") not in (-1, last):
        return None
    return _counted(operation.inputs[column], None)


def _joined(operation: tf.Operation, column: int | None) -> _Counted | None:
    *parts, axis = operation.inputs
    axis = _tf.constant_value(axis)
    if column is None or axis is None or int(axis) not in (-1, operation.outputs[0].shape.rank - 1):
        return None
    for part in parts:
        if part.shape.rank is None or part.shape[-1] is None:
            return None
        if column < part.shape[-1]:
            return _counted(part, column)
        column -= part.shape[-1]
    return None


_MADE: dict[str, Callable[[tf.Operation, int | None], _Counted | None]] = {
    "Range": _range, "Where": _chosen, "Maximum": _not_negative, "Pack": _packed,
    "ConcatV2": _joined, **dict.fromkeys((
        *AS_IT_IS, "Cast", "Reshape", "Squeeze", "ExpandDims", "StridedSlice", "Tile"), _moved)}
