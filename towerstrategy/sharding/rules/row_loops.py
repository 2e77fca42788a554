"""Loops over the rows, as in ``tf.map_fn``: each tower runs the iterations of its own rows.

Goes in: a loop with the specs of what it starts with, or an op and the specs of its inputs.  Comes
out: the specs of the loop's variables in its body, or the op's plan.

An iteration may depend on its row, on what is the same for all rows, and on the row's number.  It
puts results into lists with an entry for each row, from which the gradient's loop takes them, or
adds them to a total.  Where iterations depend on each other otherwise, the loop runs once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeGuard

import tensorflow as tf

from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.lists import is_kept
from towerstrategy.sharding.rules.registry import Op, Plan, Rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    ROW,
    SUM,
    Index,
    InRow,
    MoreRows,
    Partial,
    Position,
    Replicated,
    Row,
    RowList,
    Sharded,
    Size,
    Spec,
    Total,
    has_known_rows,
    in_one_piece,
)


class DependsOnOthers(Exception):
    """It is not known that an iteration depends on its row alone."""


# The variables of a loop.


def with_counters(body: Any, starts: Sequence[tf.Tensor], specs: Sequence[Spec]) -> list[Spec]:
    """The specs of a loop's variables, :class:`Position` for those that may count rows.

    Args:
      body: the function that is an iteration.
      starts: the tensors that the variables are copies of before the loop.
      specs: their specs.
    """
    return [Position() if _is_zero(start) and not is_kept(body, index) else spec
            for index, (start, spec) in enumerate(zip(starts, specs))]


def variables(body: Any, starts: Sequence[tf.Tensor], counters: Sequence[Spec], more: Spec
              ) -> list[Spec] | None:
    """The specs of a loop's variables in its body; None if it does not run once for each row.

    ``more`` is the spec of its condition.
    """
    if not isinstance(more, MoreRows):
        return None
    rows, found = more.rows, list[Spec]()
    for index, (start, spec) in enumerate(zip(starts, counters)):
        if isinstance(spec, Position):
            spec = Position(rows)
        elif is_kept(body, index):
            spec = REPLICATED if isinstance(spec, Partial) else _plain(spec)
        elif isinstance(spec, RowList) or start.dtype == tf.variant and _is_empty(start):
            entries = _plain(spec) if isinstance(spec, RowList) else RowList(None, rows)
            if not isinstance(entries, RowList) or entries.rows != rows:
                return None
            spec = dataclasses.replace(entries, variable=index)
        elif start.dtype.is_integer or start.dtype.is_floating or start.dtype.is_complex:
            spec = Total(index, spec if isinstance(spec, Sharded) else None)
        else:
            return None
        found.append(spec)
    return found


def settled(before: Sequence[Spec], after: Sequence[Spec]) -> list[Spec] | None:
    """The specs that fit what an iteration makes of the variables; None if none do.

    What does not count the rows is a total.
    """
    popped = {spec.backwards for spec in after if isinstance(spec, RowList) and spec.grown < 0}
    if len(popped) > 1:
        return None
    specs: list[Spec] = []
    for index, (spec, now) in enumerate(zip(before, after)):
        if isinstance(spec, Position):
            counts = now == dataclasses.replace(spec, ahead=1)
            specs.append(dataclasses.replace(spec, backwards=False in popped) if counts
                         else Total(index))
            continue
        if isinstance(spec, RowList) and spec.element is None:
            spec = dataclasses.replace(spec, backwards=False in popped)
        if not _is_still(spec, now):
            return None
        specs.append(spec)
    return specs


def _is_still(spec: Spec, now: Spec) -> bool:
    """Whether a variable that does not count the rows has this spec after an iteration, too."""
    if isinstance(spec, RowList) and isinstance(now, RowList) and spec.variable is not None:
        return spec == now or now.variable == spec.variable and (
            now.grown > 0 or spec.element is not None)
    return spec == now or isinstance(spec, Replicated) and isinstance(now, Replicated)


def outside(before: Sequence[Spec], after: Sequence[Spec]) -> tuple[list[Spec], list[Spec]]:
    """The specs of the variables' first values, and of their last ones.

    All towers' last positions add up to the number of rows.
    """
    takes = [spec.shards or SUM if isinstance(spec, Total) else _plain(spec) for spec in before]
    gives = [spec.rows if isinstance(spec, Position) and spec.rows is not None
             else _plain(now) if isinstance(spec, RowList) else spec
             for spec, now in zip(takes, after)]
    return takes, gives


def _plain(spec: Spec) -> Spec:
    """The spec without what that of a list says of the iteration."""
    if not isinstance(spec, RowList):
        return spec
    return RowList(spec.element if spec.grown >= 0 else None, spec.rows, backwards=spec.backwards)


def _is_zero(tensor: tf.Tensor) -> bool:
    value = entries_of(tensor) if tensor.dtype in (tf.int32, tf.int64) else None
    return value is not None and value.ndim == 0 and bool(value == 0)


def _is_empty(tensor_list: tf.Tensor) -> bool:
    """Whether a list is new and has no entries."""
    return tensor_list.op.type == "EmptyTensorList" or (
        tensor_list.op.type == "TensorListReserve" and _is_zero(tensor_list.op.inputs[1]))


# The plans of ops.


def without_row_lists(specs: Sequence[Spec]) -> list[Spec]:
    """The specs, with lists of rows' entries as one list of all rows."""
    return [REPLICATED if isinstance(spec, RowList) else spec for spec in specs]


