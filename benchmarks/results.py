"""Medians of the rounds, and the targets that they are held to.

Goes in: what the processes measured, a list of :class:`Run`.  Comes out: medians by job, and for
each target a :class:`Verdict`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

FIGURES = ("first_step_s", "step_ms", "peak_mb", "gpu_peak_mb")
Medians = dict["Job", dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures."""

    case: str
    strategy: str
    towers: int


@dataclasses.dataclass(frozen=True)
class Run:
    """What it measured, or its ``error``."""

    job: Job
    round: int
    figures: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target, what was measured, and whether it holds."""

    what: str
    measured: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit


# Ratios of medians; the cases in the order of the table.
_STEP_OVER = {
    "mirrored": {"mlp": 0.30, "embedding": 0.30, "conv": 0.90, "deep": 0.50, "input": 0.45},
    "none": {"mlp": 1.35, "embedding": 1.05, "conv": 1.0, "deep": 2.0, "input": 1.4},
    "jax": dict.fromkeys(("mlp", "embedding", "conv", "deep", "input"), 1.0),
}
_PEAK_OVER = {
    "mirrored": {"mlp": 0.52, "embedding": 0.55},
    "none": dict.fromkeys(("mlp", "embedding", "conv", "deep", "input"), 1.12),
}
_FIRST_STEP_OVER = {
    "mirrored": {"conv": 0.35, "deep": 0.35},
    "jax": dict.fromkeys(("mlp", "embedding", "conv", "deep", "input"), 1.0),
}
_GROWTH, _FEW, _MANY = 1.3, 2, 8  # the first step with many towers over that with few
_FULLEST_OVER_MEAN = 1.2
_BUSIEST_OVER_RING = 1.1


def medians(runs: Iterable[Run]) -> Medians:
    """For each job the median of every figure, or its ``error``, and what does not vary."""
    by_job: dict[Job, list[dict[str, Any]]] = {}
    for run in runs:
        by_job.setdefault(run.job, []).append(run.figures)
    return {job: _median(figures) for job, figures in by_job.items()}


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    good = [figures for figures in rounds if "error" not in figures]
    if not good:
        return rounds[0]
    result = dict(good[0])  # the first round counted the traffic
    for name in FIGURES:
        result[name] = statistics.median(figures[name] for figures in good)
    return result


def ratio(figures: Medians, name: str, job: Job, other: Job) -> float | None:
    """``job``'s figure over that of ``other``; None where one of them is missing."""
    above, below = (figures.get(key, {}).get(name) for key in (job, other))
    return above / below if above is not None and below else None


def verdicts(figures: Medians, towers: int, balanced: bool) -> list[Verdict]:
    """The targets for which everything needed was measured.

    Args:
      figures: medians by job.
      towers: with how many towers.
      balanced: whether TowerStrategy's merge device was ``"balanced"``.
    """
    found = [
        *_compared(figures, towers, "step_ms", "step", _STEP_OVER),
        *_compared(figures, towers, "peak_mb", "peak memory", _PEAK_OVER),
        *_compared(figures, towers, "first_step_s", "first step", _FIRST_STEP_OVER)]
    for case in _FIRST_STEP_OVER["mirrored"]:
        few, many = (Job(case, "tower", count) for count in (_FEW, _MANY))
        grown = ratio(figures, "first_step_s", many, few)
        if grown is not None:
            title = f"{case}: first step, R = {_MANY} over R = {_FEW}"
            found.append(Verdict(title, grown, _GROWTH))
    if balanced:
        for job in [job for job in figures if (job.strategy, job.towers) == ("tower", towers)]:
            found.extend(_balance(job.case, figures[job], towers))
    return found


def _compared(figures: Medians, towers: int, name: str, title: str,
              limits: dict[str, dict[str, float]]) -> Iterator[Verdict]:
    for peer, by_case in limits.items():
        for case, limit in by_case.items():
            measured = ratio(figures, name, Job(case, "tower", towers), Job(case, peer, towers))
            if measured is not None:
                yield Verdict(f"{case}: {title} over {peer}", measured, limit)


def _balance(case: str, measured: dict[str, Any], towers: int) -> Iterator[Verdict]:
    """The targets of ``"balanced"``; none where one variable is more than a tower's part of all."""
    if "error" in measured or measured["largest_bytes"] * towers > measured["parameter_bytes"]:
        return
    held = measured["state_bytes"]
    if held:
        fullest = max(held.values()) * towers / sum(held.values())
        yield Verdict(f"{case}: fullest tower over the mean", fullest, _FULLEST_OVER_MEAN)
    crossing = measured.get("traffic")
    if crossing and towers > 1:
        ring = 2 * (towers - 1) / towers * measured["parameter_bytes"]
        yield Verdict(f"{case}: busiest link over the ring all-reduce", crossing["busiest"] / ring,
                      _BUSIEST_OVER_RING)
