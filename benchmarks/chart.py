"""Draws the results of the benchmarks.

Goes in: medians by job.  Comes out: one PNG, with bars for the cases and lines for the scaling.
"""

from __future__ import annotations

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import patches, pyplot as plt

from benchmarks import cases, results, strategies

_COLORS = {"none": "#9aa5b1", "tower": "#d9730d", "mirrored": "#1f6fb2",
           "mirrored_reduce": "#7fb0db", "central": "#5f9e6e", "none_xla": "#616e7c",
           "tower_xla": "#9c4221", "jax": "#7b4fa3", "jax_one": "#bda3d4"}
_LABELS = {"none": "no strategy", "tower": "TowerStrategy", "mirrored": "MirroredStrategy",
           "mirrored_reduce": "Mirrored, ReductionToOneDevice", "central": "CentralStorageStrategy",
           "none_xla": "no strategy, XLA", "tower_xla": "TowerStrategy, XLA",
           "jax": "JAX, DataParallel", "jax_one": "JAX, one device"}
_INK, _MUTED, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_PANELS = (("step_ms", "step time, ms"), ("first_step_s", "first step, s"),
           ("peak_mb", "peak memory, MB"), ("crossing_mb", "MB across devices in a step"))


def draw(path: pathlib.Path, figures: results.Medians, towers: int, title: str) -> None:
    """Writes the picture to ``path``.

    Args:
      path: a PNG file.
      figures: medians by job; failed jobs are not drawn.
      towers: the number of towers of the bars.
      title: machine and versions.
    """
    good = {job: values for job, values in figures.items() if "error" not in values}
    scaled = [case for case in cases.SCALING if len(_tower_counts(good, case)) > 1]
    style = {"font.size": 10, "axes.edgecolor": _MUTED, "text.color": _INK, "axes.labelcolor": _INK,
             "xtick.color": _MUTED, "ytick.color": _INK, "axes.spines.top": False,
             "axes.spines.right": False}
    with plt.rc_context(style):
        bars = [panel for panel in _PANELS if _reference(good, towers, panel[0])]
        bar_rows = (len(bars) + 1) // 2
        rows = max(1, bar_rows + len(scaled))
        figure = plt.figure(figsize=(13, 4.6 * rows), layout="constrained")
        figure.get_layout_engine().set(hspace=0.06, wspace=0.04)
        grid = figure.add_gridspec(rows, 6)
        for number, (name, label) in enumerate(bars):
            row, column = divmod(number, 2)
            axes = figure.add_subplot(grid[row, 3 * column:3 * column + 3])
            _bars(axes, good, towers, name, label)
        for number, case in enumerate(scaled):
            for column, (name, label) in enumerate(_PANELS[:3]):
                axes = figure.add_subplot(grid[bar_rows + number, 2 * column:2 * column + 2])
                _lines(axes, good, case, name, label)
        shown = [name for name in strategies.NAMES if any(job.strategy == name for job in good)]
        figure.legend([patches.Patch(color=_COLORS[name]) for name in shown],
                      [_LABELS[name] for name in shown], loc="outside upper center", ncols=5,
                      frameon=False)
        figure.supxlabel(title, fontsize=9.5, color=_MUTED)
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)


def _value(figures: dict[str, Any], name: str) -> float | None:
    """The figure ``name`` of a job; ``crossing_mb`` is computed from its traffic."""
    if name != "crossing_mb":
        return figures.get(name)
    crossing = figures.get("traffic")
    return crossing["total"] / 1e6 if crossing else None


def _bars(axes: plt.Axes, good: results.Medians, towers: int, name: str, label: str) -> None:
    """Bars of ratios to the reference, which all cases can share, with the figures beside them."""
    values = _values(good, towers, name)
    shown = [case for case in cases.CASES if any(job.case == case for job in values)]
    present = [each for each in strategies.NAMES if any(job.strategy == each for job in values)]
    reference = _reference(good, towers, name)
    height = 0.8 / max(len(present), 1)
    longest = 1.0
    for number, strategy in enumerate(present):
        for position, case in enumerate(shown):
            y = position - 0.4 + height * (number + 0.5)
            value = values.get(results.Job(case, strategy, towers))
            ratio = (value or 0) / values[results.Job(case, reference, towers)]
            longest = max(longest, ratio)
            axes.barh(y, ratio, height=height * 0.9, color=_COLORS[strategy])
            axes.annotate(_text(value), (ratio, y), xytext=(4, 0), textcoords="offset points",
                          va="center", fontsize=8, color=_MUTED)
    axes.axvline(1, color=_INK, linewidth=0.8)
    axes.set_xlim(0, longest * 1.15)
    axes.set_yticks(range(len(shown)), shown)
    axes.invert_yaxis()
    axes.set_title(label, loc="left", fontweight="bold")
    axes.set_xlabel(f"times {_LABELS[reference]}; {towers} towers")
    axes.grid(axis="x", color=_GRID)
    axes.set_axisbelow(True)


def _text(figure: float | None) -> str:
    if figure is None:
        return "failed"
    return f"{figure:,.0f}" if figure >= 1000 or not figure else f"{figure:,.3g}"


def _values(good: results.Medians, towers: int, name: str) -> dict[results.Job, float]:
    """The figure ``name`` of each job that has it, for jobs of ``towers``."""
    return {job: value for job, figures in good.items()
            if job.towers == towers and (value := _value(figures, name)) is not None}


def _reference(good: results.Medians, towers: int, name: str) -> str | None:
    """The first strategy whose figure is there, and not 0, for each case; None without one."""
    values = _values(good, towers, name)
    shown = {job.case for job in values}
    return next((each for each in ("none", "mirrored", "tower", "mirrored_reduce") if shown and all(
        values.get(results.Job(case, each, towers)) for case in shown)), None)


def _tower_counts(good: results.Medians, case: str) -> list[int]:
    return sorted({job.towers for job in good if job.case == case})


def _lines(axes: plt.Axes, good: results.Medians, case: str, name: str, label: str) -> None:
    counts = _tower_counts(good, case)

    for strategy, color in _COLORS.items():
        points = [(count, good[job][name]) for count in counts
                  if (job := results.Job(case, strategy, count)) in good]
        if points and len(points) > 1:
            axes.plot(*zip(*points), color=color, marker="o", markersize=4)
        elif points and strategy == "none":
            axes.axhline(points[0][1], color=color, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("towers")
    axes.set_title(f"{case}: {label}", loc="left", fontweight="bold")
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
