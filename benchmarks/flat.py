"""A traced step as a flat list of operations on GPUs, with TensorFlow's estimate of their times.

Goes in: a ``ConcreteFunction`` that was traced on logical CPU devices (:mod:`on_gpus`).  Comes out:
operations with device, inputs and output bytes, and, from Grappler's virtual cluster, the time of
each operation on a device that runs at its peak.

Calls are replaced by the operations of the function, a conditional by its longer branch, a loop by
one iteration.  Grappler estimates equal operations (same attributes and input shapes) only once.
It gets no variables: an ``assign_add`` counts as an addition, a sparse write as an addition of the
rows, a sparse read costs nothing.  Grappler has no costs for kernels that update a variable, such
as ``ResourceApplyAdam``.  Such a kernel takes the time of its memory accesses: it reads and writes
the variable and its slots, and reads the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2
from tensorflow.python.grappler import cluster, item

from benchmarks import links, on_gpus, traffic
from towerstrategy import _tensorflow as _tf

_NO_BYTES = (tf.resource, tf.variant, tf.string)
_PREFIX = "/job:localhost/replica:0/task:0/device:"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_ADDS = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub"}
# Operations that run no kernel, or one that looks only at shapes.
FREE = {"Placeholder", "PlaceholderWithDefault", "Const", "Identity", "IdentityN", "NoOp",
        "Reshape", "ExpandDims", "Squeeze", "Shape", "ShapeN", "Size", "Rank", "StopGradient",
        "ReadVariableOp", "AssignVariableOp", "BroadcastGradientArgs", "ConcatOffset",
        "PreventGradient"}
# Operations whose output shape is missing in a graph.  It is the value of the first input, or the
# shape of the first input: these add and remove the row of padding of a tower without rows.
_SHAPED_BY_VALUE = {"Conv2DBackpropInput", "Conv3DBackpropInputV2",
                    "DepthwiseConv2dNativeBackpropInput"}
_SHAPED_LIKE_INPUT = {"Slice", "PadV2", "AddN", "PlaceholderWithDefault"}
# The gradient of an addition reduces over no axes, or axes of size 1, if nothing was broadcast.
_REDUCTIONS = {"Sum", "Mean", "Max", "Min", "Prod"}
SHAPE_OPS = {"Shape", "ShapeN", "Size", "Rank"}

UPDATES = "ResourceApply"
_MAX_SHAPE_SIZE = 64  # entries of an integer tensor that may be a shape, axes or paddings

Source = tuple[int, int]  # an operation's number and the index of its output


@dataclasses.dataclass
class Operation:
    """One operation of the step."""

    name: str
    type: str
    device: str
    inputs: list[Source]
    waits: list[int]  # the numbers of its control inputs
    sizes: list[int]  # bytes of each output
    query: tuple[bytes, ...] = ()  # for Grappler: its NodeDef, then a NodeDef for each input
    accessed_bytes: int = 0  # that it reads and writes; set if there is no query
    traced_name: str = ""  # its name in the traced graph
    link: str = ""  # the link that it occupies, if it does not run on its device
    starting: float = 0.0  # seconds that the executor needs to start it, beside links.EXECUTOR
    xla_scope: str = ""  # XLA compiles operations of the same scope together; "": not compiled
    traced: tf.Operation | None = None


def flatten(function: Any, devices: Sequence[str]) -> list[Operation]:
    """The operations of ``function``.

    Args:
      function: a ConcreteFunction.
      devices: the GPUs; the function's arguments are dealt to them in turn, like the sub-batches.
    """
    flattener, graph = _Flattener(), _inline_calls(function.graph)
    _infer_shapes(graph)
    captured = {inner.name: outer for outer, inner in function.graph.captures}
    arguments, values = 0, {}
    for tensor in function.graph.inputs:
        outer = captured.get(tensor.name)
        if outer is None:
            device = devices[arguments % len(devices)]
            arguments += 1
        else:
            device = on_gpus.name(outer.device) or devices[0]
        values[tensor.name] = flattener.placeholder(tensor, device)
    flattener.graph(graph, values, "")
    return flattener.operations


def _inline_calls(graph: tf.Graph) -> tf.Graph:
    """``graph``, in which the calls of each tower are replaced by the nodes of their functions.

    Otherwise the operations after a call have no shapes: a graph has none for a call's outputs.
    """
    calls = {op.name: op for op in graph.get_operations() if op.type in _CALLS
             and _tf.called_by_each_tower(op)}
    if not calls:
        return graph
    graph_def = graph.as_graph_def(add_shapes=True)
    inlined = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
    outputs: dict[str, str] = {}
    for node in graph_def.node:
        if node.name in calls:
            _inline_body(inlined, node, _tf.body_of(graph, node.attr["f"].func.name), outputs)
        else:
            inlined.node.add().CopyFrom(node)
    for node in inlined.node:
        node.input[:] = [outputs.get(tensor, tensor) for tensor in node.input]
    with tf.Graph().as_default() as flat:
        tf.graph_util.import_graph_def(inlined, name="")
    flat.outputs = [flat.get_tensor_by_name(tensor.name) for tensor in graph.outputs
                    if tensor.op.name not in calls]
    return flat


def _infer_shapes(graph: tf.Graph) -> None:
    """Sets the shapes that follow from shapes that :func:`_shape` knows and the graph does not."""
    for op in traffic.in_order(graph):
        unknown = [tensor for tensor in op.outputs if tensor.dtype not in _NO_BYTES
                   and not tensor.shape.is_fully_defined()]
        if unknown and op.type in _SHAPED_BY_VALUE | _SHAPED_LIKE_INPUT:
            op.outputs[0].set_shape(_shape(op.outputs[0]))
        elif unknown and all(tensor.shape.is_fully_defined() for tensor in op.inputs):
            graph_def = tf.compat.v1.GraphDef(node=[op.node_def])
            with tf.Graph().as_default():
                inputs = {
                    f"i{index}": tf.constant(value, tensor.dtype)
                    if (value := _shape_value(tensor)) is not None
                    else tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
                    for index, tensor in enumerate(op.inputs)}
                graph_def.node[0].input[:] = inputs
                graph_def.node[0].attr.pop("_class", None)  # names nodes of the other graph
                outputs = tf.graph_util.import_graph_def(
                    graph_def, inputs, [tensor.name for tensor in op.outputs], name="")
            for tensor, output in zip(op.outputs, outputs):
                tensor.set_shape(output.shape)


def _inline_body(graph_def: Any, call: Any, body: Any, outputs: dict[str, str]) -> None:
    """Adds the nodes of the called function, and the new name of each of the call's outputs."""
    def inner(tensor: str) -> str:
        name, _, index = tensor.partition(":")
        return f"{call.name}/{name}" + (f":{index}" if index and index != "0" else "")

    arguments = {tensor.op.name: name for tensor, name in zip(body.inputs, call.input)}
    for node in body.as_graph_def().node:
        if node.name in arguments:
            continue
        copy = graph_def.node.add()
        copy.CopyFrom(node)
        copy.name, copy.device = inner(node.name), call.device
        if "_XlaScope" in call.attr:
            copy.attr["_XlaScope"].CopyFrom(call.attr["_XlaScope"])
        copy.input[:] = [f"^{inner(name[1:])}" if name[0] == "^" else
                         arguments.get(name, inner(name)) for name in node.input]
    for index, output in enumerate(body.outputs):
        name = arguments.get(output.op.name, inner(output.name))
        outputs[f"{call.name}:{index}" if index else call.name] = name


