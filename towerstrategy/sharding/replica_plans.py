"""The plans of a replica function's operations: which each tower runs, and which run once.

Goes in: operations and the specs of their inputs.  Comes out: their plans.

Each tower runs the operations that take a tensor of which each tower has its own, and those that
draw, keep a state or have an effect.  Calls are inlined, so that this holds for the operations of
nested functions, too.  If a tower may have no rows, the table says what must be padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import graphs, propagate
from towerstrategy.sharding.contract import Contract
from towerstrategy.sharding.propagate import Layout, Nested
from towerstrategy.sharding.rules import registry
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import PER_TOWER, REPLICATED, SUM, ListOf, Sharded, Spec
from towerstrategy.sharding.traffic import Traffic


class NeedsOwnTrace(BaseException):
    """The function must be traced for each tower; the message says why.

    It is no ``Exception``, so that handlers in the traced code do not catch it.
    """


@dataclasses.dataclass
class OnEachTower(Plan):
    """Each tower runs the operation with its own tensors.

    Attributes:
      padded_plan: the table's plan, if a tower without rows must pad the operation's inputs.
      layouts: the layouts of the functions of a branch or a loop, if each tower has its own ones.
    """

    padded_plan: Plan | None = None
    layouts: Sequence[Layout] = ()


class WithAllRows(Plan):
    """The operation runs once, with all towers' rows, instead of on each tower before a sum."""


class Plans:
    """The plans of operations that towers run.

    Args:
      pads: whether a tower may have no rows.
      own: the inputs of the replica function of which each tower has its own.
    """

    def __init__(self, pads: bool, own: Iterable[tf.Tensor]) -> None:
        self._pads = pads
        self._rows = {tensor.ref(): _row_spec(tensor) for tensor in own}  # the specs within a tower

    def put(self, layout: Layout, plan_of: Callable[[Op], Plan]) -> None:
        """Puts the plans into a layout that has the specs of its inputs."""
        for operation in layout.order:
            if operation.output_names and operation.output_names[0] in layout.specs:
                continue  # an input
            plan = layout.plans[operation.name] = plan_of(operation)
            layout.specs.update(zip(operation.output_names, plan.gives))

    def plan_of(self, layout: Layout, operation: Op) -> Plan:
        """The plan of an operation, in a function body or not."""
        specs = layout.inputs_of(operation)
        if PER_TOWER not in specs and (
                not operation.is_stateful or only_reads(operation.operation)):
            return propagate.once(layout, operation)
        if operation.type in propagate.CALLS and not _tf.is_compiled(operation.operation):
            arguments, (body,) = _called(operation)
            inner = self._layout(body, specs, arguments)
            self._hand_on(body.outputs, operation.outputs)
            return Nested(specs, inner.outputs, layouts=[inner])
        return self.on_each_tower(operation, specs)

    def on_each_tower(self, operation: Op, specs: Sequence[Spec]) -> OnEachTower:
        """The plan of an operation that each tower runs."""
        return OnEachTower(specs, [PER_TOWER] * len(operation.outputs),
                           padded_plan=self._padded_plan(operation) if self._pads else None,
                           layouts=self._layouts(operation))

    def _layouts(self, operation: Op) -> list[Layout]:
        """The layouts of the functions that an operation calls, if each tower must have its own."""
        arguments, bodies = _called(operation)
        layouts = [self._layout(body, [PER_TOWER] * len(body.inputs), arguments)
                   for body in bodies]
        if operation.type in propagate.BRANCHES:
            for body in bodies:  # what kernels reserve for their gradients, in another branch
                self._rows.update((output.ref(), spec) for tensor, output in zip(
                    body.outputs, operation.outputs)
                    if isinstance(spec := self._rows.get(tensor.ref()), ListOf))
        compiled = operation.type in propagate.CALLS
        if not any(_differs(layout, not compiled) for layout in layouts):
            return []
        if compiled:
            raise NeedsOwnTrace("a function that XLA compiles would draw the same numbers on every "
                                "tower")
        return layouts

    def _layout(self, body: Any, specs: Sequence[Spec], arguments: Sequence[tf.Tensor]) -> Layout:
        """The layout of a function body that is called with these arguments."""
        layout = Layout(body, graphs.needed_in_order(body), dict(zip(
            (tensor.name for tensor in body.inputs), specs)), {})
        self._hand_on(arguments, body.inputs)
        self.put(layout, lambda inner: self.plan_of(layout, inner))
        return layout

    def _hand_on(self, tensors: Iterable[tf.Tensor], others: Iterable[tf.Tensor]) -> None:
        self._rows.update((other.ref(), self._rows[tensor.ref()])
                          for tensor, other in zip(tensors, others) if tensor.ref() in self._rows)

    def _padded_plan(self, operation: Op) -> Plan | None:
        """The table's plan for an operation that must be padded on a tower without rows; else None.

        A first dimension of unknown size is taken for the rows.  If it is another, the result is
        right, too: only tensors without entries are padded.
        """
        specs = [self._rows.get(tensor.ref(), REPLICATED) for tensor in operation.inputs]
        plan = registry.plan_of(operation, specs) if specs.count(REPLICATED) < len(specs) else None
        fits = plan is not None and plan.make is None and not plan.once and list(
            plan.takes) == specs
        gives = plan.gives if plan is not None and fits else map(_row_spec, operation.outputs)
        self._rows.update(zip((tensor.ref() for tensor in operation.outputs), gives))
        return plan if plan is not None and fits and plan.padded else None


