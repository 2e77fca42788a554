"""Only the chief's files are kept: what Keras 3's callbacks write on the other machines.

Goes in: a callback whose model's strategy spans several machines.  Comes out: the same callback,
which on the first of them writes where it is to, and on the others to a folder that is
thrown away, as TensorFlow's and tf_keras' own habit is.  What a backup holds is read by the chief
and handed to the others, so that no file system need be shared.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy._keras import held
from towerstrategy.placement.workers import Workers


def workers_of(callback: Any) -> Workers | None:
    """The collectives of the machines of the callback's model; None with a single one."""
    strategy = getattr(callback.model, "distribute_strategy", None)
    return getattr(getattr(strategy, "extended", None), "workers", None)


def writes(callback: Any) -> bool:
    """Whether this machine keeps what the callback writes."""
    workers = workers_of(callback)
    return workers is None or workers.is_chief


class Elsewhere(held.Held):
    """Writes to a folder that is thrown away what the callback writes.

    Args:
      callback: the callback.
      attribute: where it has the path that it writes to.
      emptied: whether the folder is emptied after each call: the callback keeps no file open.
    """

    # Live as long as the callback, which may have files open in them.
    _folders: weakref.WeakKeyDictionary[Any, tempfile.TemporaryDirectory[str]] = (
        weakref.WeakKeyDictionary())

    def __init__(self, callback: Any, attribute: str, emptied: bool) -> None:
        super().__init__(callback)
        self._attribute, self._emptied = attribute, emptied
        if callback not in self._folders:
            self._folders[callback] = tempfile.TemporaryDirectory()
        self._folder = self._folders[callback].name

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        path = getattr(self._callback, self._attribute)
        setattr(self._callback, self._attribute,
                os.path.join(self._folder, os.path.basename(path)))
        try:
            yield
        finally:
            setattr(self._callback, self._attribute, path)
            for name in os.listdir(self._folder) if self._emptied else ():
                os.remove(os.path.join(self._folder, name))


def restore(callback: Any, load: Callable[[], None], held: Callable[[], list[tf.Variable]]) -> None:
    """Loads a ``BackupAndRestore``'s backup on the chief and gives it to the other machines.

    ``load`` is what Keras does: sets the model's weights and ``_initial_epoch``; ``held`` are the
    TensorFlow variables of the model and its optimizer, which is built by then.
    """
    workers: Any = workers_of(callback)
    model = callback.model
    if workers.is_chief:
        load()
    epoch = getattr(model, "_initial_epoch", None)
    found = tf.io.gfile.exists(callback._weights_path)
    chiefs, = workers.chiefs([tf.constant([found, epoch or 0], tf.int64)])
    found, epoch = chiefs.numpy().tolist()
    if not found:
        return
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._initial_epoch = epoch
    variables = held()
    values = workers.chiefs([variable.read_value() for variable in variables])
    for variable, value in zip(variables, values):
        variable.assign(value)
