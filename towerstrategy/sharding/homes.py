"""The device and the name scope of each operation that runs once.

Goes in: a layout, and the devices of the variables that it reads or writes.  Comes out: a device
for each operation that works for one variable, such as an optimizer's.  So the parts of a gradient
are summed where its variable is, and no weight or slot crosses devices to be updated.  Also: a name
scope, by which the report and the profiler's timeline tell variable updates from all else; and
whether an operation may be repeated on each tower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tensorflow as tf

from towerstrategy.placement import scopes
from towerstrategy.sharding.layout import BRANCHES, LOOPS, Layout, Nested
from towerstrategy.sharding.rules.registry import Op
from towerstrategy.sharding.spec import Sharded

ONCE = f"{scopes.ONCE}/"  # the name scope of operations that run once
LARGEST_REPEATED = 4096  # bytes of a constant of which each tower's part of the graph has a copy
UPDATE = f"{ONCE}{scopes.UPDATE}/"


def homes(layout: Layout, devices: Mapping[str, str], merge: str,
          output_devices: Iterable[str] = ()) -> tuple[dict[str, str], dict[str, str]]:
    """The devices on which operations run once and tensors are summed, if not on ``merge``.

    Args:
      layout: the layout of a graph.
      devices: the name of a variable's handle in that graph -> the variable's device.
      merge: the merge device, for everything that has no better place.
      output_devices: the device that needs each output; "" where unknown.

    Returns:
      Operation name -> device, for operations that work for the variables of one device. Tensor
      name -> device: of several that need a sum the first one, as it has to be sent to the others.
    """
    consumers = {tensor.name: {device: None} for tensor, device
                 in zip(layout.graph.outputs, output_devices) if device}  # ordered sets
    op_devices: dict[str, str] = {}
    first: dict[str, str] = {}  # tensor -> the first of several devices that need results of it
    if not consumers and not {*devices.values()} - {merge}:
        return {}, {}
    for operation in reversed(layout.order):
        plan = layout.plans[operation.name]
        if isinstance(plan, Nested):
            if operation.type not in LOOPS:
                for inner in plan.layouts:
                    _note_consumers_in(inner, operation, devices, merge, consumers)
            continue
        device = next(filter(None, [  # of the first variable whose handle it takes
            devices.get(operation.input_names[place]) for place in operation.handles]), None)
        needed_on = [home for name in operation.output_names for home in consumers.get(name, ())]
        if device is None and len(set(needed_on)) == 1:
            device = needed_on[0]
        if device is not None:
            op_devices[operation.name] = device
        if not plan.once:
            continue  # a sharded operation: its inputs are on the towers
        needed_on += [first[name] for name in operation.output_names if name in first]
        for name in operation.input_names:
            if device is not None:
                consumers.setdefault(name, {})[device] = None
            elif needed_on:
                first.setdefault(name, needed_on[0])
    return op_devices, {**first, **{name: next(iter(on)) for name, on in consumers.items()}}


def _note_consumers_in(inner: Layout, operation: Op, devices: Mapping[str, str], merge: str,
                       consumers: dict[str, dict[str, None]]) -> None:
    """Adds the devices on which a called function or a branch needs its inputs to ``consumers``."""
    taken = operation.input_names[len(operation.inputs) - len(inner.graph.inputs):]
    outer_names = {tensor.name: outer for tensor, outer in zip(inner.graph.inputs, taken)}
    handles = {name: devices[outer] for name, outer in outer_names.items() if outer in devices}
    output_devices = [next(iter(consumers.get(name, ())), "") for name in operation.output_names]
    for name, home in homes(inner, handles, merge, output_devices)[1].items():
        if name in outer_names:
            consumers.setdefault(outer_names[name], {})[home] = None


def updates(layout: Layout) -> set[str]:
    """The names of operations that run once and that only writes of variables need."""
    found: set[str] = set()
    needed_elsewhere = {tensor.op.name for tensor in layout.graph.outputs}
    needed_by_updates: set[str] = set()
    for operation in reversed(layout.order):
        is_update = operation.name in needed_by_updates or operation.has_effect
        plan = layout.plans[operation.name]
        if is_update and operation.name not in needed_elsewhere and (
                plan.once or isinstance(plan, Nested)) and not any(
                isinstance(spec, Sharded) for spec in layout.inputs_of(operation)):
            found.add(operation.name)
            needed_by_updates.update(operation.before)
        else:
            needed_elsewhere.update(operation.before)
    return found


def is_small(tensor: tf.Tensor) -> bool:
    """Whether a tensor is a few numbers or a shape, or of a dtype that is not in a GPU's memory."""
    return tensor.dtype in (tf.string, tf.variant, tf.resource) or tensor.shape.rank is None \
        or _bytes(tensor) <= LARGEST_REPEATED


def _bytes(tensor: tf.Tensor) -> int:
    """The bytes of a tensor; more than may be repeated if its shape is unknown."""
    known = tensor.shape.is_fully_defined()
    return tensor.shape.num_elements() * tensor.dtype.size if known else LARGEST_REPEATED + 1


def is_repeatable(operation: Op) -> bool:
    """Whether each tower may make the outputs itself instead of receiving them."""
    if operation.is_stateful or operation.is_call or operation.type in (*BRANCHES, *LOOPS):
        return False
    return bool(operation.inputs) or sum(map(_bytes, operation.outputs)) <= LARGEST_REPEATED
