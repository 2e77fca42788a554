"""Private names for partitioning a traced function: definitions, bodies, new functions.

Goes in: names of operations and functions.  Comes out: their definitions and graphs.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_numbers = itertools.count()  # makes function names unique in this process
# By graph and a tensor's name, what is known of the tensor's value.
_known: weakref.WeakKeyDictionary[tf.Graph, dict[str, Any]] = weakref.WeakKeyDictionary()


def constant_value(tensor: tf.Tensor) -> Any:
    """The value of a symbolic tensor that depends only on constants; else None."""
    known = _known.setdefault(tensor.graph, {})
    if tensor.name not in known:
        known[tensor.name] = _constant_value(tensor)
    return known[tensor.name]


def note_constant(tensor: tf.Tensor, value: Any) -> None:
    """Notes the value of a symbolic tensor, which :func:`constant_value` then returns."""
    _known.setdefault(tensor.graph, {})[tensor.name] = value


def _constant_value(tensor: tf.Tensor) -> Any:
    value = tf.get_static_value(tensor)
    if value is None and functions.is_call(tensor.op.type):
        body = body_of(tensor.graph, functions.called_function(tensor.op))
        value = tf.get_static_value(body.outputs[tensor.value_index])
    # Such as axes that are computed from constants, for which tf.get_static_value returns None.
    if value is None and (tensor.dtype.is_integer or tensor.dtype.is_bool) and (
            tensor.shape.is_fully_defined() or tensor.shape.rank == 1):
        with tensor.graph._c_graph.get() as c_graph:
            value = pywrap_tf_session.TF_TryEvaluateConstant_wrapper(
                c_graph, tensor._as_tf_output())
    return value


def trace(fn: Callable[..., Any], specs: Sequence[Any], name: str) -> Any:
    """The graph of ``fn`` called with placeholders of ``specs``, a flat list.

    Its captures are eager tensors or tensors of the function that is being traced.
    """
    graph = func_graph_lib.func_graph_from_py_func(
        name, fn, list(specs), {}, add_control_dependencies=True)
    _read_outside(graph)
    return graph


def body_of(graph: tf.Graph, name: str, arguments: Sequence[Any] | None = None) -> Any:
    """The graph of the function ``name``, which ``graph`` can call.

    If it is made anew, its inputs have the static shapes of ``arguments``.
    """
    function = functions.function_of(graph, name)
    body = getattr(function, "graph", None)
    # The gradient of a loop adds inputs to the graph of its body, and makes a new function of it.
    if isinstance(body, func_graph_lib.FuncGraph) and len(body.inputs) == len(
            function.cached_definition.signature.input_arg):
        return body
    return _graph_of(copy.deepcopy(function.cached_definition), graph, arguments)


def function_attributes(type: str) -> list[str]:
    """The attributes of branches or loops that name functions: one for each, or a list."""
    return [attr.name for attr in op_def(type).attr if "func" in attr.type]


def functions_of(operation: tf.Operation) -> list[Any]:
    """The graphs of all branches, or of a loop's condition and body."""
    named = [operation.get_attr(name) for name in function_attributes(operation.type)]
    called = named[0] if isinstance(named[0], list) else named
    arguments: Sequence[Any] = operation.inputs[1:]
    if operation.type in functions.LOOPS:  # the shapes that its variables have in all iterations:
        shapes = operation.get_attr("output_shapes")  # gradients say more of the outputs
        arguments = [tf.TensorSpec(shape, tensor.dtype) for shape, tensor in zip(
            shapes, operation.outputs)] or operation.outputs
    return [body_of(operation.graph, function.name, arguments) for function in called]


def taken_branch(operation: tf.Operation) -> Any:
    """The graph of the branch that is taken; None if that is not known before it runs.

    The constants among its inputs are noted.
    """
    value = constant_value(operation.inputs[0])
    cases = len(function_attributes(operation.type)) == 1
    if value is None or value.ndim or not cases and operation.inputs[0].dtype != tf.bool:
        return None
    branches = functions_of(operation)
    number = int(value) if cases else int(not value)
    branch = branches[number if 0 <= number < len(branches) else -1]
    for inner, outer in zip(branch.inputs, operation.inputs[1:]):
        if outer.dtype.is_integer:
            note_constant(inner, constant_value(outer))
    return branch


def source_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that identities, and branches that all return the same input, made this one of."""
    source = graphs.uncopied(tensor)
    if source.op.type not in functions.BRANCHES:
        return source
    found: set[Any] = set()
    for branch in functions_of(source.op):
        inner = source_of(branch.outputs[source.value_index])
        found.add(next((index for index, each in enumerate(branch.inputs) if each is inner), None))
    index = found.pop()
    return source if found or index is None else source_of(source.op.inputs[1 + index])


def _rename(definition: Any, names: Mapping[str, str]) -> None:
    """Replaces the names of tensors that a function's operations take, and that it returns."""
    for node in definition.node_def:
        node.input[:] = [names.get(name, name) for name in node.input]
    for key, name in dict(definition.ret).items():  # a copy: protobuf's map may skip entries
        definition.ret[key] = names.get(name, name)


