"""Watches one training: the rows that its towers are trained on, and now and then a step.

Goes in: a model that trains, from the beginning of its training to the end.  Comes out: rows, times
and the latest :class:`Sample`, and nothing that stays behind.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import iterators
from towerstrategy.extras.report import quiet, sample as sample_lib
from towerstrategy.extras.report.sample import Sample
from towerstrategy.placement import devices as devices_lib

# Calls of the training function in a training that are not typical: the first traces.
_WARM_UP = 2
# A training of fewer seconds may be looked at as much as one of these.
_SHORT = 20

_WRAPPED = "_towerstrategy_wrapped"


# Gives the rows so far, by tower; None where the elements have no rows to be counted.
Count = Callable[[], "list[int] | None"]


def followed(towers: int, first: int, dataset: tf.data.Dataset,
             rows_of: Callable[[Any], Any]) -> tuple[tf.data.Dataset, Count | None]:
    """An :data:`iterators.Follow` of these towers: a dataset, counted, and its count."""
    with quiet.harmless("count the towers' rows"):
        return _counted(slice(first, first + towers), dataset, rows_of)
    return dataset, None


def _counted(here: slice, dataset: tf.data.Dataset,
             rows_of: Callable[[Any], Any]) -> tuple[tf.data.Dataset, Count]:
    with tf.init_scope(), tf.device("CPU:0"):
        # Neither tf.Variable nor traced: it must not become a variable of the strategy.
        counts = _tf.ResourceVariable(tf.zeros([here.stop - here.start], tf.int64), trainable=False)
    has_rows = True

    def add(*element: Any) -> Any:
        nonlocal has_rows
        rows = rows_of(element)
        has_rows = has_rows and rows is not None
        if rows is not None:  # of this machine's towers, or of all
            counts.assign_add(rows if rows.shape == counts.shape else rows[here], read_value=False)
        return element if len(element) > 1 else element[0]

    options = tf.data.Options()
    # A buffer after this one would count what nobody has taken.
    options.experimental_optimization.inject_prefetch = False
    return (_tf.map_in_place(dataset, add).with_options(options),
            lambda: counts.numpy().tolist() if has_rows else None)


class Watch:
    """Looks at one training of a TowerStrategy's model, by wrapping ``model.train_function``.

    ``most`` is the share of the training's time that may be spent.
    """

    rows: list[int] | None = None  # the towers', of the last epoch; None where not counted
    sample: Sample | None = None  # the latest
    sampled_in: int | None = None  # the epoch it is of
    tried_in: int | None = None  # the epoch in which one was last tried; there is one try an epoch
    seconds = spent = _sample_cost = 0.0  # of the last epoch, of all samples, of the last one
    _epoch = _calls = 0
    _from_call = _WARM_UP

    def __init__(self, model: Any, most: float) -> None:
        extended = model.distribute_strategy.extended
        self.placement: devices_lib.Placement = extended.placement
        self._eager = bool(model.run_eagerly or tf.config.functions_run_eagerly())
        # Whether one device does eager steps, which are not timed, with all rows.
        self.once = len(self.placement.towers) > 1 and self._eager
        self._model, self._most = model, most
        self._start = self._epoch_start = time.perf_counter()
        self._before: dict[Count | None, list[int] | None] = {}
        # A training that an error ended between two steps may have left a wrapper.
        self._function = getattr(model.train_function, _WRAPPED, model.train_function)
        model.train_function = self._wrapper = self._wrapped(self._function)
        iterators.counting.follow = functools.partial(
            followed, len(self.placement.towers), extended.first_replica)

    def begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._calls = 0
        self._before = {count: count() for count in self._before if count is not None}
        self._epoch_start = time.perf_counter()

    def end(self) -> None:
        self.seconds = time.perf_counter() - self._epoch_start
        self.rows = self._rows_taken()
        # Neither an epoch's first step nor its last, which may have fewer rows, if others are left.
        self._from_call = max(0, min(_WARM_UP, self._calls - 2))

    def close(self) -> None:
        """The training has ended, well or not."""
        iterators.counting.follow = None
        if self._model.train_function is self._wrapper:
            self._model.train_function = self._function

    def _wrapped(self, function: Any) -> Any:
        @functools.wraps(function)  # with what Keras' hooks have noted of it
        def train_function(iterator: Any) -> Any:
            count = getattr(iterator, "row_count", None)
            if count not in self._before:
                self._before[count] = [0] * len(self.placement.towers)
            number, self._calls = self._calls, self._calls + 1
            wanted = (number >= self._from_call and self.tried_in != self._epoch
                      and not self._eager and self.spent + self._sample_cost <= self._most
                      * max(time.perf_counter() - self._start, _SHORT))
            try:
                return self._sampled(iterator) if wanted else function(iterator)
            except BaseException:
                self.close()
                raise

        setattr(train_function, _WRAPPED, function)
        return train_function

    def _sampled(self, iterator: Any) -> Any:
        self.tried_in = self._epoch
        recording = sample_lib.begin("sample a step")
        if recording is None:
            return self._function(iterator)
        result = recording.of(lambda: self._function(iterator))
        found = recording.end(self.placement)
        if found is not None:
            self.sample, self.sampled_in = found, self._epoch
        self._sample_cost = recording.cost
        self.spent += recording.cost
        return result

    def _rows_taken(self) -> list[int] | None:
        """The rows taken in this epoch from the iterators that were trained on, by tower."""
        total = [0] * len(self.placement.towers)
        for count, before in self._before.items():
            now = None if count is None else count()
            if now is None or before is None:
                return None
            total = [sum(rows) - then for *rows, then in zip(total, now, before)]
        parts = self.placement.micro_batches
        return [sum(total[first:first + parts]) for first in range(0, len(total), parts)]
