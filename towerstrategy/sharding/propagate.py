"""The spec of each tensor of a traced step, from those of its inputs.

Goes in: a traced graph and the specs of its inputs.  Comes out: :class:`Layout`, what each of its
operations makes and takes (a :class:`Plan`, or None: once, with all rows), functions that it calls
included.

Calls, branches and loops are the only operations that are known here by their type, as what they do
is said by graphs of their own.  The specs of a loop's variables are a fixpoint over its body.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import graphs, joined, traffic as traffic_lib
from towerstrategy.sharding.rules import lists, registry
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import (
    MEAN,
    REPLICATED,
    SUM,
    ListOf,
    OptionalOf,
    Partial,
    Replicated,
    Sharded,
    Spec,
)

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
ROUNDS = 20  # a variable of a loop changes its spec a few times at most


class CannotGather(Exception):
    """A list of each tower's own is needed whole."""


@dataclasses.dataclass
class Nested(Plan):
    """A call, a branch or a loop of which some inputs differ between the towers.

    Attributes:
      layouts: of what it calls: the function; the branches; the loop's condition and body.
      local: whether each tower can do it by itself, as the others need nothing of what is in it.
    """

    layouts: Sequence[Layout] = ()
    local: bool = False


@dataclasses.dataclass
class Layout:
    """What the operations of a graph are on the towers.

    Attributes:
      graph: the graph.
      order: the operations that are needed, each behind those that it needs.
      specs: the spec of each tensor, by its name.
      plans: how each operation is done, by its name.
      parted: those of them that get what is not the same for all towers, or write within.
      fallbacks: the operations done with all rows for want of a rule, though they get parts.
    """

    graph: Any
    order: list[Op]
    specs: dict[str, Spec]
    plans: dict[str, Plan]
    parted: list[Op] = dataclasses.field(default_factory=list)
    fallbacks: list[Op] = dataclasses.field(default_factory=list)

    def inputs_of(self, operation: Op) -> list[Spec]:
        return [self.specs[name] for name in operation.input_names]

    @property
    def outputs(self) -> list[Spec]:
        return [self.specs[tensor.name] for tensor in self.graph.outputs]

    @property
    def has_state(self) -> bool:
        """Whether an operation counts how often it is done, those of called functions included."""
        return any(operation.has_state for operation in self.order) or any(
            layout.has_state for plan in self.plans.values() if isinstance(plan, Nested)
            for layout in plan.layouts)

    def gathered(self, operation: Op) -> int:
        """Bytes an example that are gathered for an operation, so far as shapes are known."""
        return sum(traffic_lib.bytes_of(tensor, spec) for tensor, spec
                   in zip(operation.inputs, self.inputs_of(operation)) if isinstance(spec, Sharded))

    def all_fallbacks(self) -> Iterator[tuple[Layout, Op]]:
        """Those of the functions that are called, too, each with the layout that it is in."""
        for operation in self.fallbacks:
            yield self, operation
        for plan in self.plans.values():
            if isinstance(plan, Nested):
                for layout in plan.layouts:
                    yield from layout.all_fallbacks()


def propagate(graph: Any, inputs: Sequence[Spec],
              traffic: traffic_lib.Traffic | None = None) -> Layout:
    """The layout of ``graph`` whose inputs are of these specs.

    Args:
      graph: the traced graph.
      inputs: the specs of its inputs.
      traffic: chooses between right ways; None for the table's.

    Raises:
      TypeError: a rule that does not return what a rule must.
    """
    for refused in ((), (OptionalOf,)):
        with contextlib.suppress(CannotGather):
            return _Propagation(graph, refused, traffic).layout(graph, inputs)
    return _Propagation(graph, (ListOf,), traffic).layout(graph, inputs)


def once(layout: Layout, operation: Op) -> Plan:
    """How an operation is done that gets the same on all towers.

    Calls and branches that write are entered, as each write is where its variable is.
    """
    _Propagation(layout.graph, (), None).operation(layout, operation)
    return layout.plans[operation.name]


