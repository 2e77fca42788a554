"""The operations on the towers and on the merge device that do what a traced step does.

Goes in: a :class:`layout.Layout` and the towers.  Comes out: nodes that give one device's
result.

Sharded and partial tensors are made on each tower.  Replicated tensors are made once: with the
variable that the operation reads or writes, else on the merge device.  Constants, and tensors made
of constants alone, are made on each tower that uses them.  Effects keep the order of the trace.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import bodies, homes, padding, staging
from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.layout import LOOPS, Layout, Nested
from towerstrategy.sharding.maker import Maker
from towerstrategy.sharding.rules import lists
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import (
    PARTED,
    REPLICATED,
    Axes,
    ListOf,
    Replicated,
    Row,
    Size,
    Spec,
)
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Lazily, Value


class Partition:
    """Makes the nodes of a layout.

    Args:
      towers: the towers.
      scope: the prefix of node names below the tower's scope, with a "/" at the end.
      once: the scope of operations that run once.
    """

    def __init__(self, towers: Towers, scope: str = "", once: str = homes.ONCE) -> None:
        self.towers, self._scope, self._once_scope = towers, scope, once
        self._owners: dict[str, int] = {}  # node -> the tower that it belongs to
        self.effects: list[str] = []  # nodes that must run
        self.reads: list[str] = []  # nodes that read variables, which a later call may write
        self._read_before: dict[Any, Value] = {}  # what operations in loops read -> its value
        self._checks: list[str] = []  # nodes that write no variable and may fail: assertions
        self._order: Sequence[int] = range(len(towers))  # in which towers run an operation

    def run(self, layout: Layout, inputs: Iterable[Value],
            controls: Sequence[str] = (), output_devices: Iterable[str] = (),
            of_batch: Sequence[bool] = ()) -> list[Value]:
        """Makes the nodes of a graph; returns its outputs, which ``output_devices`` need.

        Stateful operations wait for ``controls``.  ``of_batch``: which inputs the batch is in; by
        default all but resources.
        """
        self._outer_controls = list(controls)
        self._values = dict(zip((tensor.name for tensor in layout.graph.inputs), inputs))
        # The devices of operations, and those where tensors are summed or gathered.
        self._homes, self._sum_devices = homes.homes(layout, {
            name: value.device for name, value in self._values.items() if value.device},
            self.towers.merge, output_devices)
        self._updates = homes.updates(layout)
        taken = of_batch or [tensor.dtype != tf.resource for tensor in layout.graph.inputs]
        self._of_batch = {name for name, is_taken in zip(self._values, taken) if is_taken}
        self._stages = staging.stages_of(layout, self._values, self.towers)
        self._nodes: dict[str, list[str]] = {  # of operations that others wait for
            name: [] for operation in layout.order for name in operation.controls}
        for operation in layout.order:
            if not self._of_batch.isdisjoint(operation.input_names):
                self._of_batch.update(operation.output_names)
            self._operation(layout, operation)
        return [self._values[tensor.name] for tensor in layout.graph.outputs]

    def _operation(self, layout: Layout, operation: Op) -> None:
        """Makes the nodes of an operation, by its plan."""
        plan = layout.plans[operation.name]
        values = [self._values[name] for name in operation.input_names]
        controls = self._controls(operation)
        towers = self.towers.at(self._stages.get(operation.name, self.towers.stage))
        if isinstance(plan, Nested) and plan.inlined:
            outputs = self._inlined(operation, plan.layouts[0], values, controls, towers)
        else:
            if ListOf in map(type, plan.takes):
                values = list(map(self._own_list, values, plan.takes, operation.inputs))
            if isinstance(plan, Nested):
                values = list(map(Value.or_zeros, values, plan.takes, operation.inputs))
            values = [value.at(towers).as_spec(spec) for value, spec in zip(values, plan.takes)]
            if plan.once:
                outputs = [value.as_spec(spec, has_rows=True) for value, spec in zip(
                    self._run_once(operation, plan, values, controls, towers), plan.gives)]
            elif isinstance(plan, Nested) and not plan.local:
                outputs = self._in_one_op(operation, plan, values, controls, towers)
            else:
                outputs = self._on_towers(operation, plan, values, controls, towers)
        self._values.update(zip(operation.output_names, outputs))

    def _own_list(self, value: Value, wanted: Spec, tensor: tf.Tensor) -> Value:
        """A new list, made anew for each tower if it says how many rows all towers have."""
        element: Any = getattr(wanted, "element", None)
        if not isinstance(value.spec, Replicated) or not lists.says_rows(tensor, element):
            return value
        plan, operation = Plan([element.size, REPLICATED], [wanted]), Op(tensor.op)
        inputs = [self._values[name].as_spec(spec)
                  for name, spec in zip(operation.input_names, plan.takes)]
        return self._on_towers(operation, plan, inputs, [], self.towers)[0]

    def _controls(self, operation: Op) -> list[str]:
        """The nodes that an operation's nodes wait for."""
        if not (operation.controls or operation.is_stateful or operation.has_effect):
            return []
        outside = self._outer_controls if operation.is_stateful else []
        # If an assertion ends the step, no weight may have been updated.  A count of steps, which
        # needs no batch, counts the end of the data, too, as on one device.
        gated = operation.writes_variables and not operation.is_call \
            and not self._of_batch.isdisjoint(operation.input_names)
        if gated and len(self._checks) > 1:
            self._checks[:] = [self.towers.builder.gate(self._checks, self.towers.host)]
        checks = self._checks if gated else []
        return list(dict.fromkeys([*outside, *checks, *[
            node for before in operation.controls for node in self._nodes.get(before, ())]]))

    def _controls_on(self, controls: Iterable[str], tower: int) -> list[str]:
        """The nodes among ``controls`` that do not belong to another tower."""
        return [node for node in controls if self._owners.get(node, tower) == tower]

    def _note_nodes(self, operation: Op, nodes: Sequence[str]) -> None:
        """Notes the nodes of an operation, for operations that wait for it and as effects."""
        if operation.name in self._nodes:
            self._nodes[operation.name] += nodes
        if operation.has_effect:
            self.effects += nodes
            if not operation.writes_variables:
                self._checks += nodes
        elif operation.handles:
            self.reads += nodes

    def _run_once(self, operation: Op, plan: Plan, values: Sequence[Value],
                  controls: list[str], towers: Towers) -> list[Value]:
        """The outputs of an operation that runs once, with all rows."""
        if operation.handles and values[0].read is not None:  # the loop is given what it reads
            return [values[0].read(operation)]
        constant = plan.whole is None and all(value.constant for value in values) \
            and homes.is_repeatable(operation)
        device = towers.host if constant else self._home(operation, values)

        def whole() -> list[Ref]:
            if plan.whole is not None:
                return self._made(operation, controls, plan.whole(
                    Maker(operation, values, towers, device)))
            return self._copy(operation, [value.on(device) for value in values], device, None,
                              controls)

        if not constant:
            return [Value(towers, REPLICATED, tensor.shape, ref, None, device)
                    for ref, tensor in zip(whole(), operation.outputs)]
        if controls:  # its node may never be made, so operations that wait for it wait for these
            self._nodes[operation.name] = list(controls)
        once, repeated = Lazily(whole), Lazily(lambda tower, towers: self._copy(
            operation, [value.at(towers).part(tower) for value in values], towers.devices[tower],
            tower, self._controls_on(controls, tower)))
        return [Value(towers, REPLICATED, tensor.shape, once.output(index), None, device,
                      repeated.output(index)) for index, tensor in enumerate(operation.outputs)]

    def _made(self, operation: Op, controls: Sequence[str], outputs: list[Ref]) -> list[Ref]:
        """``outputs``, which a plan has made; notes the nodes that others wait for."""
        self._note_nodes(operation, [*controls, *[
            ref.node for ref in outputs if ref.node in self.towers.builder.nodes]])
        return outputs

    def _copy(self, operation: Op, inputs: Sequence[Ref], device: str, tower: int | None,
              controls: Iterable[str], attributes: bytes = b"") -> list[Ref]:
        scope = self._once_scope_of(operation) if tower is None else self.towers.scopes[tower]
        refs, name = self.towers.builder.copy(
            operation, inputs, device, f"{scope}{self._scope}", controls, attributes=attributes)
        if tower is not None:
            self._owners[name] = tower
        self._note_nodes(operation, [name])
        return refs

    def _once_scope_of(self, operation: Op) -> str:
        """The name scope of an operation that runs once."""
        return homes.UPDATE if operation.name in self._updates else self._once_scope

    def _home(self, operation: Op, values: Sequence[Value]) -> str:
        """The device of an operation that runs once: its variable's, or the user's choice.

        Operations on a list run where the list is: all its entries would cross with it.
        """
        device = self._variable_device(operation, values) or next((
            value.device for value, tensor in zip(values, operation.inputs)
            if tensor.dtype == tf.variant and value.device), "")
        if device:
            return device
        largest = max((value for value in values if value.constant is None),
                      key=lambda value: value.size, default=None)
        home = self._homes.get(operation.name) or operation.definition.device
        if home and not (largest and largest.device and all(
                tensor.shape.is_fully_defined() and tensor.shape.num_elements() < largest.size
                for tensor in operation.outputs)):  # sending the smaller output costs less
            return home
        if largest and largest.device:
            return largest.device
        large = not all(map(homes.is_small, operation.outputs))
        return self.towers.spare if large and self.towers.spare else self.towers.merge

    def _variable_device(self, operation: Op, values: Sequence[Value]) -> str:
        """The device of the variable whose handle an operation takes; "" without one."""
        for place in operation.handles:  # empty for most operations, and this runs for all of them
            if values[place].device:
                return values[place].device
        return ""

    _device_on_towers = _variable_device  # of one that runs on each tower; "" if it is the tower's

    def _on_towers(self, operation: Op, plan: Plan, values: Sequence[Value],
                   controls: list[str], towers: Towers) -> list[Value]:
        """The outputs of an operation that runs on each tower."""
        rows = None
        if plan.padded and (towers.replicas > 1 or towers.is_alone):
            values, rows = padding.padded(values, plan.ones)
        if plan.sizes is not None:
            values = [*values[:-1], values[-1].as_constant(plan.sizes, operation.inputs[-1].dtype)]
        maker = Maker(operation, values, towers, "" if plan.make is None else next(
            filter(None, self._output_devices(operation)), ""))
        home = "" if isinstance(plan, Nested) else self._device_on_towers(operation, values)
        if plan.near is not None and values[plan.near].constant is None:
            home = values[plan.near].device
        of_shapes = all(isinstance(spec, (Size, Replicated))
                        for spec in (*plan.takes, *plan.gives))
        part = self._part(plan, maker, home, of_shapes, controls)

        def whole() -> list[Ref]:
            if plan.whole is not None:
                return plan.whole(maker)
            return self._copy(
                operation, [value.whole() for value in values],
                towers.host if of_shapes else home or self._home(operation, values), None,
                controls)

        once = None if plan.whole is None and any(
            isinstance(spec, (ListOf, Row)) for spec in plan.takes) else Lazily(whole)
        reads = isinstance(plan, Nested) and bool(operation.handles)  # what a later call may write
        if operation.has_effect or reads or not plan.gives or any(
                isinstance(spec, PARTED) for spec in plan.gives):
            for tower in self._order:
                part(tower)
        if reads and once is not None and any(isinstance(spec, Size) for spec in plan.gives):
            once()
        only_read = plan.only_read if isinstance(plan, Nested) else ()
        outputs = [values[index] if index in only_read else self._output(
            towers, tensor, spec, index, part, once, maker.home if plan.make is not None else "",
            of_shapes) for index, (tensor, spec) in enumerate(zip(operation.outputs, plan.gives))]
        return outputs if rows is None else [
            padding.without_padding(value, rows) for value in outputs]

    def _part(self, plan: Plan, maker: Maker, home: str, of_shapes: bool, controls: list[str]
              ) -> Lazily:
        """Makes the outputs of an operation for one tower."""
        operation, towers = maker.op, maker.towers
        if plan.make is not None:
            outputs = Lazily(functools.partial(plan.make, maker))
            return Lazily(lambda tower: self._made(
                operation, self._controls_on(controls, tower),
                [each[tower] if isinstance(each, list) else each for each in outputs()]))
        if isinstance(plan, Nested):
            return Lazily(lambda tower: self._on_one_tower(
                operation, plan, maker.inputs, controls, towers, tower))
        make_part = None if towers.on_cpu else plan.part

        @Lazily
        def part(tower: int) -> list[Ref]:
            return make_part(maker, tower) if make_part is not None else self._copy(
                operation, [value.part(tower) for value in maker.inputs],
                home or (towers.shapes_on(tower) if of_shapes else towers.devices[tower]),
                tower, controls and self._controls_of_copy(operation, controls, tower))

        return part

    def _controls_of_copy(self, operation: Op, controls: list[str], tower: int) -> list[str]:
        """The nodes that a tower's copy waits for: an effect waits for those of all towers."""
        return controls if operation.has_effect else self._controls_on(controls, tower)

    def _output(self, towers: Towers, tensor: tf.Tensor, spec: Spec, index: int, parts: Lazily,
                whole: Lazily | None, home: str, of_shapes: bool) -> Value:
        if isinstance(spec, Axes) and whole is not None:
            return Value(towers, spec, tensor.shape, whole.output(index))
        part = parts.output(index)
        if isinstance(spec, (Size, ListOf)):
            return Value(towers, spec, tensor.shape,
                         None if whole is None else whole.output(index), part)
        if isinstance(spec, Replicated):  # each tower makes the same value
            constant = (lambda tower, _: part(tower)) if of_shapes and not towers.on_cpu else None
            return Value(towers, spec, tensor.shape, lambda: part(0), part, home, constant)
        rows = tensor.dtype.is_floating or not homes.is_small(tensor)
        return Value(towers, spec, tensor.shape, None, part, self._sum_devices.get(tensor.name)
                     or (towers.spare if rows else ""))

    def _output_devices(self, operation: Op) -> list[str]:
        """Where each output of an operation is summed or gathered; "" where unknown."""
        return [self._sum_devices.get(name, "") for name in operation.output_names]

    # Calls, branches and loops.

    def _inlined(self, operation: Op, layout: Layout, values: Sequence[Value],
                 controls: list[str], towers: Towers) -> list[Value]:
        """The outputs of a call, or of the branch that is taken: the function body is inlined."""
        inner = self._inner(towers, f"{self._scope}{operation.name}/",
                            self._once_scope_of(operation))
        inner._checks = self._checks
        first = len(values) - len(layout.graph.inputs)  # behind the condition
        results = inner.run(layout, values[first:], controls, self._output_devices(operation), [
            name in self._of_batch for name in operation.input_names[first:]])
        for value, tensor in zip(results, operation.outputs):
            value.shape = value.shape.merge_with(tensor.shape)  # the call may know more of it
        if operation.name in self._nodes:
            self._nodes[operation.name] += [*inner.effects, *inner.reads]
        self.effects += inner.effects
        self.reads += inner.reads
        return results

    def _inner(self, towers: Towers, scope: str = "", once: str = homes.ONCE) -> Partition:
        """The partition of a function body."""
        return Partition(towers, scope, once)

    def _on_one_tower(self, operation: Op, plan: Any, values: Sequence[Value],
                      controls: list[str], towers: Towers, tower: int) -> list[Any]:
        """The outputs of a branch or loop that a tower runs by itself, by functions of its own.

        TensorFlow colocates operations by the names in a function that several towers call.
        """
        alone, own = towers.alone(tower), []
        taken = {*operation.handles} - plan.only_read
        for index, (value, spec) in enumerate(zip(values, plan.takes)):
            own.append(value.of_one(tower, alone, spec, value.device if index in taken else ""))
            own[-1].read = functools.partial(self._read, controls, value)
        outputs = self._in_one_op(operation, plan, own, self._controls_on(controls, tower), alone,
                                  alone.scopes[0])
        return [None if index in plan.only_read else value.part(0)  # nothing takes it
                for index, value in enumerate(outputs)]

    def _in_one_op(self, operation: Op, plan: Any, values: Sequence[Value],
                   controls: list[str], towers: Towers, scope: str = "") -> list[Value]:
        """The outputs of one branch or loop for all towers; of one tower in its ``scope``."""
        loop = operation.type in LOOPS
        first = 0 if loop else 1
        functions = [bodies.Body(towers, layout, plan.takes[first:], values[first:], operation,
                                 plan.only_read, functools.partial(self._read, controls))
                     for layout in plan.layouts]
        gives = functions[-1].specs if loop else plan.gives
        for number, body in enumerate(functions):
            partition = self._inner(body.towers)
            results = partition.run(body.layout, body.values, output_devices=(
                () if loop else self._output_devices(operation)))
            body.set_results(results, gives if number or not loop else [REPLICATED],
                             partition, returns_inputs=loop and number == 1)
        refs = [ref for index, value in enumerate(values[first:]) if index not in plan.only_read
                for ref in bodies.refs_of(value)]
        refs = list(map(towers.brought, refs, functions[-1].ends)) if loop else refs
        extras = {key: extra for body in functions for key, extra in body.extras.items()}
        for number, body in enumerate(functions):
            body.finish(extras, returns_extras=loop and number == 1)
        refs += [extra.outer() for extra in extras.values()]
        returned = refs if loop else functions[-1].results
        # On one device a draw may wait for the previous iteration, e.g. for its shape.
        in_turn = loop and any(inner.has_state for layout in plan.layouts
                               for each in layout.with_bodies() for inner in each.order)
        outputs, name = towers.builder.copy(
            operation, refs if loop else [values[0].whole(), *refs], towers.merge,
            f"{scope or self._once_scope_of(operation)}{self._scope}", controls,
            bodies.attributes_of(operation, functions, refs, returned, in_turn),
            [ref.dtype for ref in returned],
            "" if any(body.is_stateful for body in functions) else _tf.STATELESS[operation.type])
        self._note_nodes(operation, [name])
        if any(body.crosses for body in functions):
            towers.across.note_control_flow(name)
        outputs_left = zip(outputs, functions[-1].ends)
        return [values[index] if index in plan.only_read else bodies.value_of(
            towers, spec, tensor.shape, outputs_left)
            for index, (tensor, spec) in enumerate(zip(operation.outputs, gives))]

    def _read(self, controls: Sequence[str], value: Value, operation: Op) -> Value:
        """What an operation of a loop reads of a variable: ``value`` is read before the loop."""
        if value.read is not None:
            return value.read(operation)
        key = operation.name, value.whole(), tuple(controls)  # a write may come between two loops
        if key not in self._read_before:
            ref, = self._copy(operation, [value.whole()], value.device, None, controls)
            self._read_before[key] = Value(
                self.towers, REPLICATED, operation.outputs[0].shape, ref, None, value.device)
        return self._read_before[key]
