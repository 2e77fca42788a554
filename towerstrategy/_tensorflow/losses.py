"""TensorFlow's own loss helpers and gradient tapes, as replica functions call them.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_array_ops, nn_impl_distribute
from tensorflow.python.training import moving_averages

from towerstrategy._tensorflow import wrapping

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
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def assign_moving_average(variable: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return original(variable, of_all(value), *args, **kwargs)

        return assign_moving_average

    wrapping.wrap((moving_averages, tf.__internal__.train), "assign_moving_average", make)


def tell_unique(told: Callable[[tf.Tensor], None]) -> None:
    """From now on tells of the values that ``tf.unique`` has found."""
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def unique(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            told(found[0])
            return found

        return unique

    wrapping.wrap(gen_array_ops, "unique", make)


def wrap_losses(average: Callable[..., Any], regularization: Callable[..., Any]) -> None:
    """Wraps what replica functions of one's own make losses with, once.

    Args:
      average: takes ``tf.nn.compute_average_loss`` and returns what is called instead.
      regularization: the same for ``tf.nn.scale_regularization_loss``.
    """
    places = (nn_impl_distribute, tf.nn, tf.compat.v1.nn, tf.compat.v2.nn)
    wrapping.wrap(places, "compute_average_loss", average)
    wrapping.wrap(places, "scale_regularization_loss", regularization)


def wrap_derivatives(gradient: Callable[..., Any], jacobian: Callable[..., Any],
                     of_graphs: Callable[..., Any], hessians: Callable[..., Any],
                     tangents: Callable[..., Any], forward: Callable[..., Any]) -> None:
    """Wraps what replica functions of one's own differentiate with, once.

    Args:
      gradient: takes ``tf.GradientTape.gradient`` and returns what is called instead.
      jacobian: the same for ``tf.GradientTape.jacobian``.
      of_graphs: the same for ``tf.gradients``.
      hessians: the same for ``tf.hessians``.
      tangents: the same for what makes a ``tf.autodiff.ForwardAccumulator``.
      forward: the same for its ``jvp``.
    """
    wrapping.wrap(tf.GradientTape, "gradient", gradient)
    wrapping.wrap(tf.GradientTape, "jacobian", jacobian)
    for name, wrapped in (("gradients", of_graphs), ("hessians", hessians)):
        wrapping.wrap((tf, tf.compat.v2), name, wrapped)
        wrapping.wrap(tf.compat.v1, name, wrapped)
    wrapping.wrap(tf.autodiff.ForwardAccumulator, "__init__", tangents)
    wrapping.wrap(tf.autodiff.ForwardAccumulator, "jvp", forward)
