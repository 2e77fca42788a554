"""Indices that name their own row, as in ``tf.gather_nd(logits, tf.stack([tf.range(n), y], 1))``.

Goes in: an op with indices.  Comes out: its plan, if each index names the row that it is in, a
position of it (``tf.range(n) * positions + position``), or a row that ``tf.where`` chose.  Then a
tower needs no rows of other towers, and subtracts the number of its first row from its indices.
What indices name is read off the ops that made them, from ``tf.range`` or ``tf.where`` on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.entries import dimensions_in, entries_of, sizes_of
from towerstrategy.sharding.rules.families import AS_IT_IS
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, plan_of, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    Chosen,
    Sharded,
    Size,
    Spec,
    in_one_piece,
    of_batch,
)


class _Column(NamedTuple):
    """The entries at a position along a dimension, such as the first numbers of all indices."""

    dim: int
    place: int


class _RowNumbers(NamedTuple):
    """Ascending numbers of rows, or of positions of rows, in a tensor.

    Attributes:
      at: the dimension along which they ascend, and how often each row is repeated.
      chosen: "rows" or "positions" (of a flat mask) if ``tf.where`` chose them.
      times: the number of positions of a row; None if unknown.
      last: the last position of a row that is named; None if unknown, so that it may be another's.
    """

    at: Sharded = Sharded(0)
    chosen: str = ""
    times: int | None = 1
    last: int | None = 0


def in_own_rows(op: Op, specs: Sequence[Spec], indices: int, batch: int, beside: Sequence[int] = (),
                column: int | None = None, into: bool = False) -> Plan | None:
    """The plan of an op whose indices name their own rows only; None if they may name others.

    Args:
      op: the operation.
      specs: the specs of its inputs.
      indices: the input that has the indices.
      batch: the input whose rows are named; for a scatter, the shape, or number, of these rows.
      beside: the inputs that have one entry for each index.
      column: the position of row numbers in the indices' last dimension; None without this one.
      into: whether the output has the rows that are named; else it has one entry for each index.
    """
    spec, rows, tensor = specs[indices], specs[batch], op.inputs[indices]
    rows = rows.shards(rows.at) if isinstance(rows, Size) else rows
    if not isinstance(spec, Sharded):
        return None
    numbers = _row_numbers(_unguarded(tensor, op.inputs[batch]), None if column is None
                           or tensor.shape.rank is None else _Column(tensor.shape.rank - 1, column))
    group = spec.group if isinstance(spec.group, Chosen) else None
    if numbers is None or numbers.at != Sharded(spec.dim, spec.times) \
            or bool(numbers.chosen) != bool(group):
        return None
    gives: list[Spec] = [rows if into else spec]
    if numbers.last is None and isinstance(rows, Sharded) and of_batch(rows) and of_batch(spec):
        # In strategy.run, whoever writes this means positions of the row.
        return Plan([REPLICATED] * len(specs), gives, once=True, alone=0)
    times = group.times if group and numbers.chosen == "positions" else numbers.times
    name = group.batch if group else spec.group
    if not in_one_piece(spec) or rows != Sharded(0, times, name) or times is None \
            or column is not None and (tensor.shape[-1] is None
                                       or tensor.shape.rank == spec.dim + 1):
        return None
    takes = [spec if index in beside else each if index in (indices, batch) else REPLICATED
             for index, each in enumerate(specs)]
    if any(isinstance(each, Sharded) and each != wanted for each, wanted in zip(specs, takes)):
        return None

    def make(m: Any) -> Any:
        inputs = [m.parts(index) for index in range(len(takes))]
        inputs[indices] = m.make("Sub", [inputs[indices], _offsets(
            m, rows, tensor.dtype, column, tensor.shape[-1:])], EACH)
        return m.copy(inputs, EACH)

    return Plan(takes, gives, make=make, alone=0)


def _unguarded(indices: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """``i`` of ``where(rows > 1, i, 0)``, which ``tf.vectorized_map`` writes for ``i``."""
    if indices.op.type != "SelectV2":
        return indices
    condition, guarded, other = indices.op.inputs
    guards = condition.op.type == "Greater" and condition.shape.rank == other.shape.rank == 0 \
        and _tf.constant_value(other) == 0 and _tf.constant_value(condition.op.inputs[1]) == 1 \
        and dimensions_in(condition.op.inputs[0], batch) == [0]
    return guarded if guards else indices


def _offsets(m: Any, spec: Sharded, dtype: tf.DType, column: int | None, columns: Any) -> Any:
    """The position of each tower's first row, as an index: in its column, 0 in others."""
    first = m.each(lambda tower: m.towers.start(spec, dtype, tower))
    return first if column is None else m.each(
        lambda tower: m.towers.vector(tower, first[tower], column, columns[0], 0))


