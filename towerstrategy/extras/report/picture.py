"""Draws the report of a training as a PNG.

Goes in: the epochs of ``TowerReport``.  Comes out: bars for the parts of the last sampled step, and
a line for the busy share of each tower, or stage, over the epochs.
"""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from towerstrategy import refused
from towerstrategy.extras.report.epochs import Epoch

_INK, _MUTED, _GRID = "#1f2933", "#616e7c", "#e4e7eb"
_TOWER, _OTHER, _IDLE = "#d9730d", "#1f6fb2", "#f5e3d0"
_MOST_LINES = 10  # the number of colors in matplotlib's cycle


def check(path: str | os.PathLike[str]) -> None:
    """Raises if ``path`` cannot be a picture's file, or matplotlib is not installed."""
    refused.check_file("picture", path, "a PNG file")
    suffix = pathlib.Path(path).suffix
    if suffix.lower() != ".png":
        raise ValueError(f'picture must be the path of a PNG file, such as "towers.png", but got '
                         f"{str(path)!r}, which ends in {suffix!r}.")
    _matplotlib()


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"TowerReport draws its picture with matplotlib, which is not there ({error}). "
            'pip install "towerstrategy[demo]" brings it; or leave the picture out.') from error
    return Figure  # not pyplot, which keeps windows


def draw(epochs: Sequence[Epoch]) -> bytes | None:
    """The bytes of the PNG; None if no step has been sampled yet."""
    sampled = [epoch for epoch in epochs if epoch.sampled is not None]
    if not sampled:
        return None
    last = sampled[-1]
    figure = _matplotlib()(figsize=(11, 2.4 + 0.42 * len(last.parts)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _bars(left, last)
    _lines(right, sampled)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110, facecolor="white")
    return png.getvalue()


def _bars(axes: Any, epoch: Epoch) -> None:
    """Draws the parts of an epoch's sampled step."""
    sample: Any = epoch.sampled
    step = 1e3 * sample.step
    longest = max(1e3 * (part.seconds or 0) for part in epoch.parts)
    shown = longest if longest and sample.too_short else step
    for height, part in enumerate(epoch.parts):
        busy = 1e3 * (part.seconds or 0)
        shows_idle = part.idle is not None and not sample.too_short
        if shows_idle:
            axes.barh(height, step, height=0.62, color=_IDLE)
        axes.barh(height, busy, height=0.62, color=_OTHER if part.idle is None else _TOWER)
        idle = f", {part.idle:.0%} idle" if shows_idle else ""
        axes.text((step if shows_idle else busy) + 0.015 * shown, height,
                  f"{busy:.3g} ms{idle}", va="center", color=_INK, fontsize=9)
    axes.set_yticks(range(len(epoch.parts)),
                    [f"{part.name}, {part.device}" if part.rows is None else
                     f"{part.name}, {part.device}\n{part.rows:,} rows in the epoch"
                     for part in epoch.parts], color=_INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * shown)
    axes.axvline(step, color=_MUTED, linewidth=0.8, linestyle=(0, (2, 3)))
    axes.set_xlabel("ms in which at least one operation was running")
    more = "" if epoch.bubble is None else f", bubble {epoch.bubble:.0%}"
    more = ", too short to measure" if sample.too_short else more
    _style(axes, f"A step of epoch {epoch.number + 1}: {step:.3g} ms{more}", "x")


def _lines(axes: Any, sampled: Sequence[Any]) -> None:
    """Draws the busy shares of towers or stages over the sampled epochs."""
    if all(epoch.sample.too_short for epoch in sampled):
        axes.axis("off")
        axes.text(0, 0.5, "No step kept a tower busy for a millisecond:\nhow idle the towers were "
                  "says nothing here.\nA larger model or larger batches have\ntheir busy shares in "
                  "this place.", va="center", color=_MUTED)
        return
    numbers, parts = [epoch.number + 1 for epoch in sampled], sampled[-1].parts
    lines = ([index for index, part in enumerate(parts) if part.is_stage]
             or [index for index, part in enumerate(parts) if part.is_tower])
    for index in lines[:_MOST_LINES]:
        axes.plot(numbers, [1 - epoch.parts[index].idle for epoch in sampled], marker="o",
                  markersize=4, linewidth=1.5, label=parts[index].name)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlim(0.5, numbers[-1] + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("epoch")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="best")
    more = f" (of {len(lines)}, the first {_MOST_LINES})" if len(lines) > _MOST_LINES else ""
    _style(axes, f"Busy share of the sampled step{more}", "y")


def _style(axes: Any, title: str, grid: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.grid(axis=grid, color=_GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