def _called(operation: Op) -> tuple[Sequence[tf.Tensor], Sequence[Any]]:
    """The graphs of the functions that an operation calls, and the inputs that they get."""
    if operation.type in propagate.CALLS:
        return operation.inputs, [_tf.called_body(operation.operation)]
    if operation.type in propagate.BRANCHES:
        return operation.inputs[1:], graphs.branches_of(operation)
    if operation.type in propagate.LOOPS:
        return operation.inputs, [graphs.function_of(operation, name) for name in ("cond", "body")]
    return [], []


def _differs(layout: Layout, pads: bool) -> bool:
    """Whether towers differ in what they do: they draw, print or assert, or one has no rows.

    ``pads`` is False for what XLA compiles, none of whose kernels fails on no rows.
    """
    for operation in layout.order:
        plan = layout.plans.get(operation.name)
        nested = plan.layouts if isinstance(plan, (Nested, OnEachTower)) else ()
        if any(_differs(each, pads) for each in nested):
            return True
        if pads and isinstance(plan, OnEachTower) and plan.padded_plan is not None:
            return True
        if operation.is_stateful and not operation.handles and operation.type not in _tf.CALLERS:
            return True
    return False


def with_all_rows(operation: Op, input_specs: Sequence[Spec], states: Contract,
                  traffic: Traffic) -> WithAllRows | None:
    """The plan of an operation that should run once, with all rows; else None.

    It should if the towers' outputs add up to its output, by the table, and have more bytes.
    """
    specs: list[Spec] = []
    for spec, tensor in zip(input_specs, operation.inputs):
        known = REPLICATED if spec == REPLICATED else states.of(tensor).spec
        if not isinstance(known, Sharded) and spec != REPLICATED or known is None:
            return None
        specs.append(known)
    plan = registry.plan_of(operation, specs)
    if plan is None or plan.gives != [SUM] or list(plan.takes) != specs:
        return None
    once = traffic.cheaper(operation, plan, specs).once
    return WithAllRows(specs, [REPLICATED], once=True) if once else None


def only_reads(operation: tf.Operation) -> bool:
    """Whether an operation only reads resources, so that it may run once; calls may do more."""
    handles = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
    return bool(handles) and operation.type not in _tf.CALLERS and not _tf.has_effect(operation)


def _row_spec(tensor: tf.Tensor) -> Spec:
    """The spec of a tensor whose first dimension is taken for the rows if its size is unknown."""
    return Sharded(0, group="own") if tensor.shape.rank and tensor.shape[0] is None else REPLICATED
