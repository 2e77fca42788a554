"""The operations of a graph: their effects, devices, inputs and kernels, also of XLA."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import (
    auto_control_deps,
    auto_control_deps_utils,
    kernels as kernels_lib,
    op_def_registry,
)
from tensorflow.python.ops import handle_data_util

from towerstrategy._tensorflow import functions

# Change an existing operation: add a control input, set its device, replace an input.
add_control_input = tf.Operation._add_control_input
set_device = tf.Operation._set_device
set_input = tf.Operation._update_input
# The attribute of a call, a branch or a loop that lists the resources that it only reads, so that
# automatic control dependencies do not order it like a write; and what of a function's it lists.
ONLY_READ = auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR
only_read_inputs = auto_control_deps_utils.get_read_only_resource_input_indices_graph


def control_dependencies_of(graph: tf.Graph) -> list[Any]:
    """The control inputs that a new operation in ``graph`` would get."""
    return list(graph._current_control_dependencies())


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Copies the handle data (dtype and shape of a variable or list) of a resource or variant."""
    if source.dtype in (tf.resource, tf.variant):
        handle_data_util.copy_handle_data(source, target)


def shape_of_entries(tensor_list: tf.Tensor) -> tf.TensorShape | None:
    """The static shape of a list's entries; None unless all of it is known."""
    data = handle_data_util.get_resource_handle_data(tensor_list)
    shapes = [tf.TensorShape(each.shape) for each in data.shape_and_type]
    return shapes[0] if shapes and shapes[0].is_fully_defined() else None


def dtype_of(tensor: tf.Tensor) -> tf.DType:
    """The dtype of a tensor; of a variable's handle, that of its value."""
    data = handle_data_util.get_resource_handle_data(tensor)
    known = tensor.dtype == tf.resource and data.is_set
    return tf.as_dtype(data.shape_and_type[0].dtype) if known else tensor.dtype


def half_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """The half-precision tensor that ``tensor`` is a wider cast of; None if it is no such cast."""
    half = tensor.op.inputs[0] if tensor.op.type == "Cast" and tensor.dtype.is_floating else None
    return half if half is not None and half.dtype in (tf.float16, tf.bfloat16) else None


@functools.cache
def is_stateful(type: str) -> bool:
    """Whether ops of this type are registered as stateful; True for unknown types."""
    definition = op_def_registry.get(type)
    return definition is None or bool(definition.is_stateful)


def has_effect(operation: tf.Operation) -> bool:
    """Whether ``operation`` writes one of its resource inputs, or has another side effect."""
    if operation.type in auto_control_deps_utils.RESOURCE_READ_OPS:
        return False
    if operation.type not in functions.CALLERS and any(
            tensor.dtype == tf.resource for tensor in operation.inputs):
        return True  # touched_resources would say the same, but slowly
    return bool(touched_resources(operation)[1])


def touched_resources(operation: tf.Operation) -> tuple[set[str], set[str]]:
    """The names of the resources that ``operation`` reads, and that it writes.

    TensorFlow's automatic control dependencies use the same.  ``""`` among the written ones means
    another side effect; operations with side effects run in the order in which they were made.
    """
    if not any(tensor.dtype == tf.resource for tensor in operation.inputs):
        return set(), {""} if auto_control_deps.op_is_stateful(operation) else set()
    read, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return ({uncopied(tensor).name for tensor in read},
            {uncopied(tensor).name for tensor in written})


def uncopied(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that identities have made this one of."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def has_xla_kernel(node: Any, device_type: str) -> bool:
    """Whether XLA has a kernel for an op (its NodeDef) and its types; compiling may still fail."""
    _register_xla_kernels()
    return any(_fits(node, kernel) for kernel in _kernels(node.op, f"XLA_{device_type}_JIT"))


def _fits(node: Any, kernel: Any) -> bool:
    """Whether a kernel supports the types of a node."""
    return all(node.attr[constraint.name].type in constraint.allowed_values.list.type
               for constraint in kernel.constraint
               if node.attr[constraint.name].HasField("type"))


@functools.cache
def _kernels(name: str, device_type: str) -> list[Any]:
    return [kernel for kernel in kernels_lib.get_registered_kernels_for_op(name).kernel
            if kernel.device_type == device_type]


@functools.cache
def _register_xla_kernels() -> None:
    """Makes XLA register its kernels, which it does when it first compiles."""
    with tf.init_scope(), tf.device("CPU:0"):
        tf.function(lambda: tf.zeros([]) + 1., jit_compile=True, autograph=False)()


def gives_on_host(operation: tf.Operation) -> bool:
    """Whether all outputs of an op on a GPU are on the host: by its kernel, or for lack of one."""
    kernel = next((each for kind in ("GPU", "DEFAULT") for each in _kernels(operation.type, kind)
                   if _fits(operation.node_def, each)), None)
    return kernel is None or all(
        arg.name in kernel.host_memory_arg for arg in operation.op_def.output_arg)


def length(node: Any, arg: Any) -> int:
    """The number of tensors of an argument (an ``ArgDef``) of a node."""
    if arg.number_attr:
        return int(node.attr[arg.number_attr].i)
    return len(node.attr[arg.type_list_attr].list.type) if arg.type_list_attr else 1


def compile_by_xla(operation: tf.Operation, scope: str) -> None:
    """Marks an existing ``operation`` for XLA, as ``jit_scope`` marks new ones.

    Another mark (``kAddOpsRewriteTag``) keeps Grappler's arithmetic optimizer from replacing sums,
    such as a normalization's, by sums that are not marked for XLA.
    """
    for mark in ("_XlaCompile", "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"):
        operation._set_attr(mark, tf.compat.v1.AttrValue(b=True))
    operation._set_attr("_XlaScope", tf.compat.v1.AttrValue(s=scope.encode()))


def hand_on_functions(source: tf.Graph, target: tf.Graph,
                      names: Iterable[str] | None = None) -> None:
    """Makes functions of ``source`` callable in ``target``: those in ``names``, or all."""
    for name in list(source._functions) if names is None else names:
        target._add_function_recursive(source._get_function(name))


def line_of(operation: tf.Operation) -> str:
    """The file and line of the user's code that made ``operation``; "" if unknown."""
    frames = [frame for frame in operation.traceback or ()
              if not any(part in frame.filename for part in _LIBRARIES)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


_LIBRARIES = ("/tensorflow/", "/keras/src/", "/tf_keras/src/", "/towerstrategy/", "<")
