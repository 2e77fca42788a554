"""``shares="measured"``: changes the towers' shares by their measured times.

Goes in: the steps of a training; some of them are sampled (:mod:`sample`).  Comes out: new shares
if enough samples call for them.  Batches are then split by the new shares, in eager code and in
pipelines and functions that were traced before.  docs/unequal_devices.md says when shares change.

:data:`ROUND` samples make a round.  A tower's rate in a sample is its rows divided by its busy
time; its rate is the median of the samples since the last change of shares.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib
from towerstrategy.extras.report import sample as sample_lib
from towerstrategy.placement import asked_shares, devices as devices_lib

ROUND = 3
# Shares change if the slowest tower takes this much more time than with better shares.
GAIN, CLEAR_GAIN = 0.05, 0.25
# Shares change if the slowest and fastest towers' times differ by so many standard errors.
SURE = 3
# Equal shares are taken if the slowest tower then takes at most this much more time.
NEAR = 0.05
_KEPT_ROUNDS = 3  # whose samples count; for as many, so do the rates before a change
# The share of a training's time that samples may take, once shares are settled.
MOST = 0.005
# Steps that trace, and steps whose batches were split before shares changed.
_WARM_UP = 3
_IN_FLIGHT = 8
# So many changes are made without a limit on the time that samples take.
_EAGER_CHANGES = 8
_WHAT = 'measure the towers of shares="measured"'


class _Change(NamedTuple):
    """The state before the last change of shares."""

    units: tuple[int, ...]  # the shares
    rows: int  # of a batch
    rates: Sequence[float]
    seconds: float  # of the slowest tower


def of(placement: devices_lib.Placement, workers: Any) -> Measuring | None:
    """The :class:`Measuring` of a strategy; None without measured shares or with one tower."""
    towers = workers.replicas if workers else len(placement.towers)
    measured = placement.shares_from == asked_shares.MEASURED and towers > 1
    return Measuring(placement, workers) if measured else None


class Measuring:
    """Measures the towers of one strategy; ``shares`` are the current shares of all towers."""

    def __init__(self, placement: devices_lib.Placement, workers: Any) -> None:
        self.rounds = self.changes = 0  # a change that is undone counts twice
        self._placement, self._workers = placement, workers
        local_towers = len(placement.towers)
        self.shares = MeasuredShares(workers.replicas if workers else local_towers, local_towers)
        self._steps, self._next_sample = 0, _WARM_UP
        self._rates: list[list[float]] = []  # of each sample since shares have changed
        self._decisions = 0  # since shares have changed
        self._last_change: _Change | None = None  # None if it was undone
        self._patience = 1  # decisions until shares may change
        self._result: tuple[list[float], list[float]] | None = None  # rates, standard errors
        self._rows = [0] * local_towers
        self._start = time.perf_counter()
        self._spent = 0.0
        self._recording: sample_lib.Recording | None = None

    def step(self, call: Callable[[Any], Any], iterator: Any) -> Any:
        """Calls ``call``, which runs one step or several, and samples it if it is time to."""
        self.between()
        try:
            return call(iterator)
        finally:
            self.end_of_loop()

    def between(self) -> None:
        """Ends a step and begins another: a Python loop takes its next batch."""
        self.end_of_loop()
        self._recording = self._begin()

    def end_of_loop(self) -> None:
        """Ends the last step of a loop."""
        recording, self._recording = self._recording, None
        if recording is not None:
            sample = recording.end(self._placement)
            if sample is not None:
                self._add(sample)
            self._spent += recording.cost

    def agree(self) -> None:
        """Decides on shares if all machines have a complete round; runs when iterators begin."""
        if self._workers is None:
            return
        zeros = [0.] * len(self._rows)
        local = tf.constant([*(self._result or (zeros, zeros)), self._rows], tf.float64)
        rates, errors, rows = tf.transpose(
            self._workers.gather_rows([tf.transpose(local)])[0]).numpy()
        if min(rates) > 0:
            self._decide(rates.tolist(), errors.tolist(), int(sum(rows)))

    def _decide(self, rates: Sequence[float], errors: Sequence[float], rows: int) -> None:
        """Changes the shares of all towers if their rates, for a batch of ``rows``, call for it.

        ``rates`` are in rows a second, ``errors`` are the standard errors of their logarithms.
        """
        self._result = None
        if rows < len(rates):
            return
        self._decisions += 1
        sizes = rows_for(self.shares.units, rows)
        seconds = slowest(sizes, rates)
        last, expected = self._last_change, list(rates)
        if last and last.rows == rows and self._decisions <= _KEPT_ROUNDS:
            if self._decisions == 1 and last.seconds / seconds - 1 < GAIN:
                self._patience *= 2
                self._change(last.units, None)
                return
            # A rate that fell with more rows may not rise with fewer, so take the lower one.
            expected = [min(pair) for pair in zip(rates, last.rates)]
        if seconds < sample_lib.SHORT:
            return
        better = rows_for(expected, rows)
        equal = rows_for([1.] * len(rates), rows)
        if slowest(equal, expected) <= (1 + NEAR) * slowest(better, expected):
            better = equal
        gain = seconds / slowest(better, expected) - 1
        needs_clear = self._decisions == 1 or self._patience > 1
        if self._decisions < self._patience or gain < (CLEAR_GAIN if needs_clear else GAIN):
            return
        if not _differ_clearly([size / rate for size, rate in zip(sizes, rates)], errors):
            return
        self._change(better, _Change(self.shares.units, rows, rates, seconds))

    def _change(self, units: Sequence[int], change: _Change | None) -> None:
        """Changes the shares; ``change`` is None if that undoes the last change."""
        self.shares.choose(units)
        self._last_change, self._rates, self._decisions = change, [], 0
        self.changes += 1
        self._next_sample = self._steps + _IN_FLIGHT

    def _begin(self) -> sample_lib.Recording | None:
        """A new recording; None if it is not time for one, or it fails."""
        number, self._steps = self._steps, self._steps + 1
        if number < self._next_sample or not self._may_spend():
            return None
        recording = sample_lib.begin(_WHAT)
        if recording is None:  # try again later
            self._next_sample = 2 * self._steps + _IN_FLIGHT
        return recording

    def _may_spend(self) -> bool:
        """Whether there is time for a sample; a round that has begun is completed."""
        settled = self._decisions > 1 or self.changes >= _EAGER_CHANGES
        return not settled or len(self._rates) % ROUND > 0 or self._spent * (
            1 + 1 / max(self.rounds, 1)) <= MOST * (time.perf_counter() - self._start)

    def _add(self, sample: sample_lib.Sample) -> None:
        rows = self.shares.rows()
        if not min(sample.towers) > 0 or not min(rows) > 0:
            # The last batch had fewer rows than towers, or steps are eager and not measured.
            self._next_sample = self._steps + self._steps // 8
            return
        self._rows = rows
        self._rates.append([count / busy for count, busy in zip(rows, sample.towers)])
        if len(self._rates) % ROUND:
            return
        self._rates = self._rates[-ROUND * max(_KEPT_ROUNDS, self._patience):]
        self._result = (np.median(self._rates, 0).tolist(),
                        (np.std(np.log(self._rates), 0, ddof=1) / len(self._rates) ** .5).tolist())
        self.rounds += 1
        if self._workers is None:
            self._decide(*self._result, sum(rows))


def _differ_clearly(times: Sequence[float], errors: Sequence[float]) -> bool:
    """Whether the longest and the shortest time differ by more than chance explains."""
    order = np.argsort(times)
    first, last = order[0], order[-1]
    return math.log(times[last] / times[first]) >= SURE * math.hypot(errors[first], errors[last])


class MeasuredShares:
    """The current shares of all towers: equal ``units`` until others are chosen.

    ``towers`` is the number of towers on all machines, ``local_towers`` on this one.
    """

    def __init__(self, towers: int, local_towers: int) -> None:
        self.units: tuple[int, ...] = (1,) * towers
        with tf.init_scope(), tf.device("CPU:0"):
            # Not tf.Variable: they must not become variables of a strategy.
            self._variable = _tf.ResourceVariable(tf.ones([towers], tf.int64), trainable=False)
            self._rows = _tf.ResourceVariable(tf.zeros([local_towers], tf.int64), trainable=False)

    def choose(self, units: Sequence[int]) -> None:
        """Splits rows by ``units`` from now on."""
        self.units = tuple(units)
        self._variable.assign(tf.constant(self.units, tf.int64))
        self._rows.assign(tf.zeros_like(self._rows))

    def now(self) -> rows_lib.Units:
        """The current units: numbers in eager code; in a graph, a tensor read when it runs."""
        return self.units if tf.executing_eagerly() else self._variable.read_value()

    def of_iterator(self) -> tf.data.Dataset:
        """An endless dataset of the units; an iterator keeps the units at its start."""
        begin = tf.data.Dataset.range(1).map(lambda _: self._variable.read_value())
        return begin.flat_map(lambda units: tf.data.Dataset.from_tensors(units).repeat())

    def note(self, sizes: rows_lib.Sizes) -> None:
        """Stores how many rows of a batch this machine's towers got."""
        # Pipelines run ahead, and the last batch often has fewer rows, so the largest one counts.
        now, before = tf.cast(sizes, tf.int64), self._rows.read_value()
        larger = tf.reduce_sum(now) >= tf.reduce_sum(before)
        self._rows.assign(tf.where(larger, now, before), read_value=False)

    def rows(self) -> list[int]:
        """The rows of this machine's towers in the largest batch since shares have changed."""
        return self._rows.numpy().tolist()

    def cut(self, rows: rows_lib.Rows) -> rows_lib.Sizes:
        """The rows of the towers of a single machine, see :data:`rows.CutRows`."""
        sizes = rows_lib.split_rows(rows, len(self.units), self.now())
        self.note(sizes)
        return sizes

    def left_out_of_checkpoints(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """``dataset`` with iterators that can be saved in a checkpoint, without the shares."""
        # By default TensorFlow refuses pipelines that read other state; with this option it warns.
        if dataset.options().experimental_external_state_policy is not None:
            return dataset
        options = tf.data.Options()
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.WARN
        return dataset.with_options(options)


def rows_for(rates: Sequence[float], rows: int) -> list[int]:
    """The sizes of a split of ``rows`` by which towers of these rates (rows a second) end together.

    Each tower gets at least one row.

    >>> rows_for([3., 1.], 8), rows_for([1000., 1.], 8)
    ([6, 2], [7, 1])
    """
    sizes = rows_lib.split_rows(rows, len(rates), rows_lib.units_of(rates))
    while min(sizes) < 1 and rows >= len(rates):
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    return sizes


def slowest(sizes: Sequence[int], rates: Sequence[float]) -> float:
    """The seconds that the slowest tower takes."""
    return max(size / rate for size, rate in zip(sizes, rates))