class _Propagation:
    """One pass; of what specs each tower may have none of its own."""

    def __init__(self, graph: Any, refused: tuple[Any, ...],
                 traffic: traffic_lib.Traffic | None) -> None:
        self._graph, self._refused = graph, refused
        self._traffic = traffic or traffic_lib.Traffic()
        self._depth = 0  # of branches and loops
        self._given: dict[tuple[Any, str], tf.Tensor] = {}  # to functions, for their inputs
        self._bodies: dict[tf.Operation, Any] = {}  # of calls
        self._loops: set[Any] = set()  # bodies that are given something else in each turn

    def layout(self, graph: Any, inputs: Sequence[Spec]) -> Layout:
        layout = Layout(graph, graphs.needed_in_order(graph), {}, {})
        layout.specs.update(zip((tensor.name for tensor in graph.inputs), inputs))
        asked = {tensor.op.name for tensor in graph.outputs}
        passed: dict[str, Op] = {}
        for operation in layout.order:
            names = operation.output_names
            if names and names[0] in layout.specs:
                continue  # an input
            if passed:
                operation.pass_by(passed)
            layout.specs.update(zip(names, self.operation(layout, operation)))
            plan = layout.plans[operation.name]
            if plan.passes and not operation.controls and operation.name not in asked:
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
        """What an operation gives; how it is done goes into the layout."""
        specs = layout.inputs_of(operation)
        nests = operation.has_effect and operation.type in (*CALLS, *BRANCHES) \
            and not _tf.is_compiled(operation.operation)  # each write is where its variable is
        if specs.count(REPLICATED) == len(specs) and not nests:
            plan = layout.plans[operation.name] = registry.once(operation)
            return plan.gives
        layout.parted.append(operation)
        found: Plan | None
        enters = nests or not all(isinstance(spec, Replicated) for spec in specs)
        if enters and operation.type in CALLS:
            found = self._call(operation, specs)
        elif enters and operation.type in (*BRANCHES, *LOOPS):
            found = self._inside(operation, specs)
        else:
            found = registry.plan_of(operation, specs)
        if found is None or not self._possible(operation, specs, found):
            if any(isinstance(spec, ListOf) for spec in specs):
                raise CannotGather(operation.type)
            found = registry.once(operation)
        if found.once and any(isinstance(spec, Sharded) for spec in specs) \
                and not operation.writes_variables:
            layout.fallbacks.append(operation)  # a sparse update takes all rows by its nature
        if not self._depth and not isinstance(found, Nested):
            found = self._traffic.cheaper(operation, found, list(specs))
        layout.plans[operation.name] = found
        if operation.outputs and layout.graph is self._graph:  # others are called elsewhere
            registry.set_static_shape(operation.outputs[0], found)
        return found.gives

    def _possible(self, operation: Op, specs: Sequence[Spec], plan: Plan) -> bool:
        """Whether each input can be made what the plan takes."""
        if any(isinstance(spec, self._refused) for spec in plan.gives):
            return False
        return plan.takes == specs or all(
            joined.can_become(spec, wanted) and self._is_each_towers(tensor, spec, wanted)
            for tensor, spec, wanted in zip(operation.inputs, specs, plan.takes))

    def _is_each_towers(self, tensor: tf.Tensor, spec: Spec, wanted: Spec) -> bool:
        """Whether each tower has what is in a list that is ``wanted``; else it has all rows."""
        return not isinstance(wanted, ListOf) or isinstance(spec, ListOf) \
            or self._is_empty([tensor], 0, wanted.element)

    def _is_empty(self, tensors: Sequence[tf.Tensor], number: int, element: Spec | None) -> bool:
        return lists.is_empty(self._origin(tensors[number], through_loops=True), element)

    def _entered(self, graph: Any, given: Iterable[tf.Tensor]) -> None:
        """Notes what a function is called with."""
        self._given.update(((graph, inner.name), outer)
                           for inner, outer in zip(graph.inputs, given))

    def _origin(self, tensor: tf.Tensor, through_loops: bool) -> tf.Tensor:
        """The same tensor where it is made: functions are given it, and give it.

        ``through_loops`` says whether that is wanted which a loop begins with.
        """
        while True:
            outer = self._given.get((tensor.graph, tensor.name)) \
                if through_loops or tensor.graph not in self._loops else None
            if outer is None and tensor.op in self._bodies:
                outer = self._bodies[tensor.op].outputs[tensor.value_index]
            if outer is None and tensor.op.type != "Identity":
                return tensor
            tensor = tensor.op.inputs[0] if outer is None else outer

    def _call(self, operation: Op, specs: Sequence[Spec]) -> Plan:
        own = _tf.called_by_each_tower(operation.operation)
        if own and isinstance(specs[0], Sharded) and specs[0].dim == 0:
            meant: dict[str, Spec] = {"rows": specs[0], "own": MEAN, "once": REPLICATED, "sum": SUM}
            takes, gives = ([meant[word] for word in words] for words in own)
            return Plan(takes, gives)
        body = self._bodies[operation.operation] = _tf.called_body(operation.operation)
        self._entered(body, operation.inputs)
        layout = self.layout(body, specs)
        if _tf.is_compiled(operation.operation) and not operation.handles \
                and is_local(layout, layout.outputs, compiled=True):
            return Plan(list(specs), layout.outputs)  # else what XLA alone has could not be done
        return Nested(list(specs), layout.outputs, layouts=[layout])

    def _inside(self, operation: Op, specs: Sequence[Spec]) -> Nested | None:
        self._depth += 1
        try:
            return (self._branch if operation.type in BRANCHES else self._loop)(operation, specs)
        finally:
            self._depth -= 1

    def _branch(self, operation: Op, specs: Sequence[Spec]) -> Nested | None:
        branches = graphs.branches_of(operation)
        for graph in branches:
            self._entered(graph, operation.inputs[1:])
        condition = self._origin(operation.inputs[0], through_loops=False).ref()
        layouts = [self.layout(graph, [joined.in_branch(condition, number, spec)
                                       for spec in specs[1:]])
                   for number, graph in enumerate(branches)]
        added_up = [isinstance(spec, Partial) and any(
            _is_wanted_whole(layout, layout.graph.inputs[place]) for layout in layouts)
            for place, spec in enumerate(specs[1:])]
        if any(added_up):  # before, so that it crosses once with all that crosses as often
            return self._branch(operation, [specs[0], *(
                REPLICATED if whole else spec for whole, spec in zip(added_up, specs[1:]))])
        given = zip(zip(*(graph.outputs for graph in branches)),
                    zip(*(layout.outputs for layout in layouts)))
        gives = [joined.of_branches(condition, outputs, functools.partial(self._is_empty, tensors))
                 for tensors, outputs in given]
        if any(not joined.can_become(spec, wanted) for layout in layouts
               for spec, wanted in zip(layout.outputs, gives)):
            raise CannotGather(operation.type)
        local = all(is_local(layout, gives) for layout in layouts)
        return Nested([REPLICATED, *specs[1:]], gives, layouts=layouts, local=local)

    def _loop(self, operation: Op, specs: Sequence[Spec]) -> Nested | None:
        condition, body = (graphs.function_of(operation, name) for name in ("cond", "body"))
        self._entered(body, operation.inputs)
        self._loops.add(body)
        found = self._settled(body, operation, specs)
        if found is None:
            return None
        sums = [_adds_up(found[1], tensor) for tensor in body.outputs]
        if any(sums):
            again = self._settled(body, operation, [SUM if is_sum else spec for is_sum, spec
                                                    in zip(sums, found[0])])
            if again is not None:
                found = again
        wanted, layout = found
        for spec, after, tensor in zip(specs, wanted, operation.inputs):
            if not self._is_each_towers(tensor, spec, after):
                raise CannotGather(operation.type)  # what is in it is made of all rows
        asked = self.layout(condition, wanted)
        local = is_local(layout, wanted) and is_local(asked, [REPLICATED])
        return Nested(wanted, wanted, layouts=[asked, layout], local=local)

    def _settled(self, body: Any, operation: Op, specs: Sequence[Spec]
                 ) -> tuple[list[Spec], Layout] | None:
        """What the variables of a loop are that begin as ``specs``; the layout of its body."""
        wanted = list(specs)
        for _ in range(ROUNDS):
            layout = self.layout(body, wanted)
            after = [joined.turned(before, now, tensor) for before, now, tensor
                     in zip(wanted, layout.outputs, operation.inputs)]
            if after == wanted:
                return wanted, layout
            if any(isinstance(now, Replicated) and not isinstance(before, (Replicated, ListOf))
                   for before, now in zip(wanted, after)):  # lists have other entries, then
                after = [first if isinstance(now, ListOf) else now
                         for first, now in zip(specs, after)]
            wanted = after
        return None


