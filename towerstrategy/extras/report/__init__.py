"""For people to read: where everything sits, how busy the towers are, whether all is right here."""

from towerstrategy.extras.report.description import describe
from towerstrategy.extras.report.epochs import Epoch, Part
from towerstrategy.extras.report.memory import Memory, estimate_memory
from towerstrategy.extras.report.sample import Sample
from towerstrategy.extras.report.tower_report import TowerReport

__all__ = ["Epoch", "Memory", "Part", "Sample", "TowerReport", "describe", "estimate_memory"]
