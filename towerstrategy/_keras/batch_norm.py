"""Batch norm by TensorFlow's fused kernel, of all rows or of each tower's.

Goes in: Keras' ``BatchNormalization.call``, and a call of it in a tower or in a step that has all
rows.  Comes out: the same, in fewer operations, and fewer sums over all rows in a row, than Keras'
code and its gradient.  With ``synchronize_batch_norm=False`` a step that has all rows normalizes
each tower's by themselves, and moving statistics move by the mean of the towers', by rows.

With a mask, renormalization or several axes Keras' code is left as it is; so are statistics of all
rows where a layer says ``synchronized=True``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts

LEAST_EPSILON = 1e-5  # CuDNN's
_OTHERWISE = "renorm", "virtual_batch_size"  # attributes that not every release has


def call(original: Callable[..., Any], self: Any, inputs: Any, training: Any = None,
         mask: Any = None) -> Any:
    """The hook for ``BatchNormalization.call``."""
    context, axis = contexts.current(), tf.nest.flatten(self.axis)
    all_rows = contexts.has_all_rows()
    if context is None or not training or mask is not None or tf.executing_eagerly() \
            or not _has_several_towers(context.strategy) or not self.trainable or len(axis) > 1 \
            or any(getattr(self, name, None) for name in _OTHERWISE) \
            or self.synchronized and not all_rows:
        return original(self, inputs, training=training, mask=mask)
    x = tf.cast(inputs, self.compute_dtype)
    by_towers = all_rows and not self.synchronized \
        and not context.strategy.extended.synchronizes_batch_norm
    if not by_towers and not _has_kernel(self, x, axis[0]):
        return original(self, inputs, training=training, mask=mask)
    moving = tf.convert_to_tensor(self.moving_mean)
    scale = tf.ones_like(moving) if self.gamma is None else tf.convert_to_tensor(self.gamma)
    offset = tf.zeros_like(moving) if self.beta is None else tf.convert_to_tensor(self.beta)
    if by_towers:
        output, mean, variance = _normalized(x, scale, offset, axis[0] % x.shape.rank,
                                             self.epsilon)
    else:
        output, mean, variance = _by_kernel(x, scale, offset, self.epsilon)
    for variable, moment in (self.moving_mean, mean), (self.moving_variance, variance):
        variable.assign(variable * self.momentum
                        + tf.cast(moment, variable.dtype) * (1. - self.momentum))
    return output


def _has_several_towers(strategy: tf.distribute.Strategy) -> bool:
    extended = strategy.extended
    return len(extended.worker_devices) > 1 or extended.workers is not None


def _has_kernel(layer: Any, x: tf.Tensor, axis: int) -> bool:
    """Whether TensorFlow's kernel can do it, and tf_keras does not call it by itself."""
    return (not getattr(layer, "fused", False) and x.shape.rank in (2, 4)
            and axis % x.shape.rank == x.shape.rank - 1 and x.dtype.size < 8
            and layer.epsilon >= LEAST_EPSILON)


def _by_kernel(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
               ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``x`` normalized by all rows; their means and variances."""
    images = x if x.shape.rank == 4 else x[:, tf.newaxis, tf.newaxis]
    nothing = tf.zeros([0], scale.dtype)
    output, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=images, scale=scale, offset=offset, mean=nothing, variance=nothing, epsilon=epsilon)
    count = tf.cast(tf.size(x) // tf.size(scale), variance.dtype)
    # The kernel divides by the count less one.
    variance *= tf.maximum(count - 1, 1) / count
    return output if x.shape.rank == 4 else output[:, 0, 0], mean, variance


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
