"""A traced step as one list of operations on GPUs, each with what TensorFlow says it costs.

Goes in: a ``ConcreteFunction`` that was traced on logical CPU devices, see :mod:`on_gpus`.  Comes
out: operations with device, inputs and bytes, and, from Grappler's virtual cluster, each one's time
at the device's peak.

Called functions are put in the place of their calls; of a conditional the longer branch, of a loop
one turn.  Grappler is asked once for what is alike: an operation of these attributes, on inputs of
these shapes.  It gets no variables: an ``assign_add`` is an addition, a sparse write an addition of
the rows, a sparse read costs nothing.  What updates a variable in one kernel (``ResourceApplyAdam``
and the like), which Grappler knows nothing of, takes what it takes to go over its memory: variable
and slots are read and written, the gradient is read.
"""

from __future__ import annotations

import collections
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
# No kernel runs, or one that looks at shapes only.
FREE = {"Placeholder", "PlaceholderWithDefault", "Const", "Identity", "IdentityN", "NoOp",
        "Reshape", "ExpandDims", "Squeeze", "Shape", "ShapeN", "Size", "Rank", "StopGradient",
        "ReadVariableOp", "AssignVariableOp", "BroadcastGradientArgs", "ConcatOffset",
        "PreventGradient"}
# Where a graph does not say how a result lies: as the values of the first input say, or as that
# input lies itself, but for the row that a tower without rows is given, and that is cut off again.
_SIZED = {"Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"}
_CUT = {"Slice", "PadV2", "AddN", "PlaceholderWithDefault"}
# Over axes that are none, or of length 1, as it comes out of a gradient's broadcast.
_OVER_AXES = {"Sum", "Mean", "Max", "Min", "Prod"}
OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank"}

UPDATES = "ResourceApply"
# Numbers that say how a tensor lies: what an operation costs depends on them.
_MOST_KNOWN = 64

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
    asked: tuple[bytes, ...] = ()  # for Grappler: a NodeDef, then one in place of each input
    moved: int = 0  # bytes that it goes over, where Grappler does not know it
    traced_as: str = ""  # its name in the traced graph
    link: str = ""  # what it occupies, where that is not its device
    compiled: str = ""  # marked for XLA, and what is compiled with it is marked alike
    traced: tf.Operation | None = None


def flatten(function: Any, devices: Sequence[str]) -> list[Operation]:
    """The operations of ``function``.

    Args:
      function: a ConcreteFunction.
      devices: the GPUs; a function's arguments are dealt to them in turn, as the parts of a batch
        are.
    """
    walk, graph = _Walk(), _inlined(function.graph)
    _find_shapes(graph)
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
    walk.graph(graph, values, "")
    return walk.operations


def _inlined(graph: tf.Graph) -> tf.Graph:
    """``graph`` with the functions that towers call in the place of the calls.

    What follows a call has its shapes that way; a graph says none of what a call returns.
    """
    calls = {op.name: op for op in graph.get_operations() if op.type in _CALLS
             and _tf.called_by_each_tower(op)}
    if not calls:
        return graph
    given = graph.as_graph_def(add_shapes=True)
    made = tf.compat.v1.GraphDef(versions=given.versions, library=given.library)
    returned: dict[str, str] = {}
    for node in given.node:
        if node.name in calls:
            _put_body(made, node, _tf.body_of(graph, node.attr["f"].func.name), returned)
        else:
            made.node.add().CopyFrom(node)
    for node in made.node:
        node.input[:] = [returned.get(text, text) for text in node.input]
    with tf.Graph().as_default() as flat:
        tf.graph_util.import_graph_def(made, name="")
    flat.outputs = [flat.get_tensor_by_name(tensor.name) for tensor in graph.outputs
                    if tensor.op.name not in calls]
    return flat


def _find_shapes(graph: tf.Graph) -> None:
    """Says the shapes that follow from those that :func:`_shape` knows and the graph does not."""
    for op in traffic.in_order(graph):
        unknown = [tensor for tensor in op.outputs if tensor.dtype not in _NO_BYTES
                   and not tensor.shape.is_fully_defined()]
        if unknown and op.type in _SIZED | _CUT:
            op.outputs[0].set_shape(_shape(op.outputs[0]))
        elif unknown and all(tensor.shape.is_fully_defined() for tensor in op.inputs):
            made = tf.compat.v1.GraphDef(node=[op.node_def])
            with tf.Graph().as_default():
                put = {f"i{place}": tf.constant(known, tensor.dtype) if (known := _known(tensor))
                       is not None else tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
                       for place, tensor in enumerate(op.inputs)}
                made.node[0].input[:] = put
                made.node[0].attr.pop("_class", None)  # beside what is not here
                found = tf.graph_util.import_graph_def(
                    made, put, [tensor.name for tensor in op.outputs], name="")
            for tensor, same in zip(op.outputs, found):
                tensor.set_shape(same.shape)


