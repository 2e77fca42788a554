"""Nodes of a graph, collected and imported at once.

Goes in: operations to copy, and types of operations to make.  Comes out: a :class:`Ref` for each
tensor, and the tensor after the import.  Making operations one by one in Python takes several times
as long.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.layout import BRANCHES, LOOPS
from towerstrategy.sharding.rules.registry import Op


class Ref(NamedTuple):
    """An output of a node, or a tensor that was in the graph before (:meth:`Builder.take`)."""

    node: str
    output: int
    dtype: tf.DType

    @property
    def input(self) -> str:
        return f"{self.node}:{self.output}" if self.output else self.node


class Node(NamedTuple):
    """A collected node; its inputs may change until the import."""

    name: str
    op: str
    input: list[str]
    device: str
    attributes: bytes  # a serialized NodeDef that has nothing but attributes
    outputs: list[Ref]


# Device -> the nodes there that take a tensor, each with the number of that input.
Consumers = dict[str, list[tuple[Node, int]]]
Crossings = dict[Ref, Consumers]


class Builder:
    """Collects nodes for ``graph``.

    Equal nodes in one scope on one device are one node, unless they are stateful.

    Attributes:
      nodes: name -> node, each after the nodes that it needs.
      operations: the name of a node -> its operation, after :meth:`finish`.
      shapes: the static shapes of outputs that :meth:`note_shape` was told.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.graph = graph
        self.nodes: dict[str, Node] = {}
        self._outer: dict[Ref, tf.Tensor] = {}
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[Any, ...], Ref] = {}
        self._reusable: dict[Any, tuple[list[Ref], str]] = {}
        self._types: dict[tuple[Any, ...], tuple[bytes, list[tf.DType]]] = {}
        self.operations: dict[str, tf.Operation] = {}
        self.shapes: dict[Ref, tuple[int, ...]] = {}

    def take(self, tensor: tf.Tensor) -> Ref:
        """The reference to a tensor that is in ``graph`` already."""
        ref = Ref(f"outside_{tensor.op.name}", tensor.value_index, tensor.dtype)
        self._outer[ref] = tensor
        return ref

    def copy(self, operation: Op, inputs: Sequence[Ref], device: str, scope: str = "",
             controls: Iterable[str] = (), attributes: bytes = b"",
             dtypes: Sequence[tf.DType] | None = None, type: str = "") -> tuple[list[Ref], str]:
        """The outputs and the node of a copy of an operation.

        Args:
          operation: an operation of this graph or another one.
          inputs: the inputs of the copy.
          device: the device of the copy.
          scope: its name scope, with a "/" at the end.
          controls: nodes that it waits for.
          attributes, dtypes, type: its attributes, its outputs' dtypes and its type, if not the
            operation's.
        """
        _, own_attributes, own_dtypes = operation.definition
        return self._add(f"{scope}{operation.name}", type or operation.type, inputs, device,
                         attributes or own_attributes, own_dtypes if dtypes is None else dtypes,
                         controls, scope,
                         alone=operation.is_stateful or bool(operation.controls))

    def make(self, type: str, inputs: Sequence[Ref], device: str, name: str = "",
             **attrs: Any) -> Ref:
        """The first output of a new operation; its dtype attributes are those of the inputs."""
        key = type, tuple([ref.dtype for ref in inputs]), repr(attrs)
        if key not in self._types:
            self._types[key] = _signature(type, inputs, attrs)
        return self._add(name or type, type, inputs, device, *self._types[key],
                         alone=_tf.is_stateful(type))[0][0]

    def constant(self, value: Any, dtype: tf.DType, device: str) -> Ref:
        """A constant; equal ones on a device are one node."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        key = (array.tobytes(), array.shape, dtype, device)
        if key not in self._constants:
            node = tf.compat.v1.NodeDef()
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype, array.shape))
            self._constants[key] = self._add("Const", "Const", (), device,
                                             node.SerializeToString(), [dtype])[0][0]
        return self._constants[key]

    def note_shape(self, ref: Ref, shape: tf.TensorShape) -> None:
        """Notes the static shape of a node's output if known and of floats: integers are shapes."""
        if ref.dtype.is_floating and shape.is_fully_defined() and ref not in self._outer:
            self.shapes[ref] = tuple(shape)

    def identity(self, ref: Ref, device: str, name: str) -> Ref:
        """A new identity of ``ref``, equal to no other: its input may change until the import."""
        return self._add(name, "Identity", [ref], device, *_signature("Identity", [ref], {}),
                         alone=True)[0][0]

    def gate(self, before: Iterable[str], device: str) -> str:
        """A node that waits for others; many nodes can then wait for it instead of for each."""
        return self._add("merge/gate", "NoOp", (), device, b"", (), before)[1]

    def finish(self) -> None:
        """Imports the collected nodes into ``graph``."""
        graph_def = tf.compat.v1.GraphDef(versions=self.graph.graph_def_versions)
        for node in self.nodes.values():
            copied = graph_def.node.add(name=node.name, op=node.op, input=node.input,
                                        device=node.device)
            copied.MergeFromString(node.attributes)
            if not self.shapes.keys().isdisjoint(node.outputs):  # TensorFlow may infer less
                copied.attr["_output_shapes"].list.shape.extend(
                    tf.TensorShape(self.shapes.get(ref)).as_proto() for ref in node.outputs)
        used = {text for node in self.nodes.values() for text in node.input}
        outer = {ref.input: tensor for ref, tensor in self._outer.items()
                 if ref.input in used}  # TensorFlow refuses others
        with self.graph.as_default(), tf.device(None):
            imported = tf.graph_util.import_graph_def(graph_def, outer, list(self.nodes), name="")
        self.operations = dict(zip(self.nodes, imported))

    def call_all(self, name: str, outputs: Mapping[Ref, tf.Tensor], effects: Iterable[str],
                 no_gradient: str = "") -> None:
        """Makes a function of the collected nodes and calls it; instead of :meth:`finish`.

        Args:
          name: the function's name.
          outputs: its outputs, each with a tensor of the same shape.
          effects: nodes that must run.
          no_gradient: the error where a gradient of the call is used; "" if it can be taken.
        """
        returned = {ref: like for ref, like in outputs.items() if ref not in self._outer}
        call = _tf.call_nodes(
            self.graph, name, self.nodes, {ref.input: each for ref, each in self._outer.items()},
            {ref.input: like for ref, like in returned.items()}, effects, no_gradient)
        self.operations = dict.fromkeys(effects, call)
        self._outer.update(zip(returned, call.outputs))

    def device(self, ref: Ref) -> str:
        """The device of the node of ``ref``; "" if unknown."""
        return self.nodes[ref.node].device if ref.node in self.nodes else ""

    def crossings(self, refs: Iterable[Ref]) -> Crossings:
        """The outputs among ``refs`` that nodes on other devices take, and those nodes.

        Branches and loops do not count: TensorFlow lowers them, so that their inputs go to the
        operations in them.
        """
        by_input = {ref.input: ref for ref in refs}
        found: Crossings = {}
        for node in self.nodes.values() if by_input else ():
            if node.op in (*BRANCHES, *LOOPS):
                continue
            for place, text in enumerate(node.input):
                ref = by_input.get(text)
                if ref is not None and node.device and self.device(ref) not in ("", node.device):
                    found.setdefault(ref, {}).setdefault(node.device, []).append((node, place))
        return found

    def levels(self, counted: Container[str] | None = None) -> dict[str, int]:
        """The level of each node: the largest number of transfers on a path to it.

        If given, results of the ``counted`` nodes are counted, in place of transfers.
        """
        levels: dict[str, int] = {}
        for name, node in self.nodes.items():
            level = 0
            for text in node.input:
                before = text if text in levels else text.lstrip("^").partition(":")[0]
                if before in self.nodes:
                    counts = before in counted if counted is not None else (
                        node.device and self.nodes[before].device not in ("", node.device))
                    level = max(level, levels.get(before, 0) + bool(counts))
            levels[name] = level
        return levels

    def tensor(self, ref: Ref) -> tf.Tensor:
        """The tensor of ``ref``; after :meth:`finish`."""
        if ref in self._outer:
            return self._outer[ref]
        return self.operations[ref.node].outputs[ref.output]

    def names_by_scope(self, scopes: Iterable[str]) -> list[list[str]]:
        """The names of each outermost scope's operations; after :meth:`finish`."""
        found: dict[str, list[str]] = {scope: [] for scope in scopes}
        for node, operation in self.operations.items():
            found.get(node[:node.find("/") + 1], []).append(operation.name)
        return list(found.values())

    def _add(self, name: str, type: str, inputs: Sequence[Ref], device: str, attributes: bytes,
             dtypes: Sequence[tf.DType], controls: Iterable[str] = (), scope: str = "",
             alone: bool = False) -> tuple[list[Ref], str]:
        """Collects a node, or finds an equal one; returns its outputs and its name.

        A node that is ``alone`` is equal to no other: it is stateful or may get more controls.
        """
        texts = [f"{node}:{place}" if place else node for node, place, _ in inputs]
        if controls:
            texts += [f"^{control}" for control in dict.fromkeys(controls)]
        key = None if alone else (
            (scope or name).partition("/")[0], type, device, attributes, *texts)
        if key in self._reusable:
            return self._reusable[key]
        wanted = name
        while name in self._names:
            self._names[wanted] += 1
            name = f"{wanted}_{self._names[wanted]}"
        self._names[name] = 0
        result = [Ref(name, index, dtype) for index, dtype in enumerate(dtypes)], name
        self.nodes[name] = Node(name, type, texts, device, attributes, result[0])
        if key is not None:
            self._reusable[key] = result
        return result


