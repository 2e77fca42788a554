"""Callbacks, as both Kerases have them, without importing either; backups that survive a kill.

Goes in: nothing, or a callback of theirs.  Comes out: a base class whose methods do nothing; the
callback with other methods; and of a ``BackupAndRestore``, on a model of a ``TowerStrategy``, the
same files, each whole and of the same epoch.  Keras 3 writes over the files of the last backup: a
run that is killed meanwhile leaves weights that cannot be read, or those of one epoch beside the
number of another.

A backup is written beside the last one.  Renaming the weights is the moment from which it counts:

1. new weights, then new metadata; whoever finds both throws them away;
2. the weights take their place; whoever finds new metadata alone finishes with
3. the metadata takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy._keras import hooks


class Callback:
    """A callback of either Keras that looks at epochs and not at batches."""

    # Neither Keras waits for a batch's logs because of us (callbacks/callback_list.py of Keras 3,
    # callbacks.py of tf_keras).
    async_safe = _supports_tf_logs = True

    params: dict[str, Any] | None = None
    model: Any = None

    def set_params(self, params: dict[str, Any]) -> None:
        self.params = params

    def set_model(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        """All other events do nothing; None, which is false, says so where tf_keras asks."""
        if name.startswith(("on_", "_implements_")):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def with_methods(callback: Any, methods: type) -> Any:
    """A Keras callback again, whose methods are these, then those of its own class."""
    # Both have one state: what is counted in either is what the user reads off `callback`.
    made_class: Any = type(type(callback).__name__, (methods, type(callback)), {})
    made = made_class.__new__(made_class)
    made.__dict__ = callback.__dict__
    return made


def save_backup(callback: Any, original: Callable[[], None]) -> None:
    """``original``, which writes the callback's two files, as one step."""
    weights, metadata = callback._weights_path, callback._training_metadata_path
    if getattr(callback, "double_checkpoint", False):
        for path in (weights, metadata):
            if tf.io.gfile.exists(path):
                tf.io.gfile.copy(path, f"{path}.bkp", overwrite=True)
    new_weights, new_metadata = _beside(callback)
    with hooks.having(callback, _weights_path=new_weights, _training_metadata_path=new_metadata):
        original()
    tf.io.gfile.rename(new_weights, weights, overwrite=True)
    tf.io.gfile.rename(new_metadata, metadata, overwrite=True)


def clean_backup(callback: Any) -> None:
    """Finishes or throws away what a run has left that was killed while it saved."""
    new_weights, new_metadata = _beside(callback)
    _remove(_doomed(callback.backup_dir))
    if not tf.io.gfile.exists(new_metadata):
        return
    if tf.io.gfile.exists(new_weights):
        tf.io.gfile.remove(new_metadata)  # before the weights: alone it would be taken for whole
        tf.io.gfile.remove(new_weights)
    else:
        tf.io.gfile.rename(new_metadata, callback._training_metadata_path, overwrite=True)


def _beside(callback: Any) -> tuple[str, str]:
    """The names of what is written beside the callback's two files."""
    return (f"{callback._weights_path.removesuffix('.weights.h5')}.new.weights.h5",
            f"{callback._training_metadata_path}.new")


def delete_backup(folder: str) -> None:
    """Deletes a backup, without a moment at which half of it is there."""
    _remove(_doomed(folder))
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rename(folder, _doomed(folder))
        _remove(_doomed(folder))


def _doomed(folder: Any) -> str:
    # What has this name is deleted: nobody else's folder may have it.
    return str(folder).rstrip("/") + ".towerstrategy-deletes"


def _remove(folder: str) -> None:
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rmtree(folder)
