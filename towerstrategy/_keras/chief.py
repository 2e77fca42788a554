"""Only the chief's files are kept: what Keras 3's callbacks write on the other machines.

Goes in: a callback whose model's strategy spans several machines.  Comes out: on the
first of them the same callback, on the others one that writes to a folder which is thrown away, as
TensorFlow's and tf_keras' own habit is.  What a backup holds is read by the chief
and handed to the others, so that no file system need be shared.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def elsewhere(callback: Any, attribute: str) -> Any:
    """A copy of ``callback`` that writes to a folder which is thrown away with it.

    ``attribute`` is where the callback has the path that it writes to.
    """
    made = copy.copy(callback)
    made._folder = tempfile.TemporaryDirectory()
    setattr(made, attribute, os.path.join(made._folder.name,
                                          os.path.basename(getattr(callback, attribute))))
    return made


def restore(callback: Any, load: Callable[[], None], held: Callable[[], list[tf.Variable]]) -> None:
    """Loads a ``BackupAndRestore``'s backup on the chief and gives it to the other machines.

    ``load`` is what Keras does: sets the model's weights and ``_initial_epoch``; ``held`` are the
    TensorFlow variables of the model and its optimizer, which is built by then.
    """
    model = callback.model
    workers = model.distribute_strategy.extended.workers
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
