"""Batch statistics: mean and variance over the rows of all towers, in one meeting a pass.

Goes in: a tower's rows.  Comes out: mean and variance of the whole batch, or the rows normalized by
them, differentiable.  Forward and backward pass send one small tensor each from every tower to the
merge device and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import merging, moments
from towerstrategy.towers import contexts


def whole_batch_moments(tower: contexts.TowerContext, x: tf.Tensor, axes: Sequence[int],
                        kept: tf.Tensor | None = None, epsilon: float = 0.) -> tuple[Any, Any, Any]:
    """What divides (the count), mean and variance over all towers' rows, reduced axes of size 1.

    The gradient is that of ``tf.nn.moments``, in which the variance's mean is a constant.

    Args:
      tower: where this runs.
      x: this tower's rows, floats.
      axes: the axes that are reduced.
      kept: a bool tensor of the shape of ``x``, the entries that count; None for all.
      epsilon: what is added to the count.
    """
    @tf.custom_gradient
    def found(x: tf.Tensor) -> Any:
        own = moments.of_rows(x, axes, kept)
        if tower.stand_ins:
            own = merging.kept(tower.filled, own)

        def together(strategy: tf.distribute.Strategy, parts: Any) -> tf.Tensor:
            return moments.of_batch(contexts.all_values(parts, tower.count),
                                    strategy.extended.workers, epsilon)

        whole = tower.meet(together, own)
        shape = [1 if axis in axes else _size(x, axis) for axis in range(x.shape.rank)]
        count, mean, variance = (tf.reshape(part, shape) for part in tf.unstack(whole))

        def gradient(of_count: tf.Tensor, of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
            del of_count
            both = tower.all_reduce(_tf.ReduceOp.SUM, tf.stack([of_mean, of_variance]))
            both = tf.math.divide_no_nan(both, count)
            if tower.stand_ins:
                both = merging.kept(tower.filled, both)
            to_mean, to_variance = tf.unstack(both)
            towards = (x - mean) * (2 * to_variance) + to_mean
            return towards if kept is None else tf.where(kept, towards, tf.zeros([], x.dtype))

        return (count, mean, variance), gradient

    return found(x)


def normalized(x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, offset: tf.Tensor,
               scale: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Images normalized by TensorFlow's fused kernel: a few passes over them and not a dozen.

    The kernel takes ``mean`` and ``variance`` for constants.  Their gradients are made of its sums
    for ``offset`` and ``scale``, as they shift and scale the same numbers.

    Args:
      x: float32, ``[rows, height, width, channels]``.
      mean: ``[channels]``, as all others.
      variance: what is divided by, squared.
      offset: what is added in the end.
      scale: what is multiplied by.
      epsilon: what is added to the variance.
    """
    how = {"epsilon": epsilon, "is_training": False}

    def plainly(of_made: tf.Tensor, *given: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            made = tf.nn.batch_normalization(*given, epsilon)
        return tape.gradient(made, given, of_made)

    @tf.custom_gradient
    def found(x: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, offset: tf.Tensor,
              scale: tf.Tensor) -> Any:
        forward = tf.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=offset, mean=mean,
                                              variance=variance, **how)

        @tf.custom_gradient
        def gradient(of_made: tf.Tensor, *given: tf.Tensor) -> Any:
            x, mean, variance, _, scale = given
            of_x, of_scale, of_offset, *_ = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=of_made, x=x, scale=scale, reserve_space_1=mean,
                reserve_space_2=variance, reserve_space_3=forward.reserve_space_3, **how)
            over = tf.math.rsqrt(variance + epsilon)
            of_mean, of_variance = -scale * over * of_offset, -0.5 * scale * over**2 * of_scale

            def twice(*seen: tf.Tensor) -> Any:
                # TensorFlow's own takes mean and variance for constants here, too.
                with tf.GradientTape() as tape:
                    tape.watch((of_made, given))
                    parts = plainly(of_made, *given)
                return tape.gradient(parts, (of_made, *given), list(seen),
                                     unconnected_gradients=tf.UnconnectedGradients.ZERO)

            return (of_x, of_mean, of_variance, of_offset, of_scale), twice

        return forward.y, lambda of_made: gradient(of_made, x, mean, variance, offset, scale)

    return found(x, mean, variance, offset, scale)


def _size(x: tf.Tensor, axis: int) -> Any:
    return tf.shape(x)[axis] if x.shape[axis] is None else x.shape[axis]
