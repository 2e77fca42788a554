"""The stage of a tower in which each operation of a traced step runs.

Goes in: a layout, and the values of its inputs.  Comes out: the stage of each operation, as far as
it is known.

The operations of a layer, and all others within ``strategy.stage``, have the stage in their name
scope (see :mod:`placement.scopes`).  So do their gradients: TensorFlow makes a gradient under the
scope of the forward operation.  Any other operation runs in the stage that has most of its data; an
operation without such data, as on labels alone, runs in the first stage that needs its output.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import tensorflow as tf

from towerstrategy.placement import scopes
from towerstrategy.sharding.layout import Layout
from towerstrategy.sharding.rules.registry import Op
from towerstrategy.sharding.spec import Replicated, Spec
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Value


def stages_of(layout: Layout, values: Mapping[str, Value], towers: Towers) -> dict[str, int]:
    """Operation name -> stage, for a layout; empty if towers have one device.

    Args:
      layout: the layout.
      values: tensor name -> value, for the graph's inputs.
      towers: the towers; if they are in a stage, it is the default.
    """
    if len(towers.stage_devices[0]) == 1:
        return {}
    input_stages = {name: value.stage for name, value in values.items() if value.stage is not None}
    stages: dict[str, int] = {}
    for operation in layout.order:
        stage = _stage_by_name(operation, towers)
        if stage is None and not operation.is_call:
            known = [(_amount_of_data(tensor, layout.specs[tensor.name]), at)
                     for tensor in operation.inputs if (at := input_stages.get(
                         tensor.name, stages.get(tensor.op.name))) is not None]
            stage = max(known, key=operator.itemgetter(0))[1] if known else None
        if stage is not None:
            stages[operation.name] = stage
    first_use: dict[str, int] = {}  # operation -> the first stage that needs an output of it
    for operation in reversed(layout.order):
        stage = stages.get(operation.name, first_use.get(operation.name))
        if stage is None:
            continue
        if not operation.is_call:
            stages[operation.name] = stage
        for tensor in operation.inputs:
            first_use[tensor.op.name] = min(stage, first_use.get(tensor.op.name, stage))
    return stages


def _stage_by_name(operation: Op, towers: Towers) -> int | None:
    """The stage by the operation's name scope or device, or the towers' stage."""
    stage = scopes.stage_in(operation.name)
    if stage is None and operation.operation.device:
        stage = towers.stage_on(operation.operation.device)
    return towers.stage if stage is None else stage


def _amount_of_data(tensor: tf.Tensor, spec: Spec) -> tuple[bool, int]:
    """A sort key for inputs: those with rows are larger; then by entries, unknown sizes as 1."""
    entries = math.prod(size or 1 for size in tensor.shape) if tensor.shape.rank else 1
    return not isinstance(spec, Replicated), entries
