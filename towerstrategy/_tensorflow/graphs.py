"""The operations of a graph: looked at, placed, given other inputs."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils, op_def_registry
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


def makes_half(operation: tf.Operation) -> bool:
    """Whether ``operation`` makes a half of a wider float."""
    return bool(operation.type == "Cast" and operation.inputs[0].dtype.is_floating
                and operation.outputs[0].dtype in _HALVES)


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


def has_effect(operation: tf.Operation, resources: Collection[Any]) -> bool:
    """Whether ``operation`` writes one of its inputs, ``resources``, or the world outside."""
    if crosses_machines(operation):
        return True
    if not resources:
        return bool(auto_control_deps.op_is_stateful(operation))
    if operation.type in auto_control_deps_utils.RESOURCE_READ_OPS:
        return False
    # Those that call functions say what these read alone.
    return operation.type not in functions.CALLERS or bool(
        auto_control_deps_utils.get_read_write_resource_inputs(operation)[1])


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
