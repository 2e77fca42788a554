"""For people to read: where everything sits, how busy the towers are, whether all is right here."""

from towerstrategy.report.description import describe
from towerstrategy.report.tower_report import Epoch, Part, TowerReport

__all__ = ["Epoch", "Part", "TowerReport", "describe"]
