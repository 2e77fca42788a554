"""The end of a traced function: what it waits for.

Goes in: a ``tf.function`` that is being traced.  Comes out: the same function, whose end waits for
each device once.

TensorFlow makes a function's end wait for every operation in it that reads or writes a variable.
Where that is on another device, each such wait is a constant, a send, a receive and an identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from towerstrategy._tensorflow.compiling import set_control_inputs
from towerstrategy._tensorflow.values import is_eager

PRIVATE_NAMES = {
    "python.framework.func_graph:FuncGraph":
        "its control_outputs, what a function's end waits for, filled when all is traced",
}


def wait_by_device() -> None:
    """Lets the end of the function that is being traced wait for each device once."""
    graph = tf.compat.v1.get_default_graph()
    graph.control_outputs = _ControlOutputs(graph)


class _ControlOutputs(list[tf.Operation]):
    """What a function's end waits for, one operation a device."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self._graph: Any = graph

    def extend(self, operations: Iterable[tf.Operation]) -> None:
        """Takes all that TensorFlow wants to wait for; it does so once, at the end."""
        graph, self._graph = self._graph, None
        every, homes = set(operations), _homes(graph)
        by_device: dict[str, list[tf.Operation]] = {}
        for operation in sorted(every, key=lambda operation: str(operation.name)):
            by_device.setdefault(_device_of(operation, homes), []).append(operation)
        with graph.as_default():
            ends = [_end_of(device, group) for device, group in by_device.items()]
        # The function's results wait for the same.
        for waiting in {control for result in graph.outputs for control in result.op.control_inputs
                        if set(control.control_inputs) == every}:
            set_control_inputs(waiting, ends)
        super().extend(ends)


def _homes(graph: Any) -> dict[int, str]:
    """The devices of the variables that ``graph`` has captured, by the captures' ids."""
    homes: dict[int, str] = {}
    around: dict[Any, Mapping[int, str]] = {}
    for outside, inside in graph.captures:
        if inside.dtype != tf.resource:
            continue
        if is_eager(outside):
            homes[id(inside)] = outside.device
            continue
        if outside.graph not in around:
            around[outside.graph] = (_homes(outside.graph) if hasattr(outside.graph, "captures")
                                     else {})
        homes[id(inside)] = around[outside.graph].get(id(outside), outside.device)
    return homes


def _device_of(operation: tf.Operation, homes: Mapping[int, str]) -> str:
    """Where an operation is; a read is noted nowhere and goes where its variable is."""
    found = (homes[id(tensor)] for tensor in operation.inputs if id(tensor) in homes)
    return operation.device or next(found, "")


def _end_of(device: str, operations: list[tf.Operation]) -> tf.Operation:
    """What is done when all of ``operations``, on ``device``, are."""
    if len(operations) == 1:
        return operations[0]
    with tf.control_dependencies(None), tf.control_dependencies(operations), tf.device(None), \
            tf.device(device or None):
        return tf.raw_ops.NoOp()
