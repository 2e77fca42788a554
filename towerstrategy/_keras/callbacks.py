"""Callbacks for both Kerases, without importing either; deleting backups in one step.

Goes in: a callback of Keras.  Comes out: the callback with some methods replaced.  There is also a
base class for callbacks of our own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


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


def delete_backup(folder: str) -> None:
    """Deletes a backup; a killed process leaves all of it or nothing in its place."""
    finish_deleting(folder)
    if tf.io.gfile.exists(folder):
        tf.io.gfile.rename(folder, _path_to_delete(folder))
        finish_deleting(folder)


def finish_deleting(folder: Any) -> None:
    """Deletes what is left of a backup, if a process was killed while it deleted it."""
    if tf.io.gfile.exists(_path_to_delete(folder)):
        tf.io.gfile.rmtree(_path_to_delete(folder))


def _path_to_delete(folder: Any) -> str:
    # We delete whatever has this name, so it must be no name that a user would choose.
    return str(folder).rstrip("/") + ".towerstrategy-deletes"
