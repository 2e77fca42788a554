"""Draws the picture of examples/digits.py: learning curves, and the data flow of a step.

Goes in: training histories and a :class:`Flow`.  Comes out: one PNG.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")

from matplotlib import patches, pyplot as plt

INK, MUTED, GRID = "#1f2933", "#616e7c", "#e4e7eb"
BLUE, ORANGE = "#1f6fb2", "#d9730d"
BATCH_FILL, TOWER_FILL, MERGE_FILL = "#e8f1fa", "#fdf3e7", "#eaf6ec"
MAX_BOXES = 8  # of towers; with more towers, the last box stands for all others

History = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Flow:
    """The rows and bytes of a training step.

    Attributes:
      rows: the rows of each tower.
      row_bytes: the bytes of an image and its label.
      towers: the device of each tower.
      merge: the device that sums gradients and runs the optimizer.
      gradient_bytes: the bytes of a tower's gradients, as many as those of the trainable weights.
      state_bytes: the bytes of all weights and of the optimizer's variables.
    """

    rows: Sequence[int]
    row_bytes: int
    towers: Sequence[str]
    merge: str
    gradient_bytes: int
    state_bytes: int


def draw(path: pathlib.Path, flow: Flow, history: History, towers: History, single: History,
         difference: float) -> None:
    """Writes the picture to ``path``.

    Args:
      path: a PNG file.
      flow: the rows and bytes of a step.
      history: the training with dropout, with validation.
      towers: the training without dropout, on the towers.
      single: the training without dropout, on one device.
      difference: the largest difference between the weights of these two.
    """
    boxes = max(2, min(len(flow.towers), MAX_BOXES))
    style = {"font.size": 10.5, "axes.edgecolor": MUTED, "axes.labelcolor": INK,
             "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED,
             "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(12, 5.2 + 0.85 * boxes), layout="constrained")
        figure.get_layout_engine().set(hspace=0.06, wspace=0.04)
        grid = figure.add_gridspec(2, 2, height_ratios=[4, 0.6 + 0.85 * boxes])
        _draw_accuracy(figure.add_subplot(grid[0, 0]), history)
        _draw_twins(figure.add_subplot(grid[0, 1]), towers, single, difference)
        _draw_flow(figure.add_subplot(grid[1, :]), flow)
        figure.savefig(path, dpi=130, facecolor="white")
        plt.close(figure)


def _draw_accuracy(axes: plt.Axes, history: History) -> None:
    epochs = range(1, len(history["accuracy"]) + 1)
    axes.plot(epochs, history["accuracy"], color=MUTED, marker="o", markersize=3.5,
              label="training (with dropout)")
    axes.plot(epochs, history["val_accuracy"], color=BLUE, marker="o", markersize=3.5,
              label="test")
    _title(axes, "Accuracy on the towers, with dropout")
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))
    axes.axhline(0.97, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), label="97 %")
    axes.set_ylim(top=1.01)
    _epochs(axes)
    axes.legend(loc="lower right", frameon=False)


def _draw_twins(axes: plt.Axes, towers: History, single: History, difference: float) -> None:
    epochs = range(1, len(towers["loss"]) + 1)
    axes.plot(epochs, single["loss"], color=BLUE, alpha=0.35, linewidth=7, solid_capstyle="round",
              label="one device")
    axes.plot(epochs, towers["loss"], color=ORANGE, linewidth=1.8, marker="o", markersize=3.5,
              label="towers")
    _title(axes, "Loss without dropout, towers and one device")
    axes.set_yscale("log")
    _epochs(axes)
    axes.legend(loc="upper right", frameon=False,
                title=f"largest weight difference {difference:.1e}")


def _title(axes: plt.Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=12, fontweight="bold", pad=10)


def _epochs(axes: plt.Axes) -> None:
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)


# The units of the drawing of the flow: 120 wide, 10 high for each tower.
_WIDE, _HIGH = 120, 10
_BOX = {"batch": (1, 19), "tower": (46, 25), "merge": (97, 22)}  # left, width


def _draw_flow(axes: plt.Axes, flow: Flow) -> None:
    lines = _tower_lines(flow)
    top = _HIGH * max(2, len(lines))
    axes.set_xlim(0, _WIDE)
    axes.set_ylim(-1, top + 3.5)
    axes.axis("off")
    _title(axes, "One training step: batch → towers → merge and update")
    middle = top / 2
    _box(axes, "batch", middle, BATCH_FILL, "batch", [f"{sum(flow.rows)} rows",
                                                      _size(sum(flow.rows) * flow.row_bytes)])
    _box(axes, "merge", middle, MERGE_FILL, "merge and update", [
        flow.merge, "weights and optimizer,", f"one copy: {_size(flow.state_bytes)}"])
    for number, (title, rows) in enumerate(lines):
        height = middle + _HIGH * (len(lines) / 2 - number - 0.5)
        _box(axes, "tower", height, TOWER_FILL, title,
             [f"{rows} rows, {_size(rows * flow.row_bytes)}"])
        spread = (len(lines) / 2 - number - 0.5) / max(len(lines), 4)
        _arrow(axes, "batch", "tower", middle + 5 * spread, height)
        _arrow(axes, "tower", "merge", height, middle + 7 * spread, both_ways=True)
    columns = {
        "split, rows in order": ("batch", "tower"),
        f"← weights, gradients →\n{_size(flow.gradient_bytes)} each per tower": ("tower", "merge")}
    for text, (left, right) in columns.items():
        start = sum(_BOX[left])
        axes.text((start + _BOX[right][0]) / 2, top + 0.2, text, ha="center", va="center",
                  color=MUTED, fontsize=10)


def _tower_lines(flow: Flow) -> list[tuple[str, int]]:
    """The title and rows of each box; the last box may stand for several towers."""
    towers = [(f"tower {number}, {device}", rows)
              for number, (device, rows) in enumerate(zip(flow.towers, flow.rows))]
    if len(towers) <= MAX_BOXES:
        return towers
    shown = MAX_BOXES - 1
    rest = towers[shown:]
    return [*towers[:shown], (f"{len(rest)} more towers", sum(rows for _, rows in rest))]


def _box(axes: plt.Axes, column: str, middle: float, fill: str, title: str,
         lines: Sequence[str]) -> None:
    left, width = _BOX[column]
    height = 4.4 + 2.6 * len(lines)
    axes.add_patch(patches.FancyBboxPatch(
        (left, middle - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.8",
        facecolor=fill, edgecolor=MUTED, linewidth=1))
    step = (height - 1.4) / (len(lines) + 1)
    for number, text in enumerate([title, *lines]):
        axes.text(left + width / 2, middle + (len(lines) / 2 - number) * step, text, ha="center",
                  va="center", fontsize=10.5, fontweight="normal" if number else "bold")


def _arrow(axes: plt.Axes, left: str, right: str, start: float, end: float,
           both_ways: bool = False) -> None:
    axes.add_patch(patches.FancyArrowPatch(
        (sum(_BOX[left]) + 0.5, start), (_BOX[right][0] - 0.5, end),
        arrowstyle="<|-|>" if both_ways else "-|>", mutation_scale=11, color=MUTED,
        linewidth=1, shrinkA=0, shrinkB=0))


def _size(count: int) -> str:
    for unit, factor in (("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} bytes"
