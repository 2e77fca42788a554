"""Whether a strategy is a TowerStrategy, for the modules below :mod:`strategy`.

Goes in: any strategy.  Comes out: a bool.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Whether a strategy whose towers have stages was ever made: only then are its hooks installed.
staged = False


class Kind(tf.distribute.Strategy):
    """The base class of ``TowerStrategy``."""


def is_tower_strategy(strategy: Any) -> bool:
    """Whether ``strategy`` is a ``TowerStrategy``."""
    return isinstance(strategy, Kind)
