"""A traced step as one list of operations on GPUs, each with what TensorFlow says it costs.

Goes in: a ``ConcreteFunction`` that was traced on logical CPU devices, see :mod:`on_gpus`.  Comes
out: operations with device, inputs and bytes, and, from Grappler's virtual cluster, each one's time
at the device's peak and each device's peak memory.

Called functions are put in the place of their calls; of a conditional the longer branch, of a loop
one turn.  Grappler gets a graph without variables: a read is a placeholder, an ``assign_add`` an
addition, a sparse write an addition of the rows, an optimizer's kernel a sum that goes over as much
memory, a sparse read costs nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.python.grappler import cluster, item

from benchmarks import links, on_gpus, traffic
from towerstrategy import _tensorflow as _tf

_NO_BYTES = (tf.resource, tf.variant, tf.string)
_PREFIX = "/job:localhost/replica:0/task:0/device:"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_ADDS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
UPDATES = "ResourceApply"  # optimizers' kernels, whose last input is the gradient
# No kernel runs, or one that looks at shapes only.
FREE = {"Placeholder", "Const", "Identity", "IdentityN", "NoOp", "Reshape", "ExpandDims", "Squeeze",
        "Shape", "ShapeN", "Size", "Rank", "StopGradient", "ReadVariableOp", "AssignVariableOp",
        "BroadcastGradientArgs", "ConcatOffset", "PreventGradient"}
_WITH_INPUT = {"Shape", "ShapeN", "Size", "Rank"}

Source = tuple[int, int]  # an operation's number, and which of its outputs


@dataclasses.dataclass
class Operation:
    """One operation of the step."""

    name: str
    type: str
    device: str
    inputs: list[Source]
    waits: list[int]
    sizes: list[int]  # bytes of each output
    node: Any  # for Grappler
    traced_as: str = ""  # its name in the traced graph


def flatten(function: Any, devices: Sequence[str]) -> list[Operation]:
    """The operations of ``function``.

    Args:
      function: a ConcreteFunction.
      devices: the GPUs; a function's arguments are dealt to them in turn, as the parts of a batch
        are.
    """
    walk = _Walk()
    captured = {inner.name: outer for outer, inner in function.graph.captures}
    given, values = 0, {}
    for tensor in function.graph.inputs:
        outer = captured.get(tensor.name)
        if outer is None:
            place = devices[given % len(devices)]
            given += 1
        else:
            place = on_gpus.name(outer.device) or devices[0]
        values[tensor.name] = walk.placeholder(tensor, place)
    walk.graph(function.graph, values, "")
    return walk.operations


class _Walk:

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def placeholder(self, tensor: tf.Tensor, device: str) -> Source:
        return self._add("Placeholder", device, [], [], [tensor], _placeholder(tensor)), 0

    def graph(self, graph: tf.Graph, values: dict[str, Source], caller: str) -> None:
        """Adds the operations of ``graph``, whose inputs are in ``values``."""
        done: dict[str, list[int]] = {}
        for op in traffic.in_order(graph):
            if op.outputs and op.outputs[0].name in values:
                continue
            inputs = [values[tensor.name] for tensor in op.inputs]
            if op.type in _CALLS:
                outputs = self._called(op, "f", inputs, caller)
            elif op.type in ("If", "StatelessIf"):
                longer = max(("then_branch", "else_branch"), key=lambda branch: len(
                    _tf.function_graph(op.graph, op.get_attr(branch).name).get_operations()))
                outputs = self._called(op, longer, inputs[1:], caller)
            elif op.type in ("While", "StatelessWhile"):
                outputs = self._called(op, "body", inputs, caller)
            else:
                waits = [number for control in op.control_inputs
                         for number in done.get(control.name, ())]
                number = self._plain(op, inputs, waits, caller)
                outputs = [(number, index) for index in range(len(op.outputs))]
                done[op.name] = [number]
            done.setdefault(op.name, [number for number, _ in outputs])
            for tensor, value in zip(op.outputs, outputs):
                values[tensor.name] = value

    def _called(self, op: tf.Operation, attribute: str, inputs: list[Source],
                caller: str) -> list[Source]:
        body = _tf.function_graph(op.graph, op.get_attr(attribute).name)
        values = {inner.name: value for inner, value in zip(body.inputs, inputs)}
        self.graph(body, values, on_gpus.name(op.device) or caller)
        return [values[tensor.name] for tensor in body.outputs]

    def _plain(self, op: tf.Operation, inputs: list[Source], waits: list[int], caller: str) -> int:
        device = on_gpus.name(op.device) or caller
        for tensor, (number, _) in zip(op.inputs, inputs):
            if tensor.dtype == tf.resource or (op.type in _WITH_INPUT and len(inputs) == 1):
                device = self.operations[number].device
                break
        return self._add(op.type, device or "GPU:0", inputs, waits, op.outputs,
                         self._node(op, inputs), op.name)

    def _node(self, op: tf.Operation, inputs: list[Source]) -> Any:
        """What Grappler is to see of ``op``."""
        plain = [value for tensor, value in zip(op.inputs, inputs)
                 if tensor.dtype not in _NO_BYTES]
        node = tf.compat.v1.NodeDef()
        if len(plain) == len(inputs) and not op.type.startswith("Variable"):
            node.CopyFrom(op.node_def)
            del node.input[:]
            node.attr.pop("_class", None)
        elif op.type in _ADDS or op.type.startswith("ResourceScatter"):
            node.op = _ADDS.get(op.type, "AddV2")
            node.attr["T"].type = op.inputs[-1].dtype.as_datatype_enum
            plain = [plain[-1], plain[-1]]
        elif op.type.startswith(UPDATES):  # reads each variable and the gradient, writes each
            times = 2 * (len(inputs) - len(plain))
            node.op = "AddN"
            node.attr["N"].i = times
            node.attr["T"].type = op.inputs[-1].dtype.as_datatype_enum
            plain = [plain[-1]] * times
        elif op.outputs and op.outputs[0].dtype not in _NO_BYTES:
            return _placeholder(op.outputs[0])
        else:
            node.op = "NoOp"
            plain = []
        node.input.extend(f"{self.operations[number].name}:{index}" for number, index in plain)
        return node

    def _add(self, kind: str, device: str, inputs: list[Source], waits: list[int],
             outputs: Sequence[tf.Tensor], node: Any, traced_as: str = "") -> int:
        number = len(self.operations)
        node.name = f"n{number}"
        node.device = _PREFIX + device
        self.operations.append(Operation(node.name, kind, device, inputs, waits,
                                         [_size(tensor) for tensor in outputs], node,
                                         traced_as))
        return number


def _placeholder(tensor: tf.Tensor) -> Any:
    node = tf.compat.v1.NodeDef()
    node.op = "NoOp"
    if tensor.dtype not in _NO_BYTES:
        node.op = "Placeholder"
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
    return node


def _size(tensor: tf.Tensor) -> int:
    if tensor.dtype in _NO_BYTES or not tensor.shape.is_fully_defined():
        return 0
    return int(tensor.shape.num_elements()) * tensor.dtype.size


@dataclasses.dataclass(frozen=True)
class Costs:
    """What Grappler says: seconds by operation, and bytes at a time by device."""

    seconds: dict[str, float]
    peak: dict[str, int]


def costs(operations: Sequence[Operation], machine: links.Machine) -> Costs:
    """TensorFlow's own costs of ``operations`` on the devices of ``machine``, at their peaks."""
    graph = tf.compat.v1.GraphDef()
    graph.versions.producer = tf.Graph().graph_def_versions.producer
    graph.node.extend(operation.node for operation in operations)
    meta = tf.compat.v1.MetaGraphDef(graph_def=graph)
    meta.meta_info_def.stripped_op_list.SetInParent()
    # What nothing in this graph takes has to be asked for: what is assigned, for one.
    used = {source.partition(":")[0] for operation in operations for source in operation.node.input}
    last = [operation.name for operation in operations
            if operation.name not in used and operation.node.op not in ("Placeholder", "NoOp")]
    meta.collection_def["train_op"].node_list.value.extend(last)
    devices = sorted({operation.device for operation in operations} | {on_gpus.HOST})
    virtual = cluster.Cluster(devices=[_properties(device, machine) for device in devices],
                              disable_detailed_stats=False)
    whole = item.Item(meta)
    performance, _, _ = virtual.MeasureCosts(whole)
    peak = virtual.DeterminePeakMemoryUsage(whole)
    return Costs({each.node: each.compute_cost / 1e9 for each in performance},
                 {name.rpartition("device:")[2]: int(value[0]) for name, value in peak.items()})


def _properties(device: str, machine: links.Machine) -> Any:
    named = device_properties_pb2.NamedDevice(name=_PREFIX + device)
    properties = named.properties
    properties.type = device[:3]
    if device.startswith("GPU"):
        gpu = links.GPUS[machine.gpu]
        # Grappler multiplies: cores x MHz x 64 lanes x 2.
        properties.num_cores, properties.frequency = 100, round(gpu.tflops * 1e6 / 100 / 128)
        properties.bandwidth = round(gpu.memory * 1e6)
        properties.environment["architecture"] = "7.0"
        properties.memory_size = 1 << 42  # what does not fit is to be seen in the peak
    else:
        properties.num_cores, properties.frequency = links.HOST_CORES, links.HOST_MHZ
        properties.bandwidth = round(machine.host_memory * 1e6)
        properties.memory_size = 1 << 42
    return named


def count(operations: Sequence[Operation]) -> collections.Counter[str]:
    """How many operations are on each device."""
    return collections.Counter(operation.device for operation in operations)
