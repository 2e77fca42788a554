"""Batch statistics: mean and variance over the rows of all towers, in one meeting a pass.

Goes in: a tower's rows.  Comes out: mean and variance of the whole batch, differentiable.  Forward
and backward pass send one small tensor each from every tower to the merge device and back.
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


def _size(x: tf.Tensor, axis: int) -> Any:
    return tf.shape(x)[axis] if x.shape[axis] is None else x.shape[axis]