def _adds_up(layout: Layout, tensor: tf.Tensor) -> bool:
    """Whether the towers' parts are summed in each turn, for the sum to be added to."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    plan = layout.plans.get(tensor.op.name)
    return plan is not None and plan.once and any(
        layout.specs[given.name] == SUM for given in tensor.op.inputs)


def _is_wanted_whole(layout: Layout, given: tf.Tensor) -> bool:
    """Whether an operation takes ``given``, an input of the layout, as one tensor."""
    for operation in layout.order:
        plan = layout.plans.get(operation.name)
        for place, name in enumerate(operation.input_names):
            if name != given.name:
                continue
            if isinstance(plan, Nested) and operation.type in CALLS:
                inner = plan.layouts[0]
                whole = _is_wanted_whole(inner, inner.graph.inputs[place])
            else:
                whole = plan is None or isinstance(plan.takes[place], Replicated)
            if whole:
                return True
    return False


def is_local(layout: Layout, outputs: Sequence[Spec], compiled: bool = False) -> bool:
    """Whether each tower can do all of this by itself, as it was traced, and gets ``outputs``.

    ``compiled`` says whether XLA compiles it, which has no kernels that fail on no rows.
    """
    if not _as_taken(layout.outputs, outputs):
        return False
    return all(_is_local(layout, operation, compiled) for operation in layout.order
               if operation.name in layout.plans)


def _is_local(layout: Layout, operation: Op, compiled: bool) -> bool:
    plan, specs = layout.plans[operation.name], layout.inputs_of(operation)
    if isinstance(plan, Nested):
        return (plan.local or operation.type in CALLS and is_local(
            plan.layouts[0], plan.gives, compiled)) and _as_taken(specs, plan.takes)
    if plan.once:
        return all(isinstance(spec, Replicated) for spec in specs) and not operation.has_state
    return plan.make is None and (compiled or not plan.padded) and _as_taken(specs, plan.takes)


def _as_taken(specs: Sequence[Spec], takes: Sequence[Spec]) -> bool:
    return all(spec == wanted or isinstance(spec, Replicated) and isinstance(wanted, Replicated)
               or isinstance(spec, ListOf) and isinstance(wanted, ListOf)
               or isinstance(wanted, ListOf) and isinstance(spec, Replicated)
               for spec, wanted in zip(specs, takes))
