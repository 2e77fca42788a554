"""Loops over the rows, as in ``tf.map_fn``: each tower runs the iterations of its own rows.

Goes in: a loop with the specs of what it starts with, or an op on rows and the specs of its inputs.
Comes out: the specs of the loop's variables in its body, or the op's plan.

An iteration may depend on its row, on what is the same for all rows, and on the row's number.  It
puts results into lists with an entry for each row, from which the gradient's loop takes them, or
adds them to a total.  Where iterations depend on each other otherwise, the loop runs once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.families import AS_IT_IS
from towerstrategy.sharding.rules.registry import Op, Plan, Rule, plan_of as plan_by_table
from towerstrategy.sharding.spec import (
    REPLICATED,
    ROW,
    SUM,
    Index,
    InRow,
    ListOf,
    MoreRows,
    Partial,
    Position,
    Replicated,
    Row,
    Sharded,
    Size,
    Spec,
    Total,
    has_known_rows,
    in_one_piece,
)

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

    ``more`` is the spec of its condition.  A loop that takes entries out of lists goes from the row
    that was put in last to the first one.
    """
    specs = list(map(_plain, counters))
    popped = {index: spec.backwards for index, spec in enumerate(specs)
              if isinstance(spec, ListOf) and spec.element is not None
              and _tf.uncopied(body.outputs[index]).op.type in (
                  "TensorListPopBack", "TensorListResize")}
    if not isinstance(more, MoreRows) or len({*popped.values()}) > 1:
        return None
    rows, backwards = more.rows, False in popped.values()
    for index, (start, spec) in enumerate(zip(starts, specs)):
        if isinstance(spec, Position):
            specs[index] = Position(rows, backwards=backwards)
        elif is_kept(body, index):
            specs[index] = REPLICATED if isinstance(spec, Partial) else spec
        elif isinstance(spec, ListOf) and spec.rows == rows and spec.element is not None:
            specs[index] = dataclasses.replace(
                spec, variable=index, ahead=1 if index in popped else None)
        elif _is_empty(start) or isinstance(spec, ListOf) and spec.rows and spec.element is None:
            specs[index] = ListOf(None, rows, backwards, index, ahead=0)
        elif start.dtype.is_integer or start.dtype.is_floating or start.dtype.is_complex:
            specs[index] = Total(index, spec if isinstance(spec, Sharded) else None)
        else:
            return None
    return specs


def settled(before: Sequence[Spec], after: Sequence[Spec]) -> list[Spec] | None:
    """The specs that fit what an iteration makes of the variables; None if none do.

    What does not count the rows is a total.
    """
    specs = list(before)
    for index, (spec, now) in enumerate(zip(before, after)):
        if isinstance(spec, Position):
            if now != dataclasses.replace(spec, ahead=1):
                specs[index] = Total(index)
        elif isinstance(spec, ListOf) and spec.variable is not None:
            if not isinstance(now, ListOf) or now.variable != index \
                    or now.ahead != {0: 1, 1: 0, None: None}[spec.ahead]:
                return None
        elif spec != now and not (isinstance(spec, Replicated) and isinstance(now, Replicated)):
            return None
    return specs


def outside(before: Sequence[Spec], after: Sequence[Spec]) -> tuple[list[Spec], list[Spec]]:
    """The specs of the variables' first values, and of their last ones.

    All towers' last positions add up to the number of rows.
    """
    takes = [spec.shards or SUM if isinstance(spec, Total) else _plain(spec) for spec in before]
    gives = [spec.rows if isinstance(spec, Position) and spec.rows is not None
             else _plain(now) if isinstance(spec, ListOf) else spec
             for spec, now in zip(takes, after)]
    return takes, gives


def _plain(spec: Spec) -> Spec:
    """The spec without what that of a list says of the iteration."""
    return ListOf(spec.element, spec.rows, spec.backwards) if isinstance(spec, ListOf) else spec


def is_kept(body: Any, index: int) -> bool:
    """Whether an iteration leaves a loop's variable as it is."""
    return _tf.source_of(body.outputs[index]) is body.inputs[index]


def _is_zero(tensor: tf.Tensor) -> bool:
    value = entries_of(tensor) if tensor.dtype in (tf.int32, tf.int64) else None
    return value is not None and value.ndim == 0 and bool(value == 0)


