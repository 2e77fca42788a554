"""The operations of all towers for a replica function that was traced for tower 0.

Goes in: the traced graph; each tower's tensors in place of tower 0's inputs; the operations of sync
points.  Comes out: nodes, collected by the partition of one-device steps.

Nothing is redistributed.  Towers run operations by their plans (:mod:`replica_plans`); all other
operations run once, and so do those of sync points, which get a tower's tensor by
:meth:`PerTowerTensors.of_tower`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import homes, propagate, replica_plans
from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.contract import Contract
from towerstrategy.sharding.layout import Layout
from towerstrategy.sharding.maker import Maker
from towerstrategy.sharding.partition import Partition
from towerstrategy.sharding.rules import registry
from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import PER_TOWER, REPLICATED, SUM, Chosen, Sharded, Spec, of_batch
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.traffic import Traffic
from towerstrategy.sharding.values import Lazily, Value, captured, opened


class PerTowerTensors:
    """The tensors of a replica function's ``graph`` of which each tower has its own.

    ``filled`` says for each tower whether it has rows; it is empty if all have.
    """

    def __init__(self, graph: Any, filled: Sequence[Any]) -> None:
        self.graph, self._filled = graph, filled
        self._inputs: dict[str, Sequence[Any]] = {}  # placeholder -> each tower's outer value
        self._plans: dict[str, Plan] = {}  # operations made here -> how they run
        self._scatters: set[str] = set()  # those whose output on tower r is input r
        self._sums: set[str] = set()  # those that return the sum over towers
        self._sync_ops: set[str] = set()  # operations of sync points
        self._stretch_start = 0  # number of operations before the current stretch of tower 0's

    def enter(self, values: Sequence[Any], shape: tf.TensorShape) -> tf.Tensor:
        """A tensor that is ``values[r]`` on tower r; its static value is unknown."""
        with self.graph.as_default(), tf.control_dependencies(None):
            if any(tf.is_symbolic_tensor(value) and value.graph is self.graph for value in values):
                first = tf.raw_ops.Merge(inputs=list(values)).output
                self._scatters.add(first.op.name)
                self._plans[first.op.name] = Plan([REPLICATED] * len(values), [PER_TOWER], make=(
                    lambda maker: [[value.whole() for value in maker.inputs]]))
            else:
                first = tf.compat.v1.placeholder(tf.as_dtype(values[0].dtype), shape)
                self._inputs[first.op.name] = list(values)
        first.set_shape(shape)
        if isinstance(values[0], tf.Tensor):
            _tf.copy_handle_data(values[0], first)
        return first

    def enter_handles(self, variables: Sequence[Any]) -> Iterator[tf.Tensor]:
        """Makes captured handles of tower-local variables each tower's own; yields the new ones."""
        captured = {id(outer): inner for outer, inner in self.graph.captures}
        for variable in variables:
            handles = [part.handle for part in variable._values]
            inner = captured.get(id(handles[0]))
            if inner is not None and inner.op.name not in self._inputs:
                self._inputs[inner.op.name] = handles
                yield inner

    def stretch(self) -> list[tf.Operation]:
        """Tower 0's operations since the last sync point."""
        return [operation for operation in self.graph.get_operations()[self._stretch_start:]
                if operation.type != "Placeholder" and operation.name not in self._scatters]

    def end_stretch(self) -> None:
        """Ends a stretch: the operations since the last sync point are tower 0's."""
        self._stretch_start = len(self.graph.get_operations())

    def end_sync(self) -> None:
        """Ends a sync point: the operations since the last stretch are the sync point's."""
        self._sync_ops.update(operation.name for operation
                              in self.graph.get_operations()[self._stretch_start:])
        self.end_stretch()

    def differs(self, tensor: tf.Tensor) -> bool:
        """Whether each tower has its own of this tensor."""
        operation = tensor.op
        if tensor.graph is not self.graph:
            return False
        if operation.name in self._scatters or operation.name in self._inputs:
            return True
        if Op(operation).only_reads:
            return any(map(self.differs, operation.inputs))
        return operation.type != "Placeholder" and operation.name not in self._sync_ops

    def of_tower(self, tensor: tf.Tensor, tower: int) -> tf.Tensor:
        """The tensor as ``tower`` has it, at a sync point."""
        if not self.differs(tensor):
            return tensor
        picked = tf.identity(tensor)
        _tf.copy_handle_data(tensor, picked)
        self._plans[picked.op.name] = Plan([PER_TOWER], [REPLICATED], once=True, whole=(
            lambda maker: [maker.part(0, tower)]))
        return picked

    def total(self, tensor: tf.Tensor, device: str) -> tf.Tensor:
        """The sum of a tensor over the towers that have rows, on ``device``."""
        half = _tf.half_of(tensor)  # crosses instead, if the tensor is the cast of a half
        with _tf.not_recorded(), tf.device(device):
            summed = tf.identity(tensor) if half is None else tf.cast(half, tensor.dtype)
        self._sums.add(summed.op.name)
        self._plans[summed.op.name] = Plan([PER_TOWER], [REPLICATED], once=True, whole=self._sum)
        self._sync_ops.add(summed.op.name)
        return summed

    # After the trace.

    def layout(self, states: Contract, traffic: Traffic) -> Layout:
        """The layout of the graph: which operations each tower runs, and which run once.

        Args:
          states: the states of the towers' tensors.
          traffic: chooses whether a sum's parts cross, or the rows that they are made of.
        """
        graph = self.graph
        self._captures = [pair for pair in (*graph.captures, *_tf.captured_at_call(graph))
                          if pair[1].op.name not in self._inputs]  # outer tensor, placeholder
        graph.inputs = [*(inner for _, inner in self._captures),
                        *(graph.get_tensor_by_name(f"{name}:0") for name in self._inputs)]
        plans = replica_plans.Plans(bool(self._filled), traffic)
        layout = Layout(graph, [REPLICATED] * len(self._captures) + [PER_TOWER] * len(self._inputs))
        summed = replica_plans.only_used_for((each.input_names[0] for each in layout.order
                                              if each.name in self._sums), layout)

        def plan_of(operation: Op) -> Plan:
            specs = layout.inputs_of(operation)
            if operation.name in self._plans and specs != [SUM]:
                return self._plans[operation.name]
            if operation.name in self._sync_ops:  # tower 0's tensor counts for all
                return propagate.once(layout, operation) if specs.count(REPLICATED) == len(specs) \
                    else registry.once(operation)
            return plans.plan_of(layout, operation, states, summed)

        replica_plans.put(layout, plan_of)
        return layout

    def inputs(self, towers: Towers) -> list[Value]:
        """The value of each input of the layout."""
        own = self.graph.inputs[len(self._captures):]
        return [*(captured(towers, outer, inner.shape) for outer, inner in self._captures),
                *(Value(towers, PER_TOWER, tensor.shape, None, functools.partial(
                    _outer, towers, values, tensor.dtype))
                    for tensor, values in zip(own, self._inputs.values()))]

    def _sum(self, maker: Maker) -> list[Ref]:
        """The sum of an operation's input over the towers that have rows."""
        output = maker.op.outputs[0]
        parts = [self._if_filled(maker.towers, *part) for part in enumerate(maker.parts(0))]
        return [maker.towers.add_up_here(parts, maker.home, output.shape, output.dtype)]

    def _if_filled(self, towers: Towers, tower: int, part: Ref) -> Ref:
        """``part``, or zeros if the tower has no rows."""
        filled = self._filled[tower] if self._filled else True
        if not tf.is_tensor(filled) and filled:
            return part
        return towers.on(tower, "SelectV2", _outer(towers, self._filled, tf.bool, tower), part,
                         towers.on(tower, "ZerosLike", part))


