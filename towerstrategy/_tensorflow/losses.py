"""TensorFlow's own loss helpers, as replica functions call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import nn_impl_distribute

from towerstrategy._tensorflow import wrapping

_PLACES = (nn_impl_distribute, tf.nn, tf.compat.v1.nn, tf.compat.v2.nn)
AVERAGE = wrapping.Place(
    _PLACES, "compute_average_loss", "takes all replicas to have as many rows")
REGULARIZATION = wrapping.Place(
    _PLACES, "scale_regularization_loss", "counts a replica without rows")


def wrap_losses(average: Callable[..., Any], regularization: Callable[..., Any]) -> None:
    """Wraps what replica functions of one's own make losses with, once.

    Args:
      average: takes ``tf.nn.compute_average_loss`` and returns what is called instead.
      regularization: the same for ``tf.nn.scale_regularization_loss``.
    """
    AVERAGE.wrap(average)
    REGULARIZATION.wrap(regularization)
