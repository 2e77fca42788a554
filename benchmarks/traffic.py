"""Counts the bytes that cross devices in a step, on its traced graph.

Goes in: a ``ConcreteFunction``.  Comes out: a :class:`Traffic`.  The rules:

- The device of an operation is that of its resource, if it has one (TensorFlow colocates such
  operations), else its own device, else the device of the function call, else that of its first
  input.  ``Shape`` and similar operations with one input are on the device of this input.
- A tensor crosses once to each other device with operations that read it: static shape times item
  size.  So the value of a variable on the merge device crosses once to each tower that uses it.
  Handles, variants and strings count 0.
- Called functions are entered, with the caller's tensors as inputs.  For a conditional the branch
  with more bytes counts, for a loop one iteration.
- An all-reduce is a ring all-reduce: each device sends and receives 2 (R-1)/R times the tensor; in
  an all-gather, (R-1) times.
- The arguments of the function, and the outputs of iterators, are the batch, which is counted
  separately.  It starts on the host, or on the devices of the given arguments: a prefetching
  iterator has a part of it on each device.
- An optional holds the tensors of its iterator.  A loop or branch is on its own device, else on its
  caller's, else on the host; its optionals cross to this device with the tensors that they hold,
  and so do all inputs of a loop.
- An unknown dimension counts as ``unknown_dimension``; ``unknown`` is the number of tensors that
  crossed and had one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

_WITH_INPUT = {"Shape", "ShapeN", "Size", "Rank"}
_KEEPS_BATCH = {"Identity", "PlaceholderWithDefault", "IdentityN", "Cast", "Reshape", "ExpandDims"}
_FROM_ITERATOR = {"IteratorGetNext", "OptionalGetValue", "IteratorGetNextAsOptional"}
_NO_BYTES = {tf.resource, tf.variant, tf.string}


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that crosses from ``source`` to ``target``; ``name`` is its operation's name."""

    name: str
    shape: tf.TensorShape
    size: int
    source: str
    target: str
    from_batch: bool


@dataclasses.dataclass
class Traffic:
    """The bytes that cross devices in a step.

    Attributes:
      sent, received: the bytes that each device sends and receives, without the batch.
      batch: bytes of the batch that cross.
      unknown: the number of tensors that cross and have an unknown dimension.
      crossings: the tensors that cross, except by collective operations.
    """

    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    received: dict[str, int] = dataclasses.field(default_factory=dict)
    batch: int = 0
    unknown: int = 0
    crossings: list[Crossing] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """All bytes that cross, also those of the batch."""
        return sum(self.sent.values()) + self.batch

    @property
    def busiest(self) -> int:
        """Bytes over the busiest link: the most that one device sends or receives."""
        return max([*self.sent.values(), *self.received.values(), 0])

    def copy(self) -> Traffic:
        return Traffic(dict(self.sent), dict(self.received), self.batch, self.unknown,
                       list(self.crossings))

    def as_dict(self) -> dict[str, Any]:
        """The counts, as they are recorded in JSON."""
        return {"total": self.total, "busiest": self.busiest, "batch": self.batch,
                "sent": self.sent, "received": self.received, "unknown": self.unknown}


@dataclasses.dataclass
class _Value:
    """A tensor: the device that computes it, its bytes, and the devices with a copy."""

    device: str
    size: int
    known: bool = True  # whether the shape is known
    from_batch: bool = False
    copied_to: set[str] = dataclasses.field(default_factory=set)


