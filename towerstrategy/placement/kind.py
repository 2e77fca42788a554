"""TODO
"""

from __future__ import annotations

from typing import Any


def is_tower_strategy(strategy: Any) -> bool:
    """Whether ``strategy`` is a ``TowerStrategy``."""
    from towerstrategy.strategy import TowerStrategy  # which imports the hooks

    return isinstance(strategy, TowerStrategy)
