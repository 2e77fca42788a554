"""``tf.function``: its traces, its captures, the functions that it calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx, config as autograph_config
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.eager import context as eager_context, record
from tensorflow.python.eager.polymorphic_function import (
    concrete_function,
    polymorphic_function,
)
from tensorflow.python.framework import (
    auto_control_deps_utils,
    func_graph,
    op_def_registry,
    random_seed,
)
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs

from towerstrategy._tensorflow import wrapping

# tf.custom_gradient, tf.recompute_grad and calls of functions record such gradients.
RECORD = wrapping.Place(
    [record], "record_operation",
    "does not know in which stage of a tower a gradient that is a Python function recomputes")
Function = polymorphic_function.Function  # the class of what tf.function returns
may_be_recorded = record.could_possibly_record
not_recorded = record.stop_recording
# The graph of a branch or of a loop's body, which is part of the code around it.
_ControlFlow = control_flow_v2_func_graphs.ControlFlowFuncGraph
# The priority of a tf.function's variable creator: after creators of strategies and users.
_CREATOR_PRIORITY = 50
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")  # input 0: condition, or branch's number
LOOPS = ("While", "StatelessWhile")
# The types of branches and loops -> those of the same without effects.
STATELESS = {name: f"Stateless{name.removeprefix('Stateless')}" for name in (*BRANCHES, *LOOPS)}
CALLERS = frozenset({*CALLS, *BRANCHES, *LOOPS, "RemoteCall", "SymbolicGradient", "MapDefun"})
# Autograph does not convert the package's functions: that would take most of the time of a trace,
# and show them in the tracebacks of users' errors.  Users' functions are converted as usual.
autograph_config.CONVERSION_RULES = (
    autograph_config.DoNotConvert("towerstrategy"), *autograph_config.CONVERSION_RULES)


def autograph_convert(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` as autograph would convert it for a call here; ``fn`` itself in unconverted code."""
    return autograph_api.tf_convert(fn, ag_ctx.control_status_ctx(), convert_by_default=False)


def clone_function(function: polymorphic_function.Function, python_function: Callable[..., Any],
                   compiles: bool) -> polymorphic_function.Function:
    """A ``tf.function`` with the options of ``function`` around another Python function."""
    cloned = function._clone(python_function=python_function)
    if not compiles:
        cloned._jit_compile = False
    return cloned


def is_jit_compiled(function: Any) -> bool:
    """Whether ``function`` is a ``tf.function`` made with ``jit_compile=True``."""
    return isinstance(function, Function) and bool(function._jit_compile)


def gradient_of_call(function: Any, call: tf.Operation, *gradients: Any) -> Any:
    """The gradient of a call of ``function``, an ``AtomicFunction``, made from its definition."""
    return concrete_function.ConcreteFunction(function)._get_gradient_function()(call, *gradients)


def has_own_gradient(operation: tf.Operation) -> bool:
    """Whether it has a gradient of its own, by ``tf.custom_gradient`` or ``tf.recompute_grad``."""
    return "_gradient_op_type" in operation.node_def.attr


@contextlib.contextmanager
def as_in_caller() -> Iterator[None]:
    """A context in which the function being traced makes variables and seeds as its caller would.

    The calling ``tf.function`` initializes the variables, and is traced again as a whole.  Scopes
    entered within the function keep their variable creators, for example a strategy's.  Random ops
    without a seed get the next number of their graph: the caller's, which then continues the count.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    next_seeds = random_seed._graph_to_seed_dict
    next_seeds[graph] = next_seeds.get(graph.outer_graph, 0)
    stack, callers = graph._variable_creator_stack, graph.outer_graph._variable_creator_stack
    of_callers = [entry for entry in callers if entry[0] == _CREATOR_PRIORITY]
    if of_callers:
        others = [entry for entry in stack if entry[0] != _CREATOR_PRIORITY]
        graph._variable_creator_stack = sorted([*of_callers, *others], key=lambda entry: entry[0])
    try:
        yield
        next_seeds[graph.outer_graph] = next_seeds[graph]
    finally:
        graph._variable_creator_stack = stack


def nested_function(outer: tf.Graph | None) -> func_graph.FuncGraph | None:
    """The function being traced inside of ``outer`` (None: inside of eager code); None if none is.

    Branches and loops belong to the code around them.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while graph is not outer and isinstance(graph, _ControlFlow):
        graph = graph.outer_graph
    return graph if graph is not outer and isinstance(graph, func_graph.FuncGraph) else None


def is_in_control_flow() -> bool:
    """Whether the current graph is that of a branch or a loop."""
    return not tf.executing_eagerly() and isinstance(
        tf.compat.v1.get_default_graph(), _ControlFlow)


