"""Batch norm with the statistics of each tower's rows, as ``synchronize_batch_norm=False`` asks.

Goes in: a strategy, a model and how its Keras names things.  Comes out: the model, whose batch norm
layers normalize each tower's rows by themselves in a step that has all rows.  Moving statistics
move by the mean of the towers' statistics, in which a tower counts by its rows.  With a mask, or
renormalization, and where a layer says ``synchronized=True`` or has a ``call`` of its own,
statistics are of the whole batch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts


def normalize_by_tower(strategy: tf.distribute.Strategy, model: Any, names: Any) -> None:
    """Has the batch norm layers of ``model`` do so, if the strategy was asked to."""
    if strategy.extended.synchronizes_batch_norm or strategy.num_replicas_in_sync == 1:
        return
    original = names.BATCH_NORM.call
    for layer in model._flatten_layers():
        if isinstance(layer, names.BATCH_NORM) and type(layer).call is original:
            vars(layer).setdefault("call", types.MethodType(_call(original), layer))


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, inputs: tf.Tensor, training: Any = None, mask: Any = None) -> Any:
        axis = list(tf.nest.flatten(self.axis))
        of_all = mask is not None or self.synchronized or self.renorm or len(axis) > 1 or getattr(
            self, "virtual_batch_size", None)
        if of_all or not training or not self.trainable or tf.executing_eagerly() \
                or not contexts.has_all_rows():
            return original(self, inputs, training=training, mask=mask)
        moving = tf.convert_to_tensor(self.moving_mean)
        x = tf.cast(inputs, self.compute_dtype)
        output, mean, variance = _normalized(
            x, tf.ones_like(moving) if self.gamma is None else tf.convert_to_tensor(self.gamma),
            tf.zeros_like(moving) if self.beta is None else tf.convert_to_tensor(self.beta),
            axis[0] % x.shape.rank, self.epsilon)
        for variable, moment in (self.moving_mean, mean), (self.moving_variance, variance):
            variable.assign(variable * self.momentum
                            + tf.cast(moment, variable.dtype) * (1. - self.momentum))
        return output

    return call


def _normalized(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, axis: int, epsilon: float
                ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``x``, each tower's rows normalized by themselves; the towers' means and variances."""
    axes = [dim for dim in range(x.shape.rank) if dim != axis]
    kind = tf.float32 if x.dtype.size < 4 else x.dtype  # halves are added up in float32
    shape = [-1 if dim == axis else 1 for dim in range(x.shape.rank)]

    def spread(of_channels: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.cast(of_channels, kind), shape)

    def forward(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> Any:
        mean, variance = tf.nn.moments(tf.cast(x, kind), axes)
        factor = tf.math.rsqrt(spread(variance) + epsilon) * spread(scale)
        output = (tf.cast(x, kind) - spread(mean)) * factor + spread(offset)
        return tf.cast(output, x.dtype), mean, variance

    def backward(x: tf.Tensor, up: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor,
                 scale: tf.Tensor) -> Any:
        """``scale * inverse * (up - mean(up) - normal * mean(up * normal))``."""
        up, inverse = tf.cast(up, kind), tf.math.rsqrt(spread(variance) + epsilon)
        normal = (tf.cast(x, kind) - spread(mean)) * inverse
        of_scale, of_offset = tf.reduce_sum(up * normal, axes), tf.reduce_sum(up, axes)
        count = tf.cast(tf.size(x) // tf.size(mean), kind)
        rest = up - (spread(of_offset) + normal * spread(of_scale)) / count
        return (tf.cast(spread(scale) * inverse * rest, x.dtype), tf.cast(of_scale, scale.dtype),
                tf.cast(of_offset, scale.dtype))

    @tf.custom_gradient
    def normalized(*given: tf.Tensor) -> Any:
        output, *moments = _tf.call_by_each_tower(
            forward, ("rows", "once", "once"), ("rows", "own", "own"), given)

        def gradient(up: tf.Tensor, *_: Any) -> Any:
            return _tf.call_by_each_tower(
                backward, ("rows", "rows", "own", "own", "once"), ("rows", "sum", "sum"),
                [given[0], up, *moments, given[1]])

        return (output, *moments), gradient

    return tuple(normalized(x, scale, offset))
