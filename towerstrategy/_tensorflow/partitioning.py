"""What partitioning a traced function needs of TensorFlow: definitions, bodies, new functions.

Goes in: names of operations and functions.  Comes out: their definitions and graphs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import (
    func_graph as func_graph_lib,
    function_def_to_graph,
    op_def_registry,
)
from tensorflow.python.ops import control_flow_util_v2

from towerstrategy._tensorflow import functions, graphs

op_def = op_def_registry.get
_numbers = itertools.count()  # functions of one name must be one function, in a whole process


def constant_value(tensor: tf.Tensor) -> Any:
    """The value of a tensor of a graph that depends on constants alone; None if it does not."""
    graph: Any = tensor.graph
    if not hasattr(graph, "_known_to_towers"):
        graph._known_to_towers = {}
    known: dict[str, Any] = graph._known_to_towers
    if tensor.name not in known:
        known[tensor.name] = _constant_value(tensor)
    return known[tensor.name]


def _constant_value(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type in ("PartitionedCall", "StatefulPartitionedCall"):
        body = body_of(tensor.graph, tensor.op.get_attr("f").name)
        value = tf.get_static_value(body.outputs[tensor.value_index])
    # Axes that are computed from constants, on which tf.get_static_value gives up.
    if value is None and tensor.dtype.is_integer and (
            tensor.shape.is_fully_defined() or tensor.shape.rank == 1):
        with tensor.graph._c_graph.get() as c_graph:
            value = pywrap_tf_session.TF_TryEvaluateConstant_wrapper(
                c_graph, tensor._as_tf_output())
    return value


def trace(fn: Callable[..., Any], specs: Sequence[Any], name: str) -> Any:
    """The graph of ``fn`` called with placeholders of these specs, a flat list.

    Its captures are tensors of the function that is being traced, or of none.
    """
    return func_graph_lib.func_graph_from_py_func(
        name, fn, list(specs), {}, add_control_dependencies=True)


def body_of(graph: tf.Graph, name: str) -> Any:
    function = graph._get_function(name)
    body = getattr(function, "graph", None)
    return _graph_of(function.cached_definition, graph) if body is None else body


def _graph_of(definition: Any, graph: tf.Graph) -> Any:
    """The graph of a function of which TensorFlow has kept the definition alone.

    It can call what a function of ``graph`` can.
    """
    with graph.as_default():
        body = function_def_to_graph.function_def_to_graph(definition)
    called = {name: None for node in definition.node_def
              for name in functions.functions_in_attributes(node) if name}
    graphs.hand_on_functions(graph, body, called)
    return body


def is_compiled(call: tf.Operation) -> bool:
    """Whether XLA is to compile the function that ``call`` calls."""
    attributes = call.node_def.attr
    return "_XlaMustCompile" in attributes and bool(attributes["_XlaMustCompile"].b)


_BY_EACH = "_towers"


def call_by_each_tower(fn: Callable[..., Any], takes: Sequence[str], gives: Sequence[str],
                       tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Calls ``fn``, which each tower of a step that has all rows calls with what it has.

    Args:
      takes: what its arguments are: "rows", in the first dimension; a tower's "own", which such a
        call has given; or the same for all, made "once".
      gives: what it returns: "rows"; a tower's "own", whose mean is taken wherever it is asked for
        outside of such calls; or parts of a "sum".
      tensors: its arguments, of rows the first; it has no variables.
    """
    function = tf.function(fn, autograph=False).get_concrete_function(
        *(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors))
    function.add_to_graph(tf.compat.v1.get_default_graph())
    outputs = function.outputs
    made = tf.raw_ops.PartitionedCall(args=list(tensors), f=function,
                                      Tout=[output.dtype for output in outputs])
    made[0].op._set_attr(_BY_EACH, tf.compat.v1.AttrValue(
        s=f"{' '.join(takes)},{' '.join(gives)}".encode()))
    for one, output in zip(made, outputs):
        one.set_shape(output.shape)
    return list(made)


def called_by_each_tower(call: tf.Operation) -> list[list[str]]:
    """What such a call takes and gives; nothing for any other."""
    attributes = call.node_def.attr
    return [words.split() for words in attributes[_BY_EACH].s.decode().split(",")] \
        if _BY_EACH in attributes else []


def called_body(call: tf.Operation) -> Any:
    """The graph of the function that ``call`` calls, with what is known of its inputs put in."""
    # A function's gradient gets axes and permutations that way.
    known = {index: value for index, tensor in enumerate(call.inputs)
             if tensor.dtype.is_integer and (value := constant_value(tensor)) is not None}
    name = call.get_attr("f").name
    if not known:
        return body_of(call.graph, name)
    definition = tf.compat.v1.GraphDef().library.function.add()
    definition.CopyFrom(call.graph._get_function(name).cached_definition)
    instead = {}
    for index, value in known.items():
        node = definition.node_def.add()
        node.name, node.op = f"known_input_{index}", "Const"
        node.attr["dtype"].type = call.inputs[index].dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, call.inputs[index].dtype))
        instead[definition.signature.input_arg[index].name] = f"{node.name}:output:0"
    for node in definition.node_def:
        node.input[:] = [instead.get(name, name) for name in node.input]
    for key, name in definition.ret.items():
        definition.ret[key] = instead.get(name, name)
    return _graph_of(definition, call.graph)


def new_function_graph(like: tf.Graph, name: str) -> Any:
    """An empty graph, to make a function of."""
    graph = func_graph_lib.FuncGraph(new_name(name), collections={})
    graph.seed = like.seed
    return graph


def new_name(name: str) -> str:
    return f"__inference_{name.replace('/', '_')}_towers_{next(_numbers)}"


def placeholder_like(tensor: tf.Tensor) -> tf.Tensor:
    """A placeholder in the current graph for a tensor of another, of any shape."""
    made = tf.compat.v1.placeholder(tensor.dtype, None)
    graphs.copy_handle_data(tensor, made)
    return made


def add_function(graph: tf.Graph, body: Any) -> str:
    """Makes a function of ``body`` that ``graph`` can call; its name."""
    with graph.as_default():
        name = str(control_flow_util_v2.create_new_tf_function(body))
    graphs.hand_on_functions(body.outer_graph, graph, [name])
    return name
