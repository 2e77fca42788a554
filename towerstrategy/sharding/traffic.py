"""Chooses, of two right plans for an operation, the one that moves fewer bytes between devices.

Goes in: an operation and its plan by the table of rules; or a whole layout.  Comes out: the same
plans, or plans by which operations run once, with all rows.

An operation runs once if its rows have fewer bytes than the tensors that would cross otherwise: the
parts of a sum over rows (a wide layer's gradient); on CPU devices, which share the cores, a wide
layer's weights; the outputs of light operations that are gathered (:func:`gather_early`); the
inputs of light operations that were made once (:func:`cut_late`).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.layout import Layout
from towerstrategy.sharding.rules import registry
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import (
    REPLICATED,
    SUM,
    ListOf,
    Replicated,
    Sharded,
    Size,
    Spec,
    of_batch,
)

# A guess of a tower's number of rows if it is unknown: on CPU devices, on other devices.
ROWS, MANY_ROWS = 64, 1024
LARGEST_KEPT = 2**16  # bytes; smaller tensors may cross


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The facts about a step by which plans are chosen.

    Attributes:
      crossings: how often a sum's bytes cross: once from each tower; with several workers twice,
        by an all-reduce.  0 keeps each plan of the table.
      rows: the approximate number of rows of a batch.
      shared: whether the towers share their cores, so that sharded work is no faster.
      kinds: the types of the towers' devices.
      replicas: the number of towers of all workers; 0 keeps rows that a step makes on one device.
    """

    crossings: int = 0
    rows: int = 0
    shared: bool = False
    kinds: frozenset[str] = frozenset({"CPU"})
    replicas: int = 0

    def pads(self, plan: Plan) -> bool:
        """Whether a tower without rows needs a row of padding for an operation of this plan."""
        return plan.padded is True or plan.padded in self.kinds

    def cheaper(self, operation: Op, plan: Plan, specs: list[Spec]) -> Plan:
        """``plan``, or a plan that moves fewer bytes."""
        if not self.crossings or plan.make is not None or not plan.gives \
                or any(isinstance(spec, ListOf) for spec in specs):
            return plan
        if plan.gives == [SUM]:
            part = bytes_of(operation.outputs[0], REPLICATED)
            cheap = part > LARGEST_KEPT and 0 < 2 * self._rows(
                operation.inputs, specs) < self.crossings * part
            return registry.once(operation) if cheap else plan
        if not self.shared or REPLICATED not in plan.takes or plan.near is not None \
                or not all(isinstance(spec, Sharded) and of_batch(spec) for spec in plan.gives):
            return plan
        whole = max(bytes_of(tensor, spec) for tensor, spec in zip(operation.inputs, plan.takes)
                    if spec == REPLICATED)
        if whole <= LARGEST_KEPT or (self.crossings - 1) * whole <= 2 * (self._rows(
                operation.inputs, specs) + self._rows(operation.outputs, plan.gives)):
            return plan
        return dataclasses.replace(registry.once(operation), gives=plan.gives, whole=plan.whole)

    def _rows(self, tensors: Sequence[tf.Tensor], specs: Sequence[Spec]) -> int:
        """The bytes of the sharded tensors among these."""
        return self.rows * sum(bytes_of(tensor, spec) for tensor, spec in zip(tensors, specs)
                               if isinstance(spec, Sharded))


ANY = Traffic()  # keeps each plan of the table


def rows_of_tower(placement: Any) -> int:
    """A guess of a tower's number of rows; 0 if rows never cross in place of sums.

    For micro-batches all rows would be held; and the host would compute for GPUs.
    """
    by_a_tower = placement.balanced or placement.merge in placement.towers
    if placement.micro_batches > 1 or placement.rows or not (by_a_tower or placement.on_cpu):
        return 0
    return ROWS if placement.on_cpu else MANY_ROWS


def of_strategy(strategy: Any, known_rows: int | None, in_run: bool = False) -> Traffic:
    """The :class:`Traffic` of a strategy's steps; ``in_run``: of a function of ``strategy.run``.

    With several workers, these must choose the same plans, so what they choose by is what they
    agreed on at their start.
    """
    extended = strategy.extended
    placement, workers, count = extended.placement, extended.workers, len(extended.worker_devices)
    known = extended.modes.batch_rows
    if workers is None:
        guess = rows_of_tower(placement) * count
        return Traffic(count if guess else 0, known_rows or known or guess, placement.on_cpu,
                       placement.kinds, count)
    guess = 0 if in_run else workers.rows  # in `run`, a worker has the sum of its own towers
    return Traffic(2 if guess else 0, known or guess, False, placement.kinds, workers.replicas)


