"""Simulates when each operation of a step runs, and when each tensor crosses.

Goes in: operations with their costs, and a machine.  Comes out: a :class:`Timeline`.

It follows TensorFlow (files in ``tensorflow/core/common_runtime``).  Each device has an executor on
the host, which starts operations one by one, in the order in which they are ready
(``executor.cc``).  To start an operation on a GPU is to put a kernel into its compute stream; the
readers of the output on that GPU may start at once, so the host runs ahead.  Each tensor is sent
once to each device that reads it, by a send operation.  A GPU has one stream for copies to other
GPUs, one for copies to the host and one for copies from it.  A copy begins after all the kernels
that the compute streams of *both* ends hold when it is requested (``gpu/gpu_util.cc``:
``DeviceToDeviceCopy``, ``CopyGPUTensorToCPU``, ``CopyCPUTensorToGPU``; ``gpu/gpu_device.cc`` makes
the streams).  The readers start when the host sees the end of the copy (``gpu/gpu_event_mgr.cc``).
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import flat, links

_CONTROL = -1  # the index of a control output, which has no bytes


@dataclasses.dataclass
class Timeline:
    """A simulated step.

    Attributes:
      seconds: the step time.
      busy: the seconds in which each device computes.
      link_seconds: the seconds in which each link is busy.
      link_bytes: the bytes over each link.
      spans: the start and the end of each operation on its device.
      copies: the times at which the copy of an output to another device was requested and arrived,
        by the operation's number, the output's index and the device.
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
        """The link that is busy longest; "" if nothing crosses."""
        return max(self.link_seconds, key=lambda link: self.link_seconds[link], default="")


def run(operations: Sequence[flat.Operation], seconds: dict[str, float], machine: links.Machine,
        factor: float = 1.0) -> Timeline:
    """Simulates a step.

    Args:
      operations: the operations of the step.
      seconds: the time of each operation on a device at its peak, by name.
      machine: the machine.
      factor: a GPU takes ``factor`` times ``seconds``.
    """
    times = [_time(each, seconds, factor) for each in operations]
    return _Simulation(operations, times, machine).run()


@dataclasses.dataclass
class _Copy:
    """The copy of an output to another device."""

    source: int
    index: int
    target: str
    readers: list[int] = dataclasses.field(default_factory=list)
    earliest: float = 0.0  # when the compute streams of both ends have run what they held
    requested: float = 0.0


