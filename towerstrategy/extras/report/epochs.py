"""Measures the epochs of a training: rows of the towers, times of each part of a step.

Goes in: a model that trains; its rows are counted, and now and then a step is sampled.  Comes out:
an :class:`Epoch` for each epoch, whose ``str`` is a table.  After the training nothing stays
installed.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import iterators
from towerstrategy.extras.report import description, quiet, sample as sample_lib
from towerstrategy.extras.report.sample import Sample
from towerstrategy.placement import devices as devices_lib, names

# Calls of the train function at the start that are not typical: the first one traces.
_WARM_UP = 2
# A training of fewer seconds may spend as much on samples as one of this many.
_SHORT = 20

# Returns each tower's rows so far; None if the elements have no rows to count.
Count = Callable[[], "list[int] | None"]


def followed(towers: int, dataset: tf.data.Dataset,
             rows_of: Callable[[Any], Any]) -> tuple[tf.data.Dataset, Count | None]:
    """An :data:`iterators.Follow`: the dataset, in which rows are counted, and the count."""
    has_rows = True

    def add(*element: Any) -> Any:
        nonlocal has_rows
        rows = rows_of(element)
        has_rows = has_rows and rows is not None
        if rows is not None:
            counts.assign_add(rows, read_value=False)
        return element if len(element) > 1 else element[0]

    with quiet.harmless("count the towers' rows"):
        with tf.init_scope(), tf.device("CPU:0"):
            # Neither tf.Variable nor made in a trace: it must not become the strategy's variable.
            counts = _tf.ResourceVariable(tf.zeros([towers], tf.int64), trainable=False)
        options = tf.data.Options()
        # With a buffer after the count, rows would count before a step takes them.
        options.experimental_optimization.inject_prefetch = False
        return (_tf.map_in_place(dataset, add).with_options(options),
                lambda: counts.numpy().tolist() if has_rows else None)
    return dataset, None


@dataclasses.dataclass(frozen=True)
class Part:
    """A line of the table: a tower, a stage of a tower, or another part of the step.

    Attributes:
      name: such as ``"tower 0"``, ``"tower 0, stage 1"`` or ``"merge"``.
      device: where it runs.
      rows: a tower's rows in this epoch; in eager steps, which run on the merge device, "merge" has
        the rows of all towers.  None if they were not counted, and for other parts.
      seconds: the time of a step in which at least one operation of this part was running; for a
        stage, an operation of its layers.
      idle: the share of the step in which no operation of a tower or stage was running; None for
        other parts.
    """

    name: str
    device: str
    rows: int | None
    seconds: float | None
    idle: float | None

    @property
    def is_tower(self) -> bool:
        """Whether this is a tower."""
        return self.name.startswith("tower") and not self.is_stage

    @property
    def is_stage(self) -> bool:
        """Whether this is a stage of a tower."""
        return ", stage " in self.name


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The measurements of ``TowerReport`` for an epoch; ``str`` makes a table of them.

    Attributes:
      number: the number of the epoch, from 0, as in Keras.
      seconds: its duration, with validation.
      parts: the lines of the table.
      sample: the times of one step; None if no step has been sampled yet.
      sampled_in: the epoch of the sampled step.
      shares: the towers' shares at its end if they are unequal or measured, else None.
    """

    number: int
    seconds: float
    parts: tuple[Part, ...]
    sample: Sample | None
    sampled_in: int | None
    shares: tuple[float, ...] | None = None

    @property
    def rows(self) -> tuple[int | None, ...]:
        """The towers' rows in this epoch."""
        return tuple(part.rows for part in self.parts if part.is_tower)

    @property
    def sampled(self) -> Sample | None:
        """The sample if its step belongs to this epoch, else None."""
        return self.sample if self.sampled_in == self.number else None

    @property
    def bubble(self) -> float | None:
        """The mean of the stages' idle shares of the sampled step; None without stages."""
        idle = [part.idle for part in self.parts if part.is_stage and part.idle is not None]
        return sum(idle) / len(idle) if idle else None

    def __str__(self) -> str:
        counted = [part.rows for part in self.parts if part.rows is not None]
        title = f"epoch {self.number + 1}: {sum(counted):,} rows in {self.seconds:.3g} s"
        too_short = self.sample is not None and self.sample.too_short
        if self.sample is None:
            title += "; no step sampled yet"
        else:
            when = "" if self.sampled else f" of epoch {(self.sampled_in or 0) + 1}"
            title += f"; a step{when} took {1e3 * self.sample.step:.3g} ms"
        if too_short:
            title += (", too short to measure idle shares: its operations kept no tower busy for a "
                      "millisecond")
        elif self.bubble is not None:
            title += f"; bubble {self.bubble:.0%}"
        if self.shares is not None:
            title += f"; shares {', '.join(f'{share:g}' for share in self.shares)}"
        cells = [(part.name, part.device, "" if part.rows is None else f"{part.rows:,}",
                  "" if part.seconds is None else f"{1e3 * part.seconds:.2f}",
                  "" if part.idle is None or too_short else f"{part.idle:.0%}")
                 for part in self.parts]
        header = ("part", "device", "rows", "busy ms a step", "idle")
        return f"{title}\n{description.table(header, cells, numbers=(2, 3, 4))}"

    @property
    def brief(self) -> str:
        """The table; one line if the sampled step is of an earlier epoch, whose table has it."""
        if self.sample is None or self.sampled:
            return f"\n{self}"
        rows = ", ".join("?" if rows is None else f"{rows:,}" for rows in self.rows)
        return (f"epoch {self.number + 1}: {self.seconds:.3g} s; rows of the towers: {rows}; "
                f"no step sampled since epoch {(self.sampled_in or 0) + 1}")


