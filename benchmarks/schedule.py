"""When each operation of a step runs, and when each tensor crosses.

Goes in: operations with their costs, and a machine.  Comes out: a :class:`Timeline`.

As TensorFlow does it (all in ``tensorflow/core/common_runtime``).  Each device has an executor on
the host, which starts operations one after another in the order in which they are ready
(``executor.cc``).  For a GPU to start is to put a kernel into the one compute stream, and what
takes its result on that GPU may start at once: the host runs ahead.  Each tensor is sent once to
each device that takes it, by an operation of its own.  A copy between GPUs is in a stream of its
source, of which there is one, and begins behind all that the compute streams of *both* ends hold
when it is asked for; so it is with the one stream to the host and the one from it that a GPU has
(``gpu/gpu_util.cc``: ``DeviceToDeviceCopy``, ``CopyGPUTensorToCPU``, ``CopyCPUTensorToGPU``;
``gpu/gpu_device.cc`` makes the streams).  What takes the tensor starts when the host has seen that
the copy has ended (``gpu/gpu_event_mgr.cc``).
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import flat, links

_WAITED_FOR = -1  # in the place of an output's index: nothing is sent but that it has run


@dataclasses.dataclass
class Timeline:
    """What came out.

    Attributes:
      seconds: from the start of the step to its end.
      busy: seconds that each device computes.
      link_seconds: seconds that each link is held.
      link_bytes: bytes over each link.
      spans: when each operation begins on its device, and when it ends.
      copies: when an operation's output was asked for by another device, and when it was there, by
        the operation's number, the output's index and the device.
    """

    spans: list[tuple[float, float]]
    seconds: float = 0.0
    busy: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float))
    link_seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float))
    link_bytes: dict[str, int] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(int))
    copies: dict[tuple[int, int, str], tuple[float, float]] = dataclasses.field(
        default_factory=dict)

    @property
    def busiest(self) -> str:
        """The link that is held longest; "" where nothing crosses."""
        return max(self.link_seconds, key=lambda link: self.link_seconds[link], default="")


def run(operations: Sequence[flat.Operation], seconds: dict[str, float], machine: links.Machine,
        factor: float = 1.0) -> Timeline:
    """Runs the step.

    Args:
      operations: the step's.
      seconds: what each costs at its device's peak, by name.
      machine: where.
      factor: how much longer than that a GPU takes.
    """
    return _Step(operations, [_time(each, seconds, factor) for each in operations], machine).run()


@dataclasses.dataclass
class _Copy:
    """A tensor's way to another device."""

    source: int
    index: int
    target: str
    readers: list[int] = dataclasses.field(default_factory=list)
    behind: float = 0.0  # when the compute streams of both ends have done what they held
    asked: float = 0.0


