"""XLA: what it can compile, and the operations that it is to compile."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels as kernels_lib


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


def hand_on_functions(source: tf.Graph, target: tf.Graph, names: Iterable[str]) -> None:
    """Makes functions of ``source`` callable in ``target``."""
    for name in names:
        target._add_function_recursive(source._get_function(name))


def line_of(operation: tf.Operation) -> str:
    """The line of the user's code that made ``operation``; nothing where it is not known."""
    frames = [frame for frame in operation.traceback or ()
              if not any(part in frame.filename for part in _LIBRARIES)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


_LIBRARIES = ("/tensorflow/", "/keras/src/", "/tf_keras/src/", "/towerstrategy/", "<")
