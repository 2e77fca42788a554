"""Of two right ways to do an operation, the one for which fewer bytes cross between devices.

Goes in: an operation and its plan by the table of rules; or all plans.  Comes out: the same plans,
or some by which an operation is done once with all rows.

The rows cross where they are smaller than what would cross else: every tower's part of a sum over
rows (the gradient of a wide layer); on CPU devices, which share the cores, the weights of a wide
layer; what light operations make of rows that are wanted whole (:func:`gather_early`), or of rows
that were made once (:func:`cut_late`).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules import registry
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import REPLICATED, SUM, ListOf, Replicated, Sharded, Size, Spec

# Rows of a tower where nobody knows: on CPU devices, elsewhere.
ROWS, MANY_ROWS = 64, 1024
LARGEST_KEPT = 2**16  # bytes; what is smaller may cross


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What has to be known of a step to choose.

    Attributes:
      towers: how many there are; 0 for each operation as the table says.
      rows: how many rows a batch has, about.
      shared: whether the towers share their cores, so that work is no faster for being spread.
    """

    towers: int = 0
    rows: int = 0
    shared: bool = False

    def cheaper(self, operation: Op, plan: Plan, specs: list[Spec]) -> Plan:
        """``plan``, or the way by which fewer bytes cross."""
        if not self.towers or plan.make is not None or not plan.gives \
                or any(isinstance(spec, ListOf) for spec in specs):
            return plan
        if plan.gives == [SUM]:
            part = bytes_of(operation.outputs[0], REPLICATED)
            cheap = part > LARGEST_KEPT and 0 < 2 * self._rows(
                operation.inputs, specs) < self.towers * part
            return registry.once(operation) if cheap else plan
        if not self.shared or REPLICATED not in plan.takes or plan.near is not None \
                or not all(isinstance(spec, Sharded) and not spec.group for spec in plan.gives):
            return plan
        whole = max(bytes_of(tensor, spec) for tensor, spec in zip(operation.inputs, plan.takes)
                    if spec == REPLICATED)
        if whole <= LARGEST_KEPT or (self.towers - 1) * whole <= 2 * (self._rows(
                operation.inputs, specs) + self._rows(operation.outputs, plan.gives)):
            return plan
        return dataclasses.replace(registry.once(operation), gives=plan.gives, whole=plan.whole)

    def _rows(self, tensors: Sequence[tf.Tensor], specs: Sequence[Spec]) -> int:
        """Bytes of what has rows among these tensors."""
        return self.rows * sum(bytes_of(tensor, spec) for tensor, spec in zip(tensors, specs)
                               if isinstance(spec, Sharded))


def of(strategy: Any, known_rows: int | None) -> Traffic:
    """That of a strategy's towers, and of batches of which the rows may be known.

    Nothing is gathered where all micro-batches' rows would be held, or rows cross machines.
    """
    placement, count = strategy.extended.placement, len(strategy.extended.worker_devices)
    if strategy.extended.workers is not None or placement.micro_batches > 1 or placement.rows:
        return Traffic()
    guess = count * (ROWS if placement.on_cpu else MANY_ROWS)
    return Traffic(count, known_rows or guess, placement.on_cpu)


def gather_early(layout: Any) -> None:
    """Gathers rows before light operations make them more, where what these make is wanted whole.

    So of the gradient of a table cross the rows that were looked up, once, and not what pooling
    repeats of them, nor beside them what an optimizer makes of them.

    Args:
      layout: a :class:`propagate.Layout`, which is changed: such operations are done once.
    """
    in_parts = collections.Counter(tensor.name for tensor in layout.graph.outputs)
    # The bytes an example that cross, at least, for a tensor to be there whole; 0 where it is.
    least: dict[str, int] = {}
    for operation in layout.parted:
        plan = layout.plans[operation.name]
        for name, whole in {(name, spec == REPLICATED)
                            for name, spec in zip(operation.input_names, plan.takes)}:
            if whole:
                least[name] = 0
            else:
                in_parts[name] += 1

    light = [operation for operation in layout.parted if _may_be_done_once(layout, operation)]
    rows = {operation.name: _rows_before(layout, operation) for operation in light}

    def before(operation: Op) -> int:
        return sum(least.get(name, bytes) for name, bytes in rows[operation.name].items())

    def after(operation: Op) -> int:
        return bytes_of(operation.outputs[0], layout.plans[operation.name].gives[0])

    for operation in _asked_for(light, rows, in_parts.copy()):
        least.setdefault(operation.output_names[0], min(after(operation), before(operation)))
    for operation in reversed(light):
        out = operation.output_names[0]
        if not in_parts[out] and before(operation) < after(operation):
            for name in rows[operation.name]:
                in_parts[name] -= 1
                least[name] = 0
            layout.plans[operation.name] = registry.once(operation)
            layout.specs[out] = REPLICATED


