"""Where the time of a step goes, from one that ran under TensorFlow's profiler.

Goes in: a step that runs during a :class:`Recording`.  Comes out: a :class:`Sample`: of each tower,
each of its stages, and of split, merge and update, how long at least one operation was running.

An operation belongs to the part of the step in whose name scope it is; those of eager code have
none, and are not measured.  A part's time is that of the union of its operations' intervals.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import datasets as datasets_lib
from towerstrategy.extras.report import quiet
from towerstrategy.placement import devices as devices_lib, names, scopes

_WINDOW = "towerstrategy_sample"
# Seconds: about what starting a step's operations, and looking at them, takes.  Of CPU devices the
# profiler leaves out what takes less than 8000 cycles, so that a shorter time may be none at all.
SHORT = 1e-3
# A tower's part of a loop that turns for all towers is in the scope of the loop, done once; the
# body of a tower's own loop is named after tower 0, whose trace it is, within the tower's scope.
_SCOPE = re.compile(rf"(?:.*?/)?tower_(?P<tower>\d+)_[A-Z]+_\d+(?=[/:]|$)|(?:^|.*?/)(?:"
                    rf"(?P<merge>merge)|(?P<split>{datasets_lib.SCOPE}(?:_\d+)?))(?=[/:]|$)")
_UPDATE = re.compile(rf"(?:^|/){scopes.UPDATE}(?:_\d+)?(?=[/:]|$)")
_OPERATION = re.compile(r"(?<!:):_?[A-Z]\w*$")
_CROSSING = re.compile(r":(?:Collective\w*|_(?:Host)?(?:Send|Recv))$")
_GET_NEXT = re.compile(r"IteratorGetNext\w*Op::DoCompute$")

# A part of the step: a tower's number, the numbers of a tower and its stage, or one of "merge",
# "update", "split", "input".
Part = Any
Interval = tuple[int, int]  # picoseconds


@dataclasses.dataclass(frozen=True)
class Sample:
    """One step's time by part, in seconds.

    Attributes:
      step: from the call of the step to its end.
      towers: by tower, the time in which at least one of its operations was running.
      merge: the same for what is done once for all towers, the update left out.
      update: the same for the optimizer.
      split: the same for the split, in the input pipeline, beside the step.
      input: how long the step waited for its batch.
      steps: how many steps ran in the sampled call; the times above are of one of them.
      stages: by tower and stage, the time in which at least one operation of the stage's layers was
        running; empty where a tower is one device.
    """

    step: float
    towers: tuple[float, ...]
    merge: float
    update: float
    split: float
    input: float
    steps: int = 1
    stages: tuple[tuple[float, ...], ...] = ()

    @property
    def too_short(self) -> bool:
        """Whether what towers do takes so little time that idle shares say nothing of them."""
        return max(self.towers, default=0.) < min(SHORT, self.step / 10)

    def idle(self, tower: int, stage: int | None = None) -> float:
        """The share of the step in which no operation of ``tower``, or its stage, was running."""
        busy = self.towers[tower] if stage is None else self.stages[tower][stage]
        return 1 - min(busy / self.step, 1)


def begin(what: str) -> Recording | None:
    """Begins to record; None where someone else does, or, with a warning of ``what``, none can."""
    with quiet.harmless(what), contextlib.suppress(tf.errors.AlreadyExistsError):
        return Recording(what)
    return None


class Recording:
    """A profile that is being taken, from here to :meth:`end`; ``cost`` are the seconds it took."""

    def __init__(self, what: str) -> None:
        self._what, begun = what, time.perf_counter()
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(
                prefix="towerstrategy_", ignore_cleanup_errors=True))
            # Without options: the defaults are right, and TensorFlow 2.21 warns of each given.
            with quiet.profiler():
                tf.profiler.experimental.start(self._folder)
            self._kept = stack.pop_all()
        self._start = time.perf_counter()
        self.cost = self._start - begun
        self._window = tf.profiler.experimental.Trace(_WINDOW)
        self._window.__enter__()

    def of(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns; where it raises, nothing is kept."""
        try:
            return call()
        except BaseException:
            with self._kept, contextlib.suppress(Exception):
                self._window.__exit__(None, None, None)
                _stop(save=False)
            raise

    def end(self, placement: devices_lib.Placement) -> Sample | None:
        """Ends it; the sample of it, see :func:`read`, or None with a warning."""
        found, ended = None, time.perf_counter()
        with quiet.harmless(self._what):
            if not placement.on_cpu:
                self.of(tf.test.experimental.sync_devices)
            self._window.__exit__(None, None, None)
            ended = time.perf_counter()
            with self._kept:
                _stop(save=True)
                found = read([_tf.read_profile(path.read_bytes())
                              for path in pathlib.Path(self._folder).rglob("*.xplane.pb")],
                             ended - self._start, placement)
        self.cost += time.perf_counter() - ended
        return found