def _put_body(made: Any, call: Any, body: Any, returned: dict[str, str]) -> None:
    """Adds the nodes of the function that ``call`` calls, and says what stands for its outputs."""
    def inner(tensor: str) -> str:
        name, _, index = tensor.partition(":")
        return f"{call.name}/{name}" + (f":{index}" if index and index != "0" else "")

    taken = {each.op.name: text for each, text in zip(body.inputs, call.input)}
    for node in body.as_graph_def().node:
        if node.name in taken:
            continue
        put = made.node.add()
        put.CopyFrom(node)
        put.name, put.device = inner(node.name), call.device
        if "_XlaScope" in call.attr:
            put.attr["_XlaScope"].CopyFrom(call.attr["_XlaScope"])
        put.input[:] = [f"^{inner(text[1:])}" if text[0] == "^" else
                        taken.get(text, inner(text)) for text in node.input]
    for index, output in enumerate(body.outputs):
        text = taken.get(output.op.name, inner(output.name))
        returned[f"{call.name}:{index}" if index else call.name] = text


class _Walk:

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def placeholder(self, tensor: tf.Tensor, device: str) -> Source:
        return self._add("Placeholder", device, [], [], [tensor]), 0

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
                    _tf.body_of(op.graph, op.get_attr(branch).name).get_operations()))
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
        body = _tf.body_of(op.graph, op.get_attr(attribute).name)
        values = {inner.name: value for inner, value in zip(body.inputs, inputs)}
        self.graph(body, values, on_gpus.name(op.device) or caller)
        return [values[tensor.name] for tensor in body.outputs]

    def _plain(self, op: tf.Operation, inputs: list[Source], waits: list[int], caller: str) -> int:
        device = on_gpus.name(op.device) or caller
        for tensor, (number, _) in zip(op.inputs, inputs):
            if tensor.dtype == tf.resource or (op.type in OF_SHAPES and len(inputs) == 1):
                device = self.operations[number].device
                break
        kind = "Identity" if _hands_on(op) else op.type
        if kind.startswith("FusedBatchNorm") and not op.get_attr("is_training"):
            kind = f"Given{kind}"  # of given moments: XLA makes entry by entry what is no sum
        return self._add(kind, device or "GPU:0", inputs, waits, op.outputs, op)

    def _add(self, kind: str, device: str, inputs: list[Source], waits: list[int],
             outputs: Sequence[tf.Tensor], op: tf.Operation | None = None) -> int:
        number = len(self.operations)
        made = Operation(f"n{number}", kind, device, inputs, waits,
                         [_size(tensor) for tensor in outputs],
                         traced_as="" if op is None else op.name,
                         compiled="" if op is None else op.node_def.attr["_XlaScope"].s.decode(),
                         traced=op)
        if kind.startswith(UPDATES):
            variables = sum(tensor.dtype == tf.resource for tensor in op.inputs)
            made.moved = (2 * variables + 1) * max(map(_size, op.inputs))
        elif kind not in FREE and op is not None:
            made.asked = _asked(op)
        self.operations.append(made)
        return number


def _hands_on(op: tf.Operation) -> bool:
    """Whether ``op`` gives what it is given: padded by nothing, summed over nothing, in order.

    TensorFlow's graph optimizer and XLA leave it out, with any strategy and with none.
    """
    if op.type == "Transpose":
        order = _known(op.inputs[1])
        return order is not None and list(order) == sorted(order)
    size = _size(op.inputs[0]) if op.inputs else 0
    return (op.type in _CUT and len(op.inputs) == 3 or op.type in _OVER_AXES and size > 0) \
        and size == _size(op.outputs[0])


def _asked(op: tf.Operation) -> tuple[bytes, ...]:
    """What Grappler is asked of ``op``: its node, then one in the place of each of its inputs.

    Nothing where it costs nothing.
    """
    plain = [tensor for tensor in op.inputs if tensor.dtype not in _NO_BYTES]
    node = tf.compat.v1.NodeDef()
    if len(plain) == len(op.inputs) and not op.type.startswith("Variable"):
        node.CopyFrom(op.node_def)
        del node.input[:]
        for attribute in [name for name in node.attr if name.startswith("_")]:
            del node.attr[attribute]  # where it stands, and that XLA is to compile it
    elif op.type in _ADDS or op.type.startswith("ResourceScatter"):
        node.op = _ADDS.get(op.type, "AddV2")
        node.attr["T"].type = op.inputs[-1].dtype.as_datatype_enum
        plain = [plain[-1], plain[-1]]
    else:
        return ()
    node.name = node.device = ""
    return tuple(each.SerializeToString(deterministic=True)
                 for each in (node, *map(_stand_in, plain)))


