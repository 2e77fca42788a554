"""Rules for tensor lists, which loops keep, and for optionals, which branches keep.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Each tower has a list, or an
optional, of its own: with an entry of its own in place of each of the whole list, or with the
entries of its rows.  The latter are taken and put by the iterations of loops over the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.dimensions import is_plain
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, rule
from towerstrategy.sharding.rules.row_loops import is_counted, is_kept, is_one_devices, one_devices
from towerstrategy.sharding.spec import (
    REPLICATED,
    ROW,
    ByBranch,
    Index,
    ListOf,
    Partial,
    Position,
    Replicated,
    Row,
    Sharded,
    Size,
    Spec,
)

_NEW = "EmptyTensorList", "TensorListReserve"


def is_empty(tensor_list: tf.Tensor, element: Spec | None) -> bool:
    """Whether a replicated list, or optional, is new and empty, so that each tower may have a copy.

    ``element`` is the spec of the entries that are put into it.  If they are sharded, the list must
    not say how many rows they have, see :func:`says_rows`.  Zeros like a list are as good as none.
    """
    kind = tensor_list.op.type
    if kind in _NEW:
        return not isinstance(element, Sharded) \
            or _size_in(tensor_list.op.inputs[0], element.dim) == -1
    return kind == "OptionalNone" or kind == "ZerosLike" and not isinstance(element, Sharded)


def says_rows(tensor_list: tf.Tensor, element: Spec | None) -> bool:
    """Whether a new list says how many rows entries of this spec have: each tower makes its own."""
    return isinstance(element, Sharded) and tensor_list.op.type in _NEW \
        and (_size_in(tensor_list.op.inputs[0], element.dim) or -1) > 0


def _size_in(shape: tf.Tensor, dim: int) -> int | None:
    """A size in the shape of a list's entries: -1 if that leaves it open, None if unknown."""
    sizes = entries_of(shape)
    if sizes is None or sizes.ndim and sizes.size <= dim:
        return None
    size: int | None = sizes[dim] if sizes.ndim else -1
    return size


def can_be_whole(tensor_list: tf.Tensor) -> bool:
    """Whether the op that makes a list of rows can also make one of all rows."""
    return tensor_list.op.type in ("TensorListFromTensor", "TensorListReserve")


def note_constants(function: Any, arguments: Iterable[tf.Tensor], is_loop: bool) -> None:
    """Notes the constants among what a branch, or the body of a loop, is given.

    They are integers, such as the axes of gradients; and what each iteration of an earlier loop has
    put into a list.  TensorFlow keeps what a loop computes for its gradient in lists, even what is
    the same in each iteration, such as the permutation of a softmax over another axis than the last
    one.
    """
    for index, (inner, outer) in enumerate(zip(function.inputs, arguments)):
        if outer.dtype.is_integer and not (is_loop and not is_kept(function, index)):
            _tf.note_constant(inner, _tf.constant_value(outer))
        entry = put_into(outer) if outer.dtype == tf.variant else None
        value = None if entry is None else _tf.constant_value(entry)
        for operation in () if value is None else inner.consumers():
            if operation.type == "TensorListPopBack":
                _tf.note_constant(operation.outputs[1], value)


def put_into(tensor_list: tf.Tensor) -> tf.Tensor | None:
    """The tensor that each iteration of a loop puts into a list; None if the list is no such."""
    result = _tf.uncopied(tensor_list)
    loop = result.op
    if loop.type not in _tf.LOOPS:
        return None
    body, index = _tf.body_of(loop.graph, loop.get_attr("body").name), result.value_index
    put = body.outputs[index].op
    is_put = put.type == "TensorListPushBack" and _tf.uncopied(put.inputs[0]) is body.inputs[index]
    return put.inputs[1] if is_put else None


def _has_all(held: Spec) -> TypeGuard[ListOf]:
    """Whether it is a list of rows that has an entry for each one."""
    return isinstance(held, ListOf) and held.rows is not None and held.element is not None \
        and held.ahead is None


def _shape_of(op: Op, spec: Spec, element: Spec | None) -> Spec | None:
    """The spec by which the last input, the shape of the entries, is right for each tower's."""
    if isinstance(spec, Size):
        return spec if spec.shards(spec.at) == element else None
    if isinstance(element, Sharded) and _size_in(op.inputs[-1], element.dim) != -1:
        return element.size
    return ROW if spec == ROW else REPLICATED


