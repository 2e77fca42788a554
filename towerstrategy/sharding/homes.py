"""The device and the name scope of each operation that is done once.

Goes in: a layout, and the device of each variable that it reads or writes.  Comes out: a device for
each operation that works for a variable, such as an optimizer's.  So a gradient's parts are summed
where its variable is, and no weight or slot crosses to be updated.  And a name scope, by
which the report and the profiler's timeline tell the update of variables from all else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from towerstrategy.placement import scopes
from towerstrategy.sharding import propagate
from towerstrategy.sharding.propagate import Layout
from towerstrategy.sharding.rules.registry import Op
from towerstrategy.sharding.spec import Sharded

ONCE = f"{scopes.ONCE}/"  # the name scope of what is done once
UPDATE = f"{ONCE}{scopes.UPDATE}/"


def homes(layout: Layout, devices: Mapping[str, str], merge: str, asked: Iterable[str] = ()
          ) -> tuple[dict[str, str], dict[str, str]]:
    """The devices of operations of ``layout``, and of sums of tensors, where it is not ``merge``.

    Args:
      layout: the operations.
      devices: the devices of variables, by the names of their handles in the layout's graph.
      merge: where everything is done that has no better place.
      asked: where the outputs of the layout are wanted; "" where nobody says.

    Returns:
      By the names of operations: the device of the variable that they are for, if it is one. By
      those of tensors: of the first such variable, as a sum has to be sent to all but one.
    """
    wanted = {tensor.name: {home: None} for tensor, home in zip(layout.graph.outputs, asked)
              if home}  # sets in order
    found: dict[str, str] = {}
    first: dict[str, str] = {}  # of what is made of a tensor, where that is for several variables
    if not wanted and not {*devices.values()} - {merge}:
        return {}, {}
    for operation in reversed(layout.order):
        plan = layout.plans.get(operation.name)
        if isinstance(plan, propagate.Nested):
            if operation.type not in propagate.LOOPS:
                for inner in plan.layouts:
                    _look_into(inner, operation, devices, merge, wanted)
            continue
        here = _of_variable(operation, devices)
        asking = [home for name in operation.output_names for home in wanted.get(name, ())]
        if here is None and len(set(asking)) == 1:
            here = asking[0]
        if here is not None:
            found[operation.name] = here
        if plan is not None and not plan.once:
            continue  # the towers have what it is made of
        asking += [first[name] for name in operation.output_names if name in first]
        for name in operation.input_names:
            if here is not None:
                wanted.setdefault(name, {})[here] = None
            elif asking:
                first.setdefault(name, asking[0])
    return found, {**first, **{name: next(iter(of)) for name, of in wanted.items()}}


def _look_into(inner: Layout, operation: Op, devices: Mapping[str, str], merge: str,
               wanted: dict[str, dict[str, None]]) -> None:
    """Notes where a called function or a branch wants what it is given."""
    given = operation.input_names[len(operation.inputs) - len(inner.graph.inputs):]
    own = {tensor.name: outer for tensor, outer in zip(inner.graph.inputs, given)}
    inside = {name: devices[outer] for name, outer in own.items() if outer in devices}
    asked = [next(iter(wanted.get(name, ())), "") for name in operation.output_names]
    for name, home in homes(inner, inside, merge, asked)[1].items():
        if name in own:
            wanted.setdefault(own[name], {})[home] = None


def updates(layout: Layout) -> set[str]:
    """Operations, by name, that are done once and that nothing but writes of variables needs."""
    found: set[str] = set()
    elsewhere = {tensor.op.name for tensor in layout.graph.outputs}
    needed: set[str] = set()
    for operation in reversed(layout.order):
        is_asked = operation.name in needed or operation.has_effect
        plan = layout.plans.get(operation.name)
        if is_asked and operation.name not in elsewhere and (
                plan is None or plan.once or isinstance(plan, propagate.Nested)) and not any(
                isinstance(spec, Sharded) for spec in layout.inputs_of(operation)):
            found.add(operation.name)
            needed.update(operation.before)
        else:
            elsewhere.update(operation.before)
    return found


def _of_variable(operation: Op, devices: Mapping[str, str]) -> str | None:
    names = [operation.input_names[place] for place in operation.handles]
    return next((devices[name] for name in names if devices.get(name)), None)
