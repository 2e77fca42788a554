"""Whether a strategy is a TowerStrategy, for the modules below :mod:`strategy`.

Goes in: any strategy.  Comes out: yes or no.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Whether there has been a strategy whose towers have stages: what those need is hooked only then.
staged = False


class Kind(tf.distribute.Strategy):
    """The base of ``TowerStrategy``, by which it is known."""


def is_tower_strategy(strategy: Any) -> bool:
    """Whether ``strategy`` is a ``TowerStrategy``."""
    return isinstance(strategy, Kind)
