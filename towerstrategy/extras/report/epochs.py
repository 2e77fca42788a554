"""What is known of an epoch of a training: rows and times of each part of a step.

Goes in: a model that trains, from the beginning of its training to the end, whose rows are counted
and of which now and then a step is sampled.  Comes out: an :class:`Epoch` each, whose ``str`` is a
table, and nothing that stays behind.
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

# Calls of the training function in a training that are not typical: the first traces.
_WARM_UP = 2
# A training of fewer seconds may be looked at as much as one of these.
_SHORT = 20

# Gives the rows so far, by tower; None where the elements have no rows to be counted.
Count = Callable[[], "list[int] | None"]


def followed(towers: int, first: int, dataset: tf.data.Dataset,
             rows_of: Callable[[Any], Any]) -> tuple[tf.data.Dataset, Count | None]:
    """An :data:`iterators.Follow` of these towers: a dataset, counted, and its count."""
    here, has_rows = slice(first, first + towers), True

    def add(*element: Any) -> Any:
        nonlocal has_rows
        rows = rows_of(element)
        has_rows = has_rows and rows is not None
        if rows is not None:  # of this machine's towers, or of all
            counts.assign_add(rows if rows.shape == counts.shape else rows[here], read_value=False)
        return element if len(element) > 1 else element[0]

    with quiet.harmless("count the towers' rows"):
        with tf.init_scope(), tf.device("CPU:0"):
            # Neither tf.Variable nor traced: it must not become a variable of the strategy.
            counts = _tf.ResourceVariable(tf.zeros([towers], tf.int64), trainable=False)
        options = tf.data.Options()
        # A buffer after this one would count what nobody has taken.
        options.experimental_optimization.inject_prefetch = False
        return (_tf.map_in_place(dataset, add).with_options(options),
                lambda: counts.numpy().tolist() if has_rows else None)
    return dataset, None


@dataclasses.dataclass(frozen=True)
class Part:
    """A line of the table: a tower, a stage of one, or another part of the step.

    Attributes:
      name: such as ``"tower 0"``, ``"tower 0, stage 1"`` or ``"merge"``.
      device: where it runs.
      rows: a tower's rows in this epoch, or those of "merge" in eager steps, which it does for all
        towers; None where they were not counted, and for other parts.
      seconds: in a step, the time in which at least one operation of it was running; of a stage,
        of its layers.
      idle: a tower's or stage's share of the step in which none was; None for other parts.
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
    """What ``TowerReport`` knows of an epoch; ``str`` makes the table of it.

    Attributes:
      number: the epoch, counted from 0 as Keras counts.
      seconds: how long it took, validation included.
      parts: the lines of the table.
      sample: the times of one step, or None: none has been sampled yet.
      sampled_in: the epoch that the sampled step belongs to.
      shares: the towers' shares at its end, where they are unequal or measured; else None.
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
        """The sample, where it is of a step of this epoch."""
        return self.sample if self.sampled_in == self.number else None

    @property
    def bubble(self) -> float | None:
        """What all stages were idle of the sampled step, on average; None without stages."""
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
        """The table, or one line where it would say again what an earlier epoch's has said."""
        if self.sample is None or self.sampled:
            return f"\n{self}"
        rows = ", ".join("?" if rows is None else f"{rows:,}" for rows in self.rows)
        return (f"epoch {self.number + 1}: {self.seconds:.3g} s; rows of the towers: {rows}; "
                f"no step sampled since epoch {(self.sampled_in or 0) + 1}")


class Watch:
    """Looks at one training of a TowerStrategy's model, step by step: ``extended.modes.watch``.

    ``most`` is the share of the training's time that may be spent.
    """

    sample: Sample | None = None  # the latest
    sampled_in: int | None = None  # the epoch it is of
    tried_in: int | None = None  # the epoch in which one was last tried; there is one try an epoch
    _spent = _sample_cost = 0.0  # seconds: of all samples, of the last one
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
        iterators.counting.follow = functools.partial(
            followed, len(self._placement.towers), extended.first_replica)

    def begin(self, epoch: int) -> None:
        self._epoch = epoch
        self._calls = 0
        self._before = {count: count() for count in self._before if count is not None}
        self._epoch_start = time.perf_counter()

    def end(self) -> Epoch:
        """The epoch that ends."""
        seconds = time.perf_counter() - self._epoch_start
        shares = self.model.distribute_strategy.shares
        # Neither an epoch's first step nor its last, which may have fewer rows, if others are left.
        self._from_call = max(0, min(_WARM_UP, self._calls - 2))
        return Epoch(self._epoch, seconds, tuple(self._parts(self._rows_taken())), self.sample,
                     self.sampled_in, shares and tuple(shares))

    def _parts(self, rows: list[int] | None) -> Iterator[Part]:
        placement, merged = self._placement, None
        sample: Any = self.sample
        if rows is not None and self._eager and len(placement.towers) > 1:  # one device does all
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
        """The training has ended, well or not."""
        iterators.counting.follow = self._modes.watch = None

    def step(self, call: Callable[[Any], Any], iterator: Any) -> Any:
        """Calls ``call``, a step or several in one, and takes a sample where it is time to."""
        self._before.setdefault(
            getattr(iterator, "row_count", None), [0] * len(self._placement.towers))
        number, self._calls = self._calls, self._calls + 1
        wanted = (number >= self._from_call and self.tried_in != self._epoch
                  and not self._eager and self._spent + self._sample_cost <= self._most
                  * max(time.perf_counter() - self._start, _SHORT))
        try:
            return self._sampled(call, iterator) if wanted else call(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # the data has ended, and the epoch
            raise
        except BaseException:
            self.close()
            raise

    def _sampled(self, call: Callable[[Any], Any], iterator: Any) -> Any:
        self.tried_in = self._epoch
        recording = sample_lib.begin("sample a step")
        if recording is None:
            return call(iterator)
        result = recording.of(lambda: call(iterator))
        found = recording.end(self._placement)
        if found is not None:
            self.sample, self.sampled_in = found, self._epoch
        self._sample_cost = recording.cost
        self._spent += recording.cost
        return result

    def _rows_taken(self) -> list[int] | None:
        """The rows taken in this epoch from the iterators that were trained on, by tower."""
        total = [0] * len(self._placement.towers)
        for count, before in self._before.items():
            now = None if count is None else count()
            if now is None or before is None:
                return None
            total = [sum(rows) - then for *rows, then in zip(total, now, before)]
        parts = self._placement.micro_batches
        return [sum(total[first:first + parts]) for first in range(0, len(total), parts)]
