"""The operations that have no GPU kernel, by TensorFlow's kernel registry.

Goes in: operations.  Comes out: the operations that TensorFlow would run on the CPU although they
are placed on a GPU, with their dtypes.  TensorFlow's CUDA build has the registry also without a
GPU.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

# TensorFlow removes these before it runs a graph.
_NO_KERNEL_NEEDED = {"Placeholder", "_Arg", "_Retval"}


def missing(operations: Iterable[tuple[Any, str]]) -> collections.Counter[str]:
    """The number of operations on GPUs without a GPU kernel, by type and dtypes: "Split T=int64".

    Args:
      operations: pairs of a NodeDef and a device, from :func:`on_gpus.nodes`.
    """
    counts: collections.Counter[str] = collections.Counter()
    for node, device in operations:
        if device.startswith("GPU") and node.op not in _NO_KERNEL_NEEDED \
                and not has_gpu_kernel(node):
            types = ", ".join(f"{attribute}={'/'.join(names)}"
                              for attribute, names in sorted(_types(node).items()))
            counts[f"{node.op} {types}".strip()] += 1
    return counts


def has_gpu_kernel(node: Any) -> bool:
    """Whether there is a GPU kernel for the dtypes of ``node``."""
    types = _types(node)
    return any(all(set(types.get(attribute, ())) <= allowed
                   for attribute, allowed in constraints.items())
               for constraints in _gpu_kernels(node.op))


def host_memory_args(node: Any) -> set[str]:
    """The inputs and outputs that the GPU kernel for ``node`` has in host memory."""
    types = _types(node)
    return {name for kernel in kernels.get_registered_kernels_for_op(node.op).kernel
            if kernel.device_type in ("GPU", "DEFAULT") and all(
                set(types.get(each.name, ())) <= _allowed(each) for each in kernel.constraint)
            for name in kernel.host_memory_arg}


def _allowed(constraint: Any) -> set[str]:
    """The names of the dtypes that a constraint of a kernel allows."""
    return {tf.as_dtype(number).name for number in constraint.allowed_values.list.type}


@functools.cache
def _gpu_kernels(op: str) -> list[dict[str, set[str]]]:
    return [{constraint.name: _allowed(constraint) for constraint in kernel.constraint}
            for kernel in kernels.get_registered_kernels_for_op(op).kernel
            if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label]


def _types(node: Any) -> dict[str, list[str]]:
    """The dtypes of a node's attributes, also of attributes that have their default value."""
    definition = op_def_registry.get(node.op)
    dtypes = {}
    for attribute in definition.attr if definition is not None else ():
        value = node.attr.get(attribute.name, attribute.default_value)
        if attribute.type == "type":
            dtypes[attribute.name] = [tf.as_dtype(value.type).name]
        elif attribute.type == "list(type)":
            dtypes[attribute.name] = [tf.as_dtype(number).name for number in value.list.type]
    return dtypes
