"""Hooks into Keras 3: seeds of random layers in replica functions.

Goes in: Keras' own function.  Comes out: the same, with other numbers on each tower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from towerstrategy import contexts


def next_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    def next(self: Any, ordered: bool = True) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(self, ordered)
        with tower.strategy.extended.writes_alike():
            seed = original(self, ordered)
        return tower.own_seed(seed)

    return next
