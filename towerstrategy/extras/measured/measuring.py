"""``shares="measured"``: the towers' times decide what each gets.

Goes in: the steps of a training.  Comes out: now and then a sample of one (:mod:`sample`), and,
when enough of them say so, other shares, by which batches are split from then on, in eager code and
in pipelines and functions that were traced before: docs/unequal_devices.md says when.

:data:`ROUND` samples make a round; a tower's rate, its rows over the time in which it was busy, is
the median of the samples since the last change of shares.
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
from towerstrategy.placement.workers import Workers

ROUND = 3
# How much more time the slowest tower must take than it could, for shares to change.
GAIN, CLEAR_GAIN = 0.05, 0.25
# How many standard errors the slowest and the fastest tower's times must lie apart.
SURE = 3
# Shares that are so near to equal ones are equal.
NEAR = 0.05
_KEPT_ROUNDS = 3
# The share of a training's time that may be spent, once shares are settled.
MOST = 0.005
# Steps that trace, or are fed with batches that were split before shares changed.
_WARM_UP = 3
_IN_FLIGHT = 8
# So many changes are made as soon as can be.
_EAGER_CHANGES = 8
_WHAT = 'measure the towers of shares="measured"'


class _Change(NamedTuple):
    """What was before shares changed last."""

    units: tuple[int, ...]  # the shares
    rows: int  # of a batch
    rates: Sequence[float]
    took: float  # seconds until all towers had ended


def of(placement: devices_lib.Placement, workers: Workers | None) -> Measuring | None:
    """What measures the towers; None where shares are no measured ones, or there is one tower."""
    number = workers.replicas if workers else len(placement.towers)
    wanted = placement.shares_from == asked_shares.MEASURED and number > 1
    return Measuring(placement, workers) if wanted else None


class Measuring:
    """Measures the towers of one strategy; ``shares`` are those of all towers, as they are now."""

    def __init__(self, placement: devices_lib.Placement, workers: Workers | None) -> None:
        self.rounds = self.changes = 0  # changes taken back included
        self._placement, self._workers = placement, workers
        here = len(placement.towers)
        self.shares = MeasuredShares(workers.replicas if workers else here, here)
        self._steps, self._next = 0, _WARM_UP
        self._rates: list[list[float]] = []
        self._left = ROUND  # samples of this round
        self._decided = 0  # how often since shares have changed
        self._tried: _Change | None = None
        self._patience = 1  # after so many rounds shares may change
        self._found: tuple[list[float], list[float]] | None = None  # rates, standard errors
        self._rows = [0] * len(placement.towers)
        self._start = time.perf_counter()
        self._spent = 0.0
        self._recording: sample_lib.Recording | None = None

    def anew(self) -> Measuring:
        """The same for another strategy of the same towers, which knows nothing yet."""
        return Measuring(self._placement, self._workers)

    def step(self, call: Callable[[Any], Any], iterator: Any) -> Any:
        """Calls ``call``, a step or several in one, and takes a sample where it is time to."""
        self.between()
        try:
            return call(iterator)
        finally:
            self.end_of_loop()

    def between(self) -> None:
        """A loop of Python's takes its next batch: a step ends here, and another begins."""
        self.end_of_loop()
        self._recording = self._begin()

    def end_of_loop(self) -> None:
        """The loop's last step has ended."""
        recording, self._recording = self._recording, None
        if recording is not None:
            sample = recording.end(self._placement)
            if sample is not None:
                self._add(sample)
            self._spent += recording.cost

    def agree(self) -> None:
        """All machines' iterators begin: decides, if there is a round of each machine's towers."""
        if self._workers is None:
            return
        nothing = [0.] * len(self._rows)
        own = tf.constant([*(self._found or (nothing, nothing)), self._rows], tf.float64)
        rates, errors, rows = tf.transpose(
            self._workers.gather_rows([tf.transpose(own)])[0]).numpy()
        if min(rates) > 0:
            self._decide(rates.tolist(), errors.tolist(), int(sum(rows)))

    def _decide(self, rates: Sequence[float], errors: Sequence[float], rows: int) -> None:
        """Changes the shares of all towers, if their rates, and the rows of a batch, say so.

        ``rates`` are rows a second, ``errors`` the standard errors of their logarithms.
        """
        self._found = None
        if rows < len(rates):
            return
        self._decided += 1
        now = rows_for(self.shares.units, rows)
        took = slowest(now, rates)
        tried, expected = self._tried, list(rates)
        if tried and tried.rows == rows and self._decided <= _KEPT_ROUNDS:
            if self._decided == 1 and tried.took / took - 1 < GAIN:
                self._patience *= 2
                self._change(tried.units, None)
                return
            # Rates may depend on the rows: one that fell as rows came does not rise as they go.
            expected = [min(pair) for pair in zip(rates, tried.rates)]
        if took < sample_lib.SHORT:
            return
        better = rows_for(expected, rows)
        equal = rows_for([1.] * len(rates), rows)
        if slowest(equal, expected) <= (1 + NEAR) * slowest(better, expected):
            better = equal
        gain = took / slowest(better, expected) - 1
        clear = self._decided == 1 or self._patience > 1
        if self._decided < self._patience or gain < (CLEAR_GAIN if clear else GAIN):
            return
        if not _lie_apart([count / rate for count, rate in zip(now, rates)], errors):
            return
        self._change(better, _Change(self.shares.units, rows, rates, took))

    def _change(self, units: Sequence[int], tried: _Change | None) -> None:
        self.shares.choose(units)
        self._tried, self._rates, self._left, self._decided = tried, [], ROUND, 0
        self.changes += 1
        self._next = self._steps + _IN_FLIGHT

    def _begin(self) -> sample_lib.Recording | None:
        """A recording, if it is time for one and one can be taken."""
        number, self._steps = self._steps, self._steps + 1
        if number < self._next or not self._affords():
            return None
        recording = sample_lib.begin(_WHAT)
        if recording is None:  # later it may be possible
            self._next = 2 * self._steps + _IN_FLIGHT
        return recording

    def _affords(self) -> bool:
        settled = self._decided > 1 or self.changes >= _EAGER_CHANGES
        return not settled or self._left < ROUND or self._spent * (
            1 + 1 / max(self.rounds, 1)) <= MOST * (time.perf_counter() - self._start)

    def _add(self, sample: sample_lib.Sample) -> None:
        rows = self.shares.rows()
        if not min(sample.towers) > 0 or not min(rows) > 0:
            # A last batch with fewer rows than towers; or eager steps, which are not measured.
            self._next = self._steps + self._steps // 8
            return
        self._rows = rows
        self._rates.append([count / busy for count, busy in zip(rows, sample.towers)])
        self._left -= 1
        if self._left:
            return
        self._rates = self._rates[-ROUND * max(_KEPT_ROUNDS, self._patience):]
        self._found = (np.median(self._rates, 0).tolist(),
                       (np.std(np.log(self._rates), 0, ddof=1) / len(self._rates) ** .5).tolist())
        self.rounds, self._left = self.rounds + 1, ROUND
        if self._workers is None:
            self._decide(*self._found, sum(rows))


