"""Which operations have no kernel on a GPU, by TensorFlow's own registry.

Goes in: operations.  Comes out: those that TensorFlow would run on the CPU, whatever device they
ask for, with the dtypes that no GPU kernel takes.  The registry of TensorFlow's CUDA build is there
without a GPU, too.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

# Made and taken away by TensorFlow itself; no kernel runs.
_NO_KERNEL_NEEDED = {"Placeholder", "_Arg", "_Retval"}


def missing(operations: Iterable[tuple[Any, str]]) -> collections.Counter[str]:
    """Operations on GPUs without a GPU kernel: ``"Split T=int64"``, and how often each.

    Args:
      operations: pairs of a NodeDef and a device, as :func:`on_gpus.nodes` gives them.
    """
    found: collections.Counter[str] = collections.Counter()
    for node, device in operations:
        if device.startswith("GPU") and node.op not in _NO_KERNEL_NEEDED and not on_gpu(node):
            types = ", ".join(f"{attribute}={'/'.join(names)}"
                              for attribute, names in sorted(_types(node).items()))
            found[f"{node.op} {types}".strip()] += 1
    return found


def on_gpu(node: Any) -> bool:
    """Whether a GPU kernel takes the dtypes of ``node``."""
    types = _types(node)
    return any(all(set(types.get(attribute, ())) <= allowed
                   for attribute, allowed in constraints.items())
               for constraints in _gpu_kernels(node.op))


def taken_from_host(node: Any) -> set[str]:
    """The inputs and outputs that the GPU kernel for ``node`` has in the host's memory."""
    types = _types(node)
    return {name for kernel in kernels.get_registered_kernels_for_op(node.op).kernel
            if kernel.device_type in ("GPU", "DEFAULT") and all(
                set(types.get(each.name, ())) <= _names(each) for each in kernel.constraint)
            for name in kernel.host_memory_arg}


def _names(constraint: Any) -> set[str]:
    return {tf.as_dtype(number).name for number in constraint.allowed_values.list.type}


@functools.cache
def _gpu_kernels(op: str) -> list[dict[str, set[str]]]:
    return [{constraint.name: _names(constraint) for constraint in kernel.constraint}
            for kernel in kernels.get_registered_kernels_for_op(op).kernel
            if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label]


def _types(node: Any) -> dict[str, list[str]]:
    """The dtypes in a node's attributes, those with their default value included."""
    definition = op_def_registry.get(node.op)
    found = {}
    for attribute in definition.attr if definition is not None else ():
        value = node.attr.get(attribute.name, attribute.default_value)
        if attribute.type == "type":
            found[attribute.name] = [tf.as_dtype(value.type).name]
        elif attribute.type == "list(type)":
            found[attribute.name] = [tf.as_dtype(number).name for number in value.list.type]
    return found
