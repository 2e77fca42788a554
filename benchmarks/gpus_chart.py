"""What was simulated, as a picture.

Goes in: simulated steps.  Comes out: one PNG: a panel for each case and machine, efficiency over
the number of GPUs.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

_COLORS = {"cpu": "#5f9e6e", "GPU:0": "#7a5ea8", "balanced": "#d9730d",
           "MirroredStrategy": "#1f6fb2"}
_INK, _MUTED, _GRID = "#1f2933", "#616e7c", "#e4e7eb"


def draw(path: pathlib.Path, results: Sequence[Any]) -> None:
    """Writes the picture to ``path``; nothing where there is one GPU only."""
    cases = list(dict.fromkeys(each.case for each in results))
    machines = list(dict.fromkeys(each.machine for each in results))
    counts = sorted({each.gpus for each in results})
    if len(counts) < 2:
        return
    style = {"font.size": 9, "axes.edgecolor": _MUTED, "text.color": _INK, "axes.labelcolor": _INK,
             "xtick.color": _MUTED, "ytick.color": _INK, "axes.spines.top": False,
             "axes.spines.right": False}
    with plt.rc_context(style):
        figure, panels = plt.subplots(
            len(cases), len(machines), figsize=(2.6 * len(machines) + 1, 2.4 * len(cases) + 0.8),
            squeeze=False, sharex=True, sharey=True, layout="constrained")
        for row, case in enumerate(cases):
            for column, machine in enumerate(machines):
                axes = panels[row][column]
                for merge, color in _COLORS.items():
                    points = {each.gpus: each.efficiency for each in results
                              if (each.case, each.machine, each.merge) == (case, machine, merge)}
                    if points:
                        axes.plot(*zip(*sorted({1: 1.0, **points}.items())), color=color,
                                  marker="o", markersize=3, label=merge)
                axes.set_xscale("log", base=2)
                axes.set_xticks(counts, [str(count) for count in counts])
                axes.set_ylim(0, 1.05 * max(1.0, *(each.efficiency for each in results)))
                axes.grid(axis="y", color=_GRID)
                if row == 0:
                    axes.set_title(machine, fontsize=9, fontweight="bold")
                if column == 0:
                    axes.set_ylabel(f"{case}\nof linear")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
        figure.supxlabel("GPUs; simulated, nothing of this was measured", color=_MUTED)
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)