def _stand_in(tensor: tf.Tensor) -> Any:
    """A node with the shape of ``tensor``, or with its value where a cost may depend on that."""
    node = tf.compat.v1.NodeDef()
    node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    known = _known(tensor)
    if known is None:
        node.op = "ImmutableConst"  # a placeholder Grappler fills with zeros, of whatever size
        node.attr["shape"].shape.CopyFrom(_shape(tensor).as_proto())
        node.attr["memory_region_name"].s = b"none"
    else:
        node.op = "Const"
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(known, tensor.dtype))
    return node


def _known(tensor: tf.Tensor) -> Any:
    """The value of ``tensor`` where it says how another lies and is known; else None."""
    if not tensor.dtype.is_integer or (tensor.shape.num_elements() or _MOST_KNOWN) >= _MOST_KNOWN:
        return None
    if tensor.op.type == "ShapeN":  # get_static_value knows Shape alone
        shape = tensor.op.inputs[tensor.value_index].shape
        return shape.as_list() if shape.is_fully_defined() else None
    if tensor.op.type == "Maximum":
        both = [_known(each) for each in tensor.op.inputs]
        return None if any(each is None for each in both) else np.maximum(*both)
    return tf.get_static_value(tensor)


def _shape(tensor: tf.Tensor) -> tf.TensorShape:
    if not tensor.shape.is_fully_defined():
        if tensor.op.type in _SIZED:
            return tf.TensorShape(_known(tensor.op.inputs[0]))
        if tensor.op.type in _CUT:
            return _shape(tensor.op.inputs[0])
    return tensor.shape


def _size(tensor: tf.Tensor) -> int:
    shape = _shape(tensor)
    if tensor.dtype in _NO_BYTES or not shape.is_fully_defined():
        return 0
    return int(shape.num_elements()) * tensor.dtype.size


class Costs:
    """TensorFlow's own costs of operations on the devices of ``machine``, at their peaks.

    What was asked once is remembered.
    """

    def __init__(self, machine: links.Machine) -> None:
        self._machine = machine
        self._known: dict[tuple[str, tuple[bytes, ...]], float] = {}

    def of(self, operations: Sequence[Operation]) -> dict[str, float]:
        """Seconds by operation."""
        asked = {(operation.device[:3], operation.asked) for operation in operations
                 if operation.asked} - set(self._known)
        if asked:
            self._known.update(self._ask(sorted(asked)))
        return {operation.name: self._seconds(operation) for operation in operations}

    def _seconds(self, operation: Operation) -> float:
        kind = operation.device[:3]
        if operation.asked:
            return self._known[kind, operation.asked]
        bandwidth = (links.GPUS[self._machine.gpu].memory if kind == "GPU"
                     else self._machine.host_memory)
        return operation.moved / (1e9 * bandwidth)

    def _ask(self, asked: Sequence[tuple[str, tuple[bytes, ...]]]
             ) -> dict[tuple[str, tuple[bytes, ...]], float]:
        graph = tf.compat.v1.GraphDef()
        graph.versions.producer = tf.Graph().graph_def_versions.producer
        for number, (kind, (operation, *inputs)) in enumerate(asked):
            names = [f"i{number}_{place}" for place in range(len(inputs))]
            for name, node in zip([*names, f"n{number}"], [*inputs, operation]):
                put = graph.node.add()
                put.MergeFromString(node)
                put.name, put.device = name, f"{_PREFIX}{kind}:0"
            put.input.extend(names)
        meta = tf.compat.v1.MetaGraphDef(graph_def=graph)
        meta.meta_info_def.stripped_op_list.SetInParent()
        meta.collection_def["train_op"].node_list.value.extend(
            f"n{number}" for number in range(len(asked)))
        virtual = cluster.Cluster(
            devices=[_properties(device, self._machine) for device in ("CPU:0", "GPU:0")],
            disable_detailed_stats=False)
        performance, _, _ = virtual.MeasureCosts(item.Item(meta))
        seconds = {each.node: each.compute_cost / 1e9 for each in performance}
        return {key: seconds.get(f"n{number}", 0.0) for number, key in enumerate(asked)}


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
