"""Callbacks for both Kerases, without importing either; backups that survive a killed process.

Goes in: a callback of Keras.  Comes out: the callback with some methods replaced.  There is also a
base class for callbacks of our own.

Keras 3's ``BackupAndRestore`` overwrites the files of the last backup.  A process that is killed
meanwhile leaves weights that cannot be read, or weights of one epoch with the number of another.
On models of a ``TowerStrategy`` the new files are written beside the last ones and then renamed:

1. The new weights are written, then the new metadata.  If the next run finds both, it deletes them.
2. The weights are renamed; from now on the new backup counts.  If the next run finds new metadata
   alone, it continues with 3.
3. The metadata is renamed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf


class Callback:
    """A base class for callbacks of either Keras that need epochs' events, not batches'."""

    # So that Keras does not wait for a batch's logs (callbacks/callback_list.py of Keras 3,
    # callbacks.py of tf_keras).
    async_safe = _supports_tf_logs = True

    params: dict[str, Any] | None = None
    model: Any = None

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params

    def set_model(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        """A method that does nothing; it returns None, so tf_keras' ``_implements_*`` are false."""
        if name.startswith(("on_", "_implements_")):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def with_methods(callback: Any, methods: type) -> Any:
    """A copy of a Keras callback, of a subclass in which ``methods`` override its class's."""
    # Both share one state, so the user reads the copy's results off `callback`.
    subclass: Any = type(type(callback).__name__, (methods, type(callback)), {})
    copy = subclass.__new__(subclass)
    copy.__dict__ = callback.__dict__
    return copy


def save_backup(callback: Any, original: Callable[[], None]) -> None:
    """Calls ``original``, which writes the callback's two files, so that a kill cannot mix them."""
    weights, metadata = callback._weights_path, callback._training_metadata_path
    if getattr(callback, "double_checkpoint", False):
        for path in (weights, metadata):
            if tf.io.gfile.exists(path):
                tf.io.gfile.copy(path, f"{path}.bkp", overwrite=True)
    new_weights, new_metadata = _new_paths(callback)
    with _tf.patched(callback, _weights_path=new_weights, _training_metadata_path=new_metadata):
        original()
    tf.io.gfile.rename(new_weights, weights, overwrite=True)
    tf.io.gfile.rename(new_metadata, metadata, overwrite=True)


def clean_backup(callback: Any) -> None:
    """Finishes or deletes the backup of a run that was killed while it saved or deleted one."""
    new_weights, new_metadata = _new_paths(callback)
    _remove(_path_to_delete(callback.backup_dir))
    if not tf.io.gfile.exists(new_metadata):
        return
    if tf.io.gfile.exists(new_weights):
        tf.io.gfile.remove(new_metadata)  # first: metadata alone means that the weights are renamed
        tf.io.gfile.remove(new_weights)
    else:
        tf.io.gfile.rename(new_metadata, callback._training_metadata_path, overwrite=True)


def _new_paths(callback: Any) -> tuple[str, str]:
    """The paths to which the new weights and the new metadata are written."""
    return (f"{callback._weights_path.removesuffix('.weights.h5')}.new.weights.h5",
            f"{callback._training_metadata_path}.new")


def delete_backup(folder: str) -> None:
    """Deletes a backup; a killed process leaves all of it or nothing in its place."""
    _remove(_path_to_delete(folder))
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rename(folder, _path_to_delete(folder))
        _remove(_path_to_delete(folder))


def _path_to_delete(folder: Any) -> str:
    # We delete whatever has this name, so it must be no name that a user would choose.
    return str(folder).rstrip("/") + ".towerstrategy-deletes"


def _remove(folder: str) -> None:
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rmtree(folder)
