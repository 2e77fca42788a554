"""Only the chief's files are kept: what Keras 3's callbacks write on the other machines.

Goes in: a callback whose model's strategy spans several machines.  Comes out: the same callback,
which on the first of them writes where it was told to, and on the others to a folder that is
thrown away, as TensorFlow's and tf_keras' own habit is.  What a backup holds is read by the chief
and handed to the others, so that no file system need be shared.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy.machines import meeting


def workers_of(callback: Any) -> meeting.Machines | None:
    """Where the machines of the callback's model meet; None with a single one."""
    strategy = getattr(callback.model, "distribute_strategy", None)
    return getattr(getattr(strategy, "extended", None), "workers", None)


def writes(callback: Any) -> bool:
    """Whether this machine keeps what the callback writes."""
    workers = workers_of(callback)
    return workers is None or workers.is_chief


@contextlib.contextmanager
def thrown_away(callback: Any, attribute: str) -> Iterator[None]:
    """Within, the path in ``attribute`` is of the same name in a folder that is then deleted."""
    path = getattr(callback, attribute)
    with tempfile.TemporaryDirectory() as folder:
        setattr(callback, attribute, os.path.join(folder, os.path.basename(path)))
        try:
            yield
        finally:
            setattr(callback, attribute, path)


def restore(callback: Any, load: Callable[[], None], held: Callable[[], list[tf.Variable]]) -> None:
    """Loads a ``BackupAndRestore``'s backup on the chief and gives it to the other machines.

    Args:
      callback: the callback.
      load: what Keras does: sets the model's weights, and ``_initial_epoch``.
      held: the TensorFlow variables of the model and its optimizer, which is built by then.
    """
    workers: Any = workers_of(callback)
    model = callback.model
    if workers.is_chief:
        load()
    epoch = getattr(model, "_initial_epoch", None)
    found = tf.io.gfile.exists(callback._weights_path)
    told, = workers.chiefs([tf.constant([found, epoch or 0], tf.int64)])
    found, epoch = told.numpy().tolist()
    if not found:
        return
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    model._initial_epoch = epoch
    variables = held()
    values = workers.chiefs([variable.read_value() for variable in variables])
    for variable, value in zip(variables, values):
        variable.assign(value)
