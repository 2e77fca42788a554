"""Hooks into tf_keras: layers that look at more than their rows.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy._keras import batch_norm
from towerstrategy.placement import kind
from towerstrategy.towers import contexts


def batch_norm_build(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(self: Any, input_shape: Any) -> Any:
        strategy = tf.distribute.get_strategy()
        if not kind.is_tower_strategy(strategy):
            return original(self, input_shape)
        with strategy.extended.one_copy_of_means():
            return original(self, input_shape)

    return build


def calculate_mean_and_var(original: Callable[..., Any]) -> Callable[..., Any]:
    def _calculate_mean_and_var(self: Any, inputs: Any, reduction_axes: Any, keep_dims: bool,
                                mask: Any = None) -> Any:
        tower = batch_norm.synchronizing(self)
        # Virtual batches are parts of the batch by their name.
        if tower is None or self.virtual_batch_size is not None:
            return batch_norm.of_own_rows(
                inputs, original(self, inputs, reduction_axes, keep_dims, mask=mask))
        _, mean, variance = batch_norm.moments(tower, inputs, reduction_axes, mask)
        if keep_dims:
            return mean, variance
        return tf.squeeze(mean, reduction_axes), tf.squeeze(variance, reduction_axes)

    return _calculate_mean_and_var


def fused_batch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def _fused_batch_norm(self: Any, inputs: Any, mask: Any, training: Any) -> Any:
        tower = batch_norm.synchronizing(self)
        if tower is None or tf.get_static_value(training) == False:  # noqa: E712
            return original(self, inputs, mask, training)
        return _unfused(tower, self, inputs, tf.cast(training, tf.bool))

    return _fused_batch_norm


def _unfused(tower: contexts.TowerContext, layer: Any, inputs: tf.Tensor,
             training: tf.Tensor) -> tf.Tensor:
    """What the fused kernel computes, which takes its statistics from its own rows.

    Like the kernel it takes no mask, and moves the variance with Bessel's correction.
    """
    x = tf.cast(inputs, layer._param_dtype)
    axes = [axis for axis in range(x.shape.rank) if axis not in layer.axis]
    shape = [size if axis in layer.axis else 1 for axis, size in enumerate(x.shape)]
    count, mean, variance = batch_norm.moments(tower, x, axes)
    moved = tf.stop_gradient(variance * count / tf.maximum(count - 1, 1))

    def move(variable: Any, value: tf.Tensor) -> Any:
        value = variable + (tf.reshape(value, variable.shape) - variable) * (1 - layer.momentum)
        return variable.assign(tf.where(training, value, variable))

    layer.add_update(lambda: move(layer.moving_mean, tf.stop_gradient(mean)))
    layer.add_update(lambda: move(layer.moving_variance, moved))
    mean, variance, offset, scale = (None if part is None else tf.reshape(part, shape) for part in (
        tf.where(training, mean, tf.reshape(layer.moving_mean, shape)),
        tf.where(training, variance, tf.reshape(layer.moving_variance, shape)),
        layer.beta, layer.gamma))
    return tf.cast(tf.nn.batch_normalization(x, mean, variance, offset, scale, layer.epsilon),
                   inputs.dtype)


def make_legacy_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_legacy_seed(self: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or not tower.draws_rows:
            return original(self)
        before = self._seed

        def again() -> None:
            self._seed = before

        return tower.for_all(("seed", id(self)), lambda: original(self), again)

    return make_legacy_seed
