"""TowerStrategy: data-parallel training for TensorFlow and Keras, with one copy of each weight."""

from towerstrategy import (
    _requirements,  # noqa: F401  (first: checks TensorFlow's version)
    sharding as sharding,
)
from towerstrategy._version import __version__
from towerstrategy.losses import whole_batch
from towerstrategy.multi_gpu import multi_gpu_model
from towerstrategy.placement.devices import split_cpu
from towerstrategy.strategy import TowerStrategy
from towerstrategy.warned import TowerWarning

__all__ = ["TowerStrategy", "TowerWarning", "__version__", "multi_gpu_model", "split_cpu",
           "whole_batch"]
