"""When each operation of a step runs, and when each tensor crosses.

Goes in: operations with their costs, and a machine.  Comes out: a :class:`Timeline`.

A device runs one operation at a time, in the order in which they are ready, as a GPU's compute
stream does; a tensor starts to cross when it is made, once for each device that takes it.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Sequence

from benchmarks import flat, links


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What came out.

    Attributes:
      seconds: from the start of the step to its end.
      busy: seconds that each device computes.
      link_seconds: seconds that each link is held.
      link_bytes: bytes over each link.
      spans: when each operation begins, and when it ends.
      arrivals: when what an operation made has come to another device, by its number and device.
    """

    seconds: float
    busy: dict[str, float]
    link_seconds: dict[str, float]
    link_bytes: dict[str, int]
    spans: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    arrivals: dict[tuple[int, str], float] = dataclasses.field(default_factory=dict)

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
    readers: dict[int, dict[str, list[int]]] = collections.defaultdict(
        lambda: collections.defaultdict(list))
    missing = []
    for number, operation in enumerate(operations):
        sources = {(source, operations[source].sizes[index]) for source, index in operation.inputs}
        before = {source for source, _ in sources} | set(operation.waits)
        missing.append(len(before))
        for source in before:
            readers[source][operation.device].append(number)
    taken: dict[tuple[int, str], int] = collections.defaultdict(int)
    for operation in operations:
        for source, index in set(operation.inputs):
            key = source, operation.device
            if index < 64:
                taken[key] |= 1 << index
    free: dict[str, float] = collections.defaultdict(float)
    busy: dict[str, float] = collections.defaultdict(float)
    link_bytes: dict[str, int] = collections.defaultdict(int)
    events = [(0.0, number, -1) for number, count in enumerate(missing) if not count]
    heapq.heapify(events)
    end = 0.0

    def arrive(number: int, at: float) -> None:
        missing[number] -= 1
        latest[number] = max(latest[number], at)
        if not missing[number]:
            heapq.heappush(events, (latest[number], number, -1))

    latest = [0.0] * len(operations)
    spans = [(0.0, 0.0)] * len(operations)
    arrivals: dict[tuple[int, str], float] = {}
    while events:
        now, number, transfer = heapq.heappop(events)
        operation = operations[number]
        if transfer < 0:
            time = _time(operation, seconds, factor)
            occupied = operation.link or operation.device
            start = max(now, free[occupied]) if time else now
            done = start + time
            spans[number] = start, done
            if time:
                free[occupied] = done
                busy[occupied] += time
            end = max(end, done)
            for place, (device, waiting) in enumerate(readers[number].items()):
                if device == operation.device:
                    for reader in waiting:
                        arrive(reader, done)
                else:
                    heapq.heappush(events, (done, number, place))
            continue
        device, waiting = list(readers[number].items())[transfer]
        mask = taken[number, device]
        size = sum(size for index, size in enumerate(operation.sizes) if mask >> index & 1)
        way = machine.way(operation.device, device)
        there = now
        for link, rate in way.items() if size else ():
            held = size / (rate * 1e9)
            free[link] = max(now, free[link]) + held
            busy[link] += held
            link_bytes[link] += size
            there = max(there, free[link])
        there += links.LATENCY if mask else 0.0
        arrivals[number, device] = there
        for reader in waiting:
            arrive(reader, there)
    devices = {operation.device for operation in operations}
    return Timeline(end, {name: busy[name] for name in devices},
                    {name: time for name, time in busy.items() if name not in devices},
                    dict(link_bytes), spans, arrivals)


def _time(operation: flat.Operation, seconds: dict[str, float], factor: float) -> float:
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