class _Simulation:
    """A simulation by events.  Executors start operations (numbers) and send copies."""

    def __init__(self, operations: Sequence[flat.Operation], times: Sequence[float],
                 machine: links.Machine) -> None:
        self._operations, self._times, self._machine = operations, times, machine
        self._timeline = Timeline([(0.0, 0.0)] * len(operations))
        self._local_readers: list[list[int]] = [[] for _ in operations]
        self._copies: list[dict[tuple[int, str], _Copy]] = [{} for _ in operations]
        self._pending = list(map(self._register_inputs, range(len(operations))))
        self._ready: dict[str, collections.deque[int | _Copy]] = collections.defaultdict(
            collections.deque)  # the queue of each device's executor
        self._running: set[str] = set()  # devices whose executor runs
        self._free_at: dict[str, float] = collections.defaultdict(float)  # of devices and links
        self._streams: dict[str, collections.deque[_Copy]] = collections.defaultdict(
            collections.deque)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._event_count = 0

    def run(self) -> Timeline:
        for number, count in enumerate(self._pending):
            if not count:
                self._enqueue(0.0, number)
        while self._events:
            now, _, handle, arguments = heapq.heappop(self._events)
            handle(now, *arguments)
        return self._timeline

    def _register_inputs(self, number: int) -> int:
        """Registers an operation as a reader of its inputs; returns the number of these."""
        operation = self._operations[number]
        inputs = {*operation.inputs, *((other, _CONTROL) for other in operation.waits)}
        for source, index in sorted(inputs):
            if self._operations[source].device == operation.device:
                self._local_readers[source].append(number)
            else:
                key = index, operation.device
                copy = self._copies[source].setdefault(key, _Copy(source, *key))
                copy.readers.append(number)
        return len(inputs)

    def _at(self, time: float, handle: Callable[..., None], *arguments: Any) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (time, self._event_count, handle, arguments))

    def _notify(self, now: float, readers: Sequence[int]) -> None:
        """An input of each of ``readers`` is there; enqueues those that have all inputs."""
        for reader in readers:
            self._pending[reader] -= 1
            if not self._pending[reader]:
                self._enqueue(now, reader)

    def _enqueue(self, now: float, work: int | _Copy) -> None:
        """Gives an operation or a copy to the executor of its device."""
        number = work.source if isinstance(work, _Copy) else work
        device = self._operations[number].device
        self._ready[device].append(work)
        if device not in self._running:
            self._running.add(device)
            self._at(now, self._execute_next, device)

    def _execute_next(self, now: float, device: str) -> None:
        """An executor starts the first operation or copy of its queue."""
        if not self._ready[device]:
            self._running.remove(device)
            return
        work = self._ready[device].popleft()
        if isinstance(work, _Copy):
            done = now + links.EXECUTOR
            self._at(done, self._request_copy, work)
        else:
            done = self._launch(now, work)
        self._at(done, self._execute_next, device)

    def _launch(self, now: float, number: int) -> float:
        """Starts an operation; returns the time at which the executor is free again."""
        operation, time = self._operations[number], self._times[number]
        host = operation.device.startswith("CPU")
        free = operation.type in flat.FREE
        starting = now if free else now + links.EXECUTOR + operation.starting
        begin = now if host else starting
        if time:
            occupied = operation.link or operation.device
            begin = max(begin, self._free_at[occupied], self._free_at[operation.device])
            self._free_at[occupied] = begin + time
            used = self._timeline.link_seconds if operation.link else self._timeline.busy
            used[occupied] += time
        end = begin + time
        self._timeline.spans[number] = begin, end
        self._timeline.seconds = max(self._timeline.seconds, end)
        # Readers may start when an operation of a CPU or of the ring has ended, but when a kernel
        # is in the stream.
        ahead = not (host or operation.link)
        self._at(starting if ahead else end, self._launched, number)
        return end if host else starting

    def _launched(self, now: float, number: int) -> None:
        for copy in self._copies[number].values():
            self._enqueue(now, copy)
        self._notify(now, self._local_readers[number])

    def _request_copy(self, now: float, copy: _Copy) -> None:
        """Adds a copy to its stream."""
        source, copy.requested = self._operations[copy.source].device, now
        # A copy of bytes waits for the target GPU, which may still use the memory that they go to.
        ends = [source] if source.startswith("GPU") and not self._size(copy) else [
            source, copy.target]
        copy.earliest = max(self._free_at[end] for end in ends if end.startswith("GPU"))
        stream = self._stream(copy)
        self._streams[stream].append(copy)
        if len(self._streams[stream]) == 1:
            self._at(max(now, copy.earliest), self._begin_copy, stream)

    def _stream(self, copy: _Copy) -> str:
        source = self._operations[copy.source].device
        return f"from {source}" if source.startswith("GPU") and copy.target.startswith("GPU") else \
            f"{source} to {copy.target}"

    def _size(self, copy: _Copy) -> int:
        sizes = self._operations[copy.source].sizes
        return sizes[copy.index] if 0 <= copy.index < len(sizes) else 0

    def _begin_copy(self, now: float, stream: str) -> None:
        """The first copy of a stream begins."""
        copy = self._streams[stream][0]
        size, end = self._size(copy), now
        route = self._machine.route(self._operations[copy.source].device, copy.target)
        for link, rate in route.items() if size else ():
            busy = size / (rate * 1e9)
            self._free_at[link] = max(now, self._free_at[link]) + busy
            self._timeline.link_seconds[link] += busy
            self._timeline.link_bytes[link] += size
            end = max(end, self._free_at[link])
        self._at(end, self._end_copy, stream)
        self._at(end + links.LATENCY, self._arrived, copy)

    def _end_copy(self, now: float, stream: str) -> None:
        self._streams[stream].popleft()
        if self._streams[stream]:
            self._at(max(now, self._streams[stream][0].earliest), self._begin_copy, stream)

    def _arrived(self, now: float, copy: _Copy) -> None:
        """The host sees that a copy has ended."""
        self._timeline.copies[copy.source, copy.index, copy.target] = copy.requested, now
        self._notify(now, copy.readers)


def _time(operation: flat.Operation, seconds: dict[str, float], factor: float) -> float:
    """The seconds of an operation on its device, or on its link."""
    if operation.link:
        return seconds[operation.name]
    if operation.type in flat.FREE:
        return 0.0
    kind = operation.device[:3]
    cost = seconds.get(operation.name, 0.0)
    # The host computes shapes while it launches kernels.
    small = max(operation.sizes, default=0) <= 64 and not operation.type.startswith(flat.UPDATES)
    if kind == "GPU" and small and cost * factor <= 1e-6:
        return 0.0
    return max(cost * (factor if kind == "GPU" else 1.0), links.LAUNCH[kind])
