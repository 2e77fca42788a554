"""Nodes -> a function that a graph calls.

Goes in: nodes, and what they take from the graph.  Comes out: the call.  Of what is in the function
there are no objects in Python at all, until somebody asks for its graph.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.function.polymorphism import function_type
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import auto_control_deps_utils, op_def_registry

from towerstrategy._tensorflow import functions, graphs

_READ_ONLY = auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR


def call_nodes(graph: tf.Graph, name: str, nodes: Mapping[str, Any],
               inputs: Mapping[tuple[str, int], tf.Tensor], outputs: Mapping[str, tf.Tensor],
               effects: Iterable[str]) -> tf.Operation:
    """Makes a function of nodes and calls it in ``graph``.

    Args:
      graph: has the functions that the nodes call.
      nodes: by name, each with ``name``, ``op``, ``input``, ``device`` and ``attributes`` (a
        serialized ``NodeDef`` of these alone).
      inputs: the tensors of ``graph`` for outputs of operations that are no nodes.
      outputs: what is given back, as inputs of nodes are written, with tensors of such types.
      effects: the names of nodes that must run.
    """
    definition = tf.compat.v1.GraphDef().library.function.add()
    signature = definition.signature
    signature.name, signature.is_stateful = name, True
    texts = _Texts(nodes)
    for number, ((node, place), tensor) in enumerate(inputs.items()):
        text = texts[f"{node}:{place}" if place else node] = f"taken_{number}"
        signature.input_arg.add(name=text, type=tensor.dtype.as_datatype_enum)
    for node in nodes.values():
        definition.node_def.add(
            name=node.name, op=node.op, input=[texts[text] for text in node.input],
            device=node.device).MergeFromString(node.attributes)
    for number, (text, tensor) in enumerate(outputs.items()):
        signature.output_arg.add(name=f"given_{number}", type=tensor.dtype.as_datatype_enum)
        definition.ret[f"given_{number}"] = texts[text]
    for effect in effects:
        signature.control_output.append(effect)
        definition.control_ret[effect] = effect
    context = eager_context.context()
    context.add_function_def(definition)
    function = atomic_function.AtomicFunction(
        name, context, function_type.from_structured_signature(
            (_specs(inputs), {}), _specs(outputs)), list(graph._functions.values()))
    return _called(graph, function, list(inputs.values()), _read_only(nodes, inputs))


def _specs(tensors: Mapping[Any, tf.Tensor]) -> tuple[tf.TensorSpec, ...]:
    """Not the tensors: TensorFlow would look for what the handles of variables stand for."""
    return tuple([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors.values()])


def _called(graph: tf.Graph, function: Any, inputs: Sequence[tf.Tensor],
            read_only: Sequence[int]) -> tf.Operation:
    graph._add_function_recursive(function)
    given = [one.dtype.as_datatype_enum for one in function.function_type.flat_outputs]
    attributes = {key: tf.compat.v1.AttrValue(**{kind: value}) for key, kind, value in (
        ("f", "func", {"name": function.name}), ("_disable_call_shape_inference", "b", True),
        ("Tin", "list", {"type": [one.dtype.as_datatype_enum for one in inputs]}),
        ("Tout", "list", {"type": given}), (_READ_ONLY, "list", {"i": read_only}),
        *((key, "s", value.encode() if isinstance(value, str) else value) for key, value
          in eager_context.context().function_call_options.as_attrs().items()))}
    with tf.device(None):
        call = graph.create_op("StatefulPartitionedCall", inputs, given, attrs=attributes)
    call._gradient_function = functools.partial(functions.gradient_of_call, function)
    return call


class _Texts(dict[str, str]):
    """Inputs of nodes as they are written in a GraphDef -> as in a function."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self._nodes = nodes
        self._outputs: dict[str, list[str]] = {}  # of nodes, by how a function names them

    def __missing__(self, text: str) -> str:
        made = text
        if not text.startswith("^"):
            name, _, place = text.partition(":")
            if name not in self._outputs:
                self._outputs[name] = _outputs_of(self._nodes[name])
            made = f"{name}:{self._outputs[name][int(place or 0)]}"
        self[text] = made
        return made


def _outputs_of(node: Any) -> list[str]:
    """How a function names the outputs of one of its nodes: by the arguments that they are of."""
    single = _single_outputs(node.op)
    if single is not None:
        return single
    definition = tf.compat.v1.NodeDef.FromString(node.attributes)
    return [f"{argument.name}:{number}" for argument in op_def_registry.get(node.op).output_arg
            for number in range(graphs.length(definition, argument))]


@functools.cache
def _single_outputs(type: str) -> list[str] | None:
    """The same of all nodes of this type; None where an argument may be several outputs."""
    arguments = op_def_registry.get(type).output_arg
    several = any(one.number_attr or one.type_list_attr for one in arguments)
    return None if several else [f"{argument.name}:0" for argument in arguments]


def _read_only(nodes: Mapping[str, Any], inputs: Mapping[tuple[str, int], tf.Tensor]) -> list[int]:
    """The resources, by number, that nodes do no more than read."""
    places = {f"{node}:{place}" if place else node: number
              for number, ((node, place), tensor) in enumerate(inputs.items())
              if tensor.dtype == tf.resource}
    written = {text for node in nodes.values()
               if node.op not in auto_control_deps_utils.RESOURCE_READ_OPS
               for text in node.input if text in places}
    return [number for text, number in places.items() if text not in written]
