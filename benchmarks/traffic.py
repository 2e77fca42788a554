"""How many bytes cross devices in a step, counted on its traced graph.

Goes in: a ``ConcreteFunction``.  Comes out: a :class:`Traffic`.  The rule:

- An operation sits where its resource lives if it takes one (TensorFlow moves such operations),
  else on the device that it asks for, else on that of the function call it is in, else with its
  first input.  ``Shape`` and its like of one input always sit with it.
- A tensor made on one device and taken on another crosses once for each device that takes it,
  however many operations there do: static shape times item size.  So a read of a variable on the
  merge device crosses once for each tower that uses it.  Handles, variants and strings count 0.
- Called functions are walked with the caller's tensors put in.  Of a conditional's branches the one
  that moves more is counted, of a loop one turn.
- A collective all-reduce is a ring's: each device sends and receives 2 (R-1)/R times the tensor;
  an all-gather (R-1) times.
- What is an argument of the function is the batch, and so is what an iterator gives.  It is counted
  apart.  It starts on the host, or where the arguments that are given lie: a prefetching iterator
  has some of it on each device.
- An optional holds what its iterator gave.  A loop or branch is on the device that it asks for,
  else on that of its caller, else on the host; optionals that it is given go there, with what they
  hold, and so does every tensor that a loop is given.
- A dimension that is not known counts as ``unknown_dimension``; ``unknown`` says for how many
  tensors that crossed this was needed.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

_WITH_INPUT = {"Shape", "ShapeN", "Size", "Rank"}
_PASSED_ON = {"Identity", "PlaceholderWithDefault", "IdentityN", "Cast", "Reshape", "ExpandDims"}
_TAKEN = {"IteratorGetNext", "OptionalGetValue", "IteratorGetNextAsOptional"}
_NO_BYTES = {tf.resource, tf.variant, tf.string}


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that crosses: the operation that made it, and from where to where it goes."""

    name: str
    shape: tf.TensorShape
    size: int
    source: str
    target: str
    from_batch: bool


@dataclasses.dataclass
class Traffic:
    """Bytes a step.

    Attributes:
      sent: by device, what leaves it, without the batch.
      received: by device, what comes to it, without the batch.
      batch: bytes of the batch that cross.
      unknown: how many tensors had an unknown dimension.
      crossings: all that crosses, but in collective operations.
    """

    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    received: dict[str, int] = dataclasses.field(default_factory=dict)
    batch: int = 0
    unknown: int = 0
    crossings: list[Crossing] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """All bytes that cross, the batch's included."""
        return sum(self.sent.values()) + self.batch

    @property
    def busiest(self) -> int:
        """Bytes over the busiest link: the most that one device sends or receives."""
        return max([*self.sent.values(), *self.received.values(), 0])

    def copy(self) -> Traffic:
        return Traffic(dict(self.sent), dict(self.received), self.batch, self.unknown,
                       list(self.crossings))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"total": self.total, "busiest": self.busiest, "batch": self.batch,
                "sent": self.sent, "received": self.received, "unknown": self.unknown}


@dataclasses.dataclass
class _Value:
    """A tensor on its way: where it is, and where it has been taken to already."""

    device: str
    size: int
    known: bool = True
    from_batch: bool = False
    taken_to: set[str] = dataclasses.field(default_factory=set)


def count(function: Any, replicas: int, host: str = "CPU:0", unknown_dimension: int = 1,
          arguments: Any = None) -> Traffic:
    """Counts the bytes that cross devices when ``function`` runs.

    Args:
      function: a ``ConcreteFunction``.
      replicas: how many take part in a collective operation.
      host: where arguments start, and operations that nothing places.
      unknown_dimension: the size of a dimension that is not known.
      arguments: what the function is called with, where that does not start on the host.
    """
    walk = _Walk(replicas, host, unknown_dimension)
    graph = function.graph
    values: dict[str, _Value] = {}
    captured = {inner.name: outer for outer, inner in graph.captures}
    given = iter([] if arguments is None else tf.nest.flatten(arguments, expand_composites=True))
    for tensor in graph.inputs:
        outer = captured.get(tensor.name)
        start = next(given, None) if outer is None else outer
        place = host if start is None else short(start.device) or host
        values[tensor.name] = walk.made(tensor, place, from_batch=outer is None)
    walk.graph(graph, values, "")
    return walk.traffic


def short(device: str) -> str:
    """``CPU:1`` for ``/job:localhost/replica:0/task:0/device:CPU:1``; "" for no device."""
    spec = tf.DeviceSpec.from_string(device or "")
    if spec.device_type is None:
        return ""
    return f"{spec.device_type}:{spec.device_index or 0}"