def _graph_of(definition: Any, graph: tf.Graph, arguments: Sequence[Any] | None) -> Any:
    """A graph from a function's definition, which changes; it calls the functions of ``graph``."""
    shapes = None
    if arguments is not None:
        shapes = [None if tensor.dtype == tf.resource else tensor.shape for tensor in arguments]
        for parameter in definition.arg_attr.values():
            parameter.attr.pop("_output_shapes", None)  # which counts for more than ``shapes``
    with graph.as_default():
        body = function_def_to_graph.function_def_to_graph(definition, input_shapes=shapes)
    called = {name: None for node in definition.node_def
              for name in functions.functions_in_attributes(node) if name}
    graphs.hand_on_functions(graph, body, called)
    return body


def is_compiled(call: tf.Operation) -> bool:
    """Whether XLA is to compile the function that ``call`` calls."""
    attributes = call.node_def.attr
    return "_XlaMustCompile" in attributes and bool(attributes["_XlaMustCompile"].b)


def _read_outside(graph: Any) -> None:
    """Gives functions that XLA compiles the values of the variables that they read, as inputs.

    XLA cannot read a variable of another device.  Functions that do anything else to a resource,
    or have a state or an effect, stay as they are.
    """
    calls = [each for each in graph.get_operations() if functions.is_call(each.type)]
    for call in filter(is_compiled, calls):
        handles = {index for index, tensor in enumerate(call.inputs) if tensor.dtype == tf.resource}
        definition = handles and copy.deepcopy(
            functions.function_definition(graph, functions.called_function(call)))
        if definition and _takes_values(definition, handles):
            _call_instead(call, definition, handles)


def _takes_values(definition: Any, handles: Iterable[int]) -> bool:
    """Changes a definition to take values in place of ``handles``; False if it cannot."""
    arguments = definition.signature.input_arg
    parameters = {arguments[index].name: arguments[index] for index in handles}
    renamed, was_read = {}, set()
    for node in definition.node_def:
        if node.op == "ReadVariableOp" and node.input[0] in parameters:
            parameters[node.input[0]].type = node.attr["T"].type = node.attr.pop("dtype").type
            node.op = "Identity"
            renamed[f"{node.name}:value:0"] = f"{node.name}:output:0"
            was_read.add(node.input[0])
        elif op_def(node.op) is None or op_def(node.op).is_stateful \
                or not parameters.keys().isdisjoint(node.input):
            return False
    _rename(definition, renamed)
    definition.signature.is_stateful = False
    return was_read == parameters.keys()


def _call_instead(call: tf.Operation, definition: Any, handles: Iterable[int]) -> None:
    """Calls the changed definition; the outputs of this call replace those of ``call``."""
    graph, inputs = call.graph, list(call.inputs)
    with graph.as_default(), tf.device(None):
        for index in handles:
            dtype = tf.as_dtype(definition.signature.input_arg[index].type)
            with tf.control_dependencies(call.control_inputs):
                inputs[index] = tf.raw_ops.ReadVariableOp(resource=inputs[index], dtype=dtype)
        definition.signature.name = new_name(definition.signature.name)
        name = add_function(graph, _graph_of(definition, graph, inputs))
        attributes = {key: value for key, value in call.node_def.attr.items()
                      if key not in ("Tin", "_read_only_resource_inputs", "_output_shapes")}
        attributes["f"].func.name = name
        attributes["Tin"] = tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(
            type=[tensor.dtype.as_datatype_enum for tensor in inputs]))
        with tf.control_dependencies(call.control_inputs), tf.device(call.device):
            made = graph.create_op("PartitionedCall", inputs, [
                output.dtype for output in call.outputs], attrs=attributes)
    for old, new in zip(call.outputs, made.outputs):
        new.set_shape(old.shape)
        graphs.copy_handle_data(old, new)
        for consumer in old.consumers():
            for index, tensor in enumerate(consumer.inputs):
                if tensor is old:
                    graphs.set_input(consumer, index, new)
        graph.outputs = [new if output is old else output for output in graph.outputs]
    for waiting in call._control_outputs:
        graphs.add_control_input(waiting, made)


_BY_EACH = "_towers"


