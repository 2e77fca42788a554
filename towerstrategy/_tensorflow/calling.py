"""Nodes -> a function that a graph calls.

Goes in: nodes, and the tensors that they take from the graph.  Comes out: the call.  The function's
operations have no Python objects until its graph is asked for.
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
               inputs: Mapping[str, tf.Tensor], outputs: Mapping[str, tf.Tensor],
               effects: Iterable[str], no_gradient: str = "") -> tf.Operation:
    """Makes a function of nodes and calls it in ``graph``.

    Args:
      graph: has the functions that the nodes call.
      nodes: by name, each with ``name``, ``op``, ``input``, ``device`` and ``attributes`` (a
        serialized ``NodeDef`` that has nothing else).
      inputs: by its name as an input of a node, each tensor of ``graph`` that the nodes take.
      outputs: by its name as an input of a node, for each result, a tensor of its type.
      effects: the names of nodes that must run.
      no_gradient: the error where a gradient of the call is used; "" if it can be taken.
    """
    definition = tf.compat.v1.GraphDef().library.function.add()
    signature = definition.signature
    signature.name, signature.is_stateful = name, True
    texts = _Texts(nodes)
    for number, (text, tensor) in enumerate(inputs.items()):
        texts[text] = f"taken_{number}"
        signature.input_arg.add(name=texts[text], type=tensor.dtype.as_datatype_enum)
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
    call = _call(graph, function, list(inputs.values()), _read_only(nodes, inputs))
    call._gradient_function = functools.partial(_refuse, no_gradient) if no_gradient \
        else functools.partial(functions.gradient_of_call, function)
    return call


def _refuse(error: str, call: tf.Operation, *_: Any) -> list[tf.Tensor | None]:
    """Gradients of a call that end with an error where they are used: a tape may not need them."""
    dtypes = [graphs.dtype_of(tensor) for tensor in call.inputs]
    check = tf.raw_ops.Assert(condition=False, data=[error])
    with tf.control_dependencies([check]):
        return [tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([], dtype), shape=None)
                if dtype.is_floating or dtype.is_complex else None for dtype in dtypes]


def _specs(tensors: Mapping[Any, tf.Tensor]) -> tuple[tf.TensorSpec, ...]:
    """The specs of tensors; for the tensors themselves, TensorFlow would look up handle data."""
    return tuple([tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors.values()])


def _call(graph: tf.Graph, function: Any, inputs: Sequence[tf.Tensor],
          read_only: Sequence[int]) -> tf.Operation:
    graph._add_function_recursive(function)
    types = [spec.dtype.as_datatype_enum for spec in function.function_type.flat_outputs]
    attributes = {key: tf.compat.v1.AttrValue(**{kind: value}) for key, kind, value in (
        ("f", "func", {"name": function.name}), ("_disable_call_shape_inference", "b", True),
        ("Tin", "list", {"type": [tensor.dtype.as_datatype_enum for tensor in inputs]}),
        ("Tout", "list", {"type": types}), (_READ_ONLY, "list", {"i": read_only}),
        *((key, "s", value.encode() if isinstance(value, str) else value) for key, value
          in eager_context.context().function_call_options.as_attrs().items()))}
    with tf.device(None):
        return graph.create_op("StatefulPartitionedCall", inputs, types, attrs=attributes)


class _Texts(dict[str, str]):
    """The names of node inputs in a ``FunctionDef``, by their names in a ``GraphDef``."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self._nodes = nodes
        self._outputs: dict[str, list[str]] = {}  # by node, the names of its outputs in a function

    def __missing__(self, text: str) -> str:
        in_function = text
        if not text.startswith("^"):
            name, _, index = text.partition(":")
            if name not in self._outputs:
                self._outputs[name] = _output_names(self._nodes[name])
            in_function = f"{name}:{self._outputs[name][int(index or 0)]}"
        self[text] = in_function
        return in_function


def _output_names(node: Any) -> list[str]:
    """The names of a node's outputs in a function: output argument and number in it."""
    single = _single_outputs(node.op)
    if single is not None:
        return single
    definition = tf.compat.v1.NodeDef.FromString(node.attributes)
    return [f"{argument.name}:{number}" for argument in op_def_registry.get(node.op).output_arg
            for number in range(graphs.length(definition, argument))]


@functools.cache
def _single_outputs(type: str) -> list[str] | None:
    """:func:`_output_names` for this op type; None if an argument may have several outputs."""
    arguments = op_def_registry.get(type).output_arg
    several = any(argument.number_attr or argument.type_list_attr for argument in arguments)
    return None if several else [f"{argument.name}:0" for argument in arguments]


def _read_only(nodes: Mapping[str, Any], inputs: Mapping[str, tf.Tensor]) -> list[int]:
    """The numbers of the inputs that are resources and that nodes only read."""
    resources = {text: number for number, (text, tensor) in enumerate(inputs.items())
                 if tensor.dtype == tf.resource}
    written = {text for node in nodes.values()
               if node.op not in auto_control_deps_utils.RESOURCE_READ_OPS
               for text in node.input if text in resources}
    return [number for text, number in resources.items() if text not in written]
