"""A traced step -> its operations on the towers and on the merge device.

Goes in: a :class:`propagate.Layout` and the towers.  Comes out: nodes that give one device's
result.

What is sharded or partial is made on each tower, what is replicated once: with the variable that
it reads or writes, else on the merge device.  Constants, and what is made of them alone, are made
on each tower that uses them.  Effects keep the order that the trace gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import bodies, homes, propagate, staging
from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.maker import Maker
from towerstrategy.sharding.propagate import Layout, Nested
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import (
    REPLICATED,
    Axes,
    ListOf,
    Partial,
    Replicated,
    Sharded,
    Size,
    Spec,
)
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Value

LARGEST_REPEATED = 4096  # bytes of a constant that each tower has in its own part of the graph


class Partition:
    """Makes the nodes of a layout.

    Args:
      towers: the towers.
      scope: a prefix for names, with a "/" behind it.
      once: the scope of what is done once.
    """

    def __init__(self, towers: Towers, scope: str = "", once: str = homes.ONCE) -> None:
        self._towers, self._scope, self._default = towers, scope, once
        self._values: dict[str, Value] = {}
        self._nodes: dict[str, list[str]] = {}  # what is waited for -> the nodes that it has become
        self._owners: dict[str, int] = {}  # a node -> the tower whose it is
        self.effects: list[str] = []  # nodes that must run
        self._outside: list[str] = []
        self._homes: dict[str, str] = {}  # of operations
        self._wanted: dict[str, str] = {}  # of what tensors are summed or gathered to
        self._updates: set[str] = set()
        self._checks: list[str] = []  # nodes that write no variable and may fail: assertions
        self._stages: dict[str, int] = {}

    def run(self, layout: Layout, inputs: Iterable[Value],
            controls: Sequence[str] = (), asked: Iterable[str] = ()) -> list[Value]:
        """Makes the nodes; gives the graph's outputs, which are ``asked`` for on these devices."""
        self._outside = list(controls)
        self._values.update(zip((tensor.name for tensor in layout.graph.inputs), inputs))
        self._homes, self._wanted = homes.homes(layout, {
            name: value.device for name, value in self._values.items() if value.device},
            self._towers.merge, asked)
        self._updates = homes.updates(layout)
        self._stages = staging.stages_of(layout, self._values, self._towers)
        self._nodes = {name: [] for operation in layout.order for name in operation.controls}
        for operation in layout.order:
            if operation.name in layout.plans:
                self._operation(layout, operation)
        return [self._values[tensor.name] for tensor in layout.graph.outputs]

    # One operation.

    def _operation(self, layout: Layout, operation: Op) -> None:
        plan = layout.plans[operation.name]
        values = [self._values[name] for name in operation.input_names]
        controls = self._controls(operation)
        towers = self._towers.at(self._stages.get(operation.name, self._towers.stage))
        if isinstance(plan, Nested) and operation.type in propagate.CALLS:
            made = self._inlined(operation, plan.layouts[0], values, controls, towers)
        else:
            values = [value.at(towers).as_spec(spec) for value, spec in zip(values, plan.takes)]
            if plan.once:
                made = [value.as_spec(spec) for value, spec in zip(
                    self._once(operation, plan, values, controls, towers), plan.gives)]
            elif isinstance(plan, Nested) and not plan.local:
                made = self._for_all(operation, plan, values, controls, towers)
            else:
                made = self._on_towers(operation, plan, values, controls, towers)
        self._values.update(zip(operation.output_names, made))

    def _controls(self, operation: Op) -> list[str]:
        if not (operation.controls or operation.is_stateful or operation.has_effect):
            return []
        outside = self._outside if operation.is_stateful else []
        # Weights are not to be half updated where an assertion ends the step.
        if operation.writes_variables and len(self._checks) > 1:
            self._checks[:] = [self._towers.builder.gate(self._checks, self._towers.host)]
        checks = self._checks if operation.writes_variables else []
        return outside + checks + [node for before in operation.controls
                                   for node in self._nodes.get(before, ())]

    def _own(self, controls: Iterable[str], tower: int) -> list[str]:
        """Those of what is waited for that are not another tower's."""
        return [node for node in controls if self._owners.get(node, tower) == tower]

    def _done(self, operation: Op, nodes: Sequence[str]) -> None:
        if operation.name in self._nodes:
            self._nodes[operation.name] += nodes
        if operation.has_effect:
            self.effects += nodes
            if not operation.writes_variables:
                self._checks += nodes

    def _once(self, operation: Op, plan: Plan, values: Sequence[Value],
              controls: list[str], towers: Towers) -> list[Value]:
        """The operation with all rows."""
        constant = all(value.constant for value in values) and _is_repeatable(operation)
        device = towers.host if constant else self._home(operation, values)

        def whole() -> list[Ref]:
            if plan.whole is not None:
                return plan.whole(Maker(operation, values, towers, device))
            return self._copied(operation, [value.on(device) for value in values], device, None,
                                controls)

        if not constant:
            return [Value(towers, REPLICATED, tensor.shape, ref, None, device)
                    for ref, tensor in zip(whole(), operation.outputs)]
        if controls:  # so that what waits for it, which may not be made, waits for these
            self._nodes[operation.name] = list(controls)
        one, own = Lazily(whole), Lazily(lambda tower, towers: self._copied(
            operation, [value.at(towers).part(tower) for value in values], towers.devices[tower],
            tower, self._own(controls, tower)))
        return [Value(towers, REPLICATED, tensor.shape, one.output(index), None, device,
                      own.output(index)) for index, tensor in enumerate(operation.outputs)]

    def _copied(self, operation: Op, inputs: Sequence[Ref], device: str, tower: int | None,
                controls: Iterable[str], attributes: bytes = b"") -> list[Ref]:
        scope = self._once_in(operation) if tower is None else self._towers.scopes[tower]
        refs, name = self._towers.builder.copy(
            operation, inputs, device, f"{scope}{self._scope}", controls, attributes=attributes)
        if tower is not None:
            self._owners[name] = tower
        self._done(operation, [name])
        return refs

    def _once_in(self, operation: Op) -> str:
        """The name scope of an operation that is done once."""
        return homes.UPDATE if operation.name in self._updates else self._default

    def _home(self, operation: Op, values: Sequence[Value]) -> str:
        """Where an operation is done once: with its variable, or where the user says."""
        here = self._of_handle(operation, values)
        if here:
            return here
        largest = max((value for value in values if value.constant is None),
                      key=lambda value: value.size, default=None)
        home = self._homes.get(operation.name) or operation.definition.device
        if home and not (largest and largest.device and all(
                tensor.shape.is_fully_defined() and tensor.shape.num_elements() < largest.size
                for tensor in operation.outputs)):  # what is made of it costs less to send
            return home
        if largest and largest.device:
            return largest.device
        large = not all(map(_is_small, operation.outputs))
        return self._towers.spare if large and self._towers.spare else self._towers.merge

    def _of_handle(self, operation: Op, values: Sequence[Value]) -> str:
        """Where the variable is that an operation is given; "" where nobody says."""
        for place in operation.handles:  # most have none, and all are asked
            if values[place].device:
                return values[place].device
        return ""

    def _on_towers(self, operation: Op, plan: Plan, values: Sequence[Value],
                   controls: list[str], towers: Towers) -> list[Value]:
        rows = None
        if plan.padded and towers.replicas > 1:
            rows = next(value for value in values if isinstance(value.spec, Sharded))
            values = [value.padded(int(at in plan.ones)) for at, value in enumerate(values)]
        if plan.sizes is not None:
            values = [*values[:-1], values[-1].known_as(plan.sizes, operation.inputs[-1].dtype)]
        maker = Maker(operation, values, towers, next(filter(None, self._asked(operation)), "")
                      if self._wanted and plan.make is not None else "")
        home = self._of_handle(operation, values)
        if plan.near is not None and values[plan.near].constant is None:
            home = values[plan.near].device
        of_shapes = all(isinstance(spec, (Size, Replicated))
                        for spec in (*plan.takes, *plan.gives))
        part = self._part(plan, maker, home, of_shapes, controls)

        def whole() -> list[Ref]:
            if plan.whole is not None:
                return plan.whole(maker)
            return self._copied(
                operation, [value.whole() for value in values],
                towers.host if of_shapes else home or self._home(operation, values), None,
                controls)

        one = None if plan.whole is None and any(
            isinstance(spec, ListOf) for spec in plan.takes) else Lazily(whole)
        if operation.has_effect or not plan.gives or any(
                isinstance(spec, (Sharded, Partial, ListOf)) for spec in plan.gives):
            for tower in range(len(towers)):
                part(tower)
        given = [self._given(towers, tensor, spec, index, part, one,
                             maker.home if plan.make is not None else "")
                 for index, (tensor, spec) in enumerate(zip(operation.outputs, plan.gives))]
        return given if rows is None else [value.without_padding(rows) for value in given]

    def _part(self, plan: Plan, maker: Maker, home: str, of_shapes: bool, controls: list[str]
              ) -> Lazily:
        """What makes the outputs of an operation on a tower."""
        operation, towers = maker.op, maker.towers
        if plan.make is not None:
            make = plan.make
            made = Lazily(lambda: make(maker))
            return Lazily(lambda tower: [output[tower] for output in made()])
        own = None if towers.on_cpu else plan.part

        @Lazily
        def part(tower: int) -> list[Ref]:
            return own(maker, tower) if own is not None else self._copied(
                operation, [value.part(tower) for value in maker.inputs],
                home or (towers.shapes_on(tower) if of_shapes else towers.devices[tower]),
                tower, controls if operation.has_effect else self._own(controls, tower))

        return part

    def _given(self, towers: Towers, tensor: tf.Tensor, spec: Spec, index: int, parts: Lazily,
               whole: Lazily | None, home: str) -> Value:
        if isinstance(spec, Axes) and whole is not None:
            return Value(towers, spec, tensor.shape, whole.output(index))
        part = parts.output(index)
        if isinstance(spec, Size):
            return Value(towers, spec, tensor.shape,
                         None if whole is None else whole.output(index), part)
        if isinstance(spec, Replicated):  # each tower's is the same
            return Value(towers, spec, tensor.shape, lambda: part(0), part, home)
        rows = tensor.dtype.is_floating or not _is_small(tensor)
        return Value(towers, spec, tensor.shape, None, part, self._wanted.get(tensor.name)
                     or (towers.spare if rows else ""))

    def _asked(self, operation: Op) -> list[str]:
        """Where the outputs of an operation are wanted; "" where nobody says."""
        return [self._wanted.get(name, "") for name in operation.output_names]

    # Calls, branches and loops.

    def _inlined(self, operation: Op, layout: Layout, values: Sequence[Value],
                 controls: list[str], towers: Towers) -> list[Value]:
        inner = Partition(towers, f"{self._scope}{operation.name}/", self._once_in(operation))
        inner._checks = self._checks
        results = inner.run(layout, values, controls, self._asked(operation))
        for value, tensor in zip(results, operation.outputs):
            value.shape = value.shape.merge_with(tensor.shape)  # of which it may know more
        if operation.name in self._nodes:
            self._nodes[operation.name] += inner.effects
        self.effects += inner.effects
        return results

    def _for_all(self, operation: Op, plan: Nested, values: Sequence[Value],
                 controls: list[str], towers: Towers) -> list[Value]:
        """One branch or loop for all towers, with what each of them has of its inputs."""
        loop = operation.type in propagate.LOOPS
        first = 0 if loop else 1
        refs: list[Ref] = []
        for value in values[first:]:
            refs += bodies.refs_of(value)
        within = [bodies.Body(towers, layout, plan.takes[first:], values[first:], operation)
                  for layout in plan.layouts]
        for number, body in enumerate(within):
            partition = Partition(body.towers)
            results = partition.run(body.layout, body.values,
                                    asked=() if loop else self._asked(operation))
            body.give(results, plan.gives if number or not loop else [REPLICATED],
                      partition.effects)
        asked = {key: one for body in within for key, one in body.asked.items()}
        for number, body in enumerate(within):
            body.finish(asked, hand_on=loop and number == 1)
        refs += [one.outer() for one in asked.values()]
        dtypes = [ref.dtype for ref in within[-1].results]
        names = [_tf.add_function(towers.builder.graph, body.graph) for body in within]
        taken = bodies.types_of(ref.dtype for ref in refs)
        extra = {"T": taken} if loop else {"Tin": taken, "Tout": bodies.types_of(dtypes)}
        if loop and any(layout.has_state for layout in plan.layouts):
            # On one device a draw may wait for what the turn before has made, its shape say.
            extra["parallel_iterations"] = tf.compat.v1.AttrValue(i=1)
        made, name = towers.builder.call(
            operation, operation.type, refs if loop else [values[0].whole(), *refs],
            towers.merge, f"{self._once_in(operation)}{self._scope}", controls,
            [ref.dtype for ref in refs] if loop else dtypes, bodies.attributes_of(operation, names),
            extra)
        self._done(operation, [name])
        if any(body.crosses for body in within):
            towers.across.note_control_flow(name)
        left = iter(made)
        return [bodies.value_of(towers, spec, tensor.shape, left)
                for tensor, spec in zip(operation.outputs, plan.gives)]


