"""Hooks into tf_keras: callbacks that write files.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tf_keras.src import callbacks

from towerstrategy._keras import backup, callback as callback_lib
from towerstrategy.placement import kind


def set_model(original: Callable[..., Any], self: Any, model: Any) -> None:
    if kind.is_tower_strategy(model.distribute_strategy):
        self.callbacks = [
            callback_lib.with_methods(callback, _WholeBackup)
            if isinstance(callback, callbacks.BackupAndRestore)
            and not isinstance(callback, _WholeBackup) else callback
            for callback in self.callbacks]
    original(self, model)


class _WholeBackup(callbacks.BackupAndRestore):
    """A ``BackupAndRestore`` that knows our strategies, and deletes a backup at once."""

    def on_train_begin(self, logs: Any = None) -> None:
        supported = self._supported_strategies  # type: ignore[has-type]
        self._supported_strategies = (*supported, kind.Kind)
        super().on_train_begin(logs)

    def on_train_end(self, logs: Any = None) -> None:
        state = self._training_state
        if (self.delete_checkpoint
                and state.write_checkpoint_manager is state.read_checkpoint_manager):
            backup.delete(state.write_checkpoint_manager.directory)
        super().on_train_end(logs)
