"""The peak memory of a simulated step on each device.

Goes in: operations and their schedule.  Comes out: bytes by device.

A tensor occupies memory from the start of its operation until the end of the last operation that
reads it; on another device, from the request of the copy.  Identities and reshapes allocate
nothing.  Variables and the batch exist before the step: only their copies on other devices count.
Not modelled: operations that reuse the buffer of an input, and the workspace of kernels.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from benchmarks import flat, schedule

_ALIASES = {"Identity", "IdentityN", "PlaceholderWithDefault", "Reshape", "ExpandDims", "Squeeze",
            "StopGradient", "PreventGradient"}
_BEFORE_STEP = {"Placeholder", "ReadVariableOp", "Const"}

_Buffer = tuple[int, int, str]  # an operation's number, the index of its output, and the device


def peaks(operations: Sequence[flat.Operation], timeline: schedule.Timeline) -> dict[str, int]:
    """The most bytes at a time, by device."""
    buffers: dict[flat.Source, _Buffer] = {}
    begins: dict[_Buffer, float] = {}
    ends: dict[_Buffer, float] = collections.defaultdict(float)
    for number, operation in enumerate(operations):
        start, end = timeline.spans[number]
        inputs = [_input_buffer(operations, timeline, source, operation.device, buffers, begins,
                                ends) for source in operation.inputs]
        for buffer in inputs:
            ends[buffer] = max(ends[buffer], end)
        for index in range(len(operation.sizes)):
            if operation.type in _ALIASES and index < len(inputs):
                buffers[number, index] = inputs[index]
                continue
            buffer = buffers[number, index] = number, index, operation.device
            ends[buffer] = max(ends[buffer], end)
            if operation.type not in _BEFORE_STEP:
                begins[buffer] = start
    changes = collections.defaultdict(list)
    for buffer, begin in begins.items():
        number, index, device = buffer
        size = operations[number].sizes[index]
        changes[device] += [(begin, size), (max(ends[buffer], begin), -size)]
    return {device: _peak(of_device) for device, of_device in changes.items()}


def _input_buffer(operations: Sequence[flat.Operation], timeline: schedule.Timeline,
                  source: flat.Source, device: str, buffers: dict[flat.Source, _Buffer],
                  begins: dict[_Buffer, float], ends: dict[_Buffer, float]) -> _Buffer:
    """The buffer that an operation on ``device`` reads: the tensor's own, or its copy there."""
    number, index = source
    if operations[number].device == device:
        return buffers[source]
    requested, arrived = timeline.copies[number, index, device]
    ends[buffers[source]] = max(ends[buffers[source]], arrived)
    begins[number, index, device] = requested
    return number, index, device


def _peak(changes: list[tuple[float, int]]) -> int:
    """The largest sum over time of ``changes``, pairs of a time and bytes."""
    now = peak = 0
    for _, size in sorted(changes):
        now += size
        peak = max(peak, now)
    return peak
