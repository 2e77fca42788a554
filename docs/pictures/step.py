"""Draws the picture in docs/how_a_step_runs.md.

Goes in: nothing.  Comes out: one PNG, the way of a batch of 10 rows through 3 towers.

    python docs/pictures/step.py docs/pictures/step.png
"""

from __future__ import annotations

import sys
from typing import Any

from matplotlib import patches
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, MUTED = "#1f2933", "#616e7c"
INPUT, TOWER, MERGE = "#e8f1fa", "#fdf3e7", "#eaf6ec"
BLUE, ORANGE = "#1f6fb2", "#d9730d"
ROWS = (4, 3, 3)
# The two ways between a tower and the merge device, apart so that both can be read.
WEIGHTS, GRADIENTS = 1.3, -1.3


def draw(path: str) -> None:
    """Writes the picture to ``path``."""
    figure = Figure(figsize=(12.4, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xlim(0, 124)
    axes.set_ylim(0, 64)
    axes.axis("off")
    _frame(axes, 1, 27, "input pipeline, on the CPU", INPUT)
    _frame(axes, 38, 30, "towers, a device each", TOWER)
    _frame(axes, 88, 35, "merge device", MERGE)
    _box(axes, 4, 30, 21, 14, "1  split", [f"global batch: {sum(ROWS)} rows", "dealt in order"])
    for number, rows in enumerate(ROWS):
        bottom = 41 - 17 * number
        _box(axes, 41, bottom, 24, 13, f"2  tower {number}",
             [f"{rows} rows, share {rows}/{sum(ROWS)}", "forward and backward",
              "own: metric sums, random draws"])
        middle = bottom + 6.5
        _arrow(axes, 25.3, 37 + 2 * (1 - number), 40.7, middle)
        axes.text(33, middle - (2.6 if number else -2), f"{rows} rows", ha="center",
                  color=MUTED, fontsize=9)
        _arrow(axes, 91, 20 + WEIGHTS - 2 * number, 65.3, middle + WEIGHTS, BLUE)
        _arrow(axes, 65.3, middle + GRADIENTS, 90.7, 47 + GRADIENTS - 2 * number,
               ORANGE)
    axes.text(77, 56, "gradients →", ha="center", color=ORANGE, fontsize=10)
    axes.text(77, 3.5, "← weights", ha="center", color=BLUE, fontsize=10)
    _box(axes, 91, 38, 29, 15, "3  merge",
         ["each weight's gradients summed", "a tower counts by its share"])
    _box(axes, 91, 9, 29, 21, "4  update",
         ["optimizer's single-device code, once:", "clipping, decay, averages, loss scale",
          "one copy: weights and slots"])
    _arrow(axes, 105.5, 37.7, 105.5, 30.3)
    axes.text(107, 33.4, "one gradient", color=MUTED, fontsize=9)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})


def _frame(axes: Any, left: float, width: float, title: str, fill: str) -> None:
    axes.add_patch(patches.FancyBboxPatch(
        (left, 1), width, 61, boxstyle="round,pad=0,rounding_size=1.2", facecolor=fill,
        edgecolor="none"))
    axes.text(left + width / 2, 59, title, ha="center", color=MUTED, fontsize=10.5)


def _box(axes: Any, left: float, bottom: float, width: float, height: float, title: str,
         lines: list[str]) -> None:
    axes.add_patch(patches.FancyBboxPatch(
        (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.8",
        facecolor="white", edgecolor=MUTED, linewidth=1))
    step = (height - 1) / (len(lines) + 1)
    for number, text in enumerate([title, *lines]):
        axes.text(left + width / 2, bottom + height - 0.5 - (number + 0.5) * step, text,
                  ha="center", va="center", color=INK, fontsize=9 if number else 11,
                  fontweight="normal" if number else "bold")


def _arrow(axes: Any, left: float, start: float, right: float, end: float,
           color: str = MUTED) -> None:
    axes.add_patch(patches.FancyArrowPatch(
        (left, start), (right, end), arrowstyle="-|>", mutation_scale=11, color=color,
        linewidth=1.2, shrinkA=0, shrinkB=0))


if __name__ == "__main__":
    draw(sys.argv[1])
