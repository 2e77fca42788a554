"""Hooks into Keras 3: callbacks that write files.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from keras.src.callbacks import backup_and_restore, csv_logger, model_checkpoint, tensorboard

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import backup, callback as callback_lib, chief, state, training
from towerstrategy._keras.keras3 import names

# What writes the same files on every machine -> where it has their path.
_PATHS = {model_checkpoint.ModelCheckpoint: "filepath", csv_logger.CSVLogger: "filename",
          tensorboard.TensorBoard: "log_dir"}


def set_model(original: Callable[..., Any], self: Any, model: Any) -> None:
    strategy = training.strategy_of(model, names)
    if strategy is not None:
        self.callbacks = [_on_towers(callback, strategy.extended.should_checkpoint)
                          for callback in self.callbacks]
    original(self, model)


def _on_towers(callback: Any, is_chief: bool) -> Any:
    """What is called in the place of a user's callback, which stays as it is."""
    if isinstance(callback, (_WholeBackup, _Emptied)):
        return callback
    if isinstance(callback, backup_and_restore.BackupAndRestore):
        return callback_lib.with_methods(callback, _WholeBackup)
    for kind, attribute in () if is_chief else _PATHS.items():
        if isinstance(callback, kind):
            callback = chief.elsewhere(callback, attribute)
    if not is_chief and isinstance(callback, model_checkpoint.ModelCheckpoint):
        return callback_lib.with_methods(callback, _Emptied)
    return callback


class _Emptied(model_checkpoint.ModelCheckpoint):
    """A ``ModelCheckpoint`` whose files, which nobody keeps, do not fill the disk."""

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        super()._save_model(*args, **kwargs)
        for name in os.listdir(self._folder.name):
            os.remove(os.path.join(self._folder.name, name))


class _WholeBackup(backup_and_restore.BackupAndRestore):
    """A ``BackupAndRestore`` whose backups are whole, and the chief's alone, see :mod:`backup`."""

    @property
    def _here(self) -> Any:
        return self.model.distribute_strategy.extended

    def _save_model(self) -> None:
        if self._here.should_checkpoint:
            backup.save(self, super()._save_model)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._here.should_checkpoint:
            backup.clean(self)
        load = functools.partial(super().on_train_begin, logs)
        if self._here.workers is None:
            load()
        else:
            chief.restore(self, load, lambda: _saved_of(self.model))

    def on_train_end(self, logs: Any = None) -> None:
        if self._here.should_checkpoint:
            if self.delete_checkpoint:
                backup.delete(self.backup_dir)
            super().on_train_end(logs)


def _saved_of(model: Any) -> list[Any]:
    """The TensorFlow variables that ``save_weights`` saves."""
    kept = [*state.variables_of(model, names), *(
        variable for part in state.optimizers_of(model, names)
        for variable in state.optimizer_variables(part, names))]
    return list({id(variable): variable for variable in kept
                 if isinstance(variable, _tf.BaseResourceVariable)}.values())
