"""Nodes of a graph, collected and imported at once.

Goes in: operations to copy, and types of operations to make.  Comes out: :class:`Ref`, what stands
for a tensor until the import, and then tensors.  Making operations one by one in Python takes
several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import propagate
from towerstrategy.sharding.rules.registry import Op


class Ref(NamedTuple):
    """Output number ``place`` of a node, or a tensor that stands outside of the nodes."""

    node: str
    place: int
    dtype: tf.DType

    @property
    def input(self) -> str:
        return f"{self.node}:{self.place}" if self.place else self.node


class Node:
    """A node that has been collected; until the import it may be given other inputs."""

    __slots__ = ("name", "op", "input", "device", "attributes")

    def __init__(self, name: str, op: str, input: list[str], device: str,
                 attributes: bytes) -> None:
        self.name, self.op, self.input, self.device = name, op, input, device
        self.attributes = attributes  # a serialized NodeDef of these alone


# By device, the nodes that take something, and as which input.
Takers = dict[str, list[tuple[Node, int]]]
Crossings = dict[Ref, Takers]


class Builder:
    """Collects nodes for ``graph``.

    Of nodes that are the same, in one scope on one device, there is one, unless they have a state.

    Attributes:
      nodes: what has been collected, by name, each node behind those that it needs.
      shapes: the static shapes of outputs, as far as they were noted (:meth:`note_shape`).
      rows: those of towers' rows, of an open number, and how many positions a row has there;
        where :mod:`relays` asks for them.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.graph = graph
        self.nodes: dict[str, Node] = {}
        self._taken: dict[tuple[str, int], tf.Tensor] = {}
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[Any, ...], Ref] = {}
        self._same: dict[Any, tuple[list[Ref], str]] = {}
        self._types: dict[tuple[Any, ...], tuple[bytes, list[tf.DType]]] = {}
        self._made: dict[str, tf.Operation] = {}
        self.shapes: dict[Ref, tuple[int, ...]] = {}
        self.rows: dict[Ref, tuple[tf.TensorShape, int]] = {}

    def take(self, tensor: tf.Tensor) -> Ref:
        """What stands for a tensor of ``graph``."""
        key = (f"outside_{tensor.op.name}", tensor.value_index)
        self._taken[key] = tensor
        return Ref(*key, tensor.dtype)

    def copy(self, operation: Op, inputs: Sequence[Ref], device: str, scope: str = "",
             controls: Iterable[str] = (), name: str = "", attributes: bytes = b""
             ) -> tuple[list[Ref], str]:
        """An operation, with other inputs, on ``device``; and its node.

        Args:
          operation: of this graph or another one.
          inputs: in place of its own.
          device: where it is to be.
          scope: of its name, with a "/" behind it.
          controls: nodes that it waits for.
          name: in place of its own in ``scope``.
          attributes: in place of its own.
        """
        _, own, dtypes = operation.definition
        return self._add(name or f"{scope}{operation.name}", operation.type, inputs, device,
                         attributes or own, dtypes, controls, scope,
                         alone=operation.is_stateful or bool(operation.controls))

    def make(self, type: str, inputs: Sequence[Ref], device: str, name: str = "",
             **attrs: Any) -> Ref:
        """The first output of a new operation; attributes that say types follow the inputs."""
        key = type, tuple([ref.dtype for ref in inputs]), repr(attrs)
        if key not in self._types:
            self._types[key] = _typed(type, inputs, attrs)
        return self._add(name or type, type, inputs, device, *self._types[key],
                         alone=_tf.is_stateful(type))[0][0]

    def constant(self, value: Any, dtype: tf.DType, device: str) -> Ref:
        """A constant; the same one once a device."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        key = (array.tobytes(), array.shape, dtype, device)
        if key not in self._constants:
            node = tf.compat.v1.NodeDef()
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype, array.shape))
            self._constants[key] = self._add("Const", "Const", (), device,
                                             node.SerializeToString(), [dtype])[0][0]
        return self._constants[key]

    def call(self, like: Op, type: str, inputs: Sequence[Ref], device: str, scope: str,
             controls: Iterable[str], dtypes: Sequence[tf.DType], functions: dict[str, Any],
             attrs: dict[str, Any]) -> tuple[list[Ref], str]:
        """A control flow operation such as ``like`` with other functions and inputs."""
        node = tf.compat.v1.NodeDef.FromString(like.definition.attributes)
        for stale in ("output_shapes", "_read_only_resource_inputs"):
            node.attr.pop(stale, None)
        for key, value in attrs.items():
            node.attr[key].CopyFrom(value)
        for key, function in functions.items():
            node.attr[key].Clear()
            if isinstance(function, str):
                node.attr[key].func.name = function
            else:
                for name in function:
                    node.attr[key].list.func.add().name = name
        return self._add(f"{scope}{like.name}", type, inputs, device, node.SerializeToString(),
                         dtypes, controls, alone=True)

    def note_shape(self, ref: Ref, shape: tf.TensorShape) -> None:
        """Notes the shape of a node's output, of floats, if it is known."""
        if ref.dtype.is_floating and shape.is_fully_defined() \
                and (ref.node, ref.place) not in self._taken:
            self.shapes[ref] = tuple(shape)

    def define(self, name: str, ref: Ref, device: str) -> None:
        """Makes a node of a name that was reserved, which is ``ref``."""
        attributes, _ = _typed("Identity", [ref], {})
        self.nodes[name] = Node(name, "Identity", [ref.input], device, attributes)

    def gate(self, before: Iterable[str], device: str) -> str:
        """A node that waits for others, so that each of many need wait for this one alone."""
        return self._add("merge/gate", "NoOp", (), device, b"", (), before)[1]

    def wait(self, name: str, before: str) -> None:
        """Makes a node wait for another."""
        if before:
            self.nodes[name].input.append(f"^{before}")

    def finish(self) -> None:
        """Imports what has been collected into ``graph``."""
        graph_def = tf.compat.v1.GraphDef(versions=self.graph.graph_def_versions)
        for node in self.nodes.values():
            graph_def.node.add(name=node.name, op=node.op, input=node.input,
                               device=node.device).MergeFromString(node.attributes)
        made = _tf.import_nodes(self.graph, graph_def, self._taken)
        self._made = dict(zip(self.nodes, made))

    def call_all(self, name: str, outputs: Mapping[Ref, tf.Tensor], effects: Iterable[str]) -> None:
        """Makes a function of what has been collected, and calls it, in place of :meth:`finish`.

        Args:
          name: of the function.
          outputs: what is asked for behind it, with tensors of such shapes.
          effects: nodes that must run.
        """
        given = {ref: like for ref, like in outputs.items()
                 if (ref.node, ref.place) not in self._taken}
        call = _tf.call_nodes(self.graph, name, self.nodes, self._taken, {
            ref.input: like for ref, like in given.items()}, effects)
        self._made = dict.fromkeys(effects, call)
        self._taken.update(((ref.node, ref.place), tensor)
                           for ref, tensor in zip(given, call.outputs))

    def device(self, ref: Ref) -> str:
        """Where ``ref`` is made, "" where no node says."""
        return self.nodes[ref.node].device if ref.node in self.nodes else ""

    def crossings(self, refs: Iterable[Ref]) -> Crossings:
        """Those of ``refs`` that nodes on other devices take, and these nodes by device.

        Branches and loops do not count, as TensorFlow takes these apart: what they are given goes
        to whoever takes it.
        """
        asked = {ref.input: ref for ref in refs}
        found: Crossings = {}
        for node in self.nodes.values() if asked else ():
            if node.op in (*propagate.BRANCHES, *propagate.LOOPS):
                continue
            for place, text in enumerate(node.input):
                ref = asked.get(text)
                if ref is not None and node.device and self.device(ref) not in ("", node.device):
                    found.setdefault(ref, {}).setdefault(node.device, []).append((node, place))
        return found

    def tensor(self, ref: Ref) -> tf.Tensor:
        """The tensor that ``ref`` has become; after :meth:`finish`."""
        if (ref.node, ref.place) in self._taken:
            return self._taken[ref.node, ref.place]
        return self._made[ref.node].outputs[ref.place]

    def made(self, scopes: Iterable[str]) -> list[list[str]]:
        """The names of the operations by their nodes' outermost scope; after :meth:`finish`."""
        found: dict[str, list[str]] = {scope: [] for scope in scopes}
        for node, operation in self._made.items():
            found.get(node[:node.find("/") + 1], []).append(operation.name)
        return list(found.values())

    @property
    def operations(self) -> Iterable[tf.Operation]:
        """The operations that the nodes have become; after :meth:`finish`."""
        return self._made.values()

    def operation(self, name: str) -> tf.Operation:
        """The operation that a node has become; after :meth:`finish`."""
        return self._made[name]

    def _add(self, name: str, type: str, inputs: Sequence[Ref], device: str, attributes: bytes,
             dtypes: Sequence[tf.DType], controls: Iterable[str] = (), scope: str = "",
             alone: bool = False) -> tuple[list[Ref], str]:
        """Collects a node; what stands for its outputs, and its name.

        A node that is ``alone`` may be told to wait for others yet, or does something else each
        time that it is done.
        """
        texts = [f"{node}:{place}" if place else node for node, place, _ in inputs]
        if controls:
            texts += [f"^{control}" for control in dict.fromkeys(controls)]
        key = None if alone else (
            (scope or name).partition("/")[0], type, device, attributes, *texts)
        if key in self._same:
            return self._same[key]
        name = self.reserve(name)
        self.nodes[name] = Node(name, type, texts, device, attributes)
        made = [Ref(name, index, dtype) for index, dtype in enumerate(dtypes)], name
        if key is not None:
            self._same[key] = made
        return made

    def reserve(self, wanted: str) -> str:
        """A name that no node has, as of one that :meth:`define` makes."""
        name = wanted
        while name in self._names:
            self._names[wanted] += 1
            name = f"{wanted}_{self._names[wanted]}"
        self._names[name] = 0
        return name


def _typed(type: str, inputs: Sequence[Ref], attrs: dict[str, Any]) -> tuple[bytes, list[Any]]:
    """The attributes of a new node that takes such inputs, and the dtypes of its outputs."""
    definition, node = _tf.op_def(type), tf.compat.v1.NodeDef()
    left = list(inputs)
    for arg in definition.input_arg:
        number = 1
        if arg.number_attr:
            number = len(inputs) - len(definition.input_arg) + 1
            node.attr[arg.number_attr].i = number
        if arg.type_attr and left:
            node.attr[arg.type_attr].type = left[0].dtype.as_datatype_enum
        left = left[number:]
    for key, value in attrs.items():
        node.attr[key].CopyFrom(_attr(value))
    return node.SerializeToString(), [tf.as_dtype(arg.type or (
        node.attr[arg.type_attr].type if arg.type_attr in node.attr
        else _default(definition, arg.type_attr))) for arg in definition.output_arg]


def _default(definition: Any, name: str) -> int:
    for attr in definition.attr:
        if attr.name == name:
            return int(attr.default_value.type)
    return 0


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