@rule("TensorListPushBack", "TensorListSetItem")
def put(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The new entry has to have the spec of the entries in the list."""
    held, *index, entry = specs
    if isinstance(held, ListOf) and held.rows and (
            held.variable is not None or index == [Position(held.rows)]):
        return _put_of_row(held, index, entry)
    entry = REPLICATED if isinstance(entry, Replicated) else entry
    if not isinstance(held, ListOf) or held.rows:
        if entry == REPLICATED:
            return None
        held = ListOf(entry)
    if entry == REPLICATED and isinstance(held.element, Sharded) \
            and op.inputs[-1].shape == _tf.shape_of_entries(op.inputs[0]):
        entry = held.element  # it has all rows, as zeros have
    if isinstance(entry, Row) or held.element not in (None, entry) or not all(map(is_plain, index)):
        return None
    return Plan([held, *[REPLICATED] * len(index), entry], [ListOf(entry)])


def _put_of_row(held: ListOf, index: Sequence[Spec], entry: Spec) -> Plan | None:
    """The iteration's entry, put at its position, or behind those of the rows before."""
    if index:
        fits = index == [Position(held.rows)] and not held.backwards and is_one_devices(entry) \
            and (held.ahead == 0 or held.element == ROW)
        entry = one_devices(entry)
    else:
        fits = held.ahead == 0 and _is_of_row(entry)
        entry = REPLICATED if isinstance(entry, Replicated) else entry
    return Plan([held, *index, entry], [dataclasses.replace(
        held, element=ROW if index else entry, ahead=None if held.ahead is None else 1)]
    ) if fits else None


def _is_of_row(entry: Spec | None) -> bool:
    """Whether an entry, or what an optional has, is the same in another loop's iteration."""
    if isinstance(entry, ByBranch):
        return all(map(_is_of_row, entry.specs))
    if isinstance(entry, ListOf):
        return entry.rows is None and _is_of_row(entry.element)
    return entry is None or isinstance(entry, (Index, Sharded, Size)) or is_one_devices(entry)


@rule("TensorListPopBack", "TensorListGetItem")
def take(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """An entry; a list into which nothing was put has zeros, of the shape in the last input."""
    held, *index, shape = specs
    if not isinstance(held, ListOf) or isinstance(held.element, ByBranch):
        return None
    rest, element = held, held.element
    if not held.rows:
        fits, index = all(map(is_plain, index)), [REPLICATED] * len(index)
        element = element or (shape.shards(shape.at) if isinstance(shape, Size) else REPLICATED)
    elif index:
        fits = index == [Position(held.rows)] and not held.backwards
    else:  # the last entry
        fits = held.variable is not None and held.ahead == 1
        rest = dataclasses.replace(held, element=None, ahead=0)
    taken = _shape_of(op, shape, element)
    if element is None or not fits or taken is None:
        return None
    gives = [rest, element] if op.type == "TensorListPopBack" else [element]
    return Plan([held, *index, taken], gives)


@rule("TensorListFromTensor")
def from_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, shape = specs
    if not isinstance(spec, Sharded):
        return None
    if spec.dim:
        element = spec.at(spec.dim - 1)
        taken = _shape_of(op, shape, element)
        return None if taken is None else Plan([spec, taken], [ListOf(element)])
    fits = is_counted(spec) and isinstance(shape, Replicated)
    return Plan([spec, REPLICATED], [ListOf(ROW, spec.size)]) if fits else None


@rule("TensorListStack")
def stack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held, shape = specs
    if not isinstance(held, ListOf):
        return None
    if held.rows:
        return _rows_of(op, held, held.rows)
    element = held.element
    taken = _shape_of(op, shape, element)
    if taken is None or not isinstance(element, (Sharded, Partial, Replicated)):
        return None
    return Plan([held, taken], [
        element.at(element.dim + 1) if isinstance(element, Sharded) else element])


def _rows_of(op: Op, held: ListOf, rows: Size) -> Plan | None:
    """The rows.  A tower without any needs the shape of a row."""
    shape = entries_of(op.inputs[1])
    if not _has_all(held) or held.element != ROW or held.variable is not None or held.backwards:
        return None
    if op.outputs[0].dtype == tf.variant or op.attr("num_elements") >= 0 or shape is None \
            or not shape.ndim or any(size is not None and size < 0 for size in shape):
        return None
    return Plan([held, REPLICATED], [rows.shards(0)])


def entry_by_entry(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan of a sum of lists, or of zeros like a list; an empty one may be each tower's.

    An iteration adds to the entry of its row only.
    """
    if op.type == "ZerosLike" and _has_all(specs[0]):
        return Plan(specs, [ListOf(ROW, specs[0].rows, zeros=True)])
    lists = [spec for spec in specs if isinstance(spec, ListOf)]
    others = [spec for spec in lists if not spec.rows]
    if others:
        spec = next((spec for spec in others if spec.element is not None), others[0])
        alike = all(isinstance(each, (ListOf, Replicated)) for each in specs) \
            and {each.element for each in others} <= {spec.element, None}
    else:
        others = [spec for spec in lists if not spec.zeros] or lists
        spec = others[0]
        alike = lists == list(specs) and {*others} == {spec} \
            and all(_has_all(each) and each.element == ROW and each.rows == spec.rows
                    for each in lists) and (len(others) == 1 or spec.variable is None)
    return Plan([spec] * len(specs), [spec] * len(op.outputs)) if alike else None


@rule("OptionalFromValue")
def make_optional(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return Plan(specs, [ListOf(specs[0])]) if len(specs) == 1 else None


@rule("OptionalGetValue")
def optional_value(op: Op, specs: Sequence[Spec]) -> Plan | None:
    element = specs[0].element if isinstance(specs[0], ListOf) else None
    if element is None or isinstance(element, ByBranch) or len(op.outputs) > 1:
        return None
    static = op.outputs[0].shape
    if not isinstance(element, Sharded) or static.rank is None or static[element.dim] is None:
        return Plan(specs, [element])
    node = tf.compat.v1.NodeDef.FromString(op.definition.attributes)  # its kernel checks the shape
    node.attr["output_shapes"].list.shape[0].dim[element.dim].size = -1
    attributes = node.SerializeToString(deterministic=True)
    return Plan(specs, [element], make=lambda m: m.copy([m.parts(0)], EACH, attributes), alone=0)


@rule("TensorListReserve", "EmptyTensorList")
def new_list(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower makes a list if the shape of the entries, or how many there are, counts rows."""
    shape, number = specs
    if isinstance(shape, Size):
        return Plan([shape, REPLICATED], [ListOf(shape.shards(shape.at))])
    if op.type == "EmptyTensorList" or not isinstance(shape, Replicated) \
            or not isinstance(number, Size) or not is_counted(number):
        return None
    return Plan([REPLICATED, number], [ListOf(ROW, number.moved(0), zeros=True)])


@rule("TensorListLength")
def length(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held, = specs
    if not isinstance(held, ListOf):
        return None
    if not held.rows or _has_all(held):
        return Plan(specs, [held.rows or REPLICATED])
    return None if held.ahead is None else Plan(
        specs, [Position(held.rows, held.ahead, held.backwards)])


@rule("TensorListResize")
def resize(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held, size = specs
    if not isinstance(held, ListOf) or not held.rows or held.element is None or held.backwards:
        return None
    if size == Position(held.rows):  # without the rows of later iterations, and this one
        return Plan(specs, [dataclasses.replace(held, element=None, ahead=0)])
    fits = held.ahead is None and isinstance(size, Size) and size.moved(0) == held.rows
    return Plan(specs, [held]) if fits else None


@rule("TensorListElementShape")
def element_shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The shape of a list's entries, with -1 for unknown sizes; the towers' rows are added up."""
    held, = specs
    element = held.element if isinstance(held, ListOf) else None
    if not isinstance(element, Sharded):
        return Plan(specs, [REPLICATED]) if isinstance(held, ListOf) else None

    def whole(m: Any) -> list[Any]:
        shapes = m.copy([m.parts(0)], EACH)[0]
        rows = m.towers.add_up(m.entries(shapes, element.dim), m.towers.host)
        total = m.make("Maximum", [rows, m.constant(-1, op.outputs[0].dtype, HOST)], HOST)
        return [m.towers.with_entry(shapes[0], element.dim, total)]

    return Plan(specs, [element.size], whole=whole)
