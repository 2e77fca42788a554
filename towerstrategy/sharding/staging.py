"""In which stage of a tower each operation of a traced step is done.

Goes in: a layout, and the stages of what it is given.  Comes out: a stage for each operation, so
far as it is known.

A layer's operations, and whatever else runs within ``strategy.stage``, have the stage in their name
scope (ours, see :mod:`placement.scopes`), and so have their gradients, which TensorFlow makes under
the scope of what they are gradients of.  What is left goes where most of its data is; where none
is, such as what is made of labels alone, to the stage that first needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from towerstrategy.placement import scopes
from towerstrategy.sharding.propagate import CALLS, Layout
from towerstrategy.sharding.rules.registry import Op
from towerstrategy.sharding.spec import Replicated
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Value


def stages_of(layout: Layout, values: Mapping[str, Value], towers: Towers) -> dict[str, int]:
    """The stages of operations of ``layout``, by name; none where a tower is one device.

    Args:
      layout: the operations.
      values: what the layout is given, by the names of tensors.
      towers: the towers; where these are in a stage all is that has none of its own.
    """
    if len(towers.rows[0]) == 1:
        return {}
    given = {name: value.stage for name, value in values.items() if value.stage is not None}
    found: dict[str, int] = {}
    for operation in layout.order:
        stage = _said(operation, towers)
        if stage is None and operation.type not in CALLS:
            known = {tensor.name: at for tensor in operation.inputs if (at := given.get(
                tensor.name, found.get(tensor.op.name))) is not None}
            stage = known[max(known, key=lambda name: _weight(layout, name, operation))] \
                if known else None
        if stage is not None:
            found[operation.name] = stage
    wanted: dict[str, int] = {}
    for operation in reversed(layout.order):
        stage = found.get(operation.name, wanted.get(operation.name))
        if stage is None:
            continue
        if operation.type not in CALLS:
            found[operation.name] = stage
        for tensor in operation.inputs:
            wanted[tensor.op.name] = min(stage, wanted.get(tensor.op.name, stage))
    return found


def _said(operation: Op, towers: Towers) -> int | None:
    stage = scopes.stage_in(operation.name)
    if stage is None and operation.operation.device:
        stage = towers.stage_on(operation.operation.device)
    return towers.stage if stage is None else stage


def _weight(layout: Layout, name: str, operation: Op) -> tuple[bool, int]:
    """How much an input has: rows before all else, then entries, one for a size not known."""
    shape = next(tensor.shape for tensor in operation.inputs if tensor.name == name)
    rows = not isinstance(layout.specs[name], Replicated)
    return rows, math.prod(size or 1 for size in shape) if shape.rank else 1