class Watch:
    """Watches one training of a TowerStrategy's model, step by step: ``extended.modes.watch``.

    ``most`` is the share of the training's time that samples may take.
    """

    sample: Sample | None = None  # the latest
    sampled_in: int | None = None  # the epoch of the latest sample
    tried_in: int | None = None  # the epoch of the latest try; there is one try per epoch
    _spent = _sample_cost = 0.0  # seconds that all samples, and the last one, took
    _epoch = _calls = 0
    _from_call = _WARM_UP

    def __init__(self, model: Any, most: float) -> None:
        extended = model.distribute_strategy.extended
        self._placement: devices_lib.Placement = extended.placement
        self._eager = bool(model.run_eagerly or tf.config.functions_run_eagerly())
        self.model, self._most = model, most
        self._start = self._epoch_start = time.perf_counter()
        self._before: dict[Count | None, list[int] | None] = {}
        self._modes, extended.modes.watch = extended.modes, self
        iterators.counting.follow = functools.partial(followed, len(self._placement.towers))

    def begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._calls = 0
        self._before = {count: count() for count in self._before if count is not None}
        self._epoch_start = time.perf_counter()

    def end(self) -> Epoch:
        """Ends an epoch and returns its measurements."""
        seconds = time.perf_counter() - self._epoch_start
        shares = self.model.distribute_strategy.shares
        # If there are others, sample neither the first step nor the last, which may be smaller.
        self._from_call = max(0, min(_WARM_UP, self._calls - 2))
        return Epoch(self._epoch, seconds, tuple(self._parts(self._rows_taken())), self.sample,
                     self.sampled_in, shares and tuple(shares))

    def _parts(self, rows: list[int] | None) -> Iterator[Part]:
        placement, merged = self._placement, None
        sample: Any = self.sample
        if rows is not None and self._eager and len(placement.towers) > 1:  # on the merge device
            merged, rows = sum(rows), [0] * len(rows)
        for tower, device in enumerate(placement.devices):
            row = placement.rows[tower] if placement.rows else ()
            yield Part(f"tower {tower}", f"{len(row)} stages" if row else names.short_name(device),
                       None if rows is None else rows[tower], sample and sample.towers[tower],
                       sample and sample.idle(tower))
            for stage, name in enumerate(row):
                yield Part(f"tower {tower}, stage {stage}", names.short_name(name), None,
                           sample and sample.stages[tower][stage],
                           sample and sample.idle(tower, stage))
        for name in ("merge", "update", "split", "input"):
            yield Part(name, placement.merge_name if name in ("merge", "update") else "CPU:0",
                       merged if name == "merge" else None, sample and getattr(sample, name), None)

    def close(self) -> None:
        """Ends watching; the training has ended or failed."""
        iterators.counting.follow = self._modes.watch = None

    def step(self, call: Callable[[Any], Any], iterator: Any) -> Any:
        """Calls ``call``, which runs one step or several, and samples it if it is time to."""
        self._before.setdefault(
            getattr(iterator, "row_count", None), [0] * len(self._placement.towers))
        number, self._calls = self._calls, self._calls + 1
        is_time = (number >= self._from_call and self.tried_in != self._epoch
                   and not self._eager and self._spent + self._sample_cost <= self._most
                   * max(time.perf_counter() - self._start, _SHORT))
        try:
            return self._sampled(call, iterator) if is_time else call(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # the end of the data and the epoch
            raise
        except BaseException:
            self.close()
            raise

    def _sampled(self, call: Callable[[Any], Any], iterator: Any) -> Any:
        self.tried_in = self._epoch
        recording = sample_lib.begin("sample a step")
        if recording is None:
            return call(iterator)
        result = recording.run(lambda: call(iterator))
        sample = recording.end(self._placement)
        if sample is not None:
            self.sample, self.sampled_in = sample, self._epoch
        self._sample_cost = recording.cost
        self._spent += recording.cost
        return result

    def _rows_taken(self) -> list[int] | None:
        """Each tower's rows in this epoch, from all iterators of train steps; None if unknown."""
        total = [0] * len(self._placement.towers)
        for count, before in self._before.items():
            now = None if count is None else count()
            if now is None or before is None:
                return None
            total = [sum(rows) - then for *rows, then in zip(total, now, before)]
        parts = self._placement.micro_batches
        return [sum(total[first:first + parts]) for first in range(0, len(total), parts)]
