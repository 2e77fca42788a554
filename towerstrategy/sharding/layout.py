"""What is known of a traced graph: the spec of each tensor, the plan of each operation.

Goes in: a graph, and what :mod:`propagate` finds, or, for ``strategy.run``, :mod:`replica_plans`.
Comes out: a :class:`Layout`, and those of the functions that operations call; the operations that
outputs and effects need, in order.

Calls, branches and loops are the only operations known here by type, because function bodies say
what they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules import scaling
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.rules.row_loops import is_kept
from towerstrategy.sharding.spec import (
    ROW,
    SUM,
    InRow,
    ListOf,
    Position,
    Replicated,
    Row,
    Sharded,
    Size,
    Spec,
    has_known_rows,
    in_one_piece,
)

BRANCHES, LOOPS = _tf.BRANCHES, _tf.LOOPS


@dataclasses.dataclass
class Nested(Plan):
    """The plan of a call, branch or loop that has an input that differs between towers, or writes.

    Attributes:
      layouts: the layouts of its functions: the body of a call, all branches, or a loop's condition
        and body; of branches whose condition is constant, the one that is taken.
      inlined: whether its only function is part of the graph around it: a call's, or a branch.
      only_read: see :func:`only_read`.
      local: whether each tower can run it alone, because nothing in it needs another tower's data.
    """

    layouts: Sequence[Layout] = ()
    only_read: Set[int] = frozenset()
    local: bool = False
    inlined: bool = False

    @property
    def gathers(self) -> bool:
        """Whether a body makes rows that are whole outside, such as rows in two dimensions."""
        return any(isinstance(inner, Sharded) and isinstance(outer, Replicated)
                   for layout in self.layouts for inner, outer in zip(layout.outputs, self.gives))


class Layout:
    """The specs of a graph's tensors and the plans of its operations.

    Attributes:
      graph: the graph.
      order: see :func:`needed_in_order`.
      specs: tensor name -> spec; at first those of the graph's ``inputs``.
      plans: operation name -> plan.
      passed: the operations that need not run, each of whose outputs is an input.
      parted: the operations with an input that is not replicated, or a function body that writes.
      fallbacks: the operations that run once with all rows, because no rule shards them.
      made: the batches that the function makes itself, by name, with their numbers of rows.
    """

    def __init__(self, graph: Any, inputs: Iterable[Spec]) -> None:
        self.graph, self.order = graph, needed_in_order(graph)
        self.specs = dict(zip((tensor.name for tensor in graph.inputs), inputs))
        self.plans: dict[str, Plan] = {}
        self.passed: list[Op] = []
        self.parted: list[Op] = []
        self.fallbacks: list[Op] = []
        self.made: Mapping[str, int] = {}

    def inputs_of(self, operation: Op) -> list[Spec]:
        return [self.specs[name] for name in operation.input_names]

    @property
    def outputs(self) -> list[Spec]:
        return [self.specs[tensor.name] for tensor in self.graph.outputs]

    def with_bodies(self) -> Iterator[Layout]:
        """The layout, and those of all function bodies in it."""
        yield self
        for plan in self.plans.values():
            for layout in plan.layouts if isinstance(plan, Nested) else ():
                yield from layout.with_bodies()


def needed_in_order(graph: Any) -> list[Op]:
    """The operations that outputs or effects need, but inputs, each after the ones that it needs.

    The order of creation does not do: a loop gets its accumulators when its gradient is taken.
    Assertions come before writes on which they do not depend.
    """
    notes: dict[Any, Any] = {}
    inputs = {tensor.op.name for tensor in graph.inputs}
    known = {operation.name: Op(operation, notes) for operation in graph.get_operations()
             if operation.name not in inputs}
    _move_controls(known.values())
    effects = [operation for operation in known.values() if operation.has_effect]
    roots = [*(operation.name for operation in effects if not operation.writes_variables),
             *(tensor.op.name for tensor in graph.outputs),
             *(operation.name for operation in effects)]
    done: set[str] = set()
    order: list[Op] = []
    stack: list[tuple[Op | None, Iterator[str]]] = [(None, iter(roots))]
    while stack:
        name = next(stack[-1][1], None)
        if name is None:
            operation, _ = stack.pop()
            order += [] if operation is None else [operation]
        elif name in known and name not in done:
            done.add(name)
            stack.append((known[name], iter([*known[name].before, *known[name].controls])))
    return order


def _move_controls(operations: Iterable[Op]) -> None:
    """Lets effects wait for what the constants that they are made of wait for, and for groups.

    Under ``tf.control_dependencies`` TensorFlow lets ``v.assign_add(1)`` wait by its constant, but
    towers make constants, and groups (``NoOp``), which have no inputs either, at any time.
    """
    waits: dict[str, set[str]] = {}  # what others should wait for that use these operations
    for operation in operations:
        found = {name for before in (*operation.before, *operation.controls)
                 for name in waits.get(before, ())} if waits else set[str]()
        found.difference_update(operation.before)
        if not (operation.inputs or operation.is_stateful):
            found.update(operation.controls)
            operation.controls = []
        if operation.has_effect:
            operation.controls = sorted({*operation.controls, *found})
        elif found:
            waits[operation.name] = found


def are_read(condition: Any, body: Any) -> list[bool]:
    """Whether each variable of a loop is read in it before it is set."""
    passed_on = {tensor.name for number, tensor in enumerate(body.outputs)
                 if tensor is not body.inputs[number]}
    return [bool(tested.consumers() or tensor.consumers() or tensor.name in passed_on)
            for tested, tensor in zip(condition.inputs, body.inputs)]


def only_read(operation: Op, layouts: Sequence[Layout]) -> Set[int]:
    """The indices of a loop's inputs that it only reads, the same for all towers.

    Of variables the loop is given their values, read before it.
    """
    others = {operation.input_names[index] for index in operation.handles if not all(
        _is_only_read(layout, layout.graph.inputs[index].name) for layout in layouts)}
    body = layouts[-1].graph
    return {index for index, name in enumerate(operation.input_names) if (
        name not in others if index in operation.handles else
        is_kept(body, index) and body.inputs[index].dtype != tf.variant
        and isinstance(layouts[-1].specs[body.inputs[index].name], Replicated))}


def _is_only_read(layout: Layout, name: str) -> bool:
    """Whether operations read a variable by itself, also in called functions and in loops."""
    for operation in layout.order:
        places = [at for at, each in enumerate(operation.input_names) if each == name]
        is_read = operation.only_reads and len(operation.inputs) == len(operation.outputs) == 1
        for at in () if is_read else places:
            plan = layout.plans[operation.name]
            if not isinstance(plan, Nested) or operation.type in BRANCHES or not (
                    at in plan.only_read and _is_only_read(layout, operation.output_names[at])
                    if operation.type in LOOPS else
                    _is_only_read(plan.layouts[0], plan.layouts[0].graph.inputs[at].name)):
                return False
    return isinstance(layout.specs[name], Replicated)


def is_summed_each_iteration(layout: Layout, tensor: tf.Tensor) -> bool:
    """Whether each iteration adds up the towers' parts and then adds the sum to ``tensor``."""
    added = _tf.uncopied(tensor).op
    plan = layout.plans.get(added.name)
    return plan is not None and plan.once and added.type in scaling.ADDITIVE and any(
        layout.specs[part.name] == SUM for part in added.inputs)