def call_by_each_tower(fn: Callable[..., Any], takes: Sequence[str], gives: Sequence[str],
                       tensors: Sequence[tf.Tensor], gradient: Callable[..., Any] | None = None
                       ) -> list[tf.Tensor]:
    """Calls ``fn`` in a step with all rows; in the partitioned step, each tower calls it.

    Args:
      fn: the function; it uses no variables.
      takes: for each argument: "rows" (sharded along the first dimension), "own" (a tower's own
        value, from another such call), "once" (the same for all towers).
      gives: for each result: "rows", "own" (in other ops the towers' mean), "sum" (partial sums).
      tensors: the arguments; the first one has rows.
      gradient: from the arguments, the results and their gradients, the gradients of the arguments;
        None if each tower can compute them from its arguments, none of which is "own".
    """
    gradient = gradient or functools.partial(gradient_by_each_tower, fn, takes, gives)
    graph = tf.compat.v1.get_default_graph()

    @tf.custom_gradient
    def call(*tensors: tf.Tensor) -> Any:
        function = tf.function(fn, autograph=False).get_concrete_function(
            *(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors))
        function.add_to_graph(graph)
        outputs = function.outputs
        with functions.not_recorded():
            results = tf.raw_ops.PartitionedCall(args=list(tensors), f=function,
                                                 Tout=[output.dtype for output in outputs])
        results[0].op._set_attr(_BY_EACH, tf.compat.v1.AttrValue(
            s=f"{' '.join(takes)},{' '.join(gives)}".encode()))
        for result, output in zip(results, outputs):
            result.set_shape(output.shape)
        return list(results), lambda *upstream: gradient(tensors, results, upstream)

    return list(call(*captured_here(tensors)))


def gradient_by_each_tower(fn: Callable[..., Any], takes: Sequence[str], gives: Sequence[str],
                           tensors: Sequence[tf.Tensor], _: Any, upstream: Sequence[tf.Tensor]
                           ) -> list[tf.Tensor]:
    """The gradient of such a call without "own" values, by differentiating ``fn``."""
    transposed = {"rows": "rows", "once": "sum", "sum": "once"}
    return call_by_each_tower(
        vector_jacobian_product(fn, len(tensors)), [*takes, *(transposed[word] for word in gives)],
        [transposed[word] for word in takes], [*tensors, *upstream])


def captured_here(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The tensors, in the current graph; there TensorFlow fails to differentiate by others."""
    graph = tf.compat.v1.get_default_graph()
    return [tensor if tensor.graph is graph else tf.identity(tensor) for tensor in tensors]


def vector_jacobian_product(fn: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The gradients of ``fn``, as a function of its arguments and of gradients of its results."""
    def product(*tensors: tf.Tensor) -> Any:
        inner = captured_here(tensors)
        return tf.gradients(fn(*inner[:count]), inner[:count], inner[count:],
                            stop_gradients=inner, unconnected_gradients="zero")

    return product


def called_by_each_tower(call: tf.Operation) -> list[list[str]]:
    """``takes`` and ``gives`` of a call by :func:`call_by_each_tower`; [] for any other call."""
    attributes = call.node_def.attr
    return [words.split() for words in attributes[_BY_EACH].s.decode().split(",")] \
        if _BY_EACH in attributes else []


def called_body(call: tf.Operation, kinds: frozenset[str]) -> Any:
    """The graph of the function that ``call`` calls; static integer inputs are constants in it.

    So the axes and permutations in a function's gradient are known.  ``kinds`` are those of the
    devices on which it runs.
    """
    known = {index: value for index, tensor in enumerate(call.inputs)
             if tensor.dtype.is_integer and (value := constant_value(tensor)) is not None}
    name = functions.implementation(call.graph, functions.called_function(call), kinds)
    if not known:
        return body_of(call.graph, name, call.inputs)
    definition = copy.deepcopy(functions.function_of(call.graph, name).cached_definition)
    constants = {}  # by a parameter's name, the output of the constant that replaces it
    for index, value in known.items():
        node = definition.node_def.add()
        node.name, node.op = f"known_input_{index}", "Const"
        node.attr["dtype"].type = call.inputs[index].dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, call.inputs[index].dtype))
        constants[definition.signature.input_arg[index].name] = f"{node.name}:output:0"
    _rename(definition, constants)
    return _graph_of(definition, call.graph, call.inputs)


def new_function_graph(like: tf.Graph, name: str) -> Any:
    """An empty function graph with the seed of ``like``."""
    graph = func_graph_lib.FuncGraph(new_name(name), collections={})
    graph.seed = like.seed
    return graph


def new_name(name: str) -> str:
    """A unique function name that contains ``name``."""
    return f"__inference_{name.replace('/', '_')}_towers_{next(_numbers)}"


def placeholder_like(tensor: tf.Tensor, with_data: bool = True) -> tf.Tensor:
    """A placeholder of unknown shape in the current graph, for a tensor of another graph.

    ``with_data``: whether the values in a variable, or a list, have the same dtype and shape.
    """
    placeholder = tf.compat.v1.placeholder(tensor.dtype, None)
    if with_data:
        graphs.copy_handle_data(tensor, placeholder)
    return placeholder


def add_function(graph: tf.Graph, body: Any) -> str:
    """Makes a function of the graph ``body`` that ``graph`` can call; returns its name."""
    with graph.as_default():
        name = str(control_flow_util_v2.create_new_tf_function(body))
    graphs.hand_on_functions(body.outer_graph, graph, [name])
    return name
