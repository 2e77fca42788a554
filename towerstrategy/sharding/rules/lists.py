"""Lists of tensors, as loops keep them: a list of its own on each tower.

Goes in: an operation.  Comes out: its plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from towerstrategy.sharding.rules.elementwise import is_plain
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, ListOf, Partial, Replicated, Sharded, Size, Spec


def _with(held: Spec, element: Spec) -> ListOf | None:
    """A list that gets an entry; None where its entries would not be alike."""
    known = held.element if isinstance(held, ListOf) else None
    if known is None or known == element:
        return ListOf(element)
    return None


def _can_be_held(spec: Spec) -> bool:
    return isinstance(spec, (Sharded, Partial, Size, ListOf))


@rule("TensorListPushBack")
def push_back(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held, element = specs
    if not _can_be_held(element):
        if not isinstance(held, ListOf):
            return None
        element = held.element or REPLICATED
    new = _with(held, element)
    return None if new is None else Plan([ListOf() if held == REPLICATED else held, element], [new])


@rule("TensorListSetItem")
def set_item(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held, index, element = specs[0], specs[1], specs[2]
    if not _can_be_held(element):
        if not isinstance(held, ListOf):
            return None
        element = held.element or REPLICATED
    new = _with(held, element)
    if new is None or not is_plain(index):
        return None
    return Plan([ListOf() if not isinstance(held, ListOf) else held, REPLICATED, element], [new])


@rule("TensorListPopBack")
def pop_back(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held = specs[0]
    if not isinstance(held, ListOf):
        return None
    takes = [held, *[spec if isinstance(spec, Size) else REPLICATED for spec in specs[1:]]]
    return Plan(takes, [held, held.element or _zeros(specs[1])])


@rule("TensorListGetItem")
def get_item(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held = specs[0]
    if not isinstance(held, ListOf) or not is_plain(specs[1]):
        return None
    takes = [held, REPLICATED, *[s if isinstance(s, Size) else REPLICATED for s in specs[2:]]]
    return Plan(takes, [held.element or _zeros(specs[2])])


def _zeros(shape: Spec) -> Spec:
    """What is taken from a list into which nothing was put: zeros of this shape."""
    return shape.shards(shape.at) if isinstance(shape, Size) else REPLICATED


@rule("TensorListFromTensor")
def from_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if not isinstance(spec, Sharded) or spec.dim == 0:
        return None
    return Plan([spec, *[s if isinstance(s, Size) else REPLICATED for s in specs[1:]]],
                [ListOf(spec.at(spec.dim - 1))])


@rule("TensorListStack")
def stack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held = specs[0]
    if not isinstance(held, ListOf):
        return None
    takes = [held, *[s if isinstance(s, Size) else REPLICATED for s in specs[1:]]]
    element = held.element
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


@rule("TensorListLength", "TensorListElementShape")
def length(op: Op, specs: Sequence[Spec]) -> Plan | None:
    held = specs[0]
    if not isinstance(held, ListOf) or op.type == "TensorListElementShape" and isinstance(
            held.element, Sharded):
        return None
    return Plan([held], [REPLICATED])
