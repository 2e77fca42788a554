"""Hooks into Keras 3: callbacks that write files.

Goes in: a callback of a model of a ``TowerStrategy``.  Comes out: one whose backups are whole.
With several machines the first one's writes, the others' write to a folder which is thrown away,
as is TensorFlow's and tf_keras' own habit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.callbacks import backup_and_restore, csv_logger, model_checkpoint, tensorboard

from towerstrategy._keras import callbacks as callbacks_lib, state, training
from towerstrategy._keras.keras3 import names
from towerstrategy.placement.workers import Workers

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
    """What is called in the place of a user's callback, whose class and paths stay."""
    if isinstance(callback, (_WholeBackup, _Emptied)):
        return callback
    if isinstance(callback, backup_and_restore.BackupAndRestore):
        return callbacks_lib.with_methods(callback, _WholeBackup)
    for kind, attribute in () if is_chief else _PATHS.items():
        if isinstance(callback, kind):
            callback = _elsewhere(callback, attribute)
    if not is_chief and isinstance(callback, model_checkpoint.ModelCheckpoint):
        return callbacks_lib.with_methods(callback, _Emptied)
    return callback


def _elsewhere(callback: Any, attribute: str) -> Any:
    """``callback``, writing to a folder which is thrown away; ``attribute`` has its path."""
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, os.path.basename(getattr(callback, attribute)))
    return callbacks_lib.with_methods(callback, type("_Elsewhere", (), {
        "_folder": folder, attribute: property(lambda _: path)}))


class _Emptied(model_checkpoint.ModelCheckpoint):
    """A ``ModelCheckpoint`` whose files, which nobody keeps, do not fill the disk."""

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        super()._save_model(*args, **kwargs)
        for name in os.listdir(self._folder.name):
            os.remove(os.path.join(self._folder.name, name))


class _WholeBackup(backup_and_restore.BackupAndRestore):
    """A ``BackupAndRestore`` whose backups are whole, and the chief's alone."""

    @property
    def _here(self) -> Any:
        return self.model.distribute_strategy.extended

    def _save_model(self) -> None:
        if self._here.should_checkpoint:
            callbacks_lib.save_backup(self, super()._save_model)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._here.should_checkpoint:
            callbacks_lib.clean_backup(self)
            super().on_train_begin(logs)
        if self._here.workers is not None:
            _hand_on(self, self._here.workers)

    def on_train_end(self, logs: Any = None) -> None:
        if self._here.should_checkpoint:
            if self.delete_checkpoint:
                callbacks_lib.delete_backup(self.backup_dir)
            super().on_train_end(logs)


def _hand_on(callback: Any, workers: Workers) -> None:
    """Gives what the chief has loaded from its backup to the other machines, who need no files."""
    model = callback.model
    chiefs, = workers.chiefs([tf.constant([tf.io.gfile.exists(callback._weights_path),
                                           getattr(model, "_initial_epoch", None) or 0], tf.int64)])
    found, epoch = chiefs.numpy().tolist()
    if not found:
        return
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._initial_epoch = epoch
    state.take_chiefs(workers, state.resident(state.saved_variables(model, names)))
