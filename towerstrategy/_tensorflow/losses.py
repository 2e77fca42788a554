"""TensorFlow's own loss helpers, as replica functions call them."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import nn_impl_distribute

from towerstrategy._tensorflow import wrapping

_PLACES = (nn_impl_distribute, tf.nn, tf.compat.v1.nn, tf.compat.v2.nn)
AVERAGE = wrapping.Place(
    _PLACES, "compute_average_loss", "takes all replicas to have as many rows")
REGULARIZATION = wrapping.Place(
    _PLACES, "scale_regularization_loss", "counts a replica without rows")
