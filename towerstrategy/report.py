"""The public names of reports: a training's, a strategy's, a model's memory."""

from towerstrategy.extras.report import (
    Epoch,
    Memory,
    Part,
    Sample,
    TowerReport,
    describe,
    estimate_memory,
)

__all__ = ["Epoch", "Memory", "Part", "Sample", "TowerReport", "describe", "estimate_memory"]


def __dir__() -> list[str]:
    return __all__
