"""Lists of tensors, as loops keep them, and optionals, as branches do: each tower has its own.

Goes in: an operation.  Comes out: its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import is_plain
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, rule
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


def is_empty(held: tf.Tensor, element: Spec | None) -> bool:
    """Whether a list made once has no entries, so that it may serve as each tower's.

    Args:
      held: the list, where it is made.
      element: what its entries are to be: a tower's rows do not go into a list of all rows.
    """
    if held.op.type == "OptionalNone":
        return True
    if held.op.type not in ("EmptyTensorList", "TensorListReserve"):
        return False
    if not isinstance(element, Sharded):
        return True
    shape = entries_of(held.op.inputs[0])
    return shape is not None and (not shape.ndim or bool(shape[element.dim] == -1))


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


@rule("TensorListPushBack", "TensorListSetItem")
def put(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """An entry that is as those are which the list has."""
    held, *index, entry = specs
    if isinstance(entry, Replicated):
        entry = REPLICATED
        if not isinstance(held, ListOf):
            return None
    if not isinstance(held, ListOf):
        held = ListOf(entry)
    if not all(map(is_plain, index)) or held.element not in (None, entry):
        return None
    return Plan([held, *[REPLICATED] * len(index), entry], [ListOf(entry)])


@rule("TensorListPopBack", "TensorListGetItem")
def take(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """An entry; of a list into which nothing was put, zeros of the shape that is said."""
    held, *index, shape = specs
    if not isinstance(held, ListOf) or not all(map(is_plain, index)):
        return None
    element = held.element or (
        shape.shards(shape.at) if isinstance(shape, Size) else REPLICATED)
    if not _shaped_as(op, len(specs) - 1, shape, element):
        return None
    gives = [held, element] if op.type == "TensorListPopBack" else [element]
    return Plan([held, *[REPLICATED] * len(index), _size_or_whole(shape)], gives)


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


@rule("OptionalFromValue")
def kept(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return Plan(specs, [OptionalOf(specs[0])]) if len(specs) == 1 else None


@rule("OptionalGetValue")
def kept_before(op: Op, specs: Sequence[Spec]) -> Plan | None:
    element = specs[0].element if isinstance(specs[0], OptionalOf) else None
    return None if element is None or len(op.outputs) > 1 else Plan(specs, [element])


@rule("TensorListReserve", "EmptyTensorList")
def new_list(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Of entries whose shape has rows."""
    size = specs[0]
    if not isinstance(size, Size):
        return None
    return Plan([size, *[REPLICATED] * (len(specs) - 1)], [ListOf(size.shards(size.at))])


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
        first, *others = m.copy([m.parts(0)], EACH)[0]
        dtype = op.outputs[0].dtype
        place = m.constant([element.dim], tf.int32, None)
        rows = [m.make("Gather", [shape, place], None) for shape in (first, *others)]
        total = m.make("Maximum", [m.towers.add_up(rows, m.towers.merge),
                                   m.constant(-1, dtype, None)], None)
        return [m.make("TensorScatterUpdate", [
            first, m.constant([[element.dim]], tf.int32, None), total], None)]

    return Plan([held], [Size(element.dim, element.times, element.group)], whole=whole)