def is_compiled_here() -> bool:
    """Whether XLA will compile the current graph (``jit_compile=True``)."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def capture_at_call(graph: func_graph.FuncGraph, key: str, value: Callable[[], tf.Tensor],
                    spec: tf.TensorSpec) -> tf.Tensor:
    """A tensor of ``graph``, a function being traced, whose value is ``value()`` at each call.

    The same ``key`` gives the same tensor; ``spec`` is its spec.  It replaces
    ``FuncGraph.capture_call_time_value``, which computes values in eager code only; a tower's
    function calls other functions while it is traced.
    """
    captures = graph.function_captures
    if key not in captures.by_ref_internal:
        with graph.as_default(), tf.control_dependencies(None):
            placeholder = tf.compat.v1.placeholder(spec.dtype, spec.shape)

        def external() -> list[tf.Tensor]:
            return [tf.convert_to_tensor(value(), spec.dtype)]

        captures.add_or_replace(key, external, placeholder, spec, is_by_ref=True)
    return captures.by_ref_internal[key]


def captured_at_call(graph: func_graph.FuncGraph) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Pairs of a value and its placeholder in ``graph``, for values computed at each call.

    Such are the keys of collective operations.  The values are tensors of the current graph.
    """
    pairs = zip(graph.deferred_external_captures, graph.deferred_internal_captures)
    return [pair for value, inner in pairs
            for pair in zip(tf.nest.flatten(value()), tf.nest.flatten(inner))]


def writers_of(graph: tf.Graph, node: Any, index: int) -> set[str]:
    """The types of the ops that write a node's input ``index``, also in functions that it calls."""
    if node.op not in CALLERS:
        return {node.op} - set(auto_control_deps_utils.RESOURCE_READ_OPS)
    types, argument = set[str](), index - (node.op in BRANCHES)
    for definition in (function_definition(graph, name) for name in functions_in_attributes(node)):
        if definition is not None and 0 <= argument < len(definition.signature.input_arg):
            parameter = definition.signature.input_arg[argument].name
            for inner in definition.node_def:
                for inner_index, text in enumerate(inner.input):
                    if text == parameter:
                        types |= writers_of(graph, inner, inner_index)
    return types


@functools.cache
def is_call(type: str) -> bool:
    """Whether ops of this type call a function, which an unregistered type is the name of."""
    return type in CALLS or op_def_registry.get(type) is None


def called_function(call: tf.Operation) -> str:
    """The name of the function that an operation calls."""
    return call.get_attr("f").name if call.type in CALLS else call.type


def implementation(graph: Any, name: str, kinds: frozenset[str]) -> str:
    """The function that TensorFlow's graph optimizer calls in place of ``name`` on such devices.

    It replaces calls, by their device, among functions that implement the same; a call that is
    inlined is none.  A function with a gradient stays: its other half is another call.
    """
    api = _implemented(graph, name)
    while api[0] and graph is not None:
        for other in getattr(graph, "_functions", ()):
            if _implemented(graph, other) == (api[0], *kinds):
                return str(other)
        graph = getattr(graph, "outer_graph", None)
    return name


def _implemented(graph: Any, name: str) -> tuple[str, str]:
    """What a function implements and the kind of devices that it is for; empty if not known."""
    attributes = function_definition(graph, name).attr
    if "forward_function_name" in attributes or "backward_function_name" in attributes:
        return "", ""
    api, device = (attributes[key].s.decode() if key in attributes else ""
                   for key in ("api_implements", "api_preferred_device"))
    return api, device


def functions_in_attributes(node: Any) -> list[str]:
    """The names of the functions in a node's attributes, and in place of its type."""
    names = [node.op] if is_call(node.op) and node.op not in CALLS else []
    for value in node.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names.extend(func.name for func in value.list.func)
    return names


def function_of(graph: Any, name: str) -> Any:
    """The function ``name`` that ``graph`` can call; None if unknown.

    Under two tapes TensorFlow makes a branch in a function, whose caller alone knows its functions.
    """
    function = graph._get_function(name)
    outer = getattr(graph, "outer_graph", None)
    return function_of(outer, name) if function is None and outer is not None else function


def function_definition(graph: tf.Graph, name: str) -> Any:
    function = function_of(graph, name)
    return None if function is None else function.cached_definition


@contextlib.contextmanager
def graph_optimizer(light: bool) -> Iterator[None]:
    """A context in which Grappler does less for functions that this thread calls.

    ``light``: it only removes needless identities and control dependencies.  Else its remapper is
    off, which fuses operations that are marked for XLA to kernels that XLA does not have.  What the
    user has set stays (``tf.config.optimizer.set_experimental_options``).
    """
    context = eager_context.context()
    before = context.function_call_options
    context.function_call_options = _options(
        before.config_proto_serialized, before.executor_type, light)
    try:
        yield
    finally:
        context.function_call_options = before


@functools.cache
def _options(config: bytes, executor_type: str | None, light: bool) -> Any:
    proto = tf.compat.v1.ConfigProto.FromString(config)
    rewrites = proto.graph_options.rewrite_options
    if not light:
        rewrites.remapping = rewrites.remapping or rewrites.OFF  # 0: not set
    elif {field.name for field, _ in rewrites.ListFields()} <= {
            "scoped_allocator_optimization", "scoped_allocator_opts"}:  # set for several machines
        rewrites.optimizers[:] = ["dependency"]
        rewrites.meta_optimizer_iterations = rewrites.ONE
        # It would convert the graph to MLIR and back, whatever the options.
        rewrites.disable_tfg_optimizer = True
    return eager_context.FunctionCallOptions(executor_type, proto)
