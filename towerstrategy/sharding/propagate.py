"""The spec of each tensor and the plan of each operation of a traced step.

Goes in: a traced graph and the specs of its inputs.  Comes out: its :class:`Layout`, and those of
the functions that it calls.  An operation without a rule runs once, with all rows.  The specs of
loop variables are a fixpoint over the loop's body.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import joined, made_rows, traffic as traffic_lib
from towerstrategy.sharding.layout import (
    BRANCHES,
    LOOPS,
    Layout,
    Nested,
    are_read,
    is_local,
    is_summed_each_iteration,
    only_read,
)
from towerstrategy.sharding.rules import lists, registry, row_loops, scaling
from towerstrategy.sharding.rules.entries import sizes_of
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import (
    MEAN,
    REPLICATED,
    ROW,
    SUM,
    ListOf,
    Partial,
    Replicated,
    Sharded,
    Size,
    Spec,
)

ROUNDS = 20  # limit of a loop's fixpoint: a loop variable changes its spec a few times at most


class CannotGather(Exception):
    """Lists are needed whole, but each tower has its own; the argument: (tensor, spec) pairs."""


def propagate(graph: Any, inputs: Sequence[Spec],
              traffic: traffic_lib.Traffic = traffic_lib.ANY) -> Layout:
    """The layout of ``graph`` for inputs with these specs.

    Args:
      graph: the traced graph.
      inputs: the specs of its inputs.
      traffic: picks the plan that moves fewer bytes; by default the plans of the rules.

    Raises:
      TypeError: a user's rule returned something other than a valid plan.
    """
    def propagated(made: made_rows.Made) -> Layout:
        whole: set[Any] = set()
        while True:
            known, propagation = len(whole), _Propagation(graph, whole, traffic, made)
            layout = propagation.layout(graph, inputs)
            if not propagation.is_void:
                return layout
            if len(whole) == known:
                whole.add(ListOf)  # all of them, as the next pass would not differ

    return made_rows.with_own_rows(propagated, traffic.replicas)


def once(layout: Layout, operation: Op) -> Plan:
    """The plan of an operation whose inputs are all replicated; it is put into ``layout``."""
    return _Propagation(layout.graph, set()).operation(layout, operation)


class _Propagation:
    """One pass over a graph; no tower may have lists of its own in place of the ``whole`` ones."""

    def __init__(self, graph: Any, whole: set[Any], traffic: traffic_lib.Traffic = traffic_lib.ANY,
                 made: made_rows.Made = made_rows.NONE) -> None:
        self._graph, self._whole, self._traffic, self._made = graph, whole, traffic, made
        self.is_void = False  # whether there are more whole lists now, for the next pass
        self._depth = 0  # of nested branches and loops
        self._keeps_parts = False  # whether linear operations do, in the innermost of them
        self._kept = 0  # how many did so
        self._shared: set[Any] = set()  # branches and loops, with their inputs' specs, not local
        # An input of a body -> the tensor outside, and in a loop what an iteration makes of it; an
        # output of a call, a branch or a loop -> the outputs of the bodies, and a loop's input.
        self._sources: dict[tuple[Any, str], Sequence[tf.Tensor]] = {}

    def layout(self, graph: Any, inputs: Sequence[Spec]) -> Layout:
        """The layout of a graph or function body for inputs with these specs."""
        layout = Layout(graph, inputs)
        outputs = {tensor.op.name for tensor in graph.outputs}
        passed: dict[str, Op] = {}
        for operation in layout.order:
            if passed:
                operation.pass_by(passed)
            try:
                plan = self.operation(layout, operation)
            except CannotGather as needed:  # the next pass makes these lists whole
                if self._depth:
                    raise
                self._make_whole(*needed.args)
                layout.plans[operation.name] = plan = registry.once(operation)
            layout.specs.update(zip(operation.output_names, plan.gives))
            if plan.passes and not operation.controls and operation.name not in outputs:
                passed[operation.name] = operation
                layout.parted.pop()
        layout.order = [operation for operation in layout.order if operation.name not in passed]
        layout.passed = list(passed.values())
        if not self._depth and not self.is_void:
            traffic_lib.cut_late(layout)
            traffic_lib.gather_early(layout)
            traffic_lib.add_up_early(layout)
        return layout

    def operation(self, layout: Layout, operation: Op) -> Plan:
        """Puts the plan of an operation into the layout; returns it."""
        specs = layout.inputs_of(operation)
        nests = operation.has_effect and (operation.is_call or operation.type in BRANCHES) \
            and not _tf.is_compiled(operation.operation)  # each write runs where its variable lives
        if specs.count(REPLICATED) == len(specs) and not nests:
            made = made_rows.plan_of(operation, self._made)
            layout.parted += [operation] if made else []
            layout.plans[operation.name] = plan = made or registry.once(operation)
            return plan
        layout.parted.append(operation)
        found = self._plan(operation, specs, nests)
        if found is not None and self._can_redistribute(operation, specs, found):
            plan = found
        else:
            plan = registry.once(operation)
            if not all(map(self._can_become, operation.inputs, specs, plan.takes)):
                raise CannotGather(zip(operation.inputs, specs))
        gathers = isinstance(plan, Nested) and plan.gathers or any(
            isinstance(wanted, Replicated) and isinstance(
                spec, (Sharded, ListOf) if plan.once else ListOf)
            for spec, wanted in zip(specs, plan.takes))
        if gathers and not operation.writes_variables:
            layout.fallbacks.append(operation)  # not sparse updates, which always take all rows
        if not self._depth and not isinstance(plan, Nested):
            plan = self._traffic.cheaper(operation, plan, list(specs))
        if plan.padded and not self._traffic.pads(plan):
            plan = dataclasses.replace(plan, padded=False)
        layout.plans[operation.name] = plan
        if operation.outputs and layout.graph is self._graph:  # other callers share a body's shapes
            registry.set_static_shape(operation.outputs[0], plan)
        return plan

    def _plan(self, operation: Op, specs: Sequence[Spec], nests: bool) -> Plan | None:
        """The plan of an operation with such inputs; None if it runs once, with all rows."""
        if not (row_loops.OF_ROWS.isdisjoint(map(type, specs)) or operation.is_call):
            plan = row_loops.plan_of(operation, specs)
            if plan is not None or operation.type not in (*BRANCHES, *LOOPS):
                return plan
        if nests or not all(isinstance(spec, Replicated) for spec in specs):
            if operation.is_call:
                return self._call(operation, specs)
            taken = _tf.taken_branch(operation.operation) if operation.type in BRANCHES else None
            if taken is not None:
                return self._taken(operation, taken, specs)
            if operation.type in (*BRANCHES, *LOOPS):
                return self._control_flow(operation, specs)
        plan = registry.plan_of(operation, specs)
        if plan is None and self._keeps_parts:
            plan = scaling.plan_of_parts(operation, specs)
            self._kept += plan is not None
        return plan

    def _can_redistribute(self, operation: Op, specs: Sequence[Spec], plan: Plan) -> bool:
        """Whether each input can be redistributed to the spec that the plan takes."""
        if self._whole and any(_key(tensor, spec) in self._whole or (
                isinstance(spec, ListOf) and ListOf in self._whole)
                for tensor, spec in zip(operation.outputs, plan.gives)):
            return False
        return plan.takes == specs or all(
            map(self._can_become, operation.inputs, specs, plan.takes))

    def _can_become(self, tensor: tf.Tensor, spec: Spec, wanted: Spec) -> bool:
        """Whether a tensor can be redistributed; a list if it is new, or one of each tower."""
        is_own = isinstance(spec, ListOf) and isinstance(wanted, ListOf) \
            and (spec.rows is None) == (wanted.rows is None)
        if isinstance(spec, ListOf) and spec.rows and not is_own:
            if not lists.can_be_whole(tensor):
                return False
            spec = REPLICATED
        return joined.can_become(spec, wanted) and (
            is_own or not isinstance(wanted, ListOf)
            or self._is_empty(tensor, wanted.element))

    def _is_empty(self, tensor: tf.Tensor, element: Spec | None) -> bool:
        """Whether a tensor is a list without entries, or one whose entries are of this spec."""
        origin = self._origin(tensor, through_loops=True)
        if not lists.says_rows(origin, element):
            return lists.is_empty(origin, element)
        changed = self._sources.get((tensor.graph, tensor.name), ())[1:]  # by each iteration
        return origin is tensor or bool(changed) and changed[0] is not tensor

    def _make_whole(self, needed: Iterable[tuple[tf.Tensor, Spec]]) -> None:
        """Adds the lists among tensors, and all that they are made of, to the whole ones."""
        self.is_void = True
        left = [(tensor, spec) for tensor, spec in needed if isinstance(spec, ListOf)]
        while left:
            tensor, spec = left.pop()
            if _key(tensor, spec) not in self._whole:
                self._whole.add(_key(tensor, spec))
                sources = self._sources.get((tensor.graph, tensor.name)) or [
                    source for source in tensor.op.inputs if source.dtype == tf.variant]
                left += [(source, spec) for source in sources]

    def _note_functions(self, operation: Op, functions: Sequence[Any],
                        arguments: Sequence[tf.Tensor]) -> None:
        """Notes what the inputs of function bodies, and the outputs of their caller, are."""
        is_loop = operation.type in LOOPS
        for function in functions:
            for index, (inner, outer) in enumerate(zip(function.inputs, arguments)):
                results = function.outputs[index:index + 1] if is_loop else ()
                self._sources[function, inner.name] = [outer, *results]
            if not operation.is_call:
                lists.note_constants(function, arguments, is_loop)
        results = [function.outputs for function in functions] + [arguments] * is_loop
        for output, sources in zip(operation.outputs, zip(*results)):
            self._sources[output.graph, output.name] = sources

    def _origin(self, tensor: tf.Tensor, through_loops: bool) -> tf.Tensor:
        """What a tensor is a copy of: through calls, identities and, if asked, to loops' starts."""
        while True:
            tensor = _tf.uncopied(tensor)
            sources = self._sources.get((tensor.graph, tensor.name), ())
            is_input = tensor.op.type == "Placeholder"
            if not sources or len(sources) > 1 and not (is_input and through_loops):
                return tensor
            tensor = sources[0]

    def _put(self, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """What a tensor is a copy of; if each iteration of a loop put it into a list from whose end
        each iteration of another one takes one: what it put there, and the body that takes it."""
        origin = self._origin(tensor, through_loops=False)
        if origin.op.type == "TensorListPopBack":
            variable = self._origin(origin.op.inputs[0], through_loops=False)
            put = lists.put_into(self._origin(variable, through_loops=True))
            if put is not None and variable.op.type == "Placeholder":
                return self._origin(put, through_loops=False), origin.graph
        return origin, None

    def _call(self, operation: Op, specs: Sequence[Spec]) -> Plan:
        signature = _tf.called_by_each_tower(operation.operation)
        if signature and isinstance(specs[0], Sharded) and specs[0].dim == 0:
            meant: dict[str, Spec] = {"rows": specs[0], "own": MEAN, "once": REPLICATED, "sum": SUM}
            takes, gives = ([meant[word] for word in words] for words in signature)
            return Plan(takes, gives)
        body = _tf.called_body(operation.operation, self._traffic.kinds)
        if not all(_tf.is_call(each.type) or scaling.is_zero(each.outputs[0])
                   for spec, tensor in zip(specs, body.inputs) if spec == MEAN
                   for each in tensor.consumers()):  # a rewritten call's
            raise NotImplementedError(
                "with synchronize_batch_norm=False, gradients of batch norm cannot be vectorized "
                "(pass experimental_use_pfor=False), nor be taken in forward mode")
        self._note_functions(operation, [body], operation.inputs)
        layout = self.layout(body, specs)
        if _tf.is_compiled(operation.operation) and not operation.handles \
                and is_local(layout, layout.outputs, compiled=True):
            return Plan(list(specs), layout.outputs)  # inlined, ops that only XLA has could not run
        return Nested(list(specs), layout.outputs, layouts=[layout], inlined=True)

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
        branches = _tf.functions_of(operation.operation)
        self._note_functions(operation, branches, operation.inputs[1:])
        condition, popped_in = self._put(operation.inputs[0])
        kept_with = [popped_in is None or self._put(tensor)[1] is popped_in
                     for tensor in operation.inputs[1:]]  # beside the condition
        layouts = [self.layout(graph, [
            joined.branch_input(condition.ref(), number, spec) if kept else spec
            for kept, spec in zip(kept_with, specs[1:])]) for number, graph in enumerate(branches)]
        by_output = zip(zip(*(graph.outputs for graph in branches)),
                        zip(*(layout.outputs for layout in layouts)))
        gives = [joined.branch_output(condition.ref(), *output, self._is_empty)
                 for output in by_output]
        for graph, layout in zip(branches, layouts):
            if not all(map(joined.can_become, layout.outputs, gives)):
                raise CannotGather(zip(graph.outputs, layout.outputs))
        local = all(is_local(layout, gives) for layout in layouts)
        tested = ROW if specs[0] == ROW else REPLICATED
        return Nested([tested, *specs[1:]], gives, layouts=layouts, local=local)

    def _taken(self, operation: Op, branch: Any, specs: Sequence[Spec]) -> Nested:
        """The plan of branches of which this one is taken; what is static in it is so outside."""
        self._note_functions(operation, [branch], operation.inputs[1:])
        layout = self.layout(branch, specs[1:])
        for output, inner in zip(operation.outputs, branch.outputs):
            if output.dtype != tf.variant and operation.operation.graph is self._graph:
                output.set_shape(sizes_of(inner))
        return Nested([REPLICATED, *specs[1:]], layout.outputs, layouts=[layout], inlined=True)

    def _loop(self, operation: Op, specs: Sequence[Spec]) -> Nested | None:
        condition, body = _tf.functions_of(operation.operation)
        starts = [self._origin(tensor, through_loops=False) for tensor in operation.inputs]
        self._note_functions(operation, [body], starts)
        over_rows = self._loop_over_rows(operation, specs, starts, condition, body)
        if over_rows is not None:
            return over_rows
        read = are_read(condition, body)

        def settle(first: list[Spec]) -> tuple[list[Spec], Layout] | None:
            return self._fixpoint(body, first, functools.partial(
                joined.loop_variables, first, operation.inputs, body.outputs, read))

        settled = settle([REPLICATED if isinstance(spec, ListOf) and spec.rows else spec
                          for spec in specs])
        if settled is None:
            return None
        sums = [is_summed_each_iteration(settled[1], tensor) for tensor in body.outputs]
        if any(sums):
            settled = settle([SUM if is_sum else spec for is_sum, spec in zip(sums, settled[0])]
                             ) or settled
        variables, layout = settled
        for start, now, wanted in zip(zip(operation.inputs, specs),
                                      zip(body.outputs, layout.outputs), variables):
            if (isinstance(start[1], ListOf) or isinstance(now[1], ListOf)) and not (
                    self._can_become(*start, wanted) and self._can_become(*now, wanted)):
                raise CannotGather([start, now])
        tested = self.layout(condition, variables)
        local = is_local(layout, variables) and is_local(
            tested, [ROW if tested.outputs == [ROW] else REPLICATED])
        takes = [dataclasses.replace(after, start=True)
                 if isinstance(before, Replicated) and isinstance(after, Sharded) else after
                 for before, after in zip(specs, variables)]
        return Nested(takes, variables, layouts=[tested, layout], local=local,
                      only_read=only_read(operation, [tested, layout]))

    def _loop_over_rows(self, operation: Op, specs: Sequence[Spec], starts: Sequence[tf.Tensor],
                        condition: Any, body: Any) -> Nested | None:
        """The plan of a loop whose iterations are the rows, each independent of the others."""
        if not any(isinstance(spec, (Size, Sharded)) for spec in specs) \
                or not row_loops.OF_ROWS.isdisjoint(map(type, specs)):  # of another loop
            return None
        counters = row_loops.with_counters(body, starts, specs)
        with contextlib.suppress(CannotGather):
            more, = self.layout(condition, counters).outputs
            variables = row_loops.variables(body, starts, counters, more)
            settled = self._fixpoint(body, variables, row_loops.settled)
            if settled is not None:
                variables, layout = settled
                layouts = [self.layout(condition, variables), layout]
                if layouts[0].outputs == [more] and all(
                        is_local(each, each.outputs) for each in layouts):
                    takes, gives = row_loops.outside(variables, layout.outputs)
                    return Nested(takes, gives, layouts=layouts, local=True,
                                  only_read=only_read(operation, layouts))
        return None

    def _fixpoint(self, body: Any, variables: list[Spec] | None,
                  join: Callable[[list[Spec], list[Spec]], list[Spec] | None]
                  ) -> tuple[list[Spec], Layout] | None:
        """The specs that a loop's variables settle at, and the layout of its body; None if none.

        ``join`` returns the specs that fit those before and after an iteration.
        """
        for _ in range(ROUNDS):
            if variables is None:
                break
            layout = self.layout(body, variables)
            before, variables = variables, join(variables, layout.outputs)
            if variables == before:
                return before, layout
        return None


def _key(tensor: tf.Tensor, spec: Spec) -> Any:
    """What is noted of a list that must be whole; one of rows may still be of another kind."""
    return tensor.graph.name, tensor.name, spec.rows is None if isinstance(spec, ListOf) else None
