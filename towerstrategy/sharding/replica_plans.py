"""The plans of a replica function's operations: which each tower runs, and which run once.

Goes in: operations and the specs of their inputs.  Comes out: their plans.

Each tower runs the operations that take a tensor of which each tower has its own, and those that
draw, keep a state or have an effect.  Calls are inlined, so that this holds for the operations of
nested functions, too.  If a tower may have no rows, the table says what must be padded.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence, Set

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import propagate
from towerstrategy.sharding.contract import Contract
from towerstrategy.sharding.layout import BRANCHES, LOOPS, Layout, Nested, only_read
from towerstrategy.sharding.rules import registry
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import PER_TOWER, REPLICATED, SUM, Sharded, Spec
from towerstrategy.sharding.traffic import Traffic


class NeedsOwnTrace(BaseException):
    """The function must be traced for each tower; the message says why.

    It is no ``Exception``, so that handlers in the traced code do not catch it.
    """


@dataclasses.dataclass
class Padded(Plan):
    """Each tower runs the operation; a tower without rows pads its inputs, as ``table`` says."""

    table: Plan = dataclasses.field(kw_only=True)


class Plans:
    """The plans of operations that towers run.

    Args:
      pads: whether a tower may have no rows.
      traffic: chooses whether a sum's parts cross, or the rows that they are made of.
    """

    def __init__(self, pads: bool, traffic: Traffic) -> None:
        self._pads, self._traffic = pads, traffic

    def plan_of(self, layout: Layout, operation: Op, states: Contract,
                summed: Set[str] = frozenset()) -> Plan:
        """The plan of an operation, in a function body or not.

        Args:
          layout: the layout of the graph or body, up to this operation.
          operation: the operation.
          states: the states of the graph's or the body's tensors.
          summed: the names of tensors of which nothing but the sum over the towers is used.
        """
        specs = layout.inputs_of(operation)
        if not summed.isdisjoint(operation.output_names):
            if specs == [SUM]:  # a copy of one that is made so
                return dataclasses.replace(registry.once(operation), gives=specs)
            rows = self._with_all_rows(operation, specs, states)
            if rows is not None:
                return rows
        if PER_TOWER not in specs and (
                not operation.is_stateful or operation.only_reads):
            return propagate.once(layout, operation)
        if operation.is_call and not _tf.is_compiled(operation.operation):
            inner, = states.bodies(operation.operation)
            body = self._layout(inner, specs, [tensor.name for tensor, name in zip(
                inner.graph.outputs, operation.output_names) if name in summed])
            return Nested(specs, body.outputs, layouts=[body], inlined=True)
        return self.on_each_tower(operation, specs, states)

    def on_each_tower(self, operation: Op, specs: Sequence[Spec], states: Contract) -> Plan:
        """The plan of an operation that each tower runs."""
        gives: list[Spec] = [PER_TOWER] * len(operation.outputs)
        padded = states.padded.get(operation.name)
        if self._pads and padded is not None and self._traffic.pads(padded):
            return Padded(specs, gives, table=Plan(  # each tower runs a copy, whatever else it says
                padded.takes, padded.gives, padded=padded.padded, ones=padded.ones))
        if not (operation.is_call or operation.type in (*BRANCHES, *LOOPS)):
            return Plan(specs, gives)
        taken: list[Spec] = [spec if tensor.dtype == tf.resource else PER_TOWER
                             for tensor, spec in zip(operation.inputs, specs)]
        layouts = [self._layout(inner, taken[int(operation.type in BRANCHES):])  # not the condition
                   for inner in states.bodies(operation.operation)]
        if operation.is_call:
            if any(map(_differs, layouts)):
                raise NeedsOwnTrace("a function that XLA compiles would draw the same numbers on "
                                    "every tower")
            return Plan(specs, gives)
        read = only_read(operation, layouts) if operation.type in LOOPS else frozenset()
        return Nested(specs, [REPLICATED if index in read else PER_TOWER
                              for index in range(len(gives))],
                      layouts=layouts, only_read=read, local=True)

    def _layout(self, states: Contract, specs: Sequence[Spec], summed: Sequence[str] = ()
                ) -> Layout:
        """The layout of a function body, of whose outputs ``summed`` are only added up."""
        layout = Layout(states.graph, specs)
        names = only_used_for(summed, layout)
        put(layout, lambda operation: self.plan_of(layout, operation, states, names))
        return layout

    def _with_all_rows(self, operation: Op, input_specs: Sequence[Spec], states: Contract
                       ) -> Plan | None:
        """The plan of an operation that should run once, with all rows; else None.

        It should if the towers' outputs add up to its output, by the table, and have more bytes.
        """
        specs: list[Spec] = []
        for spec, tensor in zip(input_specs, operation.inputs):
            state = states.of(tensor)
            # A tower without rows has none of known rows.  In another tensor it may have NaNs.
            if spec != REPLICATED and not (state.known and isinstance(state.spec, Sharded)):
                return None
            specs.append(REPLICATED if spec == REPLICATED else state.spec)
        plan = registry.plan_of(operation, specs)
        if plan is None or plan.gives != [SUM] or list(plan.takes) != specs:
            return None
        once = self._traffic.cheaper(operation, plan, specs).once
        return Plan(input_specs, [SUM], once=True, whole=lambda maker: maker.copy([
            maker.gathered(value.parts(), spec, value.shape) if isinstance(spec, Sharded)
            else value.on(maker.home) for value, spec in zip(maker.inputs, specs)], None)
        ) if once else None


def put(layout: Layout, plan_of: Callable[[Op], Plan]) -> None:
    """Puts plans into a layout that has the specs of its inputs."""
    for operation in layout.order:
        plan = layout.plans[operation.name] = plan_of(operation)
        layout.specs.update(zip(operation.output_names, plan.gives))


def only_used_for(summed: Iterable[str], layout: Layout) -> set[str]:
    """``summed`` and the tensors of which they are copies, if nothing else uses these tensors.

    Args:
      summed: the names of tensors that one operation takes, or the caller of the layout's function.
      layout: the layout.
    """
    uses = collections.Counter(name for each in layout.order for name in each.input_names)
    uses.update(tensor.name for tensor in layout.graph.outputs)
    found = {name for name in summed if uses[name] == 1}
    for operation in reversed(layout.order):
        if operation.type == "Identity" and operation.output_names[0] in found \
                and uses[operation.input_names[0]] == 1:
            found.add(operation.input_names[0])
    return found


def _differs(layout: Layout) -> bool:
    """Whether towers differ in what a compiled function does: they draw, print or assert."""
    return any(operation.is_stateful and not operation.handles
               and operation.type not in _tf.CALLERS
               for each in layout.with_bodies() for operation in each.order)