def _is_empty(tensor_list: tf.Tensor) -> bool:
    """Whether a list is new and has no entries."""
    return tensor_list.op.type == "EmptyTensorList" or (
        tensor_list.op.type == "TensorListReserve" and _is_zero(tensor_list.op.inputs[1]))


# The plans of ops.


def plan_of(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan of an op on a :class:`Row`; None if it depends on more than the iteration's row."""
    in_table = op.type in AS_IT_IS or any(isinstance(spec, ListOf) for spec in specs)
    own_rule = plan_by_table if in_table else _RULES.get(op.type)
    plan = None if own_rule is None else own_rule(op, specs)
    if plan is not None or op.has_state or op.handles or not all(map(is_one_devices, specs)):
        return plan
    return Plan(list(map(one_devices, specs)), [ROW] * len(op.outputs))  # whatever it does


def is_one_devices(spec: Spec) -> bool:
    """Whether a tower has, or can make, what one device has in the iteration of the same row."""
    is_row_number = isinstance(spec, Position) and spec.rows is not None and not spec.backwards
    return spec == ROW or isinstance(spec, Replicated) or is_row_number


def one_devices(spec: Spec) -> Spec:
    """The spec that gives a tower what one device has."""
    return ROW if isinstance(spec, Row) else REPLICATED


def is_counted(spec: Sharded | Size) -> bool:
    """Whether loops can count these rows."""
    return has_known_rows(spec) and in_one_piece(spec)


def _add(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The position of the next row, or a total."""
    first, totals = specs[0], [spec for spec in specs if isinstance(spec, Total)]
    if isinstance(first, Position) and len(specs) == 2 and not first.ahead:
        step = op.value(1)
        if step is not None and not step.ndim and step == 1:
            return Plan(specs, [dataclasses.replace(first, ahead=1)])
    if isinstance(first, InRow) and all(spec == first for spec in specs):
        return Plan(specs, [first])
    if len(totals) != 1 or not all(
            spec == InRow(totals[0].shards) if totals[0].shards else is_one_devices(spec)
            for spec in specs if not isinstance(spec, Total)):
        return None
    return Plan([ROW if isinstance(spec, Position) else spec for spec in specs], totals)


def _subtract(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return _add(op, specs) if isinstance(specs[0], Total) else None


def _less(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Whether there is a row at a position."""
    at, size = specs
    if not isinstance(at, Position) or at.ahead or not isinstance(size, Size) \
            or not is_counted(size):
        return None
    rows = size.moved(0)
    return Plan(specs, [MoreRows(rows)]) if at.rows in (None, rows) else None


def _and(op: Op, specs: Sequence[Spec]) -> Plan | None:
    alike = isinstance(specs[0], MoreRows) and specs[0] == specs[1]
    return Plan(specs, specs[:1]) if alike else None


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
    if not isinstance(size, Size) or size.at or not is_one_devices(gradient) \
            or not _is_slice_of_row(op, index, size.moved(0)):
        return None
    return Plan([size, *index, one_devices(gradient)], [InRow(size.shards(0))])


def _is_slice_of_row(op: Op, index: Sequence[Spec], rows: Size) -> bool:
    """Whether the begin, end and strides of a strided slice are those of one row."""
    strides = op.value(3)
    masks = (op.attr(f"{name}_mask") & 1 for name in ("begin", "end", "ellipsis", "new_axis"))
    return is_counted(rows) and not any(masks) and strides is not None and strides[0] == 1 \
        and list(index[:2]) == [Index(rows, 0), Index(rows, 1)] and index[2] == REPLICATED


def _check(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower checks what it has; if one device fails at a row, so does the row's tower."""
    return Plan(list(map(one_devices, specs)), []) if all(map(is_one_devices, specs)) else None


OF_ROWS = {Index, InRow, MoreRows, Position, Row, Total}
_RULES: dict[str, Rule] = {
    "Add": _add, "AddN": _add, "AddV2": _add, "Assert": _check, "Less": _less, "LogicalAnd": _and,
    "Pack": _index, "OptionalFromValue": plan_by_table, "StridedSlice": _row_of,
    "StridedSliceGrad": _gradient_of_row, "Sub": _subtract,
}
