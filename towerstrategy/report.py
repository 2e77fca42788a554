"""The public names of reports: a training's, a strategy's, a model's memory."""

from towerstrategy.extras.report.description import describe
from towerstrategy.extras.report.epochs import Epoch, Part
from towerstrategy.extras.report.memory import Memory, estimate_memory
from towerstrategy.extras.report.sample import Sample
from towerstrategy.extras.report.tower_report import TowerReport

__all__ = ["Epoch", "Memory", "Part", "Sample", "TowerReport", "describe", "estimate_memory"]


def __dir__() -> list[str]:
    return __all__
