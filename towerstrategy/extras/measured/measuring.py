"""``shares="measured"``: the towers' times decide what each gets.

Goes in: the steps of a training.  Comes out: now and then a sample of one (:mod:`sample`), and,
when enough of them say so, other shares.

:data:`ROUND` samples make a round; a tower's rate, its rows over the time in which it was busy, is
the median of the samples since the last change of shares.  Shares change only where the slowest
tower gets faster by more than samples differ: by much after one round, by little after two; and not
where it takes less than :data:`sample.SHORT`.  A change that made no step shorter is undone, and
the next waits for more rounds: where towers take as long for few rows as for many, whoever has more
rows looks faster.  Once settled, rounds are so rare that they cost next to nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy.extras.measured import shares as shares_lib
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
    """Measures the towers of one strategy.

    Args:
      placement: where the strategy runs.
      workers: their collectives; None with a single machine.

    Attributes:
      shares: those of all towers, as they are now.
      rounds: how many times the towers have been measured.
      changes: how many times shares were changed, those taken back included.
    """

    def __init__(self, placement: devices_lib.Placement, workers: Workers | None) -> None:
        self.rounds = self.changes = 0
        self._placement, self._workers = placement, workers
        here = len(placement.towers)
        self.shares = shares_lib.MeasuredShares(workers.replicas if workers else here, here)
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

    def step(self, call: Callable[[], Any]) -> Any:
        """Calls ``call``, a step or several in one, and takes a sample where it is time to."""
        recording = self._begin()
        if recording is None:
            return call()
        result = recording.of(call)
        self._end(recording)
        return result

    def between(self) -> None:
        """A loop of Python's takes its next batch: a step ends here, and another begins."""
        self.end_of_loop()
        self._recording = self._begin()

    def end_of_loop(self) -> None:
        """The loop's last step has ended."""
        recording, self._recording = self._recording, None
        if recording is not None:
            self._end(recording)

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

        Args:
          rates: rows a second.
          errors: the standard errors of the rates' logarithms.
          rows: of a batch.
        """
        self._found = None
        if rows < len(rates):
            return
        self._decided += 1
        now = shares_lib.rows_for(self.shares.units, rows)
        took = shares_lib.slowest(now, rates)
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
        better = shares_lib.rows_for(expected, rows)
        equal = shares_lib.rows_for([1.] * len(rates), rows)
        if shares_lib.slowest(equal, expected) <= (1 + NEAR) * shares_lib.slowest(better, expected):
            better = equal
        gain = took / shares_lib.slowest(better, expected) - 1
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

    def _end(self, recording: sample_lib.Recording) -> None:
        sample = recording.end(self._placement)
        if sample is not None:
            self._add(sample)
        self._spent += recording.cost

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