def count(function: Any, replicas: int, host: str = "CPU:0", unknown_dimension: int = 1,
          arguments: Any = None) -> Traffic:
    """Counts the bytes that cross devices when ``function`` runs.

    Args:
      function: a ``ConcreteFunction``.
      replicas: the number of participants of a collective operation.
      host: the device of arguments, and of operations that have no other.
      unknown_dimension: the size of an unknown dimension.
      arguments: the arguments of the call, if they are not all on the host.
    """
    walk = _Walk(replicas, host, unknown_dimension)
    graph = function.graph
    values: dict[str, _Value] = {}
    captured = {inner.name: outer for outer, inner in graph.captures}
    actual = iter([] if arguments is None else tf.nest.flatten(arguments, expand_composites=True))
    for tensor in graph.inputs:
        outer = captured.get(tensor.name)
        origin = next(actual, None) if outer is None else outer
        device = host if origin is None else short(origin.device) or host
        values[tensor.name] = walk.value(tensor, device, from_batch=outer is None)
    walk.graph(graph, values, "")
    return walk.traffic


def short(device: str) -> str:
    """``CPU:1`` for ``/job:localhost/replica:0/task:0/device:CPU:1``; "" for no device."""
    spec = tf.DeviceSpec.from_string(device or "")
    if spec.device_type is None:
        return ""
    return f"{spec.device_type}:{spec.device_index or 0}"