@rule("Where")
def where(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower looks for true entries in its own rows, and adds the number of its first row."""
    spec, shape = specs[0], op.inputs[0].shape
    if not isinstance(spec, Sharded) or spec.dim or not isinstance(spec.group, str) \
            or spec.times is None or not shape.rank or spec.times > 1 < shape.rank:
        return None
    times, rank = spec.times, shape.rank
    group = op.notes.setdefault(("chosen", _mask_key(op)), Chosen(
        None if None in shape[1:] else times * math.prod(shape[1:]), spec.group))
    return Plan(specs, [Sharded(0, 1, group)],
                make=lambda m: [m.make("AddV2", [m.copy([m.parts(0)], EACH)[0], _offsets(
                    m, spec, tf.int64, 0, [rank])], EACH)], alone=0)


def _mask_key(op: Op) -> Any:
    """A key that is equal for ops with the same mask, whatever its shape: they choose the same."""
    mask = op.inputs[0]
    while mask.op.type in (*AS_IT_IS, "Reshape"):
        mask = mask.op.inputs[0]
    return _expression(mask, 4)


def _expression(tensor: tf.Tensor, depth: int) -> Any:
    """A key that is equal for equal expressions, such as ``y > 0`` where it is written twice."""
    op = Op(tensor.op)
    if not depth or op.is_stateful or op.type == "Placeholder":
        return tensor.name
    return (op.type, op.definition.attributes, tensor.value_index,
            *(_expression(each, depth - 1) for each in op.inputs))


def _row_numbers(tensor: tf.Tensor, column: _Column | None = None) -> _RowNumbers | None:
    """The row numbers in a tensor, or in a column of it; None if it may hold anything else.

    Along dimension ``at.dim`` position i has the number ``i // at.times``.
    """
    if tensor.dtype not in (tf.int32, tf.int64) or tensor.shape.rank is None:
        return None
    if column is not None and (sizes_of(tensor) or tensor.shape)[column.dim] == 1:
        column = None
    follow = _FOLLOW.get(tensor.op.type)
    return None if follow is None else follow(tensor.op, column)


def _range(operation: tf.Operation, _: _Column | None) -> _RowNumbers | None:
    start, _, step = map(_tf.constant_value, operation.inputs)
    return _RowNumbers() if start == 0 and step == 1 else None


def _where(operation: tf.Operation, column: _Column | None) -> _RowNumbers | None:
    if operation.inputs[0].shape.rank == 1:
        return _RowNumbers(chosen="positions")
    return _RowNumbers(chosen="rows") if column is not None and column.place == 0 else None


def _move(operation: tf.Operation, column: _Column | None) -> _RowNumbers | None:
    """The op moves row numbers as its rule moves rows; columns have to stay as they are."""
    op = Op(operation)
    before = _column_of_slice(op) if column is None else _column_before(op, column)
    numbers = None if column is not None and before is None else _row_numbers(op.inputs[0], before)
    return _at_output(op, 0, numbers)


def _at_output(op: Op, place: int, numbers: _RowNumbers | None) -> _RowNumbers | None:
    """The row numbers of input ``place``, which the op moves as its rule moves rows."""
    if numbers is None:
        return None
    if op.type == "BroadcastTo":  # has rows where its own spec says so
        return numbers._replace(at=numbers.at.at(
            numbers.at.dim + op.outputs[0].shape.rank - op.inputs[0].shape.rank))
    specs: list[Spec] = [REPLICATED] * len(op.inputs)
    specs[place] = numbers.at
    plan = plan_of(op, specs)
    result = plan.gives[0] if plan is not None else REPLICATED
    return numbers._replace(at=result) if isinstance(result, Sharded) and of_batch(result) else None


def _column_before(op: Op, column: _Column) -> _Column | None:
    """The column of an op's input that it moves to ``column``."""
    if op.type == "Transpose":
        order = entries_of(op.inputs[1])
        return None if order is None or order[column.dim] is None else column._replace(
            dim=int(order[column.dim]))
    before, after = (sizes_of(tensor) or [None] for tensor in (op.inputs[0], op.outputs[0]))
    stays = column.dim == len(after) - 1 and before and None is not before[-1] == after[-1]
    return column._replace(dim=len(before) - 1) if stays and op.type != "StridedSlice" else None


def _column_of_slice(op: Op) -> _Column | None:
    """The column that a slice takes of a matrix, as in ``tf.where(mask)[:, 0]``."""
    if op.type != "StridedSlice" or op.rank(0) != 2:
        return None
    begin = op.value(1)
    one = op.attr("shrink_axis_mask") == 2 and not op.attr("new_axis_mask")
    if not one or begin is None or begin.shape != (2,):
        return None
    columns, place = op.inputs[0].shape[1], int(begin[1])
    return None if columns is None and place < 0 else _Column(
        1, place if place >= 0 else place % columns)


def _multiplied(operation: tf.Operation, column: _Column | None) -> _RowNumbers | None:
    """The first position of each row: row numbers times the number of positions."""
    for at, tensor in enumerate(operation.inputs if column is None else ()):
        numbers = _at_output(Op(operation), at, _row_numbers(tensor))
        if numbers is None:
            continue
        factor = operation.inputs[1 - at]
        times = _number_in(factor)
        if times is not None and numbers.times is not None \
                and (times == 1 or not numbers.chosen):
            return None if times < 1 or numbers.last is None else numbers._replace(
                times=numbers.times * times, last=numbers.last * times)
        if not numbers.chosen and factor.shape.rank == 0:
            return numbers._replace(times=None, last=None)
    return None


def _number_in(tensor: tf.Tensor) -> int | None:
    """The number that each entry of a tensor is; None if they may differ."""
    kind = tensor.op.type
    if kind in ("OnesLike", "ZerosLike"):
        return int(kind == "OnesLike")
    if kind in ("Fill", "BroadcastTo", "Cast", "Reshape", "ExpandDims", *AS_IT_IS):
        return _number_in(tensor.op.inputs[int(kind == "Fill")])
    entries = entries_of(tensor)
    numbers = {*entries.flat} if entries is not None else set()
    return int(numbers.pop()) if len(numbers) == 1 and None not in numbers else None


def _added(operation: tf.Operation, column: _Column | None) -> _RowNumbers | None:
    """Positions of rows: the first position of each plus others, which stay in it if they can.

    Also ``tf.maximum(numbers, 0)``, as in the gradients of segment sums.
    """
    for at, tensor in enumerate(operation.inputs if column is None else ()):
        other = operation.inputs[1 - at]
        numbers = _at_output(Op(operation), at, _row_numbers(tensor))
        if numbers is None:
            continue
        if _number_in(other) == 0:
            return numbers
        if numbers.chosen or numbers.times == 1 or operation.type == "Maximum":
            continue
        added = entries_of(other)
        if numbers.times is None or added is None or None in added:
            last = numbers.times - 1 if numbers.last == 0 and numbers.times is not None \
                and _are_positions(other, numbers.times) else None
            return numbers._replace(last=last)
        last = None if numbers.last is None else numbers.last + max(added.flat, default=0)
        inside = min(added.flat, default=0) >= 0 and (last is None or last < numbers.times)
        return numbers._replace(last=last) if inside else None
    return None


def batch_dims(gather: Op) -> int | None:
    """How many dimensions a gather's table and indices share; None if that is unknown."""
    count, rank = gather.attr("batch_dims"), gather.rank(1)
    return count if count >= 0 else None if rank is None else count + rank


def _are_positions(tensor: tf.Tensor, size: int) -> bool:
    """Whether a gather by rows, which checks them, takes these numbers as positions below ``size``.

    So they are the indices in its gradient, that of ``tf.gather(x, positions, batch_dims=1)``.
    """
    for consumer in map(Op, tensor.consumers()):
        if consumer.type == "GatherV2" and consumer.inputs[1] is tensor \
                and batch_dims(consumer):
            axes, sizes = consumer.axes(2, consumer.rank(0)), sizes_of(consumer.inputs[0])
            if axes is not None and sizes is not None and sizes[axes[0]] == size:
                return True
    return False


def _pack(operation: tf.Operation, column: _Column | None) -> _RowNumbers | None:
    axis = operation.get_attr("axis") % operation.outputs[0].shape.rank
    if column is None:
        column = _Column(axis, 0)  # the only one, unless there are several inputs
        if len(operation.inputs) > 1:
            return None
    numbers = _row_numbers(operation.inputs[column.place]) if axis == column.dim else None
    return _at_output(Op(operation), column.place, numbers)


def _concat(operation: tf.Operation, column: _Column | None) -> _RowNumbers | None:
    *parts, axis = operation.inputs
    axis = _tf.constant_value(axis)
    if column is None or axis is None \
            or int(axis) % operation.outputs[0].shape.rank != column.dim:
        return None
    place = column.place
    for part in parts:
        size = (sizes_of(part) or [None])[column.dim if part.shape.rank else 0]
        if size is None:
            return None
        if place < size:
            return _row_numbers(part, column._replace(place=place))
        place -= size
    return None


_FOLLOW: dict[str, Callable[[tf.Operation, _Column | None], _RowNumbers | None]] = {
    "Range": _range, "Where": _where, "Pack": _pack, "Mul": _multiplied,
    **dict.fromkeys(("Add", "AddV2", "Maximum"), _added),
    "ConcatV2": _concat, **dict.fromkeys((
        *AS_IT_IS, "Cast", "Reshape", "Squeeze", "ExpandDims", "StridedSlice", "Tile", "Transpose",
        "BroadcastTo"), _move)}