class _Flattener:
    """Collects the operations of a graph and of the functions that it calls."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def placeholder(self, tensor: tf.Tensor, device: str) -> Source:
        return self._add("Placeholder", device, [], [], [tensor]), 0

    def graph(self, graph: tf.Graph, values: dict[str, Source], caller: str) -> None:
        """Adds the operations of ``graph``, whose inputs are in ``values``; sets its outputs there.

        ``caller`` is the device of operations that have none.
        """
        done: dict[str, list[int]] = {}
        for op in traffic.in_order(graph):
            if op.outputs and op.outputs[0].name in values:
                continue
            inputs = [values[tensor.name] for tensor in op.inputs]
            if op.type in _CALLS:
                outputs = self._function_outputs(op, "f", inputs, caller)
            elif op.type in ("If", "StatelessIf"):
                longer = max(("then_branch", "else_branch"), key=lambda branch: len(
                    _tf.body_of(op.graph, op.get_attr(branch).name).get_operations()))
                outputs = self._function_outputs(op, longer, inputs[1:], caller)
            elif op.type in ("While", "StatelessWhile"):
                outputs = self._function_outputs(op, "body", inputs, caller)
            else:
                waits = [number for control in op.control_inputs
                         for number in done.get(control.name, ())]
                number = self._add_op(op, inputs, waits, caller)
                outputs = [(number, index) for index in range(len(op.outputs))]
                done[op.name] = [number]
            done.setdefault(op.name, [number for number, _ in outputs])
            for tensor, value in zip(op.outputs, outputs):
                values[tensor.name] = value

    def _function_outputs(self, op: tf.Operation, attribute: str, inputs: list[Source],
                          caller: str) -> list[Source]:
        body = _tf.body_of(op.graph, op.get_attr(attribute).name)
        values = {inner.name: value for inner, value in zip(body.inputs, inputs)}
        self.graph(body, values, on_gpus.name(op.device) or caller)
        return [values[tensor.name] for tensor in body.outputs]

    def _add_op(self, op: tf.Operation, inputs: list[Source], waits: list[int], caller: str) -> int:
        device = on_gpus.name(op.device) or caller
        for tensor, (number, _) in zip(op.inputs, inputs):
            if tensor.dtype == tf.resource or (op.type in SHAPE_OPS and len(inputs) == 1):
                device = self.operations[number].device
                break
        kind = "Identity" if _is_identity(op) else op.type
        if kind.startswith("FusedBatchNorm") and not op.get_attr("is_training"):
            # Without training, batch norm gets mean and variance: XLA fuses it, but for its sums.
            kind = f"Inference{kind}"
        return self._add(kind, device or "GPU:0", inputs, waits, op.outputs, op)

    def _add(self, kind: str, device: str, inputs: list[Source], waits: list[int],
             outputs: Sequence[tf.Tensor], op: tf.Operation | None = None) -> int:
        number = len(self.operations)
        operation = Operation(
            f"n{number}", kind, device, inputs, waits, [_size(tensor) for tensor in outputs],
            traced_name="" if op is None else op.name,
            xla_scope="" if op is None else op.node_def.attr["_XlaScope"].s.decode(), traced=op)
        if kind.startswith(UPDATES):
            variables = sum(tensor.dtype == tf.resource for tensor in op.inputs)
            operation.accessed_bytes = (2 * variables + 1) * max(map(_size, op.inputs))
        elif kind not in FREE and op is not None:
            operation.query = _grappler_query(op)
        self.operations.append(operation)
        return number


def _is_identity(op: tf.Operation) -> bool:
    """Whether ``op`` returns its input: pads by nothing, reduces nothing, or keeps the order.

    TensorFlow's graph optimizer and XLA remove such operations, with any strategy and without one.
    """
    if op.type == "Transpose":
        order = _shape_value(op.inputs[1])
        return order is not None and list(order) == sorted(order)
    size = _size(op.inputs[0]) if op.inputs else 0
    pads = op.type in _SHAPED_LIKE_INPUT and len(op.inputs) == 3
    return (pads or op.type in _REDUCTIONS and size > 0) and size == _size(op.outputs[0])


def _grappler_query(op: tf.Operation) -> tuple[bytes, ...]:
    """The nodes that Grappler gets for ``op``: its own, then one for each input.

    Empty if the operation costs nothing.
    """
    plain = [tensor for tensor in op.inputs if tensor.dtype not in _NO_BYTES]
    node = tf.compat.v1.NodeDef()
    if len(plain) == len(op.inputs) and not op.type.startswith("Variable"):
        node.CopyFrom(op.node_def)
        del node.input[:]
        for attribute in [name for name in node.attr if name.startswith("_")]:
            del node.attr[attribute]  # colocation and XLA scopes
    elif op.type in _ADDS or op.type.startswith("ResourceScatter"):
        node.op = _ADDS.get(op.type, "AddV2")
        node.attr["T"].type = op.inputs[-1].dtype.as_datatype_enum
        plain = [plain[-1], plain[-1]]
    else:
        return ()
    node.name = node.device = ""
    return tuple(each.SerializeToString(deterministic=True)
                 for each in (node, *map(_query_input, plain)))


def _query_input(tensor: tf.Tensor) -> Any:
    """A node with the shape of ``tensor``, or with its value if a cost may depend on the value."""
    node = tf.compat.v1.NodeDef()
    node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    value = _shape_value(tensor)
    if value is None:
        node.op = "ImmutableConst"  # Grappler would allocate zeros for a placeholder of any size
        node.attr["shape"].shape.CopyFrom(_shape(tensor).as_proto())
        node.attr["memory_region_name"].s = b"none"
    else:
        node.op = "Const"
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tensor.dtype))
    return node


def _shape_value(tensor: tf.Tensor) -> Any:
    """The value of ``tensor`` if it is constant and may be a shape, axes or paddings; else None."""
    size = tensor.shape.num_elements() or _MAX_SHAPE_SIZE
    if not tensor.dtype.is_integer or size >= _MAX_SHAPE_SIZE:
        return None
    if tensor.op.type == "ShapeN":  # tf.get_static_value supports only Shape
        shape = tensor.op.inputs[tensor.value_index].shape
        return shape.as_list() if shape.is_fully_defined() else None
    if tensor.op.type == "Maximum":
        both = [_shape_value(each) for each in tensor.op.inputs]
        return None if any(each is None for each in both) else np.maximum(*both)
    return tf.get_static_value(tensor)


def _shape(tensor: tf.Tensor) -> tf.TensorShape:
    if not tensor.shape.is_fully_defined():
        if tensor.op.type in _SHAPED_BY_VALUE:
            return tf.TensorShape(_shape_value(tensor.op.inputs[0]))
        if tensor.op.type in _SHAPED_LIKE_INPUT:
            return _shape(tensor.op.inputs[0])
    return tensor.shape


def _size(tensor: tf.Tensor) -> int:
    shape = _shape(tensor)
    if tensor.dtype in _NO_BYTES or not shape.is_fully_defined():
        return 0
    return int(shape.num_elements()) * tensor.dtype.size


class Costs:
    """Grappler's costs of operations on the devices of ``machine``, at their peaks; cached."""

    def __init__(self, machine: links.Machine) -> None:
        self._machine = machine
        self._cache: dict[tuple[str, tuple[bytes, ...]], float] = {}  # (CPU or GPU, query) -> s

    def seconds(self, operations: Sequence[Operation]) -> dict[str, float]:
        """The time of each operation, by its name."""
        queries = {(operation.device[:3], operation.query) for operation in operations
                   if operation.query} - set(self._cache)
        if queries:
            self._cache.update(self._run_grappler(sorted(queries)))
        return {operation.name: self._operation_seconds(operation) for operation in operations}

    def _operation_seconds(self, operation: Operation) -> float:
        kind = operation.device[:3]
        if operation.query:
            return self._cache[kind, operation.query]
        bandwidth = (links.GPUS[self._machine.gpu].memory_bandwidth if kind == "GPU"
                     else self._machine.host_bandwidth)
        return operation.accessed_bytes / (1e9 * bandwidth)

    def _run_grappler(self, queries: Sequence[tuple[str, tuple[bytes, ...]]]
                      ) -> dict[tuple[str, tuple[bytes, ...]], float]:
        graph = tf.compat.v1.GraphDef()
        graph.versions.producer = tf.Graph().graph_def_versions.producer
        for number, (kind, (operation, *inputs)) in enumerate(queries):
            names = [f"i{number}_{index}" for index in range(len(inputs))]
            for name, serialized in zip([*names, f"n{number}"], [*inputs, operation]):
                node = graph.node.add()
                node.MergeFromString(serialized)
                node.name, node.device = name, f"{_PREFIX}{kind}:0"
            node.input.extend(names)
        meta = tf.compat.v1.MetaGraphDef(graph_def=graph)
        meta.meta_info_def.stripped_op_list.SetInParent()
        meta.collection_def["train_op"].node_list.value.extend(
            f"n{number}" for number in range(len(queries)))
        virtual = cluster.Cluster(
            devices=[_properties(device, self._machine) for device in ("CPU:0", "GPU:0")],
            disable_detailed_stats=False)
        performance, _, _ = virtual.MeasureCosts(item.Item(meta))
        seconds = {each.node: each.compute_cost / 1e9 for each in performance}
        return {query: seconds.get(f"n{number}", 0.0) for number, query in enumerate(queries)}


def _properties(device: str, machine: links.Machine) -> Any:
    """Grappler's description of the machine's CPU or of one of its GPUs."""
    named = device_properties_pb2.NamedDevice(name=_PREFIX + device)
    properties = named.properties
    properties.type = device[:3]
    if device.startswith("GPU"):
        gpu = links.GPUS[machine.gpu]
        # Grappler computes FLOP/s as cores x MHz x 64 lanes x 2.
        properties.num_cores, properties.frequency = 100, round(gpu.tflops * 1e6 / 100 / 128)
        properties.bandwidth = round(gpu.memory_bandwidth * 1e6)
        properties.environment["architecture"] = "7.0"
        properties.memory_size = 1 << 42  # no limit: the peak shows what does not fit
    else:
        properties.num_cores, properties.frequency = links.HOST_CORES, links.HOST_MHZ
        properties.bandwidth = round(machine.host_bandwidth * 1e6)
        properties.memory_size = 1 << 42
    return named