class _Walk:
    """Goes through a graph and the functions that it calls."""

    def __init__(self, replicas: int, host: str, unknown_dimension: int) -> None:
        self.traffic = Traffic()
        self._replicas = replicas
        self._host = host
        self._unknown_dimension = unknown_dimension

    def made(self, tensor: tf.Tensor, device: str, from_batch: bool = False) -> _Value:
        """A value made on ``device``."""
        size, known = self._size(tensor.shape, tensor.dtype)
        return _Value(device, size, known, from_batch)

    def _size(self, shape: tf.TensorShape, dtype: tf.DType) -> tuple[int, bool]:
        """Bytes, and whether they are known."""
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
                outputs = self._called(op, "f", inputs, caller)
            elif op.type in ("If", "StatelessIf"):
                outputs = self._branched(op, self._brought(op, inputs, caller), caller)
            elif op.type in ("While", "StatelessWhile"):
                inputs = self._brought(op, inputs, caller)
                self._called(op, "cond", inputs, caller)
                outputs = self._called(op, "body", inputs, caller)
            else:
                outputs = self._plain(op, inputs, caller)
            for tensor, value in zip(op.outputs, outputs):
                values[tensor.name] = value

    def _called(self, op: tf.Operation, attribute: str, inputs: list[_Value],
                caller: str) -> list[_Value]:
        body = _tf.body_of(op.graph, op.get_attr(attribute).name)
        values = {inner.name: value for inner, value in zip(body.inputs, inputs)}
        self.graph(body, values, short(op.device) or caller)
        return [values[tensor.name] for tensor in body.outputs]

    def _brought(self, op: tf.Operation, inputs: list[_Value], caller: str) -> list[_Value]:
        """What a loop or branch is given: optionals, and all that a loop holds, are where it runs.
        """
        device, brought = short(op.device) or caller or self._host, []
        for tensor, value in zip(op.inputs, inputs):
            if tensor.dtype == tf.variant or (value.size and "While" in op.type):
                self._take(tensor, value, device)
                value = _Value(device, value.size, value.known, value.from_batch)
            brought.append(value)
        return brought

    def _branched(self, op: tf.Operation, inputs: list[_Value], caller: str) -> list[_Value]:
        before, taken = self.traffic, [set(value.taken_to) for value in inputs]
        results = []
        for branch in ("then_branch", "else_branch"):
            self.traffic = before.copy()
            for value, devices in zip(inputs, taken):
                value.taken_to = set(devices)
            outputs = self._called(op, branch, inputs[1:], caller)
            results.append((self.traffic, outputs))
        self.traffic, outputs = max(results, key=lambda result: result[0].total)
        return outputs

    def _plain(self, op: tf.Operation, inputs: list[_Value], caller: str) -> list[_Value]:
        device = self._device(op, inputs, caller)
        for tensor, value in zip(op.inputs, inputs):
            self._take(tensor, value, device)
        if op.type.startswith(("CollectiveReduce", "NcclAllReduce")):
            self._exchange(inputs[0], device, 2 * (self._replicas - 1) / self._replicas)
        elif op.type.startswith("CollectiveGather"):
            self._exchange(inputs[0], device, self._replicas - 1)
        from_batch = op.type in _TAKEN or (
            op.type in _PASSED_ON and bool(inputs) and inputs[0].from_batch)
        if op.type == "IteratorGetNextAsOptional":
            held = [self._size(tf.TensorShape(shape), tf.as_dtype(dtype)) for shape, dtype in zip(
                op.get_attr("output_shapes"), op.get_attr("output_types"))]
            return [_Value(device, sum(size for size, _ in held), all(known for _, known in held),
                           from_batch)]
        return [self.made(tensor, device, from_batch) for tensor in op.outputs]

    def _device(self, op: tf.Operation, inputs: list[_Value], caller: str) -> str:
        for tensor, value in zip(op.inputs, inputs):
            if tensor.dtype == tf.resource:
                return value.device
        if op.type in _WITH_INPUT and len(inputs) == 1:
            return inputs[0].device
        return short(op.device) or caller or (inputs[0].device if inputs else self._host)

    def _take(self, tensor: tf.Tensor, value: _Value, device: str) -> None:
        if value.device == device or device in value.taken_to or not value.size:
            return
        value.taken_to.add(device)
        self.traffic.unknown += not value.known
        self.traffic.crossings.append(Crossing(
            tensor.op.name, tensor.shape, value.size, value.device, device, value.from_batch))
        if value.from_batch:
            self.traffic.batch += value.size
            return
        _add(self.traffic.sent, value.device, value.size)
        _add(self.traffic.received, device, value.size)

    def _exchange(self, value: _Value, device: str, times: float) -> None:
        size = round(value.size * times)
        if size:
            self.traffic.unknown += not value.known
            _add(self.traffic.sent, device, size)
            _add(self.traffic.received, device, size)


def in_order(graph: tf.Graph) -> list[tf.Operation]:
    """The operations that run, each behind those that it waits for; else as they were made."""
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