def plan_of(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan of an op on rows of a loop, or on lists of their entries; None if it has none.

    Raises:
      DependsOnOthers: the op is in a loop over rows and depends on more than the row.
    """
    own_rule = _RULES.get(op.type)
    plan = own_rule(op, specs) if own_rule is not None else None
    if plan is None and not op.is_call and any(isinstance(spec, Row) for spec in specs):
        plan = _of_the_row(op, specs)
        if plan is None:
            raise DependsOnOthers(op.type)
    return plan


def _of_the_row(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan of any op without a state: its outputs are the row's."""
    if op.has_state or op.handles or not all(map(_is_one_devices, specs)):
        return None
    return Plan(list(map(_one_devices, specs)), [ROW] * len(op.outputs))


def _is_one_devices(spec: Spec) -> bool:
    """Whether a tower has, or can make, what one device has in the iteration of the same row."""
    return spec == ROW or isinstance(spec, Replicated) or _is_row_number(spec)


def _one_devices(spec: Spec) -> Spec:
    return ROW if isinstance(spec, Row) else REPLICATED


def _is_row_number(spec: Spec) -> bool:
    return isinstance(spec, Position) and spec.rows is not None and not spec.backwards


def _new_reserved(op: Op, specs: Sequence[Spec]) -> Plan | None:
    shape, rows = specs
    if not isinstance(shape, Replicated) or not isinstance(rows, Size) or not _is_counted(rows):
        return None
    return Plan([REPLICATED, rows], [RowList(ROW, rows.moved(0), is_new=True, zeros=True)])


def _new_from_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, shape = specs
    if not isinstance(spec, Sharded) or spec.dim or not _is_counted(spec) \
            or not isinstance(shape, Replicated):
        return None
    return Plan([spec, REPLICATED], [RowList(ROW, spec.size, is_new=True)])


def _is_counted(spec: Sharded | Size) -> bool:
    return has_known_rows(spec) and in_one_piece(spec)


def _add(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The position of the next row, or a total, or the sums of lists' entries."""
    if any(isinstance(spec, RowList) for spec in specs):
        return _entry_by_entry(op, specs)
    first, others = specs[0], [spec for spec in specs if not isinstance(spec, Total)]
    if isinstance(first, Position) and len(specs) == 2 and not first.ahead:
        step = op.value(1)
        if step is not None and not step.ndim and step == 1:
            return Plan(specs, [dataclasses.replace(first, ahead=1)])
    total = next(spec for spec in specs if isinstance(spec, Total)) \
        if len(specs) == len(others) + 1 else None
    if total is None or not all(
            spec == InRow(total.shards) if total.shards else _is_one_devices(spec)
            for spec in others):
        return None
    return Plan([ROW if isinstance(spec, Position) else spec for spec in specs], [total])


def _subtract(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return _add(op, specs) if isinstance(specs[0], Total) else None


def _less(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Whether there is a row at a position."""
    at, size = specs
    if not isinstance(at, Position) or at.ahead or not isinstance(size, Size) \
            or not _is_counted(size):
        return None
    rows = size.moved(0)
    return Plan(specs, [MoreRows(rows)]) if at.rows in (None, rows) else None


def _and(op: Op, specs: Sequence[Spec]) -> Plan | None:
    alike = isinstance(specs[0], MoreRows) and specs[0] == specs[1]
    return Plan(specs, specs[:1]) if alike else None


def _identity(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if isinstance(spec, RowList):  # if it is not passed, the copy has no whole list
        return Plan(specs, [dataclasses.replace(spec, is_new=False)], passes=True)
    return Plan(specs, specs, passes=True)


def _index(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """An index such as [i, 0], where i is the position."""
    first = specs[0]
    if not isinstance(first, Position) or first.backwards or op.out_rank() != 1 \
            or not all(isinstance(spec, Replicated) for spec in specs[1:]):
        return None
    return Plan(specs, [Index(first.rows, first.ahead)])


def _row_of(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The row at the position, as in ``x[i]`` or ``x[i, 0]``."""
    spec, *index = specs
    fits = isinstance(spec, Sharded) and spec.dim == 0 and _is_slice_of_row(op, index, spec.size)
    return Plan(specs, [ROW]) if fits else None


def _gradient_of_row(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size, *index, gradient = specs
    if not isinstance(size, Size) or size.at or gradient != ROW \
            or not _is_slice_of_row(op, index, size.moved(0)):
        return None
    return Plan(specs, [InRow(size.shards(0))])


def _is_slice_of_row(op: Op, index: Sequence[Spec], rows: Size) -> bool:
    """Whether the begin, end and strides of a strided slice are those of one row."""
    strides = op.value(3)
    masks = (op.attr(f"{name}_mask") & 1 for name in ("begin", "end", "ellipsis", "new_axis"))
    return _is_counted(rows) and not any(masks) and strides is not None and strides[0] == 1 \
        and list(index[:2]) == [Index(rows, 0), Index(rows, 1)] and index[2] == REPLICATED


def _set(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The entry of the row is put at its position."""
    entries, at, entry = specs
    if not isinstance(entries, RowList) or entries.element not in (None, ROW) \
            or at != Position(entries.rows) or not _is_one_devices(entry):
        return None
    grown = 1 if entries.element is None else entries.grown
    return Plan([entries, at, _one_devices(entry)],
                [dataclasses.replace(entries, element=ROW, is_new=False, grown=grown)])


def _push(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """An entry is put behind those of the rows before; the gradient's loop takes it from there."""
    entries, entry = specs
    entry = REPLICATED if isinstance(entry, Replicated) else entry
    if not isinstance(entries, RowList) or entries.element is not None \
            or not isinstance(entry, (Index, Size)) and not _is_one_devices(entry):
        return None
    return Plan([entries, entry], [dataclasses.replace(entries, element=entry, grown=1)])


def _get(op: Op, specs: Sequence[Spec]) -> Plan | None:
    entries, at, shape = specs
    if not isinstance(entries, RowList) or at != Position(entries.rows) \
            or entries.element != ROW or entries.grown < 0 \
            or not isinstance(shape, Replicated) and shape != ROW:
        return None
    return Plan(specs, [ROW])


def _pop(op: Op, specs: Sequence[Spec]) -> Plan | None:
    entries, shape = specs
    if not _is_full(entries) or entries.variable is None \
            or not isinstance(shape, Replicated) and shape != ROW:
        return None
    return Plan(specs, [dataclasses.replace(entries, grown=-1), entries.element or ROW])


def _stack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The rows.  A tower without any needs the shape of a row."""
    entries, shape = specs[0], entries_of(op.inputs[1])
    if not _is_full(entries) or entries.element != ROW or entries.variable is not None:
        return None
    if op.outputs[0].dtype == tf.variant or op.attr("num_elements") >= 0 or shape is None \
            or not shape.ndim or any(size is not None and size < 0 for size in shape):
        return None
    return Plan([entries, REPLICATED], [entries.rows.shards(0)])


def _length(op: Op, specs: Sequence[Spec]) -> Plan | None:
    entries, = specs
    if _is_full(entries):
        return Plan(specs, [entries.rows])
    if not isinstance(entries, RowList) or entries.variable is None or entries.grown < 0:
        return None
    return Plan(specs, [Position(entries.rows, entries.grown, entries.backwards)])


def _is_full(spec: Spec) -> TypeGuard[RowList]:
    """Whether it is a list that has an entry for each row, also if an iteration is the last."""
    return isinstance(spec, RowList) and spec.element is not None and not spec.grown


def _resize(op: Op, specs: Sequence[Spec]) -> Plan | None:
    entries, size = specs
    if not _is_full(entries):
        return None
    if size == Position(entries.rows):  # without the rows of earlier iterations, and this one
        return Plan(specs, [dataclasses.replace(entries, grown=-1)])
    fits = isinstance(size, Size) and size.moved(0) == entries.rows
    return Plan(specs, [dataclasses.replace(entries, is_new=False)]) if fits else None


def _element_shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return Plan(specs, [REPLICATED]) if isinstance(specs[0], RowList) else None


def _entry_by_entry(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Sums of lists.  An iteration adds to the entry of its row only."""
    lists = [spec for spec in specs if _is_full(spec)]
    if len(lists) < len(specs) or any(spec.rows != lists[0].rows for spec in lists):
        return None
    variable = next((spec.variable for spec in lists if spec.variable is not None), None)
    zeros = [spec.zeros for spec in lists]
    if any(spec.element != ROW for spec in lists) \
            or variable is not None and zeros.count(False) != 1:
        return None
    return Plan(specs, [RowList(ROW, lists[0].rows, variable=variable, zeros=all(zeros))])


def _zeros(op: Op, specs: Sequence[Spec]) -> Plan | None:
    entries, = specs
    return Plan(specs, [RowList(ROW, entries.rows, zeros=True)]) if _is_full(entries) else None


OF_ROWS = {Index, InRow, MoreRows, Position, Row, RowList, Total}
NEW_LISTS: dict[str, Rule] = {
    "TensorListFromTensor": _new_from_tensor, "TensorListReserve": _new_reserved}
_RULES: dict[str, Rule] = NEW_LISTS | {
    "Add": _add, "AddN": _add, "AddV2": _add, "Identity": _identity, "Less": _less,
    "LogicalAnd": _and, "Pack": _index, "StridedSlice": _row_of,
    "StridedSliceGrad": _gradient_of_row, "TensorListElementShape": _element_shape,
    "TensorListGetItem": _get, "TensorListLength": _length, "TensorListPopBack": _pop,
    "TensorListPushBack": _push, "TensorListResize": _resize, "TensorListSetItem": _set,
    "Sub": _subtract, "TensorListStack": _stack, "ZerosLike": _zeros,
}
