"""Measures the time of each part of a step by TensorFlow's profiler.

Goes in: a step that runs during a :class:`Recording`.  Comes out: a :class:`Sample`: the time in
which at least one operation was running, for each tower, stage, and split, merge and update.

An operation's name scope tells its part of the step.  Operations of eager code have no name scope
and are not measured.  A part's time is the length of the union of its operations' intervals.
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
# Seconds: about what it takes to start and to profile a step's operations.  On CPU devices the
# profiler omits operations of less than 8000 cycles, so a shorter time may even be zero.
SHORT = 1e-3
# The first tower in a name counts, also behind "merge": a loop for all towers runs once, and each
# tower's scope is inside.  In the body of a tower's own loop, tower 0's is inside the tower's.
_SCOPE = re.compile(rf"(?:.*?/)?tower_(?P<tower>\d+)_[A-Z]+_\d+(?=[/:]|$)|(?:^|.*?/)(?:"
                    rf"(?P<merge>merge)|(?P<split>{datasets_lib.SCOPE}(?:_\d+)?))(?=[/:]|$)")
_UPDATE = re.compile(rf"(?:^|/){scopes.UPDATE}(?:_\d+)?(?=[/:]|$)")
_OPERATION = re.compile(r"(?<!:):_?[A-Z]\w*$")
_CROSSING = re.compile(r":(?:Collective\w*|_(?:Host)?(?:Send|Recv))$")
_GET_NEXT = re.compile(r"IteratorGetNext\w*Op::DoCompute$")

# A part of the step: a tower's number, a tuple of tower and stage, or one of "merge", "update",
# "split", "input".
Part = Any
Interval = tuple[int, int]  # picoseconds


@dataclasses.dataclass(frozen=True)
class Sample:
    """The seconds that each part of one step took.

    Attributes:
      step: the time from the call of the step to its end.
      towers: for each tower, the time in which at least one of its operations was running.
      merge: the same for operations that run once for all towers, without the update.
      update: the same for the optimizer.
      split: the same for the split, which the input pipeline does beside the step.
      input: how long the step waited for its batch.
      steps: how many steps ran in the sampled call; the times above are means over them.
      stages: for each tower and stage, the time in which at least one operation of the stage's
        layers was running; empty if a tower is one device.
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
        """Whether the towers' operations take too little time for idle shares to mean anything."""
        return max(self.towers, default=0.) < min(SHORT, self.step / 10)

    def idle(self, tower: int, stage: int | None = None) -> float:
        """The share of the step in which no operation of ``tower``, or its stage, was running."""
        busy = self.towers[tower] if stage is None else self.stages[tower][stage]
        return 1 - min(busy / self.step, 1)


def begin(what: str) -> Recording | None:
    """A new recording; None if another profile runs or, with a warning about ``what``, it fails."""
    with quiet.harmless(what), contextlib.suppress(tf.errors.AlreadyExistsError):
        return Recording(what)
    return None


class Recording:
    """A profile from its creation to :meth:`end`; ``cost`` is the overhead in seconds."""

    def __init__(self, what: str) -> None:
        self._what, before = what, time.perf_counter()
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(
                prefix="towerstrategy_", ignore_cleanup_errors=True))
            # Without options: the defaults are right, and TensorFlow 2.21 warns about each option.
            with quiet.profiler():
                tf.profiler.experimental.start(self._folder)
            self._cleanup = stack.pop_all()
        self._start = time.perf_counter()
        self.cost = self._start - before
        self._window = tf.profiler.experimental.Trace(_WINDOW)
        self._window.__enter__()

    def run(self, call: Callable[[], Any]) -> Any:
        """The result of ``call``; if it raises, the recording ends without a sample."""
        try:
            return call()
        except BaseException:
            with self._cleanup, contextlib.suppress(Exception):
                self._window.__exit__(None, None, None)
                _stop(save=False)
            raise

    def end(self, placement: devices_lib.Placement) -> Sample | None:
        """Ends the recording; returns its sample, see :func:`read`, or None with a warning."""
        sample, end = None, time.perf_counter()
        with quiet.harmless(self._what):
            if not placement.on_cpu:
                self.run(tf.test.experimental.sync_devices)
            self._window.__exit__(None, None, None)
            end = time.perf_counter()
            with self._cleanup:
                _stop(save=True)
                sample = read([_tf.read_profile(path.read_bytes())
                               for path in pathlib.Path(self._folder).rglob("*.xplane.pb")],
                              end - self._start, placement)
        self.cost += time.perf_counter() - end
        return sample


