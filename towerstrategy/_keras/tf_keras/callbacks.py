"""Hooks into tf_keras: callbacks that write files.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from towerstrategy._keras import backup
from towerstrategy.placement import kind


def delete_backup(original: Callable[..., Any]) -> Callable[..., Any]:
    def delete_backup(self: Any) -> None:
        theirs = self.write_checkpoint_manager is not self.read_checkpoint_manager
        if kind.is_tower_strategy(self._model.distribute_strategy) and not theirs:
            backup.delete(self.write_checkpoint_manager.directory)
        original(self)

    return delete_backup


def backup_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from towerstrategy.strategy import TowerStrategy

        original(self, *args, **kwargs)
        self._supported_strategies += (TowerStrategy,)

    return __init__
