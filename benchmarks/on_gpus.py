"""A training step as it would be on GPUs, traced on logical CPU devices.

Goes in: logical CPU devices, of which the first stands for the host and each other one for a GPU.
Comes out: the step's operations, each with the device that it is given, ``CPU:0`` or ``GPU:n``.

What differs between CPU and GPU towers while a step is traced is switched to the GPU's side
(:func:`tracing`); what Keras itself traces differently there, cuDNN's kernels, if asked for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import tensorflow as tf

from towerstrategy.placement import devices as devices_lib, peers

HOST = "CPU:0"


def towers(count: int) -> list[str]:
    """The logical CPU devices that stand for ``count`` GPUs, of ``count + 1`` that there are."""
    return [f"CPU:{number + 1}" for number in range(count)]


@contextlib.contextmanager
def tracing(reached: Mapping[int, frozenset[int]] | None = None, cudnn: bool = False
            ) -> Iterator[None]:
    """Within, a step is traced as for GPUs, without the forms that pay on CPU devices only.

    Args:
      reached: which GPUs each one reaches without the host; None for what nobody knows.
      cudnn: whether LSTM and GRU call cuDNN's kernels, as they do on GPUs; then the step cannot be
        run.
    """
    placement = devices_lib.Placement
    known = {one + 1: frozenset(other + 1 for other in others)
             for one, others in (reached or {}).items()}
    rnn = sys.modules.get("keras.src.backend.tensorflow.rnn")
    with contextlib.ExitStack() as stack:
        for name, value in (("on_cpu", False), ("towers_on_host", False)):
            stack.enter_context(mock.patch.object(placement, name, value))
        stack.enter_context(mock.patch.object(peers, "reached", lambda: known))
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


def nodes(graph_def: Any, unplaced: str = "") -> Iterator[tuple[Any, str]]:
    """All operations of a graph and of the functions it calls, each with its device.

    An operation of a function that asks for none is on the device of the call.  A function that is
    called from several devices comes once for each.

    Args:
      graph_def: a GraphDef.
      unplaced: the device of what asks for none.  On a machine with GPUs TensorFlow takes
        ``GPU:0``, if it has a kernel.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    seen = set()

    def walk(these: Any, caller: str) -> Iterator[tuple[Any, str]]:
        for node in these:
            device = name(node.device) or caller
            yield node, device
            for called in _called(node):
                if called in functions and (called, device) not in seen:
                    seen.add((called, device))
                    yield from walk(functions[called].node_def, device)

    yield from walk(graph_def.node, unplaced)


def _called(node: Any) -> Iterator[str]:
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)
