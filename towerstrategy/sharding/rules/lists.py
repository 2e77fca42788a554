"""Rules for tensor lists, which loops keep, and for optionals, which branches keep.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Each tower has a list, or an
optional, of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.dimensions import is_plain
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, rule
from towerstrategy.sharding.rules.shapes import static_sizes
from towerstrategy.sharding.spec import (
    REPLICATED,
    ListOf,
    OptionalOf,
    Partial,
    Replicated,
    Sharded,
    Size,
    Spec,
)


def _size_or_whole(spec: Spec) -> Spec:
    return spec if isinstance(spec, Size) else REPLICATED


def is_empty(tensor_list: tf.Tensor, element: Spec | None) -> bool:
    """Whether a replicated list, or optional, is new and empty, so that each tower may have a copy.

    ``element`` is the spec of the entries that are put into it.  If they are sharded, the list must
    not say how many rows they have.  Zeros like a list are as good as none.
    """
    if tensor_list.op.type == "OptionalNone":
        return True
    if tensor_list.op.type == "ZerosLike":
        return not isinstance(element, Sharded)
    if tensor_list.op.type not in ("EmptyTensorList", "TensorListReserve"):
        return False
    if not isinstance(element, Sharded):
        return True
    shape = entries_of(tensor_list.op.inputs[0])
    return shape is not None and (not shape.ndim or bool(shape[element.dim] == -1))


def is_kept(body: Any, index: int) -> bool:
    """Whether an iteration leaves a loop's variable as it is."""
    result = body.outputs[index]
    while result.op.type == "Identity":
        result = result.op.inputs[0]
    return result is body.inputs[index]


def note_constants(body: Any, arguments: Iterable[tf.Tensor]) -> None:
    """Notes a loop's constants: integers that it keeps; what an earlier loop has put into lists.

    TensorFlow keeps what a loop computes for its gradient in lists, even what is the same in each
    iteration, such as the permutation of a softmax over another axis than the last one.
    """
    for index, (inner, outer) in enumerate(zip(body.inputs, arguments)):
        if outer.dtype.is_integer and outer.shape.rank == 0 and is_kept(body, index):
            _tf.note_constant(inner, _tf.constant_value(outer))
        value = _constant_put_into(outer) if outer.dtype == tf.variant else None
        for operation in () if value is None else inner.consumers():
            if operation.type == "TensorListPopBack":
                _tf.note_constant(operation.outputs[1], value)


def _constant_put_into(tensor_list: tf.Tensor) -> Any:
    """The constant that each iteration of a loop puts into a list; None if it is none."""
    loop = tensor_list.op
    while loop.type == "Identity":
        tensor_list, loop = loop.inputs[0], loop.inputs[0].op
    if loop.type not in ("While", "StatelessWhile"):
        return None
    result = _tf.body_of(loop.graph, loop.get_attr("body").name).outputs[tensor_list.value_index]
    is_put = result.op.type == "TensorListPushBack"
    return _tf.constant_value(result.op.inputs[1]) if is_put else None


def _shape_fits(op: Op, index: int, spec: Spec, element: Spec) -> bool:
    """Whether input ``index``, the shape of the entries, is right for each tower's entries."""
    if not isinstance(element, Sharded):
        return not isinstance(spec, Size)
    if isinstance(spec, Size):
        return spec.shards(spec.at) == element
    value = op.value(index)
    sizes = static_sizes(op, index, spec) if value is None else list(value.ravel())
    if sizes is None or value is not None and value.ndim == 0:
        return value is not None
    return len(sizes) > element.dim and sizes[element.dim] == -1


@rule("TensorListPushBack", "TensorListSetItem")
def put(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The new entry has to have the spec of the entries in the list."""
    list_spec, *index, entry = specs
    if isinstance(entry, Replicated):
        entry = REPLICATED
        if not isinstance(list_spec, ListOf):
            return None
    if not isinstance(list_spec, ListOf):
        list_spec = ListOf(entry)
    if not all(map(is_plain, index)) or list_spec.element not in (None, entry):
        return None
    return Plan([list_spec, *[REPLICATED] * len(index), entry], [ListOf(entry)])


@rule("TensorListPopBack", "TensorListGetItem")
def take(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """An entry; a list into which nothing was put has zeros, of the shape in the last input."""
    list_spec, *index, shape = specs
    if not isinstance(list_spec, ListOf) or not all(map(is_plain, index)):
        return None
    element = list_spec.element or (
        shape.shards(shape.at) if isinstance(shape, Size) else REPLICATED)
    if not _shape_fits(op, len(specs) - 1, shape, element):
        return None
    gives = [list_spec, element] if op.type == "TensorListPopBack" else [element]
    return Plan([list_spec, *[REPLICATED] * len(index), _size_or_whole(shape)], gives)


@rule("TensorListFromTensor")
def from_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if not isinstance(spec, Sharded) or spec.dim == 0:
        return None
    return Plan([spec, *map(_size_or_whole, specs[1:])],
                [ListOf(spec.at(spec.dim - 1))])


@rule("TensorListStack")
def stack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    list_spec = specs[0]
    if not isinstance(list_spec, ListOf):
        return None
    takes = [list_spec, *map(_size_or_whole, specs[1:])]
    element = list_spec.element
    if not _shape_fits(op, 1, specs[1], element or REPLICATED):
        return None
    if isinstance(element, Sharded):
        return Plan(takes, [element.at(element.dim + 1)])
    if isinstance(element, (Partial, Replicated)):
        return Plan(takes, [element])
    return None


@rule("OptionalFromValue")
def make_optional(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return Plan(specs, [OptionalOf(specs[0])]) if len(specs) == 1 else None


@rule("OptionalGetValue")
def optional_value(op: Op, specs: Sequence[Spec]) -> Plan | None:
    element = specs[0].element if isinstance(specs[0], OptionalOf) else None
    return None if element is None or len(op.outputs) > 1 else Plan(specs, [element])


@rule("TensorListReserve", "EmptyTensorList")
def new_list(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower makes a list if the shape of the entries has a number of rows."""
    size = specs[0]
    if not isinstance(size, Size):
        return None
    return Plan([size, *[REPLICATED] * (len(specs) - 1)], [ListOf(size.shards(size.at))])


@rule("TensorListLength")
def length(op: Op, specs: Sequence[Spec]) -> Plan | None:
    list_spec = specs[0]
    return Plan([list_spec], [REPLICATED]) if isinstance(list_spec, ListOf) else None


@rule("TensorListElementShape")
def element_shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The shape of a list's entries, with -1 for unknown sizes; the towers' rows are added up."""
    list_spec = specs[0]
    if not isinstance(list_spec, ListOf):
        return None
    element = list_spec.element
    if not isinstance(element, Sharded):
        return Plan([list_spec], [REPLICATED])

    def whole(m: Any) -> list[Any]:
        shapes = m.copy([m.parts(0)], EACH)[0]
        rows = m.towers.add_up(m.entries(shapes, element.dim), m.towers.host)
        total = m.make("Maximum", [rows, m.constant(-1, op.outputs[0].dtype, HOST)], HOST)
        return [m.towers.with_entry(shapes[0], element.dim, total)]

    return Plan([list_spec], [element.size], whole=whole)
