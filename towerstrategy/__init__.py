"""TowerStrategy: data-parallel training for TensorFlow and Keras, with one copy of each weight."""

from towerstrategy import (
    _requirements,  # noqa: F401  (first: checks TensorFlow's version)
    losses as losses,
    report as report,
    sharding as sharding,
)
from towerstrategy._version import __version__
from towerstrategy.losses import whole_batch
from towerstrategy.multi_gpu import multi_gpu_model
from towerstrategy.placement.devices import split_cpu
from towerstrategy.report import TowerReport, estimate_memory
from towerstrategy.strategy import TowerStrategy
from towerstrategy.warned import TowerWarning

__all__ = ["TowerReport", "TowerStrategy", "TowerWarning", "__version__", "estimate_memory",
           "losses", "multi_gpu_model", "report", "sharding", "split_cpu", "whole_batch"]


def __dir__() -> list[str]:
    """The public names, which ``dir`` and completion show."""
    return __all__
