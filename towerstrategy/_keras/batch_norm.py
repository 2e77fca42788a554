"""Batch norm: TensorFlow's fused kernel over all rows, or each tower's own statistics.

Goes in: Keras' ``BatchNormalization.call``, called in a tower or in a step that has all rows.
Comes out: the same results with fewer operations, and with fewer sums over all rows that depend on
each other, than by Keras' code and its gradient.  With ``synchronize_batch_norm=False`` a step that
has all rows normalizes each tower's rows by that tower's statistics; the moving statistics use the
mean of the towers' statistics, weighted by rows.

Keras' own code runs with a mask, renormalization or several axes, and, in a replica function, for
layers with ``synchronized=True``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts

LEAST_EPSILON = 1e-5  # cuDNN takes no smaller one
_UNSUPPORTED = "renorm", "virtual_batch_size"  # attributes; not every release has them


def call(original: Callable[..., Any], self: Any, inputs: Any, training: Any = None,
         mask: Any = None) -> Any:
    """The hook for ``BatchNormalization.call``."""
    context, axis = contexts.current(), tf.nest.flatten(self.axis)
    all_rows = contexts.has_all_rows()
    if context is None or not training or mask is not None or tf.executing_eagerly() \
            or not _has_several_towers(context.strategy) or not self.trainable or len(axis) > 1 \
            or any(getattr(self, name, None) for name in _UNSUPPORTED) \
            or self.synchronized and not all_rows:
        return original(self, inputs, training=training, mask=mask)
    x = tf.cast(inputs, self.compute_dtype)
    by_tower = all_rows and not self.synchronized \
        and not context.strategy.extended.synchronizes_batch_norm
    if not by_tower and not _has_kernel(self, x, axis[0]):
        return original(self, inputs, training=training, mask=mask)
    moving = tf.convert_to_tensor(self.moving_mean)
    scale = tf.ones_like(moving) if self.gamma is None else tf.convert_to_tensor(self.gamma)
    offset = tf.zeros_like(moving) if self.beta is None else tf.convert_to_tensor(self.beta)
    if by_tower:
        output, mean, variance = _normalize_by_tower(x, scale, offset, axis[0] % x.shape.rank,
                                             self.epsilon)
    else:
        output, mean, variance = _normalize_by_kernel(x, scale, offset, self.epsilon)
    for variable, moment in (self.moving_mean, mean), (self.moving_variance, variance):
        variable.assign(variable * self.momentum
                        + tf.cast(moment, variable.dtype) * (1. - self.momentum))
    return output


def _has_several_towers(strategy: tf.distribute.Strategy) -> bool:
    extended = strategy.extended
    return len(extended.worker_devices) > 1 or extended.workers is not None


def _has_kernel(layer: Any, x: tf.Tensor, axis: int) -> bool:
    """Whether TensorFlow's kernel supports the call, and tf_keras does not call it by itself."""
    return (not getattr(layer, "fused", False) and x.shape.rank in (2, 4)
            and axis % x.shape.rank == x.shape.rank - 1 and x.dtype.size < 8
            and layer.epsilon >= LEAST_EPSILON)


def _normalize_by_kernel(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
               ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``x`` normalized over all rows, and the means and variances."""
    images = x if x.shape.rank == 4 else x[:, tf.newaxis, tf.newaxis]
    empty = tf.zeros([0], scale.dtype)
    output, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=images, scale=scale, offset=offset, mean=empty, variance=empty, epsilon=epsilon)
    count = tf.cast(tf.size(x) // tf.size(scale), variance.dtype)
    # The kernel's variance is a sum divided by count - 1; Keras divides by count.
    variance *= tf.maximum(count - 1, 1) / count
    return output if x.shape.rank == 4 else output[:, 0, 0], mean, variance


def _normalize_by_tower(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, axis: int, epsilon: float
                ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``x`` with each tower's rows normalized alone, and the towers' means and variances."""
    axes = [dim for dim in range(x.shape.rank) if dim != axis]
    dtype = tf.float32 if x.dtype.size < 4 else x.dtype  # half-precision values sum in float32
    shape = [-1 if dim == axis else 1 for dim in range(x.shape.rank)]

    def broadcast(per_channel: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.cast(per_channel, dtype), shape)

    def forward(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> Any:
        mean, variance = tf.nn.moments(tf.cast(x, dtype), axes)
        factor = tf.math.rsqrt(broadcast(variance) + epsilon) * broadcast(scale)
        output = (tf.cast(x, dtype) - broadcast(mean)) * factor + broadcast(offset)
        return tf.cast(output, x.dtype), mean, variance

    def backward(x: tf.Tensor, upstream: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor,
                 scale: tf.Tensor) -> Any:
        """For x: ``scale * inverse * (up - mean(up) - normal * mean(up * normal))``."""
        up, inverse = tf.cast(upstream, dtype), tf.math.rsqrt(broadcast(variance) + epsilon)
        normal = (tf.cast(x, dtype) - broadcast(mean)) * inverse
        scale_gradient, offset_gradient = tf.reduce_sum(up * normal, axes), tf.reduce_sum(up, axes)
        count = tf.cast(tf.size(x) // tf.size(mean), dtype)
        rest = up - (broadcast(offset_gradient) + normal * broadcast(scale_gradient)) / count
        return (tf.cast(broadcast(scale) * inverse * rest, x.dtype),
                tf.cast(scale_gradient, scale.dtype), tf.cast(offset_gradient, scale.dtype))

    @tf.custom_gradient
    def normalize(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> Any:
        output, *moments = _tf.call_by_each_tower(
            forward, ("rows", "once", "once"), ("rows", "own", "own"), (x, scale, offset))

        def gradient(upstream: tf.Tensor, *_: Any) -> Any:
            return _tf.call_by_each_tower(
                backward, ("rows", "rows", "own", "own", "once"), ("rows", "sum", "sum"),
                [x, upstream, *moments, scale])

        return (output, *moments), gradient

    return tuple(normalize(x, scale, offset))
