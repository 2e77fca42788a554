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

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts

LEAST_EPSILON = 1e-5  # cuDNN takes no smaller one
_UNSUPPORTED = "renorm", "virtual_batch_size", "adjustment"  # attributes of some releases


def call(original: Callable[..., Any], self: Any, inputs: Any, training: Any = None,
         mask: Any = None) -> Any:
    """The hook for ``BatchNormalization.call``."""
    context, axis = contexts.current(), tf.nest.flatten(self.axis)
    all_rows = contexts.has_all_rows()
    if context is None or tf.is_tensor(training) or not training or mask is not None \
            or tf.executing_eagerly() or not _has_several_towers(context.strategy) \
            or not self.trainable or len(axis) > 1 or self.synchronized and not all_rows \
            or any(getattr(self, name, None) for name in _UNSUPPORTED) or _overrides(type(self)):
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


def _overrides(layer: type) -> bool:
    """Whether a subclass of Keras' layer has a helper of its own, such as ``_moments``."""
    of_keras = next(each for each in layer.__mro__
                    if each.__module__.startswith(("keras.", "tf_keras.")))
    helpers = (name for name in dir(of_keras) if name.startswith("_")
               and not name.startswith("__") and callable(getattr(of_keras, name)))
    return layer is not of_keras and any(inspect.getattr_static(layer, name) is not
                                         inspect.getattr_static(of_keras, name) for name in helpers)


def _has_several_towers(strategy: tf.distribute.Strategy) -> bool:
    extended = strategy.extended
    return len(extended.worker_devices) > 1 or extended.workers is not None


def _has_kernel(layer: Any, x: tf.Tensor, axis: int) -> bool:
    """Whether TensorFlow's kernel supports the call, and tf_keras does not call it by itself."""
    return (not getattr(layer, "fused", False) and x.shape.rank in (2, 4)
            and axis % x.shape.rank == x.shape.rank - 1 and x.dtype.size < 8
            and tf.as_dtype(layer.moving_mean.dtype) == tf.float32
            and layer.epsilon >= LEAST_EPSILON)


def _normalize_by_kernel(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
                         ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``x`` normalized over all rows, and the means and variances."""
    images = x if x.shape.rank == 4 else x[:, tf.newaxis, tf.newaxis]
    empty = tf.zeros([0], scale.dtype)

    @tf.custom_gradient
    def normalize(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> Any:
        output, mean, variance, *kept = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=empty, variance=empty, epsilon=epsilon)

        @tf.custom_gradient
        def gradients(x: tf.Tensor, upstream: tf.Tensor, scale: tf.Tensor) -> Any:
            first = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=upstream, x=x, scale=scale, reserve_space_1=kept[0],
                reserve_space_2=kept[1], reserve_space_3=kept[2], epsilon=epsilon)
            return list(first[:3]), lambda *others: _tf.vector_jacobian_product(
                functools.partial(_gradients, axis=3, epsilon=epsilon), 3)(
                    x, upstream, scale, *others)

        return (output, mean, variance), lambda upstream, *_: gradients(
            *_tf.captured_here([x, upstream, scale]))

    output, mean, variance = normalize(*_tf.captured_here([images, scale, offset]))
    count = tf.cast(tf.size(x) // tf.size(scale), variance.dtype)
    # The kernel's variance is a sum divided by count - 1; Keras divides by count.
    variance *= tf.maximum(count - 1, 1) / count
    return output if x.shape.rank == 4 else output[:, 0, 0], mean, variance


def _normalize_by_tower(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, axis: int, epsilon: float
                        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``x`` with each tower's rows normalized alone, and the towers' means and variances."""
    normalized, gradients, by_moments = (
        functools.partial(function, axis=axis, epsilon=epsilon)
        for function in (_normalized, _gradients, _gradients_by_moments))

    takes, gives = ("rows", "rows", "once"), ("rows", "sum", "sum")

    def first_order(tensors: Any, results: Any, upstream: Any) -> Any:
        (x, scale, _), (_, *moments) = tensors, results
        given = [x, upstream[0], scale]
        if tf.compat.v1.get_default_graph() is moments[0].graph:
            return _tf.call_by_each_tower(by_moments, (*takes, "own", "own"), gives,
                                          [*given, *moments], second_order)
        # A tower's own values cannot leave a function.
        return _tf.call_by_each_tower(gradients, takes, gives, given)

    def second_order(tensors: Any, results: Any, upstream: Any) -> Any:
        return [*_tf.gradient_by_each_tower(gradients, takes, gives, tensors[:3], results,
                                            upstream), None, None]

    output, *moments = _tf.call_by_each_tower(
        normalized, ("rows", "once", "once"), ("rows", "own", "own"), (x, scale, offset),
        first_order)
    return output, *moments


def _normalized(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, axis: int, epsilon: float
                ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """``x`` normalized as by Keras' code, the means and the variances."""
    axes, broadcast, dtype = _of_channels(x, axis)
    mean, variance = (tf.where(tf.size(x) > 0, moment, tf.zeros_like(moment))  # NaN without rows
                      for moment in tf.nn.moments(tf.cast(x, dtype), axes))
    factor = tf.math.rsqrt(broadcast(variance) + epsilon) * broadcast(scale)
    output = (tf.cast(x, dtype) - broadcast(mean)) * factor + broadcast(offset)
    return tf.cast(output, x.dtype), mean, variance


def _gradients(x: tf.Tensor, upstream: tf.Tensor, scale: tf.Tensor, axis: int, epsilon: float
               ) -> Any:
    """The gradients for x, scale and offset, whose own gradients are those of Keras' code.

    The kernel's are others, as ``tf.nn.moments`` stops the gradient of the mean in the variance.
    That changes nothing in first order.
    """
    given = x, scale, offset = [x, scale, tf.zeros_like(scale)]
    output, *_ = _normalized(x, scale, offset, axis, epsilon)
    return tf.gradients(output, given, upstream, stop_gradients=given)


def _gradients_by_moments(x: tf.Tensor, upstream: tf.Tensor, scale: tf.Tensor, mean: tf.Tensor,
                          variance: tf.Tensor, axis: int, epsilon: float) -> Any:
    """Those of :func:`_gradients`, in fewer passes over ``x``.

    For x: ``scale * inverse * (up - mean(up) - normal * mean(up * normal))``.
    """
    axes, broadcast, dtype = _of_channels(x, axis)
    up, inverse = tf.cast(upstream, dtype), tf.math.rsqrt(broadcast(variance) + epsilon)
    normal = (tf.cast(x, dtype) - broadcast(mean)) * inverse
    scale_gradient, offset_gradient = tf.reduce_sum(up * normal, axes), tf.reduce_sum(up, axes)
    count = tf.cast(tf.size(x) // tf.size(mean), dtype)
    rest = up - (broadcast(offset_gradient) + normal * broadcast(scale_gradient)) / count
    return (tf.cast(broadcast(scale) * inverse * rest, x.dtype),
            tf.cast(scale_gradient, scale.dtype), tf.cast(offset_gradient, scale.dtype))


def _of_channels(x: tf.Tensor, axis: int) -> tuple[list[int], Callable[..., tf.Tensor], tf.DType]:
    """The axes but the channels', what broadcasts channels' values to ``x``, and their dtype."""
    dtype = tf.float32 if x.dtype.size < 4 else x.dtype  # half-precision values sum in float32
    shape = [-1 if dim == axis else 1 for dim in range(x.shape.rank)]
    return ([dim for dim in range(x.shape.rank) if dim != axis],
            lambda value: tf.reshape(tf.cast(value, dtype), shape), dtype)
