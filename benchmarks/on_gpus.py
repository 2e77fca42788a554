"""Traces a training step for GPUs on logical CPU devices.

Goes in: logical CPU devices.  The first one stands for the host, each other one for a GPU.  Comes
out: the operations of the step, each with its device, ``CPU:0`` or ``GPU:n``.

Within :func:`tracing`, we trace as for GPU towers where this differs from CPU towers; with
``cudnn``, Keras calls cuDNN's kernels, as it does on GPUs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from towerstrategy.placement import devices as devices_lib
from towerstrategy.sharding import traffic

HOST = "CPU:0"


def towers(count: int) -> list[str]:
    """The logical CPU devices that stand for ``count`` GPUs; ``CPU:0`` stands for the host."""
    return [f"CPU:{number + 1}" for number in range(count)]


@contextlib.contextmanager
def tracing(cudnn: bool = False) -> Iterator[None]:
    """A context in which a step is traced as for GPUs, without optimizations for CPU devices.

    Args:
      cudnn: whether LSTM and GRU call cuDNN's kernels, as they do on GPUs; such a step cannot run.
    """
    placement = devices_lib.Placement
    rnn = sys.modules.get("keras.src.backend.tensorflow.rnn")
    with contextlib.ExitStack() as stack:
        for name, value in (("on_cpu", False), ("towers_on_host", False)):
            stack.enter_context(mock.patch.object(placement, name, value))
        stack.enter_context(mock.patch.object(
            traffic.Traffic, "pads", lambda _, plan: plan.padded is True))
        if cudnn:
            stack.enter_context(mock.patch.object(placement, "kinds", frozenset({"GPU"})))
        if cudnn and rnn is not None:
            stack.enter_context(mock.patch.object(rnn, "_is_gpu_available", lambda: True))
        yield


def name(device: str) -> str:
    """``GPU:1`` for the full name of the logical device ``CPU:2``; "" for no device."""
    spec = tf.DeviceSpec.from_string(device or "")
    if spec.device_type is None:
        return ""
    index = spec.device_index or 0
    return f"GPU:{index - 1}" if spec.device_type == "CPU" and index else f"CPU:{index}"


def nodes(graph_def: Any, default_device: str = "") -> Iterator[tuple[Any, str]]:
    """All nodes of a graph and of the functions that it calls, each with its device.

    In a function, a node without a device is on the device of the call.  The nodes of a function
    that is called on several devices come once for each device.

    Args:
      graph_def: a GraphDef.
      default_device: the device of nodes of the graph that have none.  On a machine with GPUs,
        TensorFlow places them on ``GPU:0``, if there is a kernel.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    seen = set()

    def walk(nodes: Any, caller: str) -> Iterator[tuple[Any, str]]:
        for node in nodes:
            device = name(node.device) or caller
            yield node, device
            for function in _called_functions(node):
                if function in functions and (function, device) not in seen:
                    seen.add((function, device))
                    yield from walk(functions[function].node_def, device)

    yield from walk(graph_def.node, default_device)


def _called_functions(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)
