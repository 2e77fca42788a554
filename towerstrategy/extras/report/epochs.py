"""What is known of an epoch: rows and times of each part of a step.

Goes in: what was counted and sampled.  Comes out: an :class:`Epoch`, whose ``str`` is a table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from towerstrategy.extras.report import description
from towerstrategy.extras.report.sample import Sample
from towerstrategy.extras.report.watch import Watch
from towerstrategy.placement import names


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
        if self.sample is None:
            title += "; no step sampled yet"
        else:
            when = "" if self.sampled else f" of epoch {(self.sampled_in or 0) + 1}"
            title += f"; a step{when} took {1e3 * self.sample.step:.3g} ms"
            if self.sample.too_short:
                title += (", too short to measure idle shares: its operations kept no tower busy "
                          "for a millisecond")
            elif self.bubble is not None:
                title += f"; bubble {self.bubble:.0%}"
        if self.shares is not None:
            title += f"; shares {', '.join(f'{share:g}' for share in self.shares)}"
        too_short = self.sample is not None and self.sample.too_short
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


def of(number: int, watch: Watch, shares: Any) -> Epoch:
    """The epoch of that number, which ``watch`` has seen."""
    placement = watch.placement
    sample: Any = watch.sample
    rows: Any = watch.rows
    merged = sum(rows) if watch.once and rows is not None else None
    if merged is not None:
        rows = [0] * len(placement.devices)
    lines = []
    for tower, device in enumerate(placement.devices):
        row = placement.rows[tower] if placement.rows else ()
        lines.append(Part(f"tower {tower}",
                          f"{len(row)} stages" if row else names.short_name(device),
                          rows and rows[tower], sample and sample.towers[tower],
                          sample and sample.idle(tower)))
        lines += [Part(f"tower {tower}, stage {stage}", names.short_name(name), None,
                       sample and sample.stages[tower][stage], sample and sample.idle(tower, stage))
                  for stage, name in enumerate(row)]
    for name in ("merge", "update", "split", "input"):
        device = placement.merge_name if name in ("merge", "update") else "CPU:0"
        lines.append(Part(name, device, merged if name == "merge" else None,
                          sample and getattr(sample, name), None))
    return Epoch(number, watch.seconds, tuple(lines), sample, watch.sampled_in,
                 shares and tuple(shares))