class Lazily:
    """What makes outputs, of a tower or of all, when the first of them is asked for."""

    def __init__(self, make: Callable[..., list[Any]]) -> None:
        self._make = make
        self._made: dict[Any, list[Any]] = {}

    def __call__(self, *of: Any) -> list[Any]:
        if of not in self._made:
            self._made[of] = self._make(*of)
        return self._made[of]

    def output(self, index: int) -> Callable[..., Ref]:
        return lambda *of: self(*of)[index]


def _is_small(tensor: tf.Tensor) -> bool:
    """Whether a tensor is numbers or a shape, or nothing that a GPU has in its memory."""
    return tensor.dtype in (tf.string, tf.variant, tf.resource) or tensor.shape.rank is None \
        or _bytes(tensor) <= LARGEST_REPEATED


def _bytes(tensor: tf.Tensor) -> int:
    """How large a tensor is; too large to be repeated where that is not known."""
    known = tensor.shape.is_fully_defined()
    return tensor.shape.num_elements() * tensor.dtype.size if known else LARGEST_REPEATED + 1


def _is_repeatable(operation: Op) -> bool:
    """Whether each tower may make it for itself rather than be sent it."""
    if operation.is_stateful or operation.type in (
            *propagate.CALLS, *propagate.BRANCHES, *propagate.LOOPS):
        return False
    return bool(operation.inputs) or sum(map(_bytes, operation.outputs)) <= LARGEST_REPEATED
