"""The spec of each tensor and the plan of each operation of a traced step.

Goes in: a traced graph and the specs of its inputs.  Comes out: its :class:`Layout`, and those of
the functions that it calls.  An operation without a rule runs once, with all rows.

The specs of loop variables are a fixpoint over the loop's body.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import graphs, joined, traffic as traffic_lib
from towerstrategy.sharding.layout import BRANCHES, LOOPS, Layout, Nested, only_read
from towerstrategy.sharding.rules import lists, registry, row_loops, scaling
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import (
    MEAN,
    REPLICATED,
    SUM,
    ListOf,
    OptionalOf,
    Partial,
    Position,
    Replicated,
    Row,
    RowList,
    Sharded,
    Size,
    Spec,
    has_known_rows,
)

ROUNDS = 20  # limit of a loop's fixpoint: a loop variable changes its spec a few times at most


class CannotGather(Exception):
    """An operation needs a ``TensorList`` with all rows, but each tower has a list of its own."""


def propagate(graph: Any, inputs: Sequence[Spec],
              traffic: traffic_lib.Traffic | None = None) -> Layout:
    """The layout of ``graph`` for inputs with these specs.

    Args:
      graph: the traced graph.
      inputs: the specs of its inputs.
      traffic: picks the plan that moves fewer bytes; None keeps the plans of the rules.

    Raises:
      TypeError: a user's rule returned something other than a valid plan.
    """
    for refused in ((), (RowList,), (RowList, OptionalOf)):
        with contextlib.suppress(CannotGather):
            return _Propagation(graph, refused, traffic).layout(graph, inputs)
    return _Propagation(graph, (ListOf,), traffic).layout(graph, inputs)


def once(layout: Layout, operation: Op) -> Plan:
    """The plan of an operation whose inputs are all replicated; it is put into ``layout``."""
    _Propagation(layout.graph, (), None).operation(layout, operation)
    return layout.plans[operation.name]


class _Propagation:
    """One pass over a graph; no tensor may get a spec of one of the ``refused`` classes."""

    def __init__(self, graph: Any, refused: tuple[Any, ...],
                 traffic: traffic_lib.Traffic | None) -> None:
        self._graph, self._refused = graph, refused
        self._traffic = traffic or traffic_lib.Traffic()
        self._depth = 0  # of nested branches and loops
        self._keeps_parts = False  # whether linear operations do, in the innermost of them
        self._kept = 0  # how many did so
        self._shared: set[Any] = set()  # branches and loops, with their inputs' specs, not local
        self._arguments: dict[tuple[Any, str], tf.Tensor] = {}  # (body, its input) -> outer tensor
        self._bodies: dict[tf.Operation, Any] = {}  # call -> the body that it calls
        self._loop_bodies: set[Any] = set()  # their inputs change from iteration to iteration

    def layout(self, graph: Any, inputs: Sequence[Spec]) -> Layout:
        """The layout of a graph or function body for inputs with these specs."""
        layout = Layout(graph, graphs.needed_in_order(graph), {}, {})
        layout.specs.update(zip((tensor.name for tensor in graph.inputs), inputs))
        outputs = {tensor.op.name for tensor in graph.outputs}
        passed: dict[str, Op] = {}
        for operation in layout.order:
            names = operation.output_names
            if names and names[0] in layout.specs:
                continue  # an input
            if passed:
                operation.pass_by(passed)
            layout.specs.update(zip(names, self.operation(layout, operation)))
            plan = layout.plans[operation.name]
            if plan.passes and not operation.controls and operation.name not in outputs:
                passed[operation.name] = operation
                layout.parted.pop()
                del layout.plans[operation.name]
        layout.order = [operation for operation in layout.order if operation.name not in passed]
        if not self._depth:
            traffic_lib.cut_late(layout)
            traffic_lib.gather_early(layout)
            traffic_lib.add_up_early(layout)
        return layout

    def operation(self, layout: Layout, operation: Op) -> Sequence[Spec]:
        """Puts the plan of an operation into the layout; returns the specs of its outputs."""
        specs = layout.inputs_of(operation)
        nests = operation.has_effect and (operation.is_call or operation.type in BRANCHES) \
            and not _tf.is_compiled(operation.operation)  # each write runs where its variable lives
        if specs.count(REPLICATED) == len(specs) and not nests:
            layout.plans[operation.name] = plan = registry.once(operation)
            return plan.gives
        layout.parted.append(operation)
        found = self._plan(operation, specs, nests)
        if found is not None and self._can_redistribute(operation, specs, found):
            plan = found
        elif all(joined.can_become(spec, REPLICATED) for spec in specs):
            plan = registry.once(operation)
        else:
            raise CannotGather(operation.type)
        if any(isinstance(wanted, Replicated) and isinstance(
                spec, (Sharded, RowList) if plan.once else RowList)
               for spec, wanted in zip(specs, plan.takes)) and not operation.writes_variables:
            layout.fallbacks.append(operation)  # not sparse updates, which always take all rows
        if not self._depth and not isinstance(plan, Nested):
            plan = self._traffic.cheaper(operation, plan, list(specs))
        if plan.padded and not self._traffic.pads(plan):
            plan = dataclasses.replace(plan, padded=False)
        layout.plans[operation.name] = plan
        if operation.outputs and layout.graph is self._graph:  # other callers share a body's shapes
            registry.set_static_shape(operation.outputs[0], plan)
        return plan.gives

    def _plan(self, operation: Op, specs: Sequence[Spec], nests: bool) -> Plan | None:
        """The plan of an operation with such inputs; None if it runs once, with all rows."""
        of_rows = operation.type in row_loops.NEW_LISTS \
            or not row_loops.OF_ROWS.isdisjoint(map(type, specs))
        plan = row_loops.plan_of(operation, specs) if of_rows else None
        if plan is not None:
            return plan
        if nests or not all(isinstance(spec, Replicated) for spec in specs):
            if operation.is_call:
                return self._call(operation, specs)
            if operation.type in (*BRANCHES, *LOOPS):
                return self._control_flow(operation, specs)
        specs = row_loops.without_row_lists(specs) if of_rows else specs
        plan = registry.plan_of(operation, specs)
        if plan is None and self._keeps_parts:
            plan = scaling.plan_of_parts(operation, specs)
            self._kept += plan is not None
        return plan

    def _can_redistribute(self, operation: Op, specs: Sequence[Spec], plan: Plan) -> bool:
        """Whether each input can be redistributed to the spec that the plan takes."""
        if any(isinstance(spec, self._refused) for spec in plan.gives):
            return False
        return plan.takes == specs or all(
            joined.can_become(spec, wanted) and self._can_be_each_towers(tensor, spec, wanted)
            for tensor, spec, wanted in zip(operation.inputs, specs, plan.takes))

    def _can_be_each_towers(self, tensor: tf.Tensor, spec: Spec, wanted: Spec) -> bool:
        """Whether a list that each tower must have is so already, or has no entries of all rows."""
        is_so = isinstance(spec, ListOf) \
            and isinstance(spec, RowList) == isinstance(wanted, RowList)
        return not isinstance(wanted, ListOf) or is_so \
            or self._is_empty([tensor], 0, wanted.element)

    def _is_empty(self, tensors: Sequence[tf.Tensor], number: int, element: Spec | None) -> bool:
        """Whether a tensor is a list without entries, or one whose entries are of this spec."""
        return lists.is_empty(self._origin(tensors[number], through_loops=True), element)

    def _note_arguments(self, graph: Any, arguments: Iterable[tf.Tensor]) -> None:
        """Notes the tensors that a function body is called with."""
        self._arguments.update(((graph, inner.name), outer)
                               for inner, outer in zip(graph.inputs, arguments))

    def _origin(self, tensor: tf.Tensor, through_loops: bool) -> tf.Tensor:
        """The tensor that this one is a copy of, traced back through calls and identities.

        ``through_loops`` also goes from a loop variable to the value that the loop starts with.
        """
        while True:
            outer = self._arguments.get((tensor.graph, tensor.name)) \
                if through_loops or tensor.graph not in self._loop_bodies else None
            if outer is None and tensor.op in self._bodies:
                outer = self._bodies[tensor.op].outputs[tensor.value_index]
            if outer is None and tensor.op.type != "Identity":
                return tensor
            tensor = tensor.op.inputs[0] if outer is None else outer

    def _call(self, operation: Op, specs: Sequence[Spec]) -> Plan:
        signature = _tf.called_by_each_tower(operation.operation)
        if signature and isinstance(specs[0], Sharded) and specs[0].dim == 0:
            meant: dict[str, Spec] = {"rows": specs[0], "own": MEAN, "once": REPLICATED, "sum": SUM}
            takes, gives = ([meant[word] for word in words] for words in signature)
            return Plan(takes, gives)
        if MEAN in specs:  # a rewritten call
            raise NotImplementedError(
                "with synchronize_batch_norm=False, gradients of batch norm cannot be vectorized "
                "(pass experimental_use_pfor=False), nor be taken in forward mode")
        body = self._bodies[operation.operation] = _tf.called_body(operation.operation)
        self._note_arguments(body, operation.inputs)
        layout = self.layout(body, specs)
        if _tf.is_compiled(operation.operation) and not operation.handles \
                and is_local(layout, layout.outputs, compiled=True):
            return Plan(list(specs), layout.outputs)  # inlined, ops that only XLA has could not run
        return Nested(list(specs), layout.outputs, layouts=[layout])

    def _control_flow(self, operation: Op, specs: Sequence[Spec]) -> Nested | None:
        """The plan of a branch or loop; its bodies keep parts of sums if that makes it local."""
        known = self._keeps_parts
        find = self._branch if operation.type in BRANCHES else self._loop
        key = operation.operation, *specs
        self._depth += 1
        try:
            if key not in self._shared:
                self._keeps_parts, before = True, self._kept
                plan = find(operation, specs)
                if plan is not None and plan.local or self._kept == before:
                    return plan
                self._shared.add(key)
            self._keeps_parts = False
            return find(operation, specs)
        finally:
            self._keeps_parts = known
            self._depth -= 1

    def _branch(self, operation: Op, specs: Sequence[Spec]) -> Nested | None:
        if self._depth == 1:  # sums cross before the branch, together with others
            specs = [REPLICATED if isinstance(spec, Partial) else spec for spec in specs]
        branches = graphs.functions_of(operation.operation)
        for graph in branches:
            self._note_arguments(graph, operation.inputs[1:])
            for inner, outer in zip(graph.inputs, operation.inputs[1:]):
                if outer.dtype.is_integer:  # such as axes, in gradients of what is outside
                    _tf.note_constant(inner, _tf.constant_value(outer))
        condition = self._origin(operation.inputs[0], through_loops=False).ref()
        layouts = [self.layout(graph, [joined.branch_input(condition, number, spec)
                                       for spec in specs[1:]])
                   for number, graph in enumerate(branches)]
        by_output = zip(zip(*(graph.outputs for graph in branches)),
                        zip(*(layout.outputs for layout in layouts)))
        gives = [joined.branch_output(condition, outputs, functools.partial(
            self._is_empty, tensors)) for tensors, outputs in by_output]
        if any(not joined.can_become(spec, wanted) for layout in layouts
               for spec, wanted in zip(layout.outputs, gives)):
            raise CannotGather(operation.type)
        local = all(is_local(layout, gives) for layout in layouts)
        return Nested([REPLICATED, *specs[1:]], gives, layouts=layouts, local=local)

    def _loop(self, operation: Op, specs: Sequence[Spec]) -> Nested | None:
        condition, body = graphs.functions_of(operation.operation)
        self._note_arguments(body, operation.inputs)
        self._loop_bodies.add(body)
        lists.note_constants(body, [
            self._origin(tensor, through_loops=False) if tensor.dtype == tf.variant else tensor
            for tensor in operation.inputs])
        over_rows = self._loop_over_rows(operation, specs, condition, body)
        if over_rows is not None:
            return over_rows
        if not all(joined.can_become(spec, REPLICATED) for spec in specs
                   if isinstance(spec, RowList)):
            raise CannotGather(operation.type)
        specs = row_loops.without_row_lists(specs)
        are_read = graphs.are_read(condition, body)
        settled = self._fixpoint(body, operation, specs, are_read)
        if settled is None:
            return None
        sums = [_is_summed_each_iteration(settled[1], tensor) for tensor in body.outputs]
        if any(sums):
            again = self._fixpoint(body, operation, [SUM if is_sum else spec for is_sum, spec
                                                     in zip(sums, settled[0])], are_read)
            if again is not None:
                settled = again
        variables, layout = settled
        for spec, after, tensor in zip(specs, variables, operation.inputs):
            if not self._can_be_each_towers(tensor, spec, after):
                raise CannotGather(operation.type)  # the loop starts with a list of all rows
        tested = self.layout(condition, variables)
        local = is_local(layout, variables) and is_local(tested, [REPLICATED])
        takes = [dataclasses.replace(after, start=True)
                 if isinstance(before, Replicated) and isinstance(after, Sharded) else after
                 for before, after in zip(specs, variables)]
        return Nested(takes, variables, layouts=[tested, layout], local=local,
                      only_read=only_read(operation, [tested, layout]))

    def _loop_over_rows(self, operation: Op, specs: Sequence[Spec], condition: Any, body: Any
                        ) -> Nested | None:
        """The plan of a loop whose iterations are the rows, each independent of the others."""
        if not any(isinstance(spec, (Size, Sharded)) for spec in specs):
            return None
        starts = [self._origin(tensor, through_loops=False) for tensor in operation.inputs]
        counters = row_loops.with_counters(body, starts, specs)
        with contextlib.suppress(row_loops.DependsOnOthers, CannotGather):
            more, = self.layout(condition, counters).outputs
            before: list[Spec] | None = None
            variables = row_loops.variables(body, starts, counters, more)
            while variables is not None and variables != before:
                before, layout = variables, self.layout(body, variables)
                variables = row_loops.settled(before, layout.outputs)
            if variables is not None:
                layouts = [self.layout(condition, variables), layout]
                if layouts[0].outputs == [more] and all(
                        is_local(each, each.outputs) for each in layouts):
                    takes, gives = row_loops.outside(variables, layout.outputs)
                    return Nested(takes, gives, layouts=layouts, local=True,
                                  only_read=only_read(operation, layouts))
        return None

    def _fixpoint(self, body: Any, operation: Op, specs: Sequence[Spec],
                  are_read: Sequence[bool]) -> tuple[list[Spec], Layout] | None:
        """The specs that a loop's variables settle at, from ``specs`` on, and its body's layout."""
        variables = list(specs)
        for _ in range(ROUNDS):
            layout = self.layout(body, variables)
            after = [joined.loop_variable(*each) for each in zip(
                variables, layout.outputs, operation.inputs, body.outputs, are_read)]
            if after == variables:
                return variables, layout
            if any(isinstance(now, Replicated) and not isinstance(before, (Replicated, ListOf))
                   for before, now in zip(variables, after)):  # the lists' entries change with it
                after = [first if isinstance(now, ListOf) else now
                         for first, now in zip(specs, after)]
            variables = after
        return None


def _is_summed_each_iteration(layout: Layout, tensor: tf.Tensor) -> bool:
    """Whether each iteration adds up the towers' parts and then adds the sum to ``tensor``."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    plan = layout.plans.get(tensor.op.name)
    return plan is not None and plan.once and tensor.op.type in scaling.ADDITIVE and any(
        layout.specs[added.name] == SUM for added in tensor.op.inputs)


