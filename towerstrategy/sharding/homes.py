"""Where an operation that is done once is done, with the variable that it is for, and its name.

Goes in: a layout, and the device of each variable that it reads or writes.  Comes out: a device for
each operation that works for one variable alone, such as an optimizer's.  So a gradient's parts are
summed where its variable is, and no weight or slot crosses to be updated.  And a name scope, by
which the report and the profiler's timeline tell the update of variables from all else.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from towerstrategy.placement import scopes
from towerstrategy.sharding import propagate
from towerstrategy.sharding.propagate import Layout
from towerstrategy.sharding.spec import Sharded

ONCE = f"{scopes.ONCE}/"  # the name scope of what is done once
UPDATE = f"{ONCE}{scopes.UPDATE}/"


def homes(layout: Layout, devices: Mapping[str, str]) -> dict[str, str]:
    """The device of operations of ``layout``, by name; no entry where none is better than another.

    Args:
      layout: the operations.
      devices: the devices of variables, by the names of their handles in the layout's graph.
    """
    if len(set(devices.values())) < 2:
        return {}
    found: dict[str, str] = {}
    wanted: dict[str, set[str]] = {}  # where those who take its results are
    for operation in reversed(layout.order):
        home = _of_variable(operation, devices)
        asked = wanted.get(operation.name, set())
        if home is None and len(asked) == 1:
            (home,) = asked
        if home is not None:
            found[operation.name] = home
            for tensor in operation.inputs:
                wanted.setdefault(tensor.op.name, set()).add(home)
    return found


def updates(layout: Layout) -> set[str]:
    """Operations, by name, that are done once and that nothing but writes of variables needs."""
    found: set[str] = set()
    elsewhere = {tensor.op.name for tensor in layout.graph.outputs}
    needed: set[str] = set()
    for operation in reversed(layout.order):
        once = layout.plans.get(operation.name) is None or operation.type in (
            *propagate.CALLS, *propagate.BRANCHES, *propagate.LOOPS)
        gathers = any(isinstance(spec, Sharded) for spec in layout.inputs_of(operation))
        is_asked = operation.name in needed or propagate.has_effect(operation)
        if once and not gathers and is_asked and operation.name not in elsewhere:
            found.add(operation.name)
            needed.update(tensor.op.name for tensor in operation.inputs)
        else:
            elsewhere.update(tensor.op.name for tensor in operation.inputs)
    return found


def _of_variable(operation: tf.Operation, devices: Mapping[str, str]) -> str | None:
    for tensor in operation.inputs:
        if tensor.dtype == tf.resource and devices.get(tensor.name):
            return devices[tensor.name]
    return None
