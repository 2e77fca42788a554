"""Nodes of a graph, collected as a ``GraphDef`` and imported at once.

Goes in: operations to copy, and types of operations to make.  Comes out: :class:`Ref`, what stands
for a tensor until the import, and then tensors.  Making operations one by one in Python takes
several times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf

# Bytes of a node.  An operation is compared with others by all that it holds, constants too.
LARGEST_COMPARED = 4096


class Ref(NamedTuple):
    """Output number ``place`` of a node, or a tensor that stands outside of the nodes."""

    node: str
    place: int
    dtype: tf.DType

    @property
    def input(self) -> str:
        return f"{self.node}:{self.place}" if self.place else self.node


class Builder:
    """Collects nodes for ``graph``.

    Attributes:
      shapes: the static shapes of outputs, as far as they were noted (:meth:`note_shape`).
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.graph = graph
        self._def = tf.compat.v1.GraphDef()
        self._def.versions.CopyFrom(graph.graph_def_versions)
        self._taken: dict[tuple[str, int], tf.Tensor] = {}
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[Any, ...], Ref] = {}
        self._copies: dict[tuple[str, bytes], tuple[list[Ref], str]] = {}
        self._made: dict[str, tf.Operation] = {}
        self.shapes: dict[Ref, tuple[int, ...]] = {}
        self.count = 0

    def take(self, tensor: tf.Tensor) -> Ref:
        """What stands for a tensor of ``graph``."""
        key = (f"outside_{tensor.op.name}", tensor.value_index)
        self._taken[key] = tensor
        return Ref(*key, tensor.dtype)

    def copy(self, operation: tf.Operation, inputs: Sequence[Ref], device: str, scope: str = "",
             controls: Iterable[str] = (), name: str = "", definition: Any = None
             ) -> tuple[list[Ref], str]:
        """An operation, with other inputs, on ``device``; and its node.

        Equal constants of a scope are one node.

        Args:
          operation: of this graph or another one.
          inputs: in place of its own.
          device: where it is to be.
          scope: of its name, with a "/" behind it.
          controls: nodes that it waits for.
          name: in place of its own in ``scope``.
          definition: in place of its own node's.
        """
        definition = operation.node_def if definition is None else definition
        key = None if inputs or controls else _content_of(operation, definition, device)
        if key is not None and (scope, key) in self._copies:
            return self._copies[scope, key]
        node = self._def.node.add()
        node.CopyFrom(definition)
        node.name = self._name(name or f"{scope}{operation.name}")
        for name in [name for name in node.attr if name in ("_class", "_output_shapes")]:
            del node.attr[name]
        refs = self._complete(node, inputs, device, controls,
                              [tensor.dtype for tensor in operation.outputs])
        if key is not None:
            self._copies[scope, key] = refs, node.name
        return refs, node.name

    def make(self, type: str, inputs: Sequence[Ref], device: str, name: str = "",
             **attrs: Any) -> Ref:
        """The first output of a new operation; attributes that say types follow the inputs."""
        definition = _tf.op_def(type)
        node = self._def.node.add()
        node.op, node.name = type, self._name(name or type)
        left = list(inputs)
        for arg in definition.input_arg:
            number = 1
            if arg.number_attr:
                others = len(definition.input_arg) - 1
                number = len(inputs) - others
                node.attr[arg.number_attr].i = number
            if arg.type_attr and left:
                node.attr[arg.type_attr].type = left[0].dtype.as_datatype_enum
            left = left[number:]
        for key, value in attrs.items():
            node.attr[key].CopyFrom(_attr(value))
        dtypes = [tf.as_dtype(arg.type or (
            node.attr[arg.type_attr].type if arg.type_attr in node.attr
            else _default(definition, arg.type_attr))) for arg in definition.output_arg]
        return self._complete(node, inputs, device, (), dtypes)[0]

    def constant(self, value: Any, dtype: tf.DType, device: str) -> Ref:
        """A constant; the same one once a device."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        key = (array.tobytes(), array.shape, dtype, device)
        if key not in self._constants:
            node = self._def.node.add()
            node.op, node.name = "Const", self._name("Const")
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype, array.shape))
            self._constants[key] = self._complete(node, (), device, (), [dtype])[0]
        return self._constants[key]

    def call(self, like: tf.Operation, type: str, inputs: Sequence[Ref], device: str, scope: str,
             controls: Iterable[str], dtypes: Sequence[tf.DType], functions: dict[str, Any],
             attrs: dict[str, Any]) -> tuple[list[Ref], str]:
        """A control flow operation such as ``like`` with other functions and inputs."""
        node = self._def.node.add()
        node.op, node.name = type, self._name(f"{scope}{like.name}")
        for key, value in like.node_def.attr.items():
            if key not in ("_class", "output_shapes", "_output_shapes") and key not in attrs:
                node.attr[key].CopyFrom(value)
        for key, value in attrs.items():
            node.attr[key].CopyFrom(value)
        for key, function in functions.items():
            node.attr[key].Clear()
            if isinstance(function, str):
                node.attr[key].func.name = function
            else:
                for name in function:
                    node.attr[key].list.func.add().name = name
        return self._complete(node, inputs, device, controls, dtypes), node.name

    def note_shape(self, ref: Ref, shape: tf.TensorShape) -> None:
        """Notes the shape of a node's output, if it is known."""
        if shape.is_fully_defined() and (ref.node, ref.place) not in self._taken:
            self.shapes[ref] = tuple(shape)

    @property
    def nodes(self) -> Any:
        """What has been collected, each node behind those that it needs."""
        return self._def.node

    def reserve(self, wanted: str) -> str:
        """A name for a node that :meth:`define` makes."""
        return self._name(wanted)

    def define(self, name: str, ref: Ref, device: str) -> None:
        """Makes a node of a name that was reserved, which is ``ref``."""
        node = self._def.node.add()
        node.op, node.name = "Identity", name
        node.attr["T"].type = ref.dtype.as_datatype_enum
        self._complete(node, [ref], device, (), [ref.dtype])

    def wait(self, name: str, before: str) -> None:
        """Makes a node wait for another."""
        if before:
            next(node for node in self._def.node if node.name == name).input.append(f"^{before}")

    def finish(self) -> None:
        """Imports what has been collected into ``graph``."""
        made = _tf.import_nodes(self.graph, self._def, self._taken)
        self._made = {node.name: operation for node, operation in zip(self._def.node, made)}

    def tensor(self, ref: Ref) -> tf.Tensor:
        """The tensor that ``ref`` has become; after :meth:`finish`."""
        if (ref.node, ref.place) in self._taken:
            return self._taken[ref.node, ref.place]
        return self._made[ref.node].outputs[ref.place]

    def made(self, scope: str) -> list[str]:
        """The names of the operations whose nodes are in a name scope; after :meth:`finish`."""
        return [operation.name for node, operation in self._made.items() if node.startswith(scope)]

    @property
    def operations(self) -> Iterable[tf.Operation]:
        """The operations that the nodes have become; after :meth:`finish`."""
        return self._made.values()

    def operation(self, name: str) -> tf.Operation:
        """The operation that a node has become; after :meth:`finish`."""
        return self._made[name]

    def _complete(self, node: Any, inputs: Sequence[Ref], device: str, controls: Iterable[str],
                  dtypes: Sequence[tf.DType]) -> list[Ref]:
        del node.input[:]
        node.input.extend(ref.input if (ref.node, ref.place) not in self._taken
                          else f"{ref.node}:{ref.place}" for ref in inputs)
        node.input.extend(f"^{name}" for name in dict.fromkeys(controls))
        node.device = device
        self.count += 1
        return [Ref(node.name, index, dtype) for index, dtype in enumerate(dtypes)]

    def _name(self, wanted: str) -> str:
        number = self._names.get(wanted)
        self._names[wanted] = 0 if number is None else number + 1
        if number is None:
            return wanted
        return self._name(f"{wanted}_{number + 1}")


def _content_of(operation: tf.Operation, definition: Any, device: str) -> bytes | None:
    """What is the same of two nodes on ``device`` that are equal; None of what is not compared."""
    if operation.op_def.is_stateful or definition.ByteSize() > LARGEST_COMPARED:
        return None
    key = type(definition)()
    key.CopyFrom(definition)
    key.name, key.device = "", device
    return bytes(key.SerializeToString(deterministic=True))


def _default(definition: Any, name: str) -> int:
    for attr in definition.attr:
        if attr.name == name:
            return int(attr.default_value.type)
    return 0


def _attr(value: Any) -> Any:
    attr = tf.compat.v1.AttrValue()
    if isinstance(value, bool):
        attr.b = value
    elif isinstance(value, int):
        attr.i = value
    elif isinstance(value, float):
        attr.f = value
    elif isinstance(value, tf.DType):
        attr.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        attr.shape.CopyFrom(value.as_proto())
    elif isinstance(value, (str, bytes)):
        attr.s = value if isinstance(value, bytes) else value.encode()
    else:
        attr.list.i.extend(value)
        attr.list.SetInParent()
    return attr
