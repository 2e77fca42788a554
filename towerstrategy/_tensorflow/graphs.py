"""The operations of a graph: looked at, placed, given other inputs.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils
from tensorflow.python.ops import handle_data_util

PRIVATE_NAMES = {
    "tensorflow.python.framework.auto_control_deps:op_is_stateful":
        "tells which operations TensorFlow's own ordering keeps in the order they were made in",
    "tensorflow.python.framework.auto_control_deps_utils:get_read_write_resource_inputs":
        "tells which resources an operation writes, as TensorFlow's own ordering of reads and "
        "writes asks",
    "tensorflow.python.framework.ops:Operation._set_device":
        "places an operation that is there; tf.device places only those made within",
    "tensorflow.python.framework.ops:Operation._update_input":
        "gives an operation another input; only whole graphs can be edited publicly",
    "tensorflow.python.ops.handle_data_util:copy_handle_data":
        "tells a resource's shape and dtype to its copy",
}


def control_dependencies_of(graph: tf.Graph) -> list[Any]:
    """The control inputs that an operation made now in ``graph`` would get."""
    return list(graph._current_control_dependencies())


def operation_count(graph: tf.Graph) -> int:
    """How many operations ``graph`` has."""
    return len(graph.get_operations())


def captures_of(graph: tf.Graph) -> list[tuple[Any, tf.Tensor]]:
    """Pairs of a tensor outside of ``graph`` and what stands for it inside."""
    return list(graph.captures)


def capture(graph: tf.Graph, tensor: tf.Tensor) -> tf.Tensor:
    """What stands for ``tensor`` in ``graph``: itself, or a placeholder if it is from outside."""
    return graph.capture(tensor)


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Hands on what is known of the variable or list behind a resource or variant tensor."""
    if source.dtype in (tf.resource, tf.variant):
        handle_data_util.copy_handle_data(source, target)


def add_control_input(operation: tf.Operation, control: tf.Operation) -> None:
    """Makes ``operation`` wait for ``control``."""
    operation._add_control_input(control)


def set_device(operation: tf.Operation, device: str) -> None:
    """Puts ``operation`` on ``device``, a full name."""
    operation._set_device(device)


def set_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Gives ``operation`` another input."""
    operation._update_input(index, tensor)


def written_resources(operation: tf.Operation) -> Collection[tf.Tensor]:
    """The resources among the inputs of ``operation`` that it writes."""
    _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return written


def crosses_machines(operation: tf.Operation) -> bool:
    """Whether ``operation`` is a collective one, which waits for those of other machines."""
    return bool(operation.type.startswith("Collective"))


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
