"""The operations of a graph: looked at, placed, given other inputs; their kernels, XLA's, too."""

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

# Of an operation that is there: to wait for another, to be on a device, to have another input.
add_control_input = tf.Operation._add_control_input
set_device = tf.Operation._set_device
set_input = tf.Operation._update_input


def control_dependencies_of(graph: tf.Graph) -> list[Any]:
    """The control inputs that an operation made now in ``graph`` would get."""
    return list(graph._current_control_dependencies())


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Hands on what is known of the variable or list behind a resource or variant tensor."""
    if source.dtype in (tf.resource, tf.variant):
        handle_data_util.copy_handle_data(source, target)


_HALVES = (tf.float16, tf.bfloat16)


def half_of(value: Any) -> tf.Tensor | None:
    """The half that a tensor of a graph is a wider copy of; None where it is none."""
    if not isinstance(value, tf.Tensor) or not tf.is_symbolic_tensor(value):
        return None
    half = value.op.inputs[0] if value.op.type == "Cast" and value.dtype.is_floating else None
    return None if half is None or half.dtype not in _HALVES else half


def crosses_machines(operation: tf.Operation) -> bool:
    """Whether ``operation`` is a collective one, which waits for those of other machines."""
    return bool(operation.type.startswith("Collective"))


@functools.cache
def is_stateful(type: str) -> bool:
    """Whether operations of this type keep or touch a state; those of no known type may."""
    definition = op_def_registry.get(type)
    return definition is None or bool(definition.is_stateful)


def has_effect(operation: tf.Operation) -> bool:
    """Whether ``operation`` writes one of its inputs, or the world outside."""
    if operation.type in auto_control_deps_utils.RESOURCE_READ_OPS:
        return False
    if operation.type not in functions.CALLERS and any(
            tensor.dtype == tf.resource for tensor in operation.inputs):
        return True  # TensorFlow takes long to say of what else it has read alone
    return bool(touched_resources(operation)[1])


def touched_resources(operation: tf.Operation) -> tuple[set[str], set[str]]:
    """The resources that ``operation`` reads and writes, as TensorFlow's own ordering takes them.

    Each by its tensor's name; ``""`` written stands for an effect on the world outside, in which
    operations are kept in the order that they were made in.
    """
    if crosses_machines(operation):  # in one order on all machines
        return set(), {"collective"}
    if not any(tensor.dtype == tf.resource for tensor in operation.inputs):
        return set(), {""} if auto_control_deps.op_is_stateful(operation) else set()
    read, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return {_origin(tensor) for tensor in read}, {_origin(tensor) for tensor in written}


def _origin(resource: tf.Tensor) -> str:
    while resource.op.type == "Identity":
        resource = resource.op.inputs[0]
    return str(resource.name)


def has_xla_kernel(node: Any, device_type: str) -> bool:
    """Whether XLA compiles an operation (its NodeDef), as far as types say, without trying."""
    _prepare()
    return any(_fits(node, kernel) for kernel in _kernels(node.op, f"XLA_{device_type}_JIT"))


def _fits(node: Any, kernel: Any) -> bool:
    return all(node.attr[constraint.name].type in constraint.allowed_values.list.type
               for constraint in kernel.constraint
               if node.attr[constraint.name].HasField("type"))


@functools.cache
def _kernels(name: str, device_type: str) -> list[Any]:
    return [kernel for kernel in kernels_lib.get_registered_kernels_for_op(name).kernel
            if kernel.device_type == device_type]


@functools.cache
def _prepare() -> None:
    """XLA registers its kernels when it compiles for the first time."""
    with tf.init_scope(), tf.device("CPU:0"):
        tf.function(lambda: tf.zeros([]) + 1., jit_compile=True, autograph=False)()


def host_memory(operation: tf.Operation, of_any_type: bool = False
                ) -> tuple[list[bool], list[bool]]:
    """For each input and output of an operation on a GPU whether it is in the host's memory.

    As its kernel says, or ``of_any_type`` all kernels of its type; all are where TensorFlow has
    none for GPUs.
    """
    definition, node = operation.op_def, operation.node_def
    kernels = [each for kind in ("GPU", "DEFAULT") for each in _kernels(node.op, kind)]
    if not of_any_type:
        kernels = [each for each in kernels if _fits(node, each)][:1]

    def on_host(args: Any) -> list[bool]:
        return [all(arg.name in kernel.host_memory_arg for kernel in kernels)
                for arg in args for _ in range(length(node, arg))]

    return on_host(definition.input_arg), on_host(definition.output_arg)


def length(node: Any, arg: Any) -> int:
    """How many tensors an argument of an operation is."""
    if arg.number_attr:
        return int(node.attr[arg.number_attr].i)
    return len(node.attr[arg.type_list_attr].list.type) if arg.type_list_attr else 1


def compile_by_xla(operation: tf.Operation, scope: str) -> None:
    """Marks ``operation`` for XLA, as ``jit_scope`` marks what is made within.

    Also as what Grappler's arithmetic optimizer has seen (``kAddOpsRewriteTag``): it would put sums
    in the place of others, as of each normalization, that are not marked for XLA.
    """
    for mark in ("_XlaCompile", "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"):
        operation._set_attr(mark, tf.compat.v1.AttrValue(b=True))
    operation._set_attr("_XlaScope", tf.compat.v1.AttrValue(s=scope.encode()))


def hand_on_functions(source: tf.Graph, target: tf.Graph,
                      names: Iterable[str] | None = None) -> None:
    """Makes functions of ``source``, all where none are named, callable in ``target``."""
    for name in list(source._functions) if names is None else names:
        target._add_function_recursive(source._get_function(name))


def line_of(operation: tf.Operation) -> str:
    """The line of the user's code that made ``operation``; nothing where it is not known."""
    frames = [frame for frame in operation.traceback or ()
              if not any(part in frame.filename for part in _LIBRARIES)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


_LIBRARIES = ("/tensorflow/", "/keras/src/", "/tf_keras/src/", "/towerstrategy/", "<")