def is_local(layout: Layout, outputs: Sequence[Spec], compiled: bool = False) -> bool:
    """Whether each tower can run the traced operations alone and gets outputs of these specs.

    ``compiled`` says that XLA compiles them; no kernel of XLA fails on zero rows.
    """
    return _match(layout.outputs, outputs, compiled) and all(
        _is_local(layout, operation, compiled)
        for operation in [*layout.order, *(layout.passed if compiled else ())])


def _is_local(layout: Layout, operation: Op, compiled: bool) -> bool:
    plan, specs = layout.plans[operation.name], layout.inputs_of(operation)
    if isinstance(plan, Nested):
        local = plan.local if not (compiled or plan.inlined) else all(
            is_local(each, plan.gives if each is plan.layouts[-1] or operation.type not in LOOPS
                     else each.outputs, compiled) for each in plan.layouts)
        return local and _match(specs, plan.takes, compiled)
    # The tower is given the batch's number of rows, unless XLA compiles it.
    knows_rows = not compiled and all(has_known_rows(spec) for spec in specs
                                      if isinstance(spec, (Sharded, Size)))
    if plan.once:
        return not operation.has_state and all(isinstance(spec, Replicated) or isinstance(
            spec, Size) and knows_rows for spec in specs) \
            and all(isinstance(spec, Replicated) for spec in plan.gives)
    is_made = plan.make is None or plan.alone is not None and knows_rows
    if compiled and plan.sizes is not None and isinstance(specs[-1], Replicated):
        value = operation.value(-1)
        is_made = is_made and value is not None and [*value] == [*plan.sizes]  # not all rows' shape
    return is_made and (compiled or not plan.padded) and _match(specs, plan.takes, compiled)


def _match(specs: Sequence[Spec], takes: Sequence[Spec], compiled: bool = False) -> bool:
    """Whether a tower by itself has inputs of the specs that a plan takes, or makes them.

    Of what is the same for all towers, the first one has all as its part of a sum.
    """
    return all(spec == wanted or isinstance(spec, Sharded) and spec.uncounted == wanted
               or isinstance(spec, Replicated) and (
        isinstance(wanted, (Replicated, ListOf)) or not compiled and (
            wanted in (SUM, ROW) or isinstance(wanted, Size) or isinstance(wanted, Sharded)
            and has_known_rows(wanted) and in_one_piece(wanted) and not wanted.start))
        or isinstance(spec, ListOf) and isinstance(wanted, ListOf)
        or isinstance(spec, Position) and isinstance(wanted, Row) and not compiled
        or isinstance(spec, Sharded) and wanted == InRow(spec)
        for spec, wanted in zip(specs, takes))
