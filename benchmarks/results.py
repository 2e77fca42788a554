"""Computes medians over rounds, and compares them with the targets.

Goes in: the figures of the processes, a list of :class:`Run`.  Comes out: medians by job, and for
each target a :class:`Verdict`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Iterator
from typing import Any

FIGURES = ("first_step_s", "step_ms", "peak_mb", "gpu_peak_mb")
Medians = dict["Job", dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A case and strategy that one process measures."""

    case: str
    strategy: str
    towers: int


@dataclasses.dataclass(frozen=True)
class Run:
    """The figures of a job in a round, or its ``error``."""

    job: Job
    round: int
    figures: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target, the measured value, and its upper limit."""

    what: str
    measured: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit


# Limits of TowerStrategy's medians over those of a peer, by peer and case.
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
_GROWTH, _FEW, _MANY = 1.3, 2, 8  # limit of the first step with 8 towers over that with 2
_FULLEST_OVER_MEAN = 1.2
_BUSIEST_OVER_RING = 1.1


def medians(runs: Iterable[Run]) -> Medians:
    """For each job the medians of :data:`FIGURES` and the other figures, or its ``error``."""
    by_job: dict[Job, list[dict[str, Any]]] = {}
    for run in runs:
        by_job.setdefault(run.job, []).append(run.figures)
    return {job: _median(figures) for job, figures in by_job.items()}


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    good = [figures for figures in rounds if "error" not in figures]
    if not good:
        return rounds[0]
    result = dict(good[0])  # only the first round counts the traffic
    for name in FIGURES:
        result[name] = statistics.median(figures[name] for figures in good)
    return result


def median_figures(runs: Iterable[tuple[Any, dict[str, Any]]],
                   names: Collection[str]) -> dict[Any, dict[str, Any]]:
    """For each job the medians of the figures ``names`` over its rounds, or its first error."""
    by_job: dict[Any, list[dict[str, Any]]] = {}
    for job, figures in runs:
        by_job.setdefault(job, []).append(figures)
    return {job: next((each for each in rounds if "error" in each), None) or {
        name: statistics.median(each[name] for each in rounds)
        for name in names if name in rounds[0]} for job, rounds in by_job.items()}


def ratio(figures: Medians, name: str, job: Job, other: Job) -> float | None:
    """The figure ``name`` of ``job`` over that of ``other``; None if one of them is missing."""
    numerator, denominator = (figures.get(key, {}).get(name) for key in (job, other))
    return numerator / denominator if numerator is not None and denominator else None


def verdicts(figures: Medians, towers: int, balanced: bool) -> list[Verdict]:
    """The verdicts on the targets whose figures were measured.

    Args:
      figures: medians by job.
      towers: the number of towers.
      balanced: whether TowerStrategy's merge device was ``"balanced"``.
    """
    verdicts_ = [
        *_peer_verdicts(figures, towers, "step_ms", "step", _STEP_OVER),
        *_peer_verdicts(figures, towers, "peak_mb", "peak memory", _PEAK_OVER),
        *_peer_verdicts(figures, towers, "first_step_s", "first step", _FIRST_STEP_OVER)]
    for case in _FIRST_STEP_OVER["mirrored"]:
        few, many = (Job(case, "tower", count) for count in (_FEW, _MANY))
        growth = ratio(figures, "first_step_s", many, few)
        if growth is not None:
            title = f"{case}: first step, R = {_MANY} over R = {_FEW}"
            verdicts_.append(Verdict(title, growth, _GROWTH))
    if balanced:
        for job in [job for job in figures if (job.strategy, job.towers) == ("tower", towers)]:
            verdicts_.extend(_balance_verdicts(job.case, figures[job], towers))
    return verdicts_


def _peer_verdicts(figures: Medians, towers: int, name: str, title: str,
                   limits: dict[str, dict[str, float]]) -> Iterator[Verdict]:
    """The verdicts on ratios of TowerStrategy's figure ``name`` to that of each peer."""
    for peer, by_case in limits.items():
        for case, limit in by_case.items():
            measured = ratio(figures, name, Job(case, "tower", towers), Job(case, peer, towers))
            if measured is not None:
                yield Verdict(f"{case}: {title} over {peer}", measured, limit)


def _balance_verdicts(case: str, measured: dict[str, Any], towers: int) -> Iterator[Verdict]:
    """The verdicts for ``"balanced"``; none if one variable has more than 1/R of all bytes."""
    if "error" in measured or measured["largest_bytes"] * towers > measured["parameter_bytes"]:
        return
    state = measured["state_bytes"]
    if state:
        fullest = max(state.values()) * towers / sum(state.values())
        yield Verdict(f"{case}: fullest tower over the mean", fullest, _FULLEST_OVER_MEAN)
    crossing = measured.get("traffic")
    if crossing and towers > 1:
        ring = 2 * (towers - 1) / towers * measured["parameter_bytes"]
        yield Verdict(f"{case}: busiest link over the ring all-reduce", crossing["busiest"] / ring,
                      _BUSIEST_OVER_RING)