def is_local(layout: Layout, outputs: Sequence[Spec], compiled: bool = False) -> bool:
    """Whether each tower can run the traced operations alone and gets outputs of these specs.

    ``compiled`` says that XLA compiles them; no kernel of XLA fails on zero rows.
    """
    return _match(layout.outputs, outputs, compiled) and all(
        _is_local(layout, operation, compiled) for operation in layout.order
        if operation.name in layout.plans)


def _is_local(layout: Layout, operation: Op, compiled: bool) -> bool:
    plan, specs = layout.plans[operation.name], layout.inputs_of(operation)
    if isinstance(plan, Nested):
        return _match(specs, plan.takes, compiled) and (
            plan.local or operation.is_call and is_local(
                plan.layouts[0], plan.gives, compiled))
    # The tower is given the batch's number of rows, unless XLA compiles it.
    knows_rows = not compiled and all(has_known_rows(spec) for spec in specs
                                      if isinstance(spec, (Sharded, Size)))
    if plan.once:
        return not operation.has_state and all(isinstance(spec, Replicated) or isinstance(
            spec, Size) and knows_rows for spec in specs) \
            and all(isinstance(spec, Replicated) for spec in plan.gives)
    is_made = plan.make is None or plan.alone is not None and knows_rows
    return is_made and (compiled or not plan.padded) and _match(specs, plan.takes, compiled)


def _match(specs: Sequence[Spec], takes: Sequence[Spec], compiled: bool = False) -> bool:
    """Whether a tower by itself has inputs of the specs that a plan takes, or makes them.

    Of what is the same for all towers, the first one has all as its part of a sum.
    """
    return all(spec == wanted or isinstance(spec, Sharded) and spec.uncounted == wanted
               or isinstance(spec, Replicated) and (
        isinstance(wanted, (Replicated, ListOf)) or wanted == SUM and not compiled)
        or isinstance(spec, ListOf) and isinstance(wanted, ListOf)
        or isinstance(spec, Position) and isinstance(wanted, Row) and not compiled
        for spec, wanted in zip(specs, takes))
