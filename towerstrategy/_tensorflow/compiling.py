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
    return any(_fits(node, kernel) for kernel in _xla_kernels(node.op, device_type))


def _fits(node: Any, kernel: Any) -> bool:
    return all(node.attr[constraint.name].type in constraint.allowed_values.list.type
               for constraint in kernel.constraint
               if node.attr[constraint.name].HasField("type"))


@functools.cache
def _xla_kernels(name: str, device_type: str) -> list[Any]:
    wanted = f"XLA_{device_type}_JIT"
    return [kernel for kernel in kernels_lib.get_registered_kernels_for_op(name).kernel
            if kernel.device_type == wanted]


@functools.cache
def _prepare() -> None:
    """XLA registers its kernels when it compiles for the first time."""
    with tf.init_scope(), tf.device("CPU:0"):
        tf.function(lambda: tf.zeros([]) + 1., jit_compile=True, autograph=False)()


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