class _Step:
    """One run.  What executors start is an operation's number or a :class:`_Copy` to send."""

    def __init__(self, operations: Sequence[flat.Operation], times: Sequence[float],
                 machine: links.Machine) -> None:
        self._operations, self._times, self._machine = operations, times, machine
        self._line = Timeline([(0.0, 0.0)] * len(operations))
        self._here: list[list[int]] = [[] for _ in operations]  # readers on the same device
        self._copies: list[dict[tuple[int, str], _Copy]] = [{} for _ in operations]
        self._missing = list(map(self._taken, range(len(operations))))
        self._started: dict[str, collections.deque[int | _Copy]] = collections.defaultdict(
            collections.deque)
        self._working: set[str] = set()
        self._free: dict[str, float] = collections.defaultdict(float)  # devices, rings and links
        self._streams: dict[str, collections.deque[_Copy]] = collections.defaultdict(
            collections.deque)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def run(self) -> Timeline:
        for number, count in enumerate(self._missing):
            if not count:
                self._ready(0.0, number)
        while self._events:
            now, _, do, arguments = heapq.heappop(self._events)
            do(now, *arguments)
        return self._line

    def _taken(self, number: int) -> int:
        """Notes what an operation waits for; returns how many tensors and operations that is."""
        operation = self._operations[number]
        taken = {*operation.inputs, *((other, _WAITED_FOR) for other in operation.waits)}
        for source, index in sorted(taken):
            if self._operations[source].device == operation.device:
                self._here[source].append(number)
            else:
                key = index, operation.device
                copy = self._copies[source].setdefault(key, _Copy(source, *key))
                copy.readers.append(number)
        return len(taken)

    def _at(self, time: float, do: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, do, arguments))

    def _arrive(self, now: float, readers: Sequence[int]) -> None:
        for reader in readers:
            self._missing[reader] -= 1
            if not self._missing[reader]:
                self._ready(now, reader)

    def _ready(self, now: float, what: int | _Copy) -> None:
        """Hands something to the executor of its device."""
        number = what.source if isinstance(what, _Copy) else what
        device = self._operations[number].device
        self._started[device].append(what)
        if device not in self._working:
            self._working.add(device)
            self._at(now, self._start, device)

    def _start(self, now: float, device: str) -> None:
        """An executor takes the next one."""
        if not self._started[device]:
            self._working.remove(device)
            return
        what = self._started[device].popleft()
        if isinstance(what, _Copy):
            done = now + links.EXECUTOR
            self._at(done, self._ask, what)
        else:
            done = self._launch(now, what)
        self._at(done, self._start, device)

    def _launch(self, now: float, number: int) -> float:
        """Starts an operation; returns when the executor is free again."""
        operation, time = self._operations[number], self._times[number]
        host = operation.device.startswith("CPU")
        free = operation.type in flat.FREE
        begin = now if host or free else now + links.EXECUTOR
        if time:
            occupied = operation.link or operation.device
            begin = max(begin, self._free[occupied], self._free[operation.device])
            self._free[occupied] = begin + time
            used = self._line.link_seconds if operation.link else self._line.busy
            used[occupied] += time
        end = begin + time
        self._line.spans[number] = begin, end
        self._line.seconds = max(self._line.seconds, end)
        # What a CPU or the ring has to do is done when it is seen to be; a kernel is once it waits.
        ahead = not (host or operation.link)
        known = (now if free else now + links.EXECUTOR) if ahead else end
        self._at(known, self._launched, number)
        return end if host else (now if free else now + links.EXECUTOR)

    def _launched(self, now: float, number: int) -> None:
        for copy in self._copies[number].values():
            self._ready(now, copy)
        self._arrive(now, self._here[number])

    def _ask(self, now: float, copy: _Copy) -> None:
        """A copy gets into its stream."""
        source, copy.asked = self._operations[copy.source].device, now
        # Between GPUs the target's stream matters to bytes alone, as what they go to may be in use.
        ends = [source] if source.startswith("GPU") and not self._size(copy) else [
            source, copy.target]
        copy.behind = max(self._free[end] for end in ends if end.startswith("GPU"))
        stream = self._stream(copy)
        self._streams[stream].append(copy)
        if len(self._streams[stream]) == 1:
            self._at(max(now, copy.behind), self._cross, stream)

    def _stream(self, copy: _Copy) -> str:
        source = self._operations[copy.source].device
        return f"from {source}" if source.startswith("GPU") and copy.target.startswith("GPU") else \
            f"{source} to {copy.target}"

    def _size(self, copy: _Copy) -> int:
        sizes = self._operations[copy.source].sizes
        return sizes[copy.index] if 0 <= copy.index < len(sizes) else 0

    def _cross(self, now: float, stream: str) -> None:
        """The first copy of a stream begins."""
        copy = self._streams[stream][0]
        size, end = self._size(copy), now
        way = self._machine.way(self._operations[copy.source].device, copy.target)
        for link, rate in way.items() if size else ():
            held = size / (rate * 1e9)
            self._free[link] = max(now, self._free[link]) + held
            self._line.link_seconds[link] += held
            self._line.link_bytes[link] += size
            end = max(end, self._free[link])
        self._at(end, self._crossed, stream)
        self._at(end + links.LATENCY, self._there, copy)

    def _crossed(self, now: float, stream: str) -> None:
        self._streams[stream].popleft()
        if self._streams[stream]:
            self._at(max(now, self._streams[stream][0].behind), self._cross, stream)

    def _there(self, now: float, copy: _Copy) -> None:
        self._line.copies[copy.source, copy.index, copy.target] = copy.asked, now
        self._arrive(now, copy.readers)


def _time(operation: flat.Operation, seconds: dict[str, float], factor: float) -> float:
    """What an operation takes on its device, or on its ring."""
    if operation.link:
        return seconds[operation.name]
    if operation.type in flat.FREE:
        return 0.0
    kind = operation.device[:3]
    cost = seconds.get(operation.name, 0.0)
    # Numbers that say how a tensor lies are computed by the host while it launches.
    small = max(operation.sizes, default=0) <= 64 and not operation.type.startswith(flat.UPDATES)
    if kind == "GPU" and small and cost * factor <= 1e-6:
        return 0.0
    return max(cost * (factor if kind == "GPU" else 1.0), links.LAUNCH[kind])
