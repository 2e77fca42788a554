"""Mean and variance of a whole batch, from what each tower knows of its own rows.

Goes in: of each tower's entries the count, the mean and the sum of squared distances from it.
Comes out: the same of all of them (Chan, Golub and LeVeque's update), so that nothing cancels where
means are large, as it does in ``E[x^2] - E[x]^2``, and all of it crosses in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def of_rows(x: tf.Tensor, axes: Sequence[int], kept: tf.Tensor | None = None) -> tf.Tensor:
    """What a tower brings: count, mean and sum of squared distances, ``[3, channels]``.

    Args:
      x: floats.
      axes: the axes that are reduced; what is left are the channels.
      kept: a bool tensor of the shape of ``x``, the entries that count; None for all.
    """
    if kept is None:
        total = tf.reduce_sum(x, axes, keepdims=True)
        entries = tf.size(x, tf.int64) // tf.size(total, tf.int64)
        count = tf.fill(tf.shape(total), tf.cast(entries, x.dtype))
    else:
        total = tf.reduce_sum(tf.where(kept, x, tf.zeros([], x.dtype)), axes, keepdims=True)
        count = tf.reduce_sum(tf.cast(kept, x.dtype), axes, keepdims=True)
    mean = tf.math.divide_no_nan(total, count)
    distances = tf.math.squared_difference(x, mean)
    if kept is not None:
        distances = tf.where(kept, distances, tf.zeros([], x.dtype))
    return tf.stack([tf.reshape(part, [-1]) for part in (
        count, mean, tf.reduce_sum(distances, axes, keepdims=True))])


def merged(parts: tf.Tensor) -> tf.Tensor:
    """Of parts ``[parts, 3, channels]``, as :func:`of_rows` makes them, that of all their rows."""
    counts, means, squares = tf.unstack(parts, axis=1)
    count = tf.reduce_sum(counts, 0)
    base = means[0]
    mean = base + tf.math.divide_no_nan(tf.reduce_sum(counts * (means - base), 0), count)
    between = counts * tf.math.squared_difference(means, mean)
    return tf.stack([count, mean, tf.reduce_sum(squares + between, 0)])


def of_batch(parts: Sequence[tf.Tensor], workers: Any, epsilon: float) -> tf.Tensor:
    """What divides, mean and variance of the whole batch, ``[3, channels]``.

    Args:
      parts: what each of this machine's towers brings.
      workers: where the machines meet, or None.
      epsilon: what Keras adds to the count.
    """
    whole = merged(tf.stack(list(parts)))
    if workers is not None:
        whole = merged(workers.stack(whole))
    count, mean, squares = tf.unstack(whole)
    divisor = count + epsilon
    if epsilon:
        between = count * tf.math.square(mean * (epsilon / divisor))
        mean, squares = mean * (count / divisor), squares + between
    return tf.stack([divisor, mean, tf.math.divide_no_nan(squares, divisor)])
