"""Draws the results of ``stages``.

Goes in: medians by job.  Comes out: one PNG with a row of panels for each case, with lines over the
number of micro-batches.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks import stages

_COLORS = {1: "#9c4221", 2: "#d9730d", 4: "#f0b27a"}  # by the number of stages
_NO_STRATEGY, _TOWERS = "#9aa5b1", {2: "#1f6fb2", 4: "#7fb0db"}
_INK, _MUTED, _GRID = "#1f2933", "#616e7c", "#e4e7eb"


def _figure(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda values: values.get(name)


def _mb_between_stages(values: dict[str, Any]) -> float | None:
    return (values["activations"] + values["gradients"]) / 1e6 if "simulated" in values else None


def _idle(values: dict[str, Any]) -> float | None:
    return values["simulated"]["idle"] if "simulated" in values else None


_PANELS = (("MB added by training", _figure("added_mb")), ("step, ms", _figure("step_ms")),
           ("MB between stages in a step", _mb_between_stages),
           ("idle, simulated, equal passes", _idle))


def draw(path: pathlib.Path, figures: stages.Figures, title: str) -> None:
    """Writes the picture to ``path``; failed jobs are not drawn."""
    good = {job: values for job, values in figures.items() if "error" not in values}
    names = list(dict.fromkeys(job.case for job in good))
    if not names:
        return
    style = {"font.size": 9, "axes.edgecolor": _MUTED, "text.color": _INK, "axes.labelcolor": _INK,
             "xtick.color": _MUTED, "ytick.color": _INK, "axes.spines.top": False,
             "axes.spines.right": False}
    with plt.rc_context(style):
        figure, panels = plt.subplots(len(names), len(_PANELS), squeeze=False,
                                      figsize=(3.6 * len(_PANELS), 3.0 * len(names) + 0.8),
                                      layout="constrained")
        for row, name in zip(panels, names):
            values = {job: each for job, each in good.items() if job.case == name}
            for axes, (label, value) in zip(row, _PANELS):
                _lines(axes, values, value)
                axes.set_title(f"{name}: {label}", loc="left", fontweight="bold", fontsize=9)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6, frameon=False)
        figure.supxlabel(f"micro-batches; {title}", fontsize=9, color=_MUTED)
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)


def _lines(axes: plt.Axes, values: stages.Figures,
           value: Callable[[dict[str, Any]], float | None]) -> None:
    """Lines of a figure of one case, which ``value`` takes from the values of a job."""
    points = {job: y for job, each in values.items() if (y := value(each)) is not None}
    for job, y in points.items():
        if not job.towers:
            axes.axhline(y, color=_NO_STRATEGY, linestyle="--", label="no strategy")
        elif job.towers > 1:
            axes.axhline(y, color=_TOWERS[job.towers], linestyle=":",
                         label=f"{job.towers} towers")
    for count, color in _COLORS.items():
        line = {job.parts: y for job, y in points.items()
                if (job.towers, job.stages) == (1, count)}
        if line:
            axes.plot(list(line), list(line.values()), color=color, marker="o", markersize=4,
                      label=f"{count} stage{'s' if count > 1 else ''}")
    parts = sorted({job.parts for job in values})
    axes.set_xscale("log", base=2)
    axes.set_xticks(parts, [str(count) for count in parts])
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