def _outer(towers: Towers, values: Sequence[Any], dtype: tf.DType, tower: int) -> Ref:
    """A tower's outer tensor, or constant, among all towers' ``values``."""
    build, value = towers.builder, values[tower]
    return build.take(build.graph.capture(value)) if tf.is_tensor(value) else build.constant(
        value, dtype, towers.devices[tower])


def _with_spec(value: Value, spec: Spec) -> Value:
    """The same parts as ``value``, with another spec."""
    if isinstance(spec, Sharded) and of_batch(spec):  # each tensor shows how many rows it has
        spec = dataclasses.replace(spec, group=Chosen(None))
    shape = opened(value.shape, spec.dim) if isinstance(spec, Sharded) else value.shape
    return Value(value.towers, spec, shape, None, value.part, value.device)


class ReplicaPartition(Partition):
    """Makes the nodes of a replica function."""

    def __init__(self, towers: Towers, scope: str = "", once: str = homes.ONCE) -> None:
        super().__init__(towers, scope, once)
        self._first = 0  # the number of the first of the towers on this machine
        # The order in which towers run: the first micro-batches of all devices come first.
        micro_batches = len(towers) // len({*towers.devices})
        self._order = sorted(range(len(towers)), key=lambda tower: tower % micro_batches)
        # Resource, or its tensor's name -> the last node that wrote it; those that read it since.
        self._writers: dict[Ref | str, str] = {}
        self._readers: dict[Ref | str, list[str]] = {}

    def _once_scope_of(self, operation: Op) -> str:
        del operation
        return self._once_scope  # updates have their own name scope in the trace

    def _inner(self, towers: Towers, scope: str = "", once: str = homes.ONCE) -> Partition:
        inner = ReplicaPartition(towers, scope, once)
        inner._first = self._first + towers.first - self.towers.first
        if towers.builder is self.towers.builder:  # nodes of one graph
            inner._writers, inner._readers = self._writers, self._readers
        return inner

    def _on_towers(self, operation: Op, plan: Plan, values: Sequence[Value],
                   controls: list[str], towers: Towers) -> list[Value]:
        if not isinstance(plan, replica_plans.Padded):
            return super()._on_towers(operation, plan, values, controls, towers)
        table = plan.table
        outputs = super()._on_towers(operation, table, [
            value if spec == REPLICATED else _with_spec(value, spec)
            for value, spec in zip(values, table.takes)], controls, towers)
        return [_with_spec(value, PER_TOWER) for value in outputs]

    def _output(self, towers: Towers, tensor: tf.Tensor, spec: Spec, index: int, parts: Lazily,
                *_: Any) -> Value:
        value = Value(towers, PER_TOWER, tensor.shape, None, parts.output(index),
                      self._traced_device(tensor.op.device))
        return value if spec in (PER_TOWER, REPLICATED) else _with_spec(value, spec)

    def _device_on_towers(self, operation: Op, values: Sequence[Value]) -> str:
        return self._traced_device(operation.definition.device) or self._variable_device(
            operation, values)

    def _traced_device(self, device: str) -> str:
        """The device that the function asks for; "" if that is tower 0's."""
        return "" if device in self.towers.stage_devices[0] else device

    def _controls_of_copy(self, operation: Op, controls: list[str], tower: int) -> list[str]:
        del operation
        return self._controls_on(controls, tower)

    def _copy(self, operation: Op, inputs: Sequence[Ref], device: str, tower: int | None,
              controls: Iterable[str], attributes: bytes = b"") -> list[Ref]:
        """A copy that waits for earlier accesses to its resources, if either access is a write.

        The trace has ordered accesses by the resource tensor, which is another one on each tower.
        """
        if not (operation.is_stateful or operation.handles):
            return super()._copy(operation, inputs, device, tower, controls, attributes)
        if tower is not None:
            attributes = _attributes_with_seed(operation, self._first + tower)
        refs_of = dict(zip(operation.input_names, inputs))
        reads, writes = ([refs_of.get(name, name) for name in sorted(names)]
                         for names in _tf.touched_resources(operation.operation))
        before = [self._writers[key] for key in (*reads, *writes) if key in self._writers]
        before += [name for key in writes for name in self._readers.pop(key, ())]
        refs = super()._copy(operation, inputs, device, tower, [*controls, *before], attributes)
        name = next(reversed(self.towers.builder.nodes))
        self._writers.update(dict.fromkeys(writes, name))
        for key in reads:
            self._readers.setdefault(key, []).append(name)
        return refs


def _attributes_with_seed(operation: Op, tower: int) -> bytes:
    """A tower's attributes of a stateful random operation, with its own seed; else none."""
    if not tower or not operation.is_stateful:
        return b""
    node = tf.compat.v1.NodeDef.FromString(operation.definition.attributes)
    if "seed2" not in node.attr or not (node.attr["seed"].i or node.attr["seed2"].i):
        return b""
    node.attr["seed2"].i = (node.attr["seed2"].i + tower * _tf.SEED_STEP) % 2**31
    return node.SerializeToString(deterministic=True)
