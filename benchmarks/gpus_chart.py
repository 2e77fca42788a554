"""Draws the simulated efficiencies of ``gpus``.

Goes in: simulated steps.  Comes out: one PNG with a panel for each case: the efficiency of the
largest number of GPUs, by machine.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

# (merge device, with XLA?): the defaults, and MirroredStrategy as if it were compiled.
_BARS = {("cpu", True): "#5f9e6e", ("GPU:0", True): "#7a5ea8", ("balanced", True): "#d9730d",
         ("MirroredStrategy", False): "#1f6fb2", ("MirroredStrategy", True): "#b9d3ea"}
_INK, _MUTED, _GRID = "#1f2933", "#616e7c", "#e4e7eb"


def draw(path: pathlib.Path, results: Sequence[Any]) -> None:
    """Writes the picture to ``path``, unless there are only results for one GPU."""
    cases = list(dict.fromkeys(each.case for each in results))
    machines = list(dict.fromkeys(each.machine for each in results))
    most = max(each.gpus for each in results)
    if most < 2:
        return
    style = {"font.size": 9, "axes.edgecolor": _MUTED, "text.color": _INK, "axes.labelcolor": _INK,
             "xtick.color": _MUTED, "ytick.color": _INK, "axes.spines.top": False,
             "axes.spines.right": False}
    with plt.rc_context(style):
        figure, panels = plt.subplots(len(cases), 1, figsize=(9, 1.9 * len(cases) + 0.9),
                                      squeeze=False, sharex=True, layout="constrained")
        for axes, case in zip(panels[:, 0], cases):
            for place, ((merge, xla), color) in enumerate(_BARS.items()):
                heights = [next((each.efficiency for each in results if (
                    each.case, each.machine, each.gpus, each.merge, each.xla) == (
                        case, machine, most, merge, xla)), 0.0) for machine in machines]
                axes.bar([number + 0.16 * (place - 2) for number in range(len(machines))], heights,
                         0.15, color=color,
                         label=f"{merge}, {'with' if xla else 'without'} XLA")
            axes.set_xticks(range(len(machines)), machines)
            axes.set_ylabel(f"{case}\nefficiency")
            axes.grid(axis="y", color=_GRID)
            axes.set_axisbelow(True)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
        figure.supxlabel(f"{most} GPUs; simulated, nothing of this was measured", color=_MUTED)
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)
