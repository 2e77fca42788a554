"""A replica function that was traced for tower 0 -> the operations of every tower.

Goes in: the traced graph; what each tower has in place of tower 0's inputs; which operations are
those of sync points.  Comes out: nodes, collected as those of a step that sees all rows.

Nothing is redistributed.  What takes something of which each tower has its own is done by each
tower with that, and so is what draws, keeps a state or has an effect.  All else is the same for all
and done once, as is what is done at sync points, which get at the towers' values by
:meth:`OwnTensors.of_tower`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import blocks, graphs, propagate
from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.contract import Contract
from towerstrategy.sharding.partition import Lazily, Partition
from towerstrategy.sharding.rules import registry
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import OWN, REPLICATED, SUM, Sharded, Spec
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.traffic import Traffic
from towerstrategy.sharding.values import Value, captured


class NeedsOwnTrace(BaseException):
    """The function must be traced for each tower; the message says why.

    Not an ``Exception``, so that the traced code's own handlers do not take it for one of theirs.
    """


@dataclasses.dataclass
class ByEach(Plan):
    """Done by each tower, with what it has.

    Attributes:
      by_rows: the table's plan, where the op fails on a tower without rows unless it is padded.
    """

    by_rows: Plan | None = None


class OfAllRows(Plan):
    """Done once, with the rows of all towers, in place of a sum over what each makes of its own."""


class OwnTensors:
    """Tensors of a replica function's ``graph`` of which each of ``count`` towers has its own.

    ``filled`` says of each tower whether it has rows; it is empty where all have.
    """

    def __init__(self, graph: Any, count: int, filled: Sequence[Any] = ()) -> None:
        self.graph, self._count, self._filled = graph, count, filled
        self._inputs: dict[str, Sequence[Any]] = {}  # a placeholder -> each tower's, made outside
        self._joined: set[str] = set()  # operations that give tower r their input number r
        self._picks: dict[str, int] = {}  # operations that give what this tower has
        self._totals: set[str] = set()  # operations that give the sum of the towers' inputs
        self._once: set[str] = set()  # those of sync points
        self._captures: dict[str, Any] = {}  # a placeholder -> what it stands for, for all towers
        self._checked: set[str] = set()  # functions that draw nothing
        self._seen = 0

    def enter(self, values: Sequence[Any], shape: tf.TensorShape) -> tf.Tensor:
        """A tensor of tower 0's that is ``values[r]`` on tower r; nothing is known of its value."""
        with self.graph.as_default(), tf.control_dependencies(None):
            if any(tf.is_symbolic_tensor(value) and value.graph is self.graph for value in values):
                first = tf.raw_ops.Merge(inputs=list(values)).output
                self._joined.add(first.op.name)
            else:
                first = tf.compat.v1.placeholder(tf.as_dtype(values[0].dtype), shape)
                self._inputs[first.op.name] = list(values)
        first.set_shape(shape)
        if isinstance(values[0], tf.Tensor):
            _tf.copy_handle_data(values[0], first)
        return first

    def enter_handles(self, variables: Sequence[Any]) -> Iterator[tf.Tensor]:
        """Captured handles of such variables, of whose parts tower r has number r, as they come."""
        captured = {id(outer): inner for outer, inner in self.graph.captures}
        for variable in variables:
            handles = [part.handle for part in variable._values]
            inner = captured.get(id(handles[0]))
            if inner is not None and inner.op.name not in self._inputs:
                self._inputs[inner.op.name] = handles
                yield inner

    def stretch(self) -> list[tf.Operation]:
        """Tower 0's operations since the last sync point."""
        return [operation for operation in self.graph.get_operations()[self._seen:]
                if operation.type != "Placeholder" and operation.name not in self._joined]

    def end_stretch(self) -> None:
        """What was made since is tower 0's."""
        self._seen = len(self.graph.get_operations())

    def end_sync(self) -> None:
        """What was made since is a sync point's."""
        self._once.update(each.name for each in self.graph.get_operations()[self._seen:])
        self.end_stretch()

    def differs(self, tensor: tf.Tensor) -> bool:
        """Whether towers get one each where it is handed on; not of what is one for all of them."""
        made_by = tensor.op
        if tensor.graph is not self.graph:
            return False
        if made_by.name in self._joined or made_by.name in self._inputs:
            return True
        if _only_reads(made_by):
            return any(map(self.differs, made_by.inputs))
        return made_by.type != "Placeholder" and made_by.name not in self._once

    def of_tower(self, tensor: tf.Tensor, tower: int) -> tf.Tensor:
        """What ``tower`` has of a tensor, at a sync point."""
        if not self.differs(tensor):
            return tensor
        picked = tf.identity(tensor)
        _tf.copy_handle_data(tensor, picked)
        self._picks[picked.op.name] = tower
        return picked

    def total(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """The sum of what the towers that have rows have of a tensor, on ``device``."""
        half = _tf.half_of(tensor)  # which crosses then
        with _tf.not_recorded(), tf.device(device):
            summed = tf.identity(tensor) if half is None else tf.cast(half, tensor.dtype)
        self._totals.add(summed.op.name)
        self._once.add(summed.op.name)
        return summed

    # When all is traced.

    def layout(self, states: Contract, traffic: Traffic) -> propagate.Layout:
        """Which operations each tower does, and which are done once.

        Args:
          states: what is known of the towers' tensors.
          traffic: chooses between what the towers make being added up and their rows crossing.
        """
        graph = self.graph
        self._captures = {inner.name: outer for outer, inner in (
            *graph.captures, *_tf.captured_at_call(graph)) if inner.op.name not in self._inputs}
        graph.inputs = [*map(graph.get_tensor_by_name, self._captures),
                        *(graph.get_tensor_by_name(f"{name}:0") for name in self._inputs)]
        specs: dict[str, Spec] = {tensor.name: OWN if tensor.op.name in self._inputs else REPLICATED
                                  for tensor in graph.inputs}
        local = {tensor.name: _rows_first(tensor) for tensor in graph.inputs
                 if specs[tensor.name] == OWN}
        found = propagate.Layout(graph, graphs.needed_in_order(graph), specs, {})
        taken = collections.Counter(name for each in found.order for name in each.input_names)
        added_up = {each.input_names[0] for each in found.order if each.name in self._totals
                    and taken[each.input_names[0]] == 1}
        for operation in found.order:
            if operation.output_names and operation.output_names[0] in specs:
                continue  # an input
            given = found.inputs_of(operation)
            rows = None if added_up.isdisjoint(operation.output_names) else _rows_of(
                operation, given, states, traffic)
            if rows is not None:
                plan: Plan = OfAllRows(rows, [REPLICATED], once=True)
            elif self._is_own(operation, given):
                for name in _tf.functions_of(operation.operation):
                    self._check_function(name)
                plan = ByEach(given, [OWN] * len(operation.outputs),
                              by_rows=_by_rows(operation, local) if self._filled else None)
            elif OWN in given:  # at a sync point: what is tower 0's there is taken for all
                plan = registry.once(operation)
            else:
                plan = propagate.once(found, operation)
            found.plans[operation.name] = plan
            specs.update(zip(operation.output_names, plan.gives))
        return found

    def _is_own(self, operation: Op, specs: Sequence[Any]) -> bool:
        if operation.name in self._joined:
            return True
        if operation.name in self._picks or operation.name in self._once:
            return False
        return OWN in specs or operation.is_stateful and not _only_reads(operation.operation)

    def _check_function(self, name: str) -> None:
        """A function draws the same numbers wherever it is called, so it must draw none."""
        if name in self._checked:
            return
        self._checked.add(name)
        if _tf.asserts(self.graph, name):
            raise NeedsOwnTrace("an assertion in it would name tower 0 whichever tower fails")
        definition = _tf.function_definition(self.graph, name)
        for node in definition.node_def if definition is not None else ():
            if "seed2" in node.attr:
                raise NeedsOwnTrace(f"{node.op} inside a nested function would draw the same "
                                    "numbers on every tower")
            for called in _tf.functions_in_attributes(node):
                self._check_function(called)

    def inputs(self, towers: Towers) -> list[Value]:
        """What stands for each input of the layout."""
        return [self._input(towers, tensor) for tensor in self.graph.inputs]

    def _input(self, towers: Towers, tensor: tf.Tensor) -> Value:
        outer = self._captures.get(tensor.name)
        if outer is not None:
            return captured(towers, outer, tensor.shape)
        own = self._inputs[tensor.op.name]
        return Value(towers, OWN, tensor.shape, None, lambda tower: _made_outside(
            towers, tower, own[tower], tensor.dtype))

    def hands_on(self, layout: propagate.Layout, operation: Op) -> bool:
        """Whether an operation gives what towers have: at a sync point, or behind it."""
        return operation.name in self._picks or operation.name in self._joined or (
            operation.name in self._totals
            and not isinstance(layout.plans.get(operation.before[0]), OfAllRows))

    def handed_on(self, operation: Op, values: Sequence[Value]) -> tuple[list[Value], list[Ref]]:
        """What such an operation gives, and what it takes of these."""
        towers, shape = values[0].towers, operation.outputs[0].shape
        if operation.name in self._joined:
            refs = [value.whole() for value in values]
            return [Value(towers, OWN, shape, None, refs.__getitem__)], refs
        if operation.name in self._totals:
            refs, device = values[0].parts(), operation.definition.device or towers.merge
            ref = towers.add_up_here([self._if_filled(towers, tower, part) for tower, part in
                                      enumerate(refs)], device, shape, operation.outputs[0].dtype)
            return [Value(towers, REPLICATED, shape, ref, None, device)], refs
        ref = values[0].part(self._picks[operation.name])
        return [Value(towers, REPLICATED, shape, ref)], [ref]

    def _if_filled(self, towers: Towers, tower: int, part: Ref) -> Ref:
        """``part``, or zeros where the tower has no rows."""
        filled = self._filled[tower] if self._filled else True
        if not tf.is_tensor(filled) and filled:
            return part
        return towers.on(tower, "SelectV2", _made_outside(towers, tower, filled, tf.bool), part,
                         towers.on(tower, "ZerosLike", part))


def _made_outside(towers: Towers, tower: int, value: Any, dtype: tf.DType) -> Ref:
    """What stands on a tower for a tensor that was made outside, or for a number."""
    build = towers.builder
    return build.take(build.graph.capture(value)) if tf.is_tensor(value) else build.constant(
        value, dtype, towers.devices[tower])


def _rows_of(operation: Op, given: Sequence[Spec], states: Contract,
             traffic: Traffic) -> list[Spec] | None:
    """The specs of inputs whose rows cross, to be worked on once, if these are fewer bytes.

    By the table what towers make of their rows then adds up to what is made of the rows of all.
    """
    specs: list[Spec] = []
    for spec, tensor in zip(given, operation.inputs):
        known = REPLICATED if spec == REPLICATED else states.of(tensor).spec
        if not isinstance(known, Sharded) and spec != REPLICATED or known is None:
            return None
        specs.append(known)
    plan = registry.plan_of(operation, specs)
    if plan is None or plan.gives != [SUM] or list(plan.takes) != specs:
        return None
    return specs if traffic.cheaper(operation, plan, specs).once else None


def _by_rows(operation: Op, local: dict[str, Spec]) -> Plan | None:
    """The table's plan of an op that has to be padded where a tower has no rows.

    ``local`` has the specs of the tensors by name, with a first dimension of an open size as that of
    the rows; the op's outputs are added.  Where another tensor has such a dimension, that is right
    as well: padding changes what has no entries alone, and the op's outputs have none either.
    """
    specs = [local.get(name, REPLICATED) for name in operation.input_names]
    plan = registry.plan_of(operation, specs) if specs.count(REPLICATED) < len(specs) else None
    if plan is None or plan.make is not None or plan.once or list(plan.takes) != specs:
        local.update((tensor.name, _rows_first(tensor)) for tensor in operation.outputs)
        return None
    local.update(zip(operation.output_names, plan.gives))
    return plan if plan.padded else None


def _rows_first(tensor: tf.Tensor) -> Spec:
    """The spec of a tensor whose first dimension is that of the rows if its size is open."""
    return Sharded(0, group="own") if tensor.shape.rank and tensor.shape[0] is None else REPLICATED


def _with_spec(value: Value, spec: Spec) -> Value:
    """What each tower has of ``value``, as a value of another spec."""
    return Value(value.towers, spec, value.shape, None, value.part, value.device)


def _sharded(value: Value, spec: Sharded, home: str) -> Value:
    """The towers' own rows as those of one batch, which ``home`` gathers."""
    return Value(value.towers, spec, blocks.opened(value.shape, spec.dim), None, value.part, home)


def _only_reads(operation: tf.Operation) -> bool:
    """Whether an operation reads resources, as all towers may read them; functions may do more."""
    handles = [tensor for tensor in operation.inputs if tensor.dtype == tf.resource]
    return bool(handles) and operation.type not in _tf.CALLERS \
        and not _tf.has_effect(operation)


class ReplicaPartition(Partition):
    """Makes the nodes of a replica function, of whose tensors ``own`` knows."""

    def __init__(self, towers: Towers, own: OwnTensors) -> None:
        super().__init__(towers)
        self._of = own
        # In the order of their work: of micro-batches the first of each tower comes first.
        parts = len(towers) // len({*towers.devices})
        self._turns = sorted(range(len(towers)), key=lambda tower: tower % parts)
        # By resource (a name for what is none): the last node that has written it, and those that
        # have read it since.
        self._writers: dict[Ref | str, str] = {}
        self._readers: dict[Ref | str, list[str]] = {}

    def _once_in(self, operation: Op) -> str:
        del operation
        return self._default  # in which the update has a name scope of its own already

    def _operation(self, layout: propagate.Layout, operation: Op) -> None:
        values = [self._values[name] for name in operation.input_names]
        plan = layout.plans[operation.name]
        if self._of.hands_on(layout, operation):
            made, refs = self._of.handed_on(operation, values)
            if operation.name in self._nodes:
                self._nodes[operation.name] += [*self._controls(operation), *(
                    ref.node for ref in refs if ref.node in self._towers.builder.nodes)]
        elif isinstance(plan, ByEach):
            made = self._by_each(operation, values, plan.by_rows)
        elif isinstance(plan, OfAllRows):
            home = self._home(operation, [])
            made = self._once(operation, plan, [
                _sharded(value, spec, home) if isinstance(spec, Sharded) else value
                for value, spec in zip(values, plan.takes)], self._controls(operation),
                self._towers)
        else:
            return super()._operation(layout, operation)
        self._values.update(zip(operation.output_names, made))

    def _by_each(self, operation: Op, values: Sequence[Value], by_rows: Plan | None
                 ) -> list[Value]:
        """The operation on each tower; by a plan that pads it where a tower has no rows."""
        towers = self._towers.at(self._stages.get(operation.name, self._towers.stage))
        device = operation.definition.device
        device = "" if device in self._towers.rows[0] else device
        home = device or self._of_handle(operation, values)
        controls = self._controls(operation)
        if by_rows is not None:
            values = [value if spec == REPLICATED else _with_spec(value, spec)
                      for value, spec in zip(values, by_rows.takes)]
            rows = next(value for value in values if isinstance(value.spec, Sharded))
            values = [value.padded(int(at in by_rows.ones)) for at, value in enumerate(values)]
        part = Lazily(lambda tower: self._copied(
            operation, [value.part(tower) for value in values], home or towers.devices[tower],
            tower, self._own(controls, tower), _with_seed_of(operation, tower)))
        for tower in self._turns:
            part(tower)
        made = [Value(towers, OWN, tensor.shape, None, part.output(index), device)
                for index, tensor in enumerate(operation.outputs)]
        if by_rows is not None:
            made = [_with_spec(_with_spec(value, spec).without_padding(rows), OWN)
                    for value, spec in zip(made, by_rows.gives)]
        return made

    def _copied(self, operation: Op, inputs: Sequence[Ref], device: str, tower: int | None,
                controls: Iterable[str], attributes: bytes = b"") -> list[Ref]:
        """A copy that waits for what has written, or read, a resource that it reads, or writes.

        The trace has ordered what uses a resource by its tensor there, which stands for another
        resource on each tower.
        """
        if not (operation.is_stateful or operation.handles):
            return super()._copied(operation, inputs, device, tower, controls, attributes)
        given = dict(zip(operation.input_names, inputs))
        reads, writes = ([given.get(name, name) for name in sorted(names)]
                         for names in _tf.touched_resources(operation.operation))
        before = [self._writers[key] for key in (*reads, *writes) if key in self._writers]
        before += [name for key in writes for name in self._readers.pop(key, ())]
        refs = super()._copied(operation, inputs, device, tower, [*controls, *before], attributes)
        name = next(reversed(self._towers.builder.nodes))
        self._writers.update(dict.fromkeys(writes, name))
        for key in reads:
            self._readers.setdefault(key, []).append(name)
        return refs


def _with_seed_of(operation: Op, tower: int) -> bytes:
    """Other attributes than tower 0's, of a random operation that keeps a state; else none."""
    if not tower or not operation.is_stateful or not _has_seed(operation.type):
        return b""
    node = tf.compat.v1.NodeDef.FromString(operation.definition.attributes)
    if not (node.attr["seed"].i or node.attr["seed2"].i):
        return b""
    node.attr["seed2"].i = (node.attr["seed2"].i + tower * _tf.SEED_STEP) % 2**31
    return node.SerializeToString(deterministic=True)


@functools.cache
def _has_seed(type: str) -> bool:
    definition = _tf.op_def(type)
    return definition is not None and any(attr.name == "seed2" for attr in definition.attr)