def read(spaces: Iterable[Any], seconds: float, placement: devices_lib.Placement) -> Sample:
    """The sample of a profile (``XSpace`` messages).

    ``seconds`` is the step's time in case the profile does not have it.
    """
    intervals = _intervals(spaces, placement)
    window = next(iter(intervals[_WINDOW, True]), None)
    steps = max(len(intervals["input", True]), 1)

    def time_of(part: Part, device: str = "/device:CPU:0") -> float:
        return _covered(intervals[part, names.kind_of(device) == "CPU"], window) / steps

    step = seconds if window is None else (window[1] - window[0]) / 1e12
    return Sample(step / steps, tuple(map(time_of, range(len(placement.devices)),
                                          placement.devices)),
                  time_of("merge", placement.merge), time_of("update", placement.merge),
                  time_of("split"), time_of("input"), steps,
                  tuple(tuple(time_of((tower, stage), device) for stage, device in enumerate(row))
                        for tower, row in enumerate(placement.rows)))


def _stop(save: bool) -> None:
    with quiet.profiler(), quiet.overwriting_freed_memory():
        tf.profiler.experimental.stop(save=save)


def _covered(intervals: Iterable[Interval], window: Interval | None) -> float:
    """The seconds in ``window`` that ``intervals`` cover."""
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
    """The intervals in which each part of the step ran: on the host (True) or on accelerators."""
    intervals: dict[tuple[Part, bool], list[Interval]] = collections.defaultdict(list)
    alone = len(placement.towers) == 1 and not placement.rows
    parts_of = functools.cache(lambda name: _parts(name, alone, placement.micro_batches))
    for plane in (plane for space in spaces for plane in space.planes):
        on_host = plane.name.startswith("/host:")
        parts_by_key = {key: parts_of(event.name) for key, event in plane.event_metadata.items()}
        # The event of an accelerator's kernel has the name of its operation as ``tf_op``.
        op_keys = {key for key, stat in plane.stat_metadata.items() if stat.name == "tf_op"}
        for line in plane.lines:
            if not on_host and not line.name.startswith("Stream"):
                continue  # other lines are derived from the streams
            of_data = line.name.startswith("tf_data")  # does not belong to a lone tower
            for event in line.events:
                for part in parts_by_key[event.metadata_id] if on_host else parts_of(next(
                        (stat.str_value or plane.stat_metadata[stat.ref_value].name
                         for stat in event.stats if stat.metadata_id in op_keys), "")):
                    start = line.timestamp_ns * 1000 + event.offset_ps
                    if not (alone and of_data and part == 0):
                        intervals[part, on_host].append((start, start + event.duration_ps))
    return intervals


def _parts(name: str, alone: bool, micro_batches: int) -> Sequence[Part]:
    """The parts to which an operation, ``name:Type``, belongs; ``alone``: there is one tower."""
    if name == _WINDOW or _GET_NEXT.search(name):
        return [_WINDOW if name == _WINDOW else "input"]
    if not _OPERATION.search(name):
        return []
    part: Part = 0
    if (found := _SCOPE.match(name)) is None:
        # A lone tower that waits for other machines is not busy.
        if not alone or name.startswith("EagerLocalExecute") or _CROSSING.search(name):
            return []
    elif found["merge"]:
        part = "update" if _UPDATE.search(name, found.end()) else "merge"
    else:
        part = "split" if found["split"] else int(found["tower"]) // micro_batches
    stage = scopes.stage_in(name)
    return [part] if stage is None else [part, (part, stage)]