class _Walk:
    """Counts the crossings of a graph and of the functions that it calls."""

    def __init__(self, replicas: int, host: str, unknown_dimension: int) -> None:
        self.traffic = Traffic()
        self._replicas = replicas
        self._host = host
        self._unknown_dimension = unknown_dimension

    def value(self, tensor: tf.Tensor, device: str, from_batch: bool = False) -> _Value:
        """The value of a tensor that ``device`` computes."""
        size, known = self._size(tensor.shape, tensor.dtype)
        return _Value(device, size, known, from_batch)

    def _size(self, shape: tf.TensorShape, dtype: tf.DType) -> tuple[int, bool]:
        """The bytes of a tensor, and whether its shape is known."""
        if dtype in _NO_BYTES:
            return 0, True
        sizes = [size or 0 if size is not None else self._unknown_dimension
                 for size in shape.as_list()] if shape.rank is not None else []
        return math.prod(sizes) * dtype.size, shape.is_fully_defined()

    def graph(self, graph: tf.Graph, values: dict[str, _Value], caller: str) -> None:
        """Walks ``graph``, whose inputs are in ``values``, called from device ``caller``."""
        for op in in_order(graph):
            if op.outputs and op.outputs[0].name in values:
                continue  # an argument
            inputs = [values[tensor.name] for tensor in op.inputs]
            if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
                outputs = self._function_outputs(op, "f", inputs, caller)
            elif op.type in ("If", "StatelessIf"):
                outputs = self._branch_outputs(op, self._move_inputs(op, inputs, caller), caller)
            elif op.type in ("While", "StatelessWhile"):
                inputs = self._move_inputs(op, inputs, caller)
                self._function_outputs(op, "cond", inputs, caller)
                outputs = self._function_outputs(op, "body", inputs, caller)
            else:
                outputs = self._op_outputs(op, inputs, caller)
            for tensor, value in zip(op.outputs, outputs):
                values[tensor.name] = value

    def _function_outputs(self, op: tf.Operation, attribute: str, inputs: list[_Value],
                          caller: str) -> list[_Value]:
        body = _tf.body_of(op.graph, op.get_attr(attribute).name)
        values = {inner.name: value for inner, value in zip(body.inputs, inputs)}
        self.graph(body, values, short(op.device) or caller)
        return [values[tensor.name] for tensor in body.outputs]

    def _move_inputs(self, op: tf.Operation, inputs: list[_Value], caller: str) -> list[_Value]:
        """The inputs of a loop or branch, after optionals, and all inputs of a loop, have crossed.
        """
        device, moved = short(op.device) or caller or self._host, []
        for tensor, value in zip(op.inputs, inputs):
            if tensor.dtype == tf.variant or (value.size and "While" in op.type):
                self._read(tensor, value, device)
                value = _Value(device, value.size, value.known, value.from_batch)
            moved.append(value)
        return moved

    def _branch_outputs(self, op: tf.Operation, inputs: list[_Value], caller: str) -> list[_Value]:
        """The outputs of the branch with more bytes, whose traffic is counted."""
        before, copied = self.traffic, [set(value.copied_to) for value in inputs]
        results = []
        for branch in ("then_branch", "else_branch"):
            self.traffic = before.copy()
            for value, devices in zip(inputs, copied):
                value.copied_to = set(devices)
            outputs = self._function_outputs(op, branch, inputs[1:], caller)
            results.append((self.traffic, outputs))
        self.traffic, outputs = max(results, key=lambda result: result[0].total)
        return outputs

    def _op_outputs(self, op: tf.Operation, inputs: list[_Value], caller: str) -> list[_Value]:
        device = self._device(op, inputs, caller)
        for tensor, value in zip(op.inputs, inputs):
            self._read(tensor, value, device)
        if op.type.startswith(("CollectiveReduce", "NcclAllReduce")):
            self._exchange(inputs[0], device, 2 * (self._replicas - 1) / self._replicas)
        elif op.type.startswith("CollectiveGather"):
            self._exchange(inputs[0], device, self._replicas - 1)
        from_batch = op.type in _FROM_ITERATOR or (
            op.type in _KEEPS_BATCH and bool(inputs) and inputs[0].from_batch)
        if op.type == "IteratorGetNextAsOptional":
            held = [self._size(tf.TensorShape(shape), tf.as_dtype(dtype)) for shape, dtype in zip(
                op.get_attr("output_shapes"), op.get_attr("output_types"))]
            return [_Value(device, sum(size for size, _ in held), all(known for _, known in held),
                           from_batch)]
        return [self.value(tensor, device, from_batch) for tensor in op.outputs]

    def _device(self, op: tf.Operation, inputs: list[_Value], caller: str) -> str:
        for tensor, value in zip(op.inputs, inputs):
            if tensor.dtype == tf.resource:
                return value.device
        if op.type in _WITH_INPUT and len(inputs) == 1:
            return inputs[0].device
        return short(op.device) or caller or (inputs[0].device if inputs else self._host)

    def _read(self, tensor: tf.Tensor, value: _Value, device: str) -> None:
        """Counts a read on ``device``: the tensor crosses, unless the device has a copy."""
        if value.device == device or device in value.copied_to or not value.size:
            return
        value.copied_to.add(device)
        self.traffic.unknown += not value.known
        self.traffic.crossings.append(Crossing(
            tensor.op.name, tensor.shape, value.size, value.device, device, value.from_batch))
        if value.from_batch:
            self.traffic.batch += value.size
            return
        _add(self.traffic.sent, value.device, value.size)
        _add(self.traffic.received, device, value.size)

    def _exchange(self, value: _Value, device: str, times: float) -> None:
        """Counts a collective, in which each device sends and receives ``times`` the tensor."""
        size = round(value.size * times)
        if size:
            self.traffic.unknown += not value.known
            _add(self.traffic.sent, device, size)
            _add(self.traffic.received, device, size)


def in_order(graph: tf.Graph) -> list[tf.Operation]:
    """The operations that outputs or effects need, in topological order."""
    wanted = [tensor.op for tensor in graph.outputs]
    wanted += [op for op in reversed(graph.get_operations()) if op.op_def.is_stateful]
    ordered: dict[str, tf.Operation] = {}
    entered: set[str] = set()
    while wanted:
        op = wanted.pop()
        if op.name in ordered:
            continue
        before = [other for other in (*(tensor.op for tensor in op.inputs), *op.control_inputs)
                  if other.name not in ordered]
        if op.name in entered or not before:
            ordered[op.name] = op
            continue
        entered.add(op.name)
        wanted += [op, *reversed(before)]
    return list(ordered.values())


def _add(counter: dict[str, int], device: str, size: int) -> None:
    counter[device] = counter.get(device, 0) + size
