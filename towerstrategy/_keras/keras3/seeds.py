"""Hooks into Keras 3: seeds of random layers in replica functions.

Goes in: Keras' own function.  Comes out: the same, with other numbers on each tower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from towerstrategy import contexts
from towerstrategy.variables import rules


def next_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    def next(self: Any, ordered: bool = True) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(self, ordered)
        state = rules.held_variable(self.state)
        state._alike_on_all = True  # every machine counts alike, so what is written need not cross
        try:
            seed = original(self, ordered)
        finally:
            state._alike_on_all = False
        return tower.own_seed(seed)

    return next
