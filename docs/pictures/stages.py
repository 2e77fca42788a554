"""Draws the picture in docs/one_large_model.md.

Goes in: nothing.  Comes out: one PNG, eight micro-batches on their way through four stages.

    python docs/pictures/stages.py docs/pictures/stages.png

A backward pass is drawn twice as long as a forward one, as it is on most devices.
"""

from __future__ import annotations

import sys

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK, MUTED = "#1f2933", "#616e7c"
FORWARD, BACKWARD, UPDATE = "#bcd9f0", "#f5c99b", "#b9e0c0"
STAGES, PARTS = 4, 8
LENGTH = {False: 1, True: 2}  # of a forward pass, of a backward pass


def schedule() -> list[tuple[int, int, bool, int]]:
    """Stage, micro-batch, whether backward, and when it begins.

    Each stage does what waits for it, backward passes first, and begins no micro-batch while it
    holds as many as there are stages from it to the end.
    """
    began: dict[tuple[int, int, bool], int] = {}
    free, now = [0] * STAGES, 0

    def ended(stage: int, part: int, backward: bool) -> bool:
        key = stage, part, backward
        return key in began and began[key] + LENGTH[backward] <= now

    def can_begin(stage: int, part: int, backward: bool) -> bool:
        if (stage, part, backward) in began:
            return False
        if backward:
            return ended(*((stage, part, False) if stage == STAGES - 1
                           else (stage + 1, part, True)))
        held = STAGES - stage
        return ((stage == 0 or ended(stage - 1, part, False))
                and (part < held or ended(stage, part - held, True)))

    while len(began) < 2 * STAGES * PARTS:
        for stage in range(STAGES):
            work = [(part, backward) for backward in (True, False) for part in range(PARTS)
                    if can_begin(stage, part, backward)]
            if free[stage] <= now and work:
                part, backward = work[0]
                began[stage, part, backward] = now
                free[stage] = now + LENGTH[backward]
        now += 1
    return [(*key, start) for key, start in began.items()]


def draw(path: str) -> None:
    """Writes the picture to ``path``."""
    figure = Figure(figsize=(12.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    end = 0
    for stage, part, backward, start in schedule():
        axes.barh(stage, LENGTH[backward], left=start, height=.86, edgecolor="white",
                  color=BACKWARD if backward else FORWARD)
        axes.text(start + LENGTH[backward] / 2, stage, str(part), ha="center", va="center",
                  color=INK, fontsize=10)
        end = max(end, start + LENGTH[backward])
    for stage in range(STAGES):
        axes.barh(stage, 1, left=end, height=.86, color=UPDATE, edgecolor="white")
    for color, text, left in ((FORWARD, "forward", 0), (BACKWARD, "backward", 5),
                              (UPDATE, "update, once", 10)):
        axes.barh(-1, .8, left=left, height=.4, color=color)
        axes.text(left + 1.1, -1, text, va="center", color=INK, fontsize=10)
    axes.text(17, -1, "the number is the micro-batch; what is white is the bubble", va="center",
              color=MUTED, fontsize=10)
    axes.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
    axes.set_ylim(STAGES - .4, -1.4)
    axes.set_xlim(-.2, end + 1.2)
    axes.set_xticks([])
    axes.set_xlabel("time →", color=MUTED, loc="right")
    axes.tick_params(length=0, labelcolor=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    draw(sys.argv[1])