def _signature(type: str, inputs: Sequence[Ref], attrs: dict[str, Any]) -> tuple[bytes, list[Any]]:
    """The attributes of a new node with these inputs, and the dtypes of its outputs."""
    definition, node = _tf.op_def(type), tf.compat.v1.NodeDef()
    for attr in definition.attr:
        if attr.HasField("default_value"):
            node.attr[attr.name].CopyFrom(attr.default_value)
    inputs_left = list(inputs)
    for arg in definition.input_arg:
        number = 1
        if arg.number_attr:
            number = len(inputs) - len(definition.input_arg) + 1
            node.attr[arg.number_attr].i = number
        if arg.type_attr and inputs_left:
            node.attr[arg.type_attr].type = inputs_left[0].dtype.as_datatype_enum
        inputs_left = inputs_left[number:]
    for key, value in attrs.items():
        node.attr[key].CopyFrom(_attr(value))
    return node.SerializeToString(deterministic=True), [
        tf.as_dtype(arg.type or node.attr[arg.type_attr].type) for arg in definition.output_arg]


def _attr(value: Any) -> Any:
    attr = tf.compat.v1.AttrValue
    if isinstance(value, tf.DType):
        return attr(type=value.as_datatype_enum)
    if isinstance(value, tf.TensorShape):
        return attr(shape=value.as_proto())
    if isinstance(value, (str, bytes)):
        return attr(s=tf.compat.as_bytes(value))
    kind = {bool: "b", int: "i", float: "f"}.get(type(value))
    return attr(**{kind: value}) if kind else attr(list=attr.ListValue(i=value))
