"""Rows that a step makes itself: noise of a constant shape, or positions, in a constant number.

Goes in: a function that propagates specs through a graph, if the towers make the rows of given
operations.  Comes out: the layout by which they make all those that need not be gathered.

So a generator's passes over its noise run on the towers.  Which tower makes which rows changes no
result, so that a number of rows may decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import tensorflow as tf

from towerstrategy.sharding.layout import Layout, Nested
from towerstrategy.sharding.rules import registry
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import Sharded, of_batch

_ROUNDS = 4  # limit: in most steps no rows, or those of one operation or two, are gathered


class Batch(NamedTuple):
    """The batch that rows belong to: its name, as in :class:`Sharded`; its number of rows."""

    name: str
    rows: int


Made = Mapping[tf.Operation, Batch]  # operations, with the batch that the rows of each belong to
NONE: Made = {}


def plan_of(operation: Op, made: Made) -> Plan | None:
    """The plan by which each tower makes its rows; None if the operation makes none of ``made``."""
    batch = made.get(operation.operation)
    return batch and registry.plan_of_rows(operation, batch.name)


def with_own_rows(propagated: Callable[[Made], Layout], replicas: int) -> Layout:
    """The layout by which the towers make rows that the step makes of none, if it can.

    Args:
      propagated: returns the layout if the towers make these rows.
      replicas: the number of towers of all workers; 0 if they make none.
    """
    layout = propagated({})
    made = _made_in(layout, replicas)
    for _ in range(_ROUNDS if made else 0):
        other = propagated(made)
        gathered = _gathered(other, layout, made)
        if not gathered:
            other.made = dict(made.values())
            return other
        made = {operation: batch for operation, batch in made.items() if operation not in gathered}
    return layout


def _made_in(layout: Layout, replicas: int) -> Made:
    """The operations that make a constant number of rows of none.

    If the function was traced for the batch's number of rows, so many rows are the batch's.  Other
    rows are a batch of their own if there is one for each tower, and an operation that is not light
    makes some.
    """
    makers = {operation.operation: (rows, registry.is_light(operation.type))
              for each in (layout.with_bodies() if replicas else ()) for operation in each.order
              if operation.type in registry.SIZES and each.plans[operation.name].once
              and (rows := registry.rows_made(operation)) is not None}
    batches = {rows: Batch(f"{rows} rows", rows) for rows, light in makers.values()
               if rows >= replicas and not light}
    for tensor in layout.graph.inputs:
        spec = layout.specs[tensor.name]
        if isinstance(spec, Sharded) and of_batch(spec) and tensor.shape[spec.dim] is not None:
            batches[tensor.shape[spec.dim]] = Batch("", tensor.shape[spec.dim])
    return {operation: batches[rows] for operation, (rows, _) in makers.items() if rows in batches}


def _gathered(layout: Layout, before: Layout, made: Made) -> set[tf.Operation]:
    """Those of ``made`` whose rows, or what is made of them, are gathered, but not ``before``."""
    known = {(each.graph, name) for each in before.with_bodies() for name in _gathered_in(each)}
    found: set[tf.Operation] = set()
    for each in layout.with_bodies():
        needed = {name for name in _gathered_in(each) if (each.graph, name) not in known}
        makers = set(found)
        for operation in reversed(each.order if needed else ()):
            if not needed.isdisjoint(operation.output_names):
                needed.update(operation.input_names)
                makers.update({operation.operation} & made.keys())
        if needed and makers == found:
            return {*made}  # they are outside of the body
        found = makers
    return found


def _gathered_in(layout: Layout) -> set[str]:
    """The tensors that are gathered: made on the towers, but needed whole, or cut otherwise."""
    found: set[str] = set()
    whole: set[str] = set()
    for operation in layout.parted:
        plan = layout.plans[operation.name]
        whole.update(operation.output_names if plan.once else ())
        found.update(operation.output_names
                     if isinstance(plan, Nested) and plan.gathers else ())
        found.update(name for name, spec, wanted in zip(
            operation.input_names, layout.inputs_of(operation), plan.takes)
            if isinstance(spec, Sharded) and not (
                isinstance(wanted, Sharded) and wanted.given in (spec, spec.uncounted)))
    return found - whole