def _asked_for(light: Sequence[Op], rows: Mapping[str, Mapping[str, int]],
               in_parts: collections.Counter[str]) -> list[Op]:
    """Those that make what may be wanted whole alone, and what that is made of."""
    asked: set[str] = set()
    found: list[Op] = []
    for operation in reversed(light):
        out = operation.output_names[0]
        if out in asked or not in_parts[out]:
            asked.update(rows[operation.name])
            found.append(operation)
            if not in_parts[out]:
                in_parts.subtract(rows[operation.name].keys())
    return found[::-1]


def cut_late(layout: Any) -> None:
    """Light operations on what was made once and is to be cut are done once if they make it less.

    So of a dropout's draws the mask crosses, a byte each, and not the numbers.

    Args:
      layout: a :class:`propagate.Layout`, which is changed: such operations are done once.
    """
    there: set[str] = set()  # sharded, and whole on a device already
    for operation in layout.parted:
        plan = layout.plans[operation.name]
        if not there.isdisjoint(operation.input_names) and _may_be_done_once(layout, operation):
            rows = _rows_before(layout, operation)
            if rows and there.issuperset(rows) \
                    and bytes_of(operation.outputs[0], plan.gives[0]) <= sum(rows.values()):
                plan = dataclasses.replace(registry.once(operation), gives=plan.gives)
                layout.plans[operation.name] = plan
        if plan.once:
            there.update(operation.output_names)


def add_up_early(layout: Any) -> None:
    """Adds up before linear operations what is wanted whole behind them, if fewer bytes cross so.

    So a mean over rows of which several things are made crosses once, and a half before its cast.

    Args:
      layout: a :class:`propagate.Layout`, which is changed: such operations are done once.
    """
    linear = {name for name, plan in layout.plans.items() if _is_of_one_sum(plan)}
    if not linear:
        return
    whole: set[str] = set()
    parts = {tensor.name for tensor in layout.graph.outputs}  # of which a tower wants its part
    below: collections.Counter[str] = collections.Counter()  # bytes of what is made of a sum
    for operation in reversed(layout.parted):
        plan = layout.plans[operation.name]
        for name, spec in zip(operation.input_names, plan.takes):
            if spec == REPLICATED:
                whole.add(name)
            elif operation.name not in linear or operation.output_names[0] in parts:
                parts.add(name)
            else:
                bytes, out = bytes_of(operation.outputs[0], REPLICATED), operation.output_names[0]
                below[name] += bytes if out in whole else min(bytes, below[out])
    for operation in layout.parted:
        if operation.name not in linear:
            continue
        plan = layout.plans[operation.name]
        of = operation.inputs[list(plan.takes).index(SUM)]
        if of.name not in parts and (
                of.name in whole or 0 < bytes_of(of, REPLICATED) <= below[of.name]):
            layout.plans[operation.name] = registry.once(operation)
            layout.specs[operation.outputs[0].name] = REPLICATED
            whole.update((of.name, operation.outputs[0].name))


def _is_of_one_sum(plan: Any) -> bool:
    """Whether an operation makes a sum's part of another sum's part and what all towers have."""
    return list(plan.gives) == [SUM] and plan.make is None and not plan.once \
        and plan.near is None and list(plan.takes).count(SUM) == 1 \
        and all(spec == SUM or isinstance(spec, Replicated) for spec in plan.takes)


def _may_be_done_once(layout: Any, operation: Op) -> bool:
    plan = layout.plans.get(operation.name)
    return isinstance(plan, Plan) and registry.is_light(operation.type) \
        and len(operation.outputs) == 1 and isinstance(plan.gives[0], Sharded) and all(
            isinstance(spec, (Replicated, Sharded, Size)) for spec in plan.takes)


def _rows_before(layout: Any, operation: Op) -> dict[str, int]:
    """The sharded inputs of an operation, with the bytes of an example."""
    return {tensor.name: bytes_of(tensor, spec) for tensor, spec
            in zip(operation.inputs, layout.inputs_of(operation)) if isinstance(spec, Sharded)}


def bytes_of(tensor: tf.Tensor, spec: Spec) -> int:
    """Bytes of a tensor, or of an example of one with rows; 0 if that is unknown."""
    shape, dtype = tensor.shape, tensor.dtype
    if shape.rank is None or dtype == tf.resource:
        return 0
    sizes = shape.as_list()
    if isinstance(spec, Sharded):
        sizes[spec.dim] = spec.times
    return int(math.prod([size or 1 for size in sizes]) * dtype.size)
