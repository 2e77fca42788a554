"""Measures what ``shares`` bring where a tower is slower, and what they cost where none is.

Goes in: the flags of ``python -m benchmarks``.  Comes out: two tables, the targets with pass or
MISS, and ``unequal.json`` in the output folder.

    python -m benchmarks unequal                      # half an hour on two idle cores
    python -m benchmarks unequal --unequal_factor=5 --unequal_rounds=10

Two towers train in one process, on logical CPU devices; an operation gets one thread, so a tower
has a core of its own where there are two.  Tower 1 repeats the work of one layer: as often as
tower 0, or ``--unequal_factor`` times as often.  All choices of shares are measured in turns, a few
steps each, so that what else the machine does meets all alike:

- with a slower tower the fixed shares ``[k, 1]`` on both sides of the factor are tried, and
  ``"measured"`` is held against the best of them, by medians of steps;
- with equal towers ``"measured"`` is held against no shares, by the time of all steps together, as
  what measuring costs is in few of them.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any

import numpy as np
import tensorflow as tf

import towerstrategy
from benchmarks import results, table
from towerstrategy.extras.measured import measuring as measured
from towerstrategy.placement.asked_shares import MEASURED

TOWERS = ("CPU:0", "CPU:1")
SLOW = 1  # which tower repeats its work more often
OVER_BEST, OVER_NONE = 1.10, 1.01
_BATCH, _WIDTH, _TIMES = 96, 512, 4
_SMALL_WIDTH = 16
_TRIED = (1 / 3, 2 / 3, 5 / 6, 1., 7 / 6, 4 / 3, 5 / 3)  # of the factor: shares to try
_WARM_UP = 3  # steps of each turn, which wait for their data
_MOST_TURNS = 12  # to wait for shares that stay


@dataclasses.dataclass
class Found:
    """What was measured of one choice of shares.

    Attributes:
      rows: of a batch, by tower, at the end.
      step_ms: the median of all turns' medians.
      all_s: seconds of all steps together.
      cpu_s: the process' CPU seconds in them.
    """

    rows: list[int]
    step_ms: float
    all_s: float
    cpu_s: float


class Job:
    """A model that trains with one choice of shares.

    Args:
      keras: the Keras to train with.
      shares: as given to the strategy.
      factor: how many times as often tower :data:`SLOW` repeats its work.
      small: whether to train a small model.
    """

    def __init__(self, keras: Any, shares: Any, factor: int, small: bool) -> None:
        self.strategy = towerstrategy.TowerStrategy(list(TOWERS), shares=shares)
        width = _SMALL_WIDTH if small else _WIDTH
        with self.strategy.scope():
            keras.utils.set_random_seed(1)
            inputs = keras.Input([width])
            worked = _repeating(keras, factor, width)(inputs)
            self._model = keras.Model(inputs, keras.layers.Dense(1)(worked))
            self._model.compile("adam", "mse")
        random = np.random.default_rng(0)
        x = random.standard_normal((4 * _BATCH, width)).astype("float32")
        rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
        self._batches = rows.batch(_BATCH).cache().repeat().prefetch(2)
        self._clock = _clock(keras)
        self._medians: list[float] = []
        self._all = self._cpu = 0.

    def turn(self, steps: int, counts: bool = True) -> None:
        """Trains for so many steps; their times are kept where it ``counts``."""
        self._clock.ends.clear()
        self._model.fit(self._batches, steps_per_epoch=_WARM_UP + steps, shuffle=False, verbose=0,
                        callbacks=[self._clock])
        walls, cpus = zip(*self._clock.ends[_WARM_UP - 1:])
        if counts:
            self._medians.append(statistics.median(np.diff(walls).tolist()))
            self._all += walls[-1] - walls[0]
            self._cpu += cpus[-1] - cpus[0]

    def settle(self, steps: int) -> None:
        """Trains until measured shares stay as they are, or :data:`_MOST_TURNS` turns."""
        self.turn(steps, counts=False)
        measuring = self.strategy.extended.inputs.measuring
        seen = (0, -1)
        for _ in range(_MOST_TURNS if measuring is not None else 0):
            self.turn(steps, counts=False)
            if measuring.changes == seen[1] and measuring.rounds > seen[0] > 1:
                break
            seen = measuring.rounds, measuring.changes

    def found(self) -> Found:
        """What was measured so far."""
        shares = self.strategy.shares or [1.] * len(TOWERS)
        return Found(measured.rows_for(shares, _BATCH), 1e3 * statistics.median(self._medians),
                     self._all, self._cpu)


def _repeating(keras: Any, factor: int, width: int) -> Any:
    """A layer that works on its rows, on one tower ``factor`` times as often, and changes nothing.
    """
    matrix = np.random.default_rng(1).standard_normal((width, width)) / np.sqrt(width)

    class Repeating(keras.layers.Layer):

        def call(self, x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            number = 0 if context is None else context.replica_id_in_sync_group
            times = tf.where(tf.equal(number, SLOW), factor * _TIMES, _TIMES)
            weights = tf.constant(matrix, tf.float32)
            _, made = tf.while_loop(
                lambda turn, _: turn < times,
                lambda turn, made: (turn + 1, tf.tanh(tf.matmul(made, weights))),
                (tf.constant(0), tf.stop_gradient(x)))
            return x + 1e-30 * made  # which rounds to x

    return Repeating()


def _clock(keras: Any) -> Any:
    """A callback that notes when steps end: wall time, and CPU time of the process."""

    class Clock(keras.callbacks.Callback):
        ends: list[tuple[float, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            float(logs["loss"])  # the step has ended when it is known
            self.ends.append((time.perf_counter(), time.process_time()))

    clock = Clock()
    clock.ends = []
    return clock


def choices(factor: int) -> list[Any]:
    """The shares to compare, ``"measured"`` first; None is equal ones."""
    if factor == 1:
        return [MEASURED, None]
    return [MEASURED, None, *([round(factor * part, 2), 1.] for part in _TRIED)]


def measure(keras: Any, factor: int, rounds: int, steps: int, small: bool) -> dict[str, Found]:
    """What was found, by the shares as they are written in code.

    Args:
      keras: the Keras to train with.
      factor: how many times as often the slow tower repeats its work; 1 for equal towers.
      rounds: how many turns each choice gets.
      steps: of a turn.
      small: whether to train a small model.
    """
    jobs = {repr(shares): Job(keras, shares, factor, small) for shares in choices(factor)}
    for job in jobs.values():
        job.settle(steps)
    for number in range(rounds):
        for job in list(jobs.values())[::1 if number % 2 else -1]:
            job.turn(steps)
    return {name: job.found() for name, job in jobs.items()}


def verdicts(slowed: dict[str, Found], equal: dict[str, Found]) -> list[results.Verdict]:
    """The targets."""
    own, others = _apart(slowed)
    best = min(others, key=lambda name: others[name].step_ms)
    alike, plain = _apart(equal)
    none = plain["None"]
    return [
        results.Verdict(f'a slower tower: step with "measured" over the best fixed, {best}',
                        own.step_ms / others[best].step_ms, OVER_BEST),
        results.Verdict('equal towers: rows by which "measured" has settled apart',
                        max(alike.rows) - min(alike.rows), 0),
        results.Verdict('equal towers: time with "measured" over no shares',
                        alike.all_s / none.all_s, OVER_NONE),
        results.Verdict('equal towers: CPU time with "measured" over no shares',
                        alike.cpu_s / none.cpu_s, OVER_NONE)]


def _apart(found: dict[str, Found]) -> tuple[Found, dict[str, Found]]:
    name = repr(MEASURED)
    return found[name], {other: mine for other, mine in found.items() if other != name}


def shown(found: dict[str, Found]) -> str:
    """A line for each choice of shares."""
    none = found["None"]
    return table.columns(("shares", "rows", "step ms", "/ None", "all steps, s", "CPU s"), [
        [name, "+".join(map(str, mine.rows)), f"{mine.step_ms:.2f}",
         f"{mine.step_ms / none.step_ms:.3f}", f"{mine.all_s:.1f}", f"{mine.cpu_s:.1f}"]
        for name, mine in found.items()])


def main(keras: Any, factor: int, rounds: int, steps: int, small: bool, out: pathlib.Path,
         title: str) -> None:
    """Measures, prints, writes."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    towerstrategy.split_cpu(len(TOWERS))
    print(f"{title}\n{_BATCH} rows, tower {SLOW} repeats its work {factor} times as often",
          flush=True)
    slowed = measure(keras, factor, rounds, steps, small)
    print(f"{shown(slowed)}\n\nequal towers", flush=True)
    equal = measure(keras, 1, rounds, steps, small)
    found = verdicts(slowed, equal)
    print(f"{shown(equal)}\n\n{table.targets(found)}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "unequal.json").write_text(json.dumps({
        "title": title, "factor": factor, "rounds": rounds, "steps": steps, "small": small,
        **{name: {shares: dataclasses.asdict(mine) for shares, mine in each.items()}
           for name, each in (("slowed", slowed), ("equal", equal))},
        "targets": [{**dataclasses.asdict(each), "holds": each.holds} for each in found]},
        indent=1))
    print(f"\n{out / 'unequal.json'}")
