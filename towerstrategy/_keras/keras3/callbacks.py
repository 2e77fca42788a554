"""Hooks into Keras 3: callbacks that write files.

Goes in: the callbacks of a model of a ``TowerStrategy``.  Comes out: callbacks whose backups
survive a killed process.  With several machines the chief's callbacks write the user's files; the
other workers' write to a temporary folder, as in TensorFlow and tf_keras.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.callbacks import backup_and_restore, csv_logger, model_checkpoint, tensorboard

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import adopting, callbacks as callbacks_lib, state
from towerstrategy._keras.keras3 import names

# The callbacks that write the same files on every machine -> the attribute with the path.
_PATHS = {model_checkpoint.ModelCheckpoint: "filepath", csv_logger.CSVLogger: "filename",
          tensorboard.TensorBoard: "log_dir"}


def set_model(original: Callable[..., Any], self: Any, model: Any) -> None:
    """The hook for ``CallbackList.set_model``: replaces callbacks that write files."""
    strategy = adopting.strategy_of(model, names)
    if strategy is not None:
        self.callbacks = [_replaced(callback, strategy.extended.should_checkpoint)
                          for callback in self.callbacks]
    original(self, model)


def _replaced(callback: Any, is_chief: bool) -> Any:
    """The callback to call in place of a user's, which stays as it is."""
    if isinstance(callback, (_WholeBackup, _EmptiedCheckpoint)):
        return callback
    if isinstance(callback, backup_and_restore.BackupAndRestore):
        return callbacks_lib.with_methods(callback, _WholeBackup)
    for kind, attribute in () if is_chief else _PATHS.items():
        if isinstance(callback, kind):
            callback = _in_temporary_folder(callback, attribute)
    if not is_chief and isinstance(callback, model_checkpoint.ModelCheckpoint):
        return callbacks_lib.with_methods(callback, _EmptiedCheckpoint)
    return callback


def _in_temporary_folder(callback: Any, attribute: str) -> Any:
    """A copy of ``callback`` that writes to a temporary folder; ``attribute`` has its path."""
    folder = tempfile.TemporaryDirectory()
    path = os.path.join(folder.name, os.path.basename(getattr(callback, attribute)))
    return callbacks_lib.with_methods(callback, type("_Elsewhere", (), {
        "_folder": folder, attribute: property(lambda _: path)}))


class _EmptiedCheckpoint(model_checkpoint.ModelCheckpoint):
    """A ``ModelCheckpoint`` that deletes its files, so that they do not fill the disk."""

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        super()._save_model(*args, **kwargs)
        for name in os.listdir(self._folder.name):
            os.remove(os.path.join(self._folder.name, name))


class _WholeBackup(backup_and_restore.BackupAndRestore):
    """A ``BackupAndRestore`` that writes on the chief only, and survives a killed process.

    Keras' own overwrites the files of the last backup.  A process that is killed meanwhile leaves
    weights that cannot be read, or weights of one epoch with the number of another.  This one
    writes the new files beside the last ones and then renames them:

    1. The new weights are written, then the new metadata.  If the next run finds both, it deletes
       them.
    2. The weights are renamed; from now on the new backup counts.  If the next run finds new
       metadata alone, it continues with 3.
    3. The metadata is renamed.
    """

    _extended = property(lambda self: self.model.distribute_strategy.extended)
    _new_weights = property(
        lambda self: f"{self._weights_path.removesuffix('.weights.h5')}.new.weights.h5")
    _new_metadata = property(lambda self: f"{self._training_metadata_path}.new")

    def _save_model(self) -> None:
        if not self._extended.should_checkpoint:
            return
        paths = self._weights_path, self._training_metadata_path
        if getattr(self, "double_checkpoint", False):
            for path in paths:
                if tf.io.gfile.exists(path):
                    tf.io.gfile.copy(path, f"{path}.bkp", overwrite=True)
        new_paths = self._new_weights, self._new_metadata
        with _tf.patched(self, _weights_path=new_paths[0], _training_metadata_path=new_paths[1]):
            super()._save_model()
        for new_path, path in zip(new_paths, paths):
            tf.io.gfile.rename(new_path, path, overwrite=True)

    def _finish_save(self) -> None:
        """Finishes or deletes the backup of a run that was killed while it saved it."""
        if not tf.io.gfile.exists(self._new_metadata):
            return
        if tf.io.gfile.exists(self._new_weights):
            # Metadata first: if it is alone, the weights are renamed.
            tf.io.gfile.remove(self._new_metadata)
            tf.io.gfile.remove(self._new_weights)
        else:
            tf.io.gfile.rename(self._new_metadata, self._training_metadata_path, overwrite=True)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._extended.should_checkpoint:
            callbacks_lib.finish_deleting(self.backup_dir)
            self._finish_save()
            super().on_train_begin(logs)
        if self._extended.workers is not None:
            _send_backup(self, self._extended.workers)

    def on_train_end(self, logs: Any = None) -> None:
        if self._extended.should_checkpoint:
            if self.delete_checkpoint:
                callbacks_lib.delete_backup(self.backup_dir)
            super().on_train_end(logs)


def _send_backup(callback: Any, workers: Any) -> None:
    """Sends the state that the chief has loaded from its backup to all other workers."""
    model = callback.model
    chiefs, = workers.chiefs([tf.constant([tf.io.gfile.exists(callback._weights_path),
                                           getattr(model, "_initial_epoch", None) or 0], tf.int64)])
    exists, epoch = chiefs.numpy().tolist()
    if not exists:
        return
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._initial_epoch = epoch
    state.copy_from_chief(workers, state.resident(state.saved_variables(model, names)))
