"""Lists of tensors, as loops keep them: a list of its own on each tower.

Goes in: an operation.  Comes out: its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.elementwise import is_plain
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.rules.shapes import static_sizes
from towerstrategy.sharding.spec import REPLICATED, ListOf, Partial, Replicated, Sharded, Size, Spec


def _with(held: Spec, element: Spec) -> ListOf | None:
    """A list that gets an entry; None where its entries would not be alike."""
    known = held.element if isinstance(held, ListOf) else None
    if known is None or known == element:
        return ListOf(element)
    return None


def _can_be_held(spec: Spec) -> bool:
    return isinstance(spec, (Sharded, Partial, Size, ListOf))


def _size_or_whole(spec: Spec) -> Spec:
    return spec if isinstance(spec, Size) else REPLICATED


def is_empty(held: tf.Tensor) -> bool:
    """Whether a list made once has no entries, so that it may serve as each tower's.

    Of a list that a function is given, or a loop, the caller knows.
    """
    while held.op.type == "Identity":
        (held,) = held.op.inputs
    return held.op.type in ("EmptyTensorList", "TensorListReserve", "Placeholder")


def _shaped_as(op: Op, index: int, spec: Spec, element: Spec) -> bool:
    """Whether the shape that entries are said to have holds for the towers' entries."""
    if not isinstance(element, Sharded):
        return not isinstance(spec, Size)
    if isinstance(spec, Size):
        return spec.shards(spec.at) == element
    value = op.value(index)
    known = static_sizes(op, index, spec) if value is None else list(value.ravel())
    if known is None or value is not None and value.ndim == 0:
        return value is not None
    return len(known) > element.dim and known[element.dim] == -1


def _put(held: Spec, tensor: tf.Tensor, element: Spec) -> tuple[Spec, Spec, ListOf] | None:
    """What a list and an entry that it gets are to be, and what the list is then."""
    if not isinstance(held, ListOf) and not is_empty(tensor):
        return None
    if not _can_be_held(element):
        if not isinstance(held, ListOf):
            return None
        element = held.element or REPLICATED
    new = _with(held, element)
    if new is None:
        return None
    return held if isinstance(held, ListOf) else ListOf(), element, new


@rule("TensorListPushBack")
def push_back(op: Op, specs: Sequence[Spec]) -> Plan | None:
    put = _put(specs[0], op.inputs[0], specs[1])
    return None if put is None else Plan(put[:2], [put[2]])


@rule("TensorListSetItem")
def set_item(op: Op, specs: Sequence[Spec]) -> Plan | None:
    put = _put(specs[0], op.inputs[0], specs[2])
    if put is None or not is_plain(specs[1]):
        return None
    held, element, new = put
    return Plan([held, REPLICATED, element], [new])


@rule("TensorListPopBack")
def pop_back(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held = specs[0]
    if not isinstance(held, ListOf):
        return None
    takes = [held, *map(_size_or_whole, specs[1:])]
    element = held.element or _zeros(specs[1])
    return Plan(takes, [held, element]) if _shaped_as(op, 1, specs[1], element) else None


@rule("TensorListGetItem")
def get_item(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held = specs[0]
    if not isinstance(held, ListOf) or not is_plain(specs[1]):
        return None
    takes = [held, REPLICATED, *map(_size_or_whole, specs[2:])]
    element = held.element or _zeros(specs[2])
    return Plan(takes, [element]) if _shaped_as(op, 2, specs[2], element) else None


def _zeros(shape: Spec) -> Spec:
    """What is taken from a list into which nothing was put: zeros of this shape."""
    return shape.shards(shape.at) if isinstance(shape, Size) else REPLICATED


@rule("TensorListFromTensor")
def from_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if not isinstance(spec, Sharded) or spec.dim == 0:
        return None
    return Plan([spec, *map(_size_or_whole, specs[1:])],
                [ListOf(spec.at(spec.dim - 1))])


@rule("TensorListStack")
def stack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held = specs[0]
    if not isinstance(held, ListOf):
        return None
    takes = [held, *map(_size_or_whole, specs[1:])]
    element = held.element
    if not _shaped_as(op, 1, specs[1], element or REPLICATED):
        return None
    if isinstance(element, Sharded):
        return Plan(takes, [element.at(element.dim + 1)])
    if isinstance(element, (Partial, Replicated)):
        return Plan(takes, [element])
    return None


@rule("TensorListReserve", "EmptyTensorList")
def new_list(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Of entries whose shape has rows."""
    size = specs[0]
    if not isinstance(size, Size):
        return None
    return Plan([size, *[REPLICATED] * (len(specs) - 1)], [ListOf()])


@rule("TensorListLength")
def length(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held = specs[0]
    return Plan([held], [REPLICATED]) if isinstance(held, ListOf) else None


@rule("TensorListElementShape")
def element_shape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The shape of a list's entries, with -1 where it is open."""
    held = specs[0]
    if not isinstance(held, ListOf):
        return None
    element = held.element
    if not isinstance(element, Sharded):
        return Plan([held], [REPLICATED])

    def whole(m: Any) -> list[Any]:
        first, *others = m.each(lambda tower: m.copy([m.part(0, tower)], tower)[0])
        dtype = op.outputs[0].dtype
        place = m.constant([element.dim], tf.int32, None)
        rows = [m.make("Gather", [shape, place], None) for shape in (first, *others)]
        total = m.make("Maximum", [m.towers.add_up(rows, m.towers.merge),
                                   m.constant(-1, dtype, None)], None)
        return [m.make("TensorScatterUpdate", [
            first, m.constant([[element.dim]], tf.int32, None), total], None)]

    return Plan([held], [Size(element.dim, element.times, element.group)], whole=whole)
