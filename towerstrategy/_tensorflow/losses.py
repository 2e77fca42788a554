"""TensorFlow's own loss helpers and gradient tapes, as replica functions call them.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_array_ops, nn_impl_distribute
from tensorflow.python.training import moving_averages

PRIVATE_NAMES = {
    "tensorflow.python.ops.nn_impl_distribute:compute_average_loss":
        "tf.nn.compute_average_loss, which takes all replicas to have as many rows; others take it "
        "from here",
    "tensorflow.python.ops.nn_impl_distribute:scale_regularization_loss":
        "tf.nn.scale_regularization_loss, which counts a replica without rows; the same",
    "tensorflow.python.ops.gen_array_ops:unique":
        "what tf.unique, and with it tf.nn.embedding_lookup_sparse, calls; an eager gradient does "
        "not tell that it names each row once",
    "tensorflow.python.training.moving_averages:assign_moving_average":
        "takes the plain mean over the replicas in its own merge_call, behind "
        "tf.compat.v1.train.ExponentialMovingAverage and tf_keras.backend.moving_average_update; "
        "in towers it is given the mean by share of rows",
}


def give_moving_averages(of_all: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """From now on ``assign_moving_average`` moves towards ``of_all(value)``."""
    original = moving_averages.assign_moving_average
    if hasattr(original, "_towerstrategy_original"):
        return

    @functools.wraps(original)
    def assign_moving_average(variable: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return original(variable, of_all(value), *args, **kwargs)

    assign_moving_average._towerstrategy_original = original  # type: ignore[attr-defined]
    moving_averages.assign_moving_average = assign_moving_average
    tf.__internal__.train.assign_moving_average = assign_moving_average


def tell_unique(told: Callable[[tf.Tensor], None]) -> None:
    """From now on tells of the values that ``tf.unique`` has found."""
    original = gen_array_ops.unique
    if hasattr(original, "_towerstrategy_original"):
        return

    @functools.wraps(original)
    def unique(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        told(found[0])
        return found

    unique._towerstrategy_original = original  # type: ignore[attr-defined]
    gen_array_ops.unique = unique


def wrap_losses(average: Callable[..., Any], regularization: Callable[..., Any],
                gradient: Callable[..., Any]) -> None:
    """Wraps what replica functions of one's own make losses with, once.

    Args:
      average: takes ``tf.nn.compute_average_loss`` and returns what is called instead.
      regularization: the same for ``tf.nn.scale_regularization_loss``.
      gradient: the same for ``tf.GradientTape.gradient``.
    """
    places = (nn_impl_distribute, tf.nn, tf.compat.v1.nn, tf.compat.v2.nn)
    for owners, name, make in ((places, "compute_average_loss", average),
                               (places, "scale_regularization_loss", regularization),
                               ((tf.GradientTape,), "gradient", gradient)):
        original = getattr(owners[0], name)
        if not hasattr(original, "_towerstrategy_original"):
            wrapped: Any = functools.wraps(original)(make(original))
            wrapped._towerstrategy_original = original
            for owner in owners:
                setattr(owner, name, wrapped)
