"""For people to read: where everything sits, how busy the towers are, whether all is right here."""

from towerstrategy.report.description import describe
from towerstrategy.report.epochs import Epoch, Part
from towerstrategy.report.memory import Memory, estimate_memory
from towerstrategy.report.sample import Sample
from towerstrategy.report.tower_report import TowerReport

__all__ = ["Epoch", "Memory", "Part", "Sample", "TowerReport", "describe", "estimate_memory"]


def __dir__() -> list[str]:
    return __all__