def _lie_apart(times: Sequence[float], errors: Sequence[float]) -> bool:
    """Whether the longest time is longer than the shortest for more than that samples differ."""
    order = np.argsort(times)
    ends = [order[0], order[-1]]
    return math.log(times[ends[1]] / times[ends[0]]) >= SURE * math.hypot(
        *(errors[tower] for tower in ends))


class MeasuredShares:
    """The shares of all towers, as they are now: equal ``units`` until others are chosen.

    ``towers`` are on all machines, of which this one has so many ``here``.
    """

    def __init__(self, towers: int, here: int) -> None:
        self.units: tuple[int, ...] = (1,) * towers
        with tf.init_scope(), tf.device("CPU:0"):
            # Not tf.Variable: they must not become variables of a strategy.
            self._variable = _tf.ResourceVariable(tf.ones([towers], tf.int64), trainable=False)
            # The rows of a batch, then those of each tower here.
            self._split = _tf.ResourceVariable(tf.zeros([1 + here], tf.int64), trainable=False)

    def choose(self, units: Sequence[int]) -> None:
        """From now on rows are split by ``units``."""
        self.units = tuple(units)
        self._variable.assign(tf.constant(self.units, tf.int64))
        self._split.assign(tf.zeros_like(self._split))

    def now(self) -> rows_lib.Units:
        """The units: numbers in eager code, in a function a tensor that is read when it runs."""
        return self.units if tf.executing_eagerly() else self._variable.read_value()

    def of_iterator(self) -> tf.data.Dataset:
        """The units, without end: in each iterator as they are when it begins."""
        begin = tf.data.Dataset.range(1).map(lambda _: self._variable.read_value())
        return begin.flat_map(lambda units: tf.data.Dataset.from_tensors(units).repeat())

    def note(self, rows: rows_lib.Rows, sizes: rows_lib.Sizes) -> None:
        """Remembers how many rows of ``rows`` this machine's towers got."""
        # Pipelines run ahead, and the last batch of many has fewer rows: the largest one counts.
        now = tf.concat([tf.cast([rows], tf.int64), tf.cast(sizes, tf.int64)], 0)
        before = self._split.read_value()
        self._split.assign(tf.where(now[0] >= before[0], now, before), read_value=False)

    def rows(self) -> list[int]:
        """The rows of this machine's towers, of the largest batch since shares have changed."""
        return self._split.numpy().tolist()[1:]

    def cut(self, rows: rows_lib.Rows) -> tuple[rows_lib.Sizes, slice, None]:
        """Cuts a batch that stays on this machine, see :data:`rows.CutRows`."""
        sizes = rows_lib.split_rows(rows, len(self.units), self.now())
        self.note(rows, sizes)
        return sizes, slice(None), None

    def left_out_of_checkpoints(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """``dataset``, whose iterators can be saved in a checkpoint, which has no shares."""
        # TensorFlow refuses pipelines that have state of other kinds, unless asked; now it warns.
        if dataset.options().experimental_external_state_policy is not None:
            return dataset
        options = tf.data.Options()
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.WARN
        return dataset.with_options(options)


def rows_for(rates: Sequence[float], rows: int) -> list[int]:
    """``rows`` split so that towers of these ``rates`` (rows a second) end together.

    None gets less than one.

    >>> rows_for([3., 1.], 8), rows_for([1000., 1.], 8)
    ([6, 2], [7, 1])
    """
    sizes = rows_lib.split_rows(rows, len(rates), rows_lib.units_of(rates))
    while min(sizes) < 1 and rows >= len(rates):
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    return sizes


def slowest(sizes: Sequence[int], rates: Sequence[float]) -> float:
    """The seconds after which all towers have ended."""
    return max(size / rate for size, rate in zip(sizes, rates))
