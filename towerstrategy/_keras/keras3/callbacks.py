"""Hooks into Keras 3: callbacks that write files.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import backup, chief
from towerstrategy._keras.keras3 import names


def checkpoint_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def _save_model(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            if not chief.writes(self):
                stack.enter_context(chief.thrown_away(self, "filepath"))
            original(self, *args, **kwargs)

    return _save_model


def csv_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if not chief.writes(self):
            self.filename = os.devnull
        original(self, logs)

    return on_train_begin


def tensorboard_set_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_model(self: Any, model: Any) -> None:
        self._model = model
        if not chief.writes(self):
            # Lives as long as the callback, whose writers keep files open.
            self._towerstrategy_folder = tempfile.TemporaryDirectory()
            self.log_dir = self._towerstrategy_folder.name
        original(self, model)

    return set_model


def backup_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def _save_model(self: Any) -> None:
        if names.strategy_of(self.model) is None:
            original(self)
        elif chief.writes(self):
            backup.save(self, original)

    return _save_model


def backup_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if names.strategy_of(self.model) is not None and chief.writes(self):
            backup.clean(self)
        if chief.workers_of(self) is None:
            original(self, logs)
        else:
            chief.restore(self, lambda: original(self, logs), lambda: _saved_of(self.model))

    return on_train_begin


def _saved_of(model: Any) -> list[Any]:
    """The TensorFlow variables that ``save_weights`` saves."""
    held = [*names.held_variables(model),
            *(variable for part in names.optimizers_of(model)
              for variable in names.optimizer_variables(part))]
    return list({id(variable): variable for variable in held
                 if isinstance(variable, _tf.BaseResourceVariable)}.values())


def backup_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_end(self: Any, logs: Any = None) -> None:
        if names.strategy_of(self.model) is None:
            original(self, logs)
        elif chief.writes(self):
            if self.delete_checkpoint:
                backup.delete(self.backup_dir)
            original(self, logs)

    return on_train_end
