"""Hooks into Keras 3: callbacks that write files.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.callbacks import backup_and_restore, csv_logger, model_checkpoint, tensorboard

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import backup, chief, held
from towerstrategy._keras.keras3 import names

# What writes the same files on every machine -> where it has their path, and whether it closes
# them before a call of it ends.
_PATHS = {
    model_checkpoint.ModelCheckpoint: ("filepath", True),
    csv_logger.CSVLogger: ("filename", False),
    tensorboard.TensorBoard: ("log_dir", False),
}


def set_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_model(self: Any, model: Any) -> None:
        if names.strategy_of(model) is not None:
            workers = names.strategy_of(model).extended.workers
            is_chief = workers is None or workers.is_chief
            self.callbacks = [_wrapped(callback, is_chief) for callback in self.callbacks]
        original(self, model)

    return set_model


def _wrapped(callback: Any, is_chief: bool) -> Any:
    if held.is_held(callback):
        return callback
    if isinstance(callback, backup_and_restore.BackupAndRestore):
        return _WholeBackup(callback)
    for kind, (attribute, closes) in () if is_chief else _PATHS.items():
        if isinstance(callback, kind):
            return chief.Elsewhere(callback, attribute, closes)
    return callback


class _WholeBackup(held.Held):
    """A ``BackupAndRestore`` whose backups are whole, and the chief's alone, see :mod:`backup`."""

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        callback = self._callback
        save = type(callback)._save_model

        def save_whole() -> None:
            if chief.writes(callback):
                backup.save(callback, save)

        callback._save_model = save_whole
        try:
            yield
        finally:
            del callback._save_model

    def on_train_begin(self, logs: Any = None) -> None:
        callback = self._callback
        if chief.writes(callback):
            backup.clean(callback)
        if chief.workers_of(callback) is None:
            callback.on_train_begin(logs)
        else:
            chief.restore(callback, lambda: callback.on_train_begin(logs),
                          lambda: _saved_of(callback.model))

    def on_train_end(self, logs: Any = None) -> None:
        callback = self._callback
        if chief.writes(callback):
            if callback.delete_checkpoint:
                backup.delete(callback.backup_dir)
            callback.on_train_end(logs)


def _saved_of(model: Any) -> list[Any]:
    """The TensorFlow variables that ``save_weights`` saves."""
    kept = [*names.held_variables(model),
            *(variable for part in names.optimizers_of(model)
              for variable in names.optimizer_variables(part))]
    return list({id(variable): variable for variable in kept
                 if isinstance(variable, _tf.BaseResourceVariable)}.values())
