"""Measures step times with ``shares``, for a slow tower and for equal towers.

Goes in: the flags of ``python -m benchmarks``.  Comes out: two tables, the targets with pass or
MISS, and ``unequal.json`` in the output folder.

    python -m benchmarks unequal                      # half an hour on two idle cores
    python -m benchmarks unequal --unequal_factor=5 --unequal_rounds=10

Two towers train in one process, on logical CPU devices.  An operation gets one thread, so each
tower has a core of its own on a machine with two.  Each tower repeats the work of one layer; tower
1 as often as tower 0, or ``--unequal_factor`` times as often.  Each round measures all shares in
turn, for a few steps each, so that other load on the machine affects all alike:

- with a slow tower, fixed shares ``[k, 1]`` with k below and above the factor are measured, and
  ``"measured"`` is compared with the best of them, by median step times;
- with equal towers, ``"measured"`` is compared with no shares, by the time of all steps, as only
  few steps have the cost of measuring.
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
from towerstrategy.extras import measured
from towerstrategy.placement.asked_shares import MEASURED

TOWERS = ("CPU:0", "CPU:1")
SLOW = 1  # which tower repeats its work more often
OVER_BEST, OVER_NONE = 1.10, 1.01
_BATCH, _WIDTH, _REPEATS = 96, 512, 4
_SMALL_WIDTH = 16
_SHARES_OVER_FACTOR = (1 / 3, 2 / 3, 5 / 6, 1., 7 / 6, 4 / 3, 5 / 3)  # fixed shares to measure
_WARM_UP = 3  # steps of each turn, which may wait for their data
_MAX_SETTLING_TURNS = 12  # turns in which measured shares may change before measurements count


@dataclasses.dataclass
class Figures:
    """The figures of one choice of shares.

    Attributes:
      rows: the rows of a batch that each tower gets at the end.
      step_ms: the median over turns of the median step time.
      all_s: the seconds of all steps together.
      cpu_s: the CPU seconds of the process in these steps.
    """

    rows: list[int]
    step_ms: float
    all_s: float
    cpu_s: float


class Job:
    """A model that trains with one choice of shares.

    Args:
      keras: ``keras`` or ``tf_keras``.
      shares: the argument of the strategy.
      factor: the work of tower :data:`SLOW` over that of the other tower.
      small: whether to train a small model.
    """

    def __init__(self, keras: Any, shares: Any, factor: int, small: bool) -> None:
        self.strategy = towerstrategy.TowerStrategy(list(TOWERS), shares=shares)
        width = _SMALL_WIDTH if small else _WIDTH
        with self.strategy.scope():
            keras.utils.set_random_seed(1)
            inputs = keras.Input([width])
            outputs = _repeating_layer(keras, factor, width)(inputs)
            self._model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
            self._model.compile("adam", "mse")
        random = np.random.default_rng(0)
        x = random.standard_normal((4 * _BATCH, width)).astype("float32")
        rows = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
        self._batches = rows.batch(_BATCH).cache().repeat().prefetch(2)
        self._clock = _clock(keras)
        self._medians: list[float] = []
        self._all_s = self._cpu_s = 0.

    def turn(self, steps: int, counts: bool = True) -> None:
        """Trains for ``steps`` steps, after the warm-up; records their times if it ``counts``."""
        self._clock.ends.clear()
        self._model.fit(self._batches, steps_per_epoch=_WARM_UP + steps, shuffle=False, verbose=0,
                        callbacks=[self._clock])
        walls, cpus = zip(*self._clock.ends[_WARM_UP - 1:])
        if counts:
            self._medians.append(statistics.median(np.diff(walls).tolist()))
            self._all_s += walls[-1] - walls[0]
            self._cpu_s += cpus[-1] - cpus[0]

    def settle(self, steps: int) -> None:
        """Trains until measured shares do not change, at most :data:`_MAX_SETTLING_TURNS` turns."""
        self.turn(steps, counts=False)
        measuring = self.strategy.extended.inputs.measuring
        rounds, changes = 0, -1
        for _ in range(_MAX_SETTLING_TURNS if measuring is not None else 0):
            self.turn(steps, counts=False)
            if measuring.changes == changes and measuring.rounds > rounds > 1:
                break
            rounds, changes = measuring.rounds, measuring.changes

    def figures(self) -> Figures:
        """The figures of all turns that counted."""
        shares = self.strategy.shares or [1.] * len(TOWERS)
        return Figures(measured.rows_for(shares, _BATCH), 1e3 * statistics.median(self._medians),
                       self._all_s, self._cpu_s)


def _repeating_layer(keras: Any, factor: int, width: int) -> Any:
    """A layer that returns its input after some work, ``factor`` times as much on tower 1."""
    matrix = np.random.default_rng(1).standard_normal((width, width)) / np.sqrt(width)

    class Repeating(keras.layers.Layer):

        def call(self, x: Any) -> Any:
            context = tf.distribute.get_replica_context()
            number = 0 if context is None else context.replica_id_in_sync_group
            times = tf.where(tf.equal(number, SLOW), factor * _REPEATS, _REPEATS)
            weights = tf.constant(matrix, tf.float32)
            _, result = tf.while_loop(
                lambda turn, _: turn < times,
                lambda turn, result: (turn + 1, tf.tanh(tf.matmul(result, weights))),
                (tf.constant(0), tf.stop_gradient(x)))
            return x + 1e-30 * result  # rounds to x

    return Repeating()


def _clock(keras: Any) -> Any:
    """A callback that records wall time and CPU time of the process at the end of each step."""

    class Clock(keras.callbacks.Callback):
        ends: list[tuple[float, float]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            float(logs["loss"])  # waits for the end of the step
            self.ends.append((time.perf_counter(), time.process_time()))

    clock = Clock()
    clock.ends = []
    return clock


def choices(factor: int) -> list[Any]:
    """The shares to compare, ``"measured"`` first; None means equal shares."""
    if factor == 1:
        return [MEASURED, None]
    return [MEASURED, None, *([round(factor * part, 2), 1.] for part in _SHARES_OVER_FACTOR)]


def measure(keras: Any, factor: int, rounds: int, steps: int, small: bool) -> dict[str, Figures]:
    """The figures of each choice of shares, by its ``repr``.

    Args:
      keras: ``keras`` or ``tf_keras``.
      factor: the work of the slow tower over that of the other; 1 for equal towers.
      rounds: the number of rounds, in each of which each choice has a turn.
      steps: the steps of a turn.
      small: whether to train a small model.
    """
    jobs = {repr(shares): Job(keras, shares, factor, small) for shares in choices(factor)}
    for job in jobs.values():
        job.settle(steps)
    for number in range(rounds):
        for job in list(jobs.values())[::1 if number % 2 else -1]:
            job.turn(steps)
    return {name: job.figures() for name, job in jobs.items()}


def verdicts(slowed: dict[str, Figures], equal: dict[str, Figures]) -> list[results.Verdict]:
    """The verdicts, from the figures with a slow tower and with equal towers."""
    name, none = repr(MEASURED), equal["None"]
    measured_equal = equal[name]
    fixed = {shares: figures for shares, figures in slowed.items() if shares != name}
    best = min(fixed, key=lambda shares: fixed[shares].step_ms)
    return [
        results.Verdict(f'slow tower: step with "measured" over the best fixed, {best}',
                        slowed[name].step_ms / fixed[best].step_ms, OVER_BEST),
        results.Verdict('equal towers: difference of the towers\' rows with "measured"',
                        max(measured_equal.rows) - min(measured_equal.rows), 0),
        results.Verdict('equal towers: time with "measured" over no shares',
                        measured_equal.all_s / none.all_s, OVER_NONE),
        results.Verdict('equal towers: CPU time with "measured" over no shares',
                        measured_equal.cpu_s / none.cpu_s, OVER_NONE)]


def format_table(figures: dict[str, Figures]) -> str:
    """A line for each choice of shares."""
    none = figures["None"]
    return table.columns(("shares", "rows", "step ms", "/ None", "all steps, s", "CPU s"), [
        [name, "+".join(map(str, values.rows)), f"{values.step_ms:.2f}",
         f"{values.step_ms / none.step_ms:.3f}", f"{values.all_s:.1f}", f"{values.cpu_s:.1f}"]
        for name, values in figures.items()])


def main(keras: Any, factor: int, rounds: int, steps: int, small: bool, out: pathlib.Path,
         title: str) -> None:
    """Measures with a slow tower and with equal towers, prints tables, writes ``unequal.json``."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    towerstrategy.split_cpu(len(TOWERS))
    print(f"{title}\n{_BATCH} rows, tower {SLOW} has {factor} times the work of the other tower",
          flush=True)
    slowed = measure(keras, factor, rounds, steps, small)
    print(f"{format_table(slowed)}\n\nequal towers", flush=True)
    equal = measure(keras, 1, rounds, steps, small)
    targets = verdicts(slowed, equal)
    print(f"{format_table(equal)}\n\n{table.targets(targets)}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "unequal.json").write_text(json.dumps({
        "title": title, "factor": factor, "rounds": rounds, "steps": steps, "small": small,
        **{name: {shares: dataclasses.asdict(values) for shares, values in each.items()}
           for name, each in (("slowed", slowed), ("equal", equal))},
        "targets": [{**dataclasses.asdict(each), "holds": each.holds} for each in targets]},
        indent=1))
    print(f"\n{out / 'unequal.json'}")