def gather_early(layout: Layout) -> None:
    """Gathers rows before light operations whose outputs are gathered anyway and are larger.

    So the gradient of an embedding table crosses as the rows that were looked up, once: not as the
    rows that pooling repeats, and not a second time after an optimizer's operations on them.

    Args:
      layout: it is changed: such operations run once.
    """
    # Tensor -> how many consumers take the towers' parts.
    in_parts = collections.Counter(tensor.name for tensor in layout.graph.outputs)
    # Tensor -> the fewest bytes per example that cross to gather it; 0 if it is gathered anyway.
    least: dict[str, int] = {}
    for operation in layout.parted:
        plan = layout.plans[operation.name]
        for name, whole in {(name, spec == REPLICATED)
                            for name, spec in zip(operation.input_names, plan.takes)}:
            if whole:
                least[name] = 0
            else:
                in_parts[name] += 1

    light = [operation for operation in layout.parted if _is_movable(layout, operation)]
    rows = {operation.name: rows_before(layout, operation) for operation in light}

    def before(operation: Op) -> int:
        return sum(least.get(name, bytes) for name, bytes in rows[operation.name].items())

    def after(operation: Op) -> int:
        return bytes_of(operation.outputs[0], layout.plans[operation.name].gives[0])

    moved_from = {name for names in rows.values() for name in names}
    for operation in light:
        if operation.output_names[0] in moved_from:
            least.setdefault(operation.output_names[0], min(after(operation), before(operation)))
    for operation in reversed(light):
        out = operation.output_names[0]
        if not in_parts[out] and before(operation) < after(operation):
            for name in rows[operation.name]:
                in_parts[name] -= 1
                least[name] = 0
            layout.plans[operation.name] = registry.once(operation)
            layout.specs[out] = REPLICATED


def cut_late(layout: Layout) -> None:
    """Cuts tensors that were made once after light operations, if these make them smaller.

    So a dropout's mask crosses, one byte per entry, instead of the random numbers.

    Args:
      layout: it is changed: such operations run once.
    """
    there: set[str] = set()  # tensors that are sharded, but whole on a device already
    for operation in layout.parted:
        plan = layout.plans[operation.name]
        if not there.isdisjoint(operation.input_names) and _is_movable(layout, operation):
            rows = rows_before(layout, operation)
            if rows and there.issuperset(rows) \
                    and bytes_of(operation.outputs[0], plan.gives[0]) <= sum(rows.values()):
                plan = dataclasses.replace(registry.once(operation), gives=plan.gives)
                layout.plans[operation.name] = plan
        if plan.once:
            there.update(operation.output_names)


def add_up_early(layout: Layout) -> None:
    """Adds up partial sums before linear operations, if the sums after them have more bytes.

    So a mean over rows that has several consumers crosses once, and a half crosses before its cast.

    Args:
      layout: it is changed: such operations run once.
    """
    linear = {name for name, plan in layout.plans.items() if _is_linear_in_sum(plan)}
    if not linear:
        return
    whole: set[str] = set()
    parts = {tensor.name for tensor in layout.graph.outputs}  # sums of which towers take their part
    below: collections.Counter[str] = collections.Counter()  # sum -> bytes that cross after it
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
        term = operation.inputs[list(plan.takes).index(SUM)]
        if term.name not in parts and (
                term.name in whole or 0 < bytes_of(term, REPLICATED) <= below[term.name]):
            layout.plans[operation.name] = registry.once(operation)
            layout.specs[operation.outputs[0].name] = REPLICATED
            whole.update((term.name, operation.outputs[0].name))


def _is_linear_in_sum(plan: Plan) -> bool:
    """Whether an operation is linear in a partial sum; its other inputs are replicated."""
    return not plan.once and plan.make is None and plan.near is None \
        and list(plan.gives) == [SUM] and list(plan.takes).count(SUM) == 1 \
        and all(spec == SUM or isinstance(spec, Replicated) for spec in plan.takes)


def _is_movable(layout: Layout, operation: Op) -> bool:
    """Whether an operation may run once instead of on each tower: it is light and shards rows."""
    plan = layout.plans.get(operation.name)
    return plan is not None and registry.is_light(operation.type) \
        and len(operation.outputs) == 1 and isinstance(plan.gives[0], Sharded) and all(
            isinstance(spec, (Replicated, Sharded, Size)) for spec in plan.takes)


def rows_before(layout: Layout, operation: Op) -> dict[str, int]:
    """The sharded inputs of an operation, each with its bytes per example."""
    return {tensor.name: bytes_of(tensor, spec) for tensor, spec
            in zip(operation.inputs, layout.inputs_of(operation)) if isinstance(spec, Sharded)}


def bytes_of(tensor: tf.Tensor, spec: Spec) -> int:
    """The bytes of a tensor, or the bytes per example of a sharded one; 0 if unknown."""
    shape, dtype = tensor.shape, tensor.dtype
    if shape.rank is None or dtype == tf.resource:
        return 0
    sizes = shape.as_list()
    if isinstance(spec, Sharded):
        sizes[spec.dim] = spec.times
    return int(math.prod([size or 1 for size in sizes]) * dtype.size)
