"""How many bytes a step makes on each device, at the most at one time.

Goes in: operations and when each runs.  Comes out: bytes by device.

A tensor is there from when the operation that makes it begins to when the last one that reads it
ends; on another device from when it is asked for.  What hands a tensor on makes none; variables
and the batch are there before the step and are not counted, but on devices that they are sent to.
That an operation may write over its input is left out, and so is what a kernel needs for itself.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from benchmarks import flat, schedule

_HANDS_ON = {"Identity", "IdentityN", "PlaceholderWithDefault", "Reshape", "ExpandDims", "Squeeze",
             "StopGradient", "PreventGradient"}
_THERE_BEFORE = {"Placeholder", "ReadVariableOp", "Const"}

_Held = tuple[int, int, str]  # an operation's number, which of its outputs, and where


def peaks(operations: Sequence[flat.Operation], line: schedule.Timeline) -> dict[str, int]:
    """Bytes by device."""
    held: dict[flat.Source, _Held] = {}
    begins: dict[_Held, float] = {}
    ends: dict[_Held, float] = collections.defaultdict(float)
    for number, operation in enumerate(operations):
        start, end = line.spans[number]
        taken = [_taken(operations, line, source, operation.device, held, begins, ends)
                 for source in operation.inputs]
        for key in taken:
            ends[key] = max(ends[key], end)
        for index in range(len(operation.sizes)):
            if operation.type in _HANDS_ON and index < len(taken):
                held[number, index] = taken[index]
                continue
            key = held[number, index] = number, index, operation.device
            ends[key] = max(ends[key], end)
            if operation.type not in _THERE_BEFORE:
                begins[key] = start
    events = collections.defaultdict(list)
    for key, begin in begins.items():
        number, index, device = key
        size = operations[number].sizes[index]
        events[device] += [(begin, size), (max(ends[key], begin), -size)]
    return {device: _most(found) for device, found in events.items()}


def _taken(operations: Sequence[flat.Operation], line: schedule.Timeline, source: flat.Source,
           device: str, held: dict[flat.Source, _Held], begins: dict[_Held, float],
           ends: dict[_Held, float]) -> _Held:
    """What an operation on ``device`` reads: the tensor, or its copy there."""
    number, index = source
    if operations[number].device == device:
        return held[source]
    asked, there = line.copies[number, index, device]
    ends[held[source]] = max(ends[held[source]], there)
    begins[number, index, device] = asked
    return number, index, device


def _most(events: list[tuple[float, int]]) -> int:
    now = most = 0
    for _, size in sorted(events):
        now += size
        most = max(most, now)
    return most