def read(spaces: Iterable[Any], seconds: float, placement: devices_lib.Placement) -> Sample:
    """The sample in a profile (``XSpace`` messages); ``seconds``, if it does not say how long."""
    intervals = _intervals(spaces, placement)
    window = next(iter(intervals[_WINDOW, True]), None)
    steps = max(len(intervals["input", True]), 1)

    def time_of(part: Part, where: str = "/device:CPU:0") -> float:
        return _covered(intervals[part, names.kind_of(where) == "CPU"], window) / steps

    step = seconds if window is None else (window[1] - window[0]) / 1e12
    return Sample(step / steps, tuple(map(time_of, range(len(placement.devices)),
                                          placement.devices)),
                  time_of("merge", placement.merge), time_of("update", placement.merge),
                  time_of("split"), time_of("input"), steps,
                  tuple(tuple(time_of((tower, stage), where) for stage, where in enumerate(row))
                        for tower, row in enumerate(placement.rows)))


def _stop(save: bool) -> None:
    with quiet.profiler(), quiet.freed_overwritten():
        tf.profiler.experimental.stop(save=save)


def _covered(intervals: Iterable[Interval], window: Interval | None) -> float:
    """The seconds, within ``window``, in which there was one of ``intervals`` or several."""
    covered, end = 0, 0
    for first, last in sorted(intervals):
        if window is not None:
            first, last = max(first, window[0]), min(last, window[1])
        first = max(first, end)
        if last > first:
            covered, end = covered + last - first, last
    return covered / 1e12


def _intervals(spaces: Iterable[Any], placement: devices_lib.Placement
               ) -> Mapping[tuple[Part, bool], list[Interval]]:
    """When each part of the step ran, on the host or (False) on accelerators."""
    found: dict[tuple[Part, bool], list[Interval]] = collections.defaultdict(list)
    alone = len(placement.towers) == 1 and not placement.rows
    parts_of = functools.cache(lambda name: _parts(name, alone, placement.micro_batches))
    for plane in (plane for space in spaces for plane in space.planes):
        on_host = plane.name.startswith("/host:")
        of_key = {key: parts_of(event.name) for key, event in plane.event_metadata.items()}
        # What an accelerator runs has the operation that started it in ``tf_op``.
        named = {key for key, stat in plane.stat_metadata.items() if stat.name == "tf_op"}
        for line in plane.lines:
            if not on_host and not line.name.startswith("Stream"):
                continue  # made from the streams' own
            of_data = line.name.startswith("tf_data")  # is not the only tower's
            for event in line.events:
                for part in of_key[event.metadata_id] if on_host else parts_of(next(
                        (stat.str_value or plane.stat_metadata[stat.ref_value].name
                         for stat in event.stats if stat.metadata_id in named), "")):
                    start = line.timestamp_ns * 1000 + event.offset_ps
                    if not (alone and of_data and part == 0):
                        found[part, on_host].append((start, start + event.duration_ps))
    return found


def _parts(name: str, alone: bool, micro_batches: int) -> Sequence[Part]:
    """The parts for which an operation, ``name:Type``, counts; ``alone``: if there is one tower."""
    if name == _WINDOW or _GET_NEXT.search(name):
        return [_WINDOW if name == _WINDOW else "input"]
    if not _OPERATION.search(name):
        return []
    part: Part = 0
    if (found := _SCOPE.match(name)) is None:
        # Where a lone tower waits for those of other machines, it is not busy.
        if not alone or name.startswith("EagerLocalExecute") or _CROSSING.search(name):
            return []
    elif found["merge"]:
        part = "update" if _UPDATE.search(name, found.end()) else "merge"
    else:
        part = "split" if found["split"] else int(found["tower"]) // micro_batches
    stage = scopes.stage_in(name)
    return [part] if stage is None else [part, (part, stage)]
