"""Writes to pieces of a variable: slices (``v[a:b].assign``) and elements (``scatter_nd_*``).

Goes in: the indices or slices that towers write to, and their values.  Comes out: one set of
indices and values.  Elements are counted through the variable (flat positions), so that several
machines exchange them as ``tf.IndexedSlices``, like the rows of other scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.merge import merging, shares as shares_lib


def flat_slices(shape: tf.Tensor, indices: Any, updates: Any) -> tf.IndexedSlices:
    """``scatter_nd`` indices and updates as slices of the variable with its first dimensions flat.

    Args:
      shape: the variable's, an int64 vector.
      indices: ``[..., depth]``, which index the first ``depth`` dimensions.
      updates: ``[..., *shape[depth:]]``.
    """
    indices = tf.cast(indices, tf.int64)
    depth = tf.shape(indices)[-1]
    sizes = shape[:depth]
    inside = tf.reduce_all((indices >= 0) & (indices < sizes), -1)
    # One outside must not become another element: below zero it stays outside.
    flat = tf.where(inside, tf.reduce_sum(indices * _steps(sizes), -1), -tf.ones([], tf.int64))
    values = tf.reshape(updates, tf.concat([[-1], shape[depth:]], 0))
    return tf.IndexedSlices(values, tf.reshape(flat, [-1]))


def nd_indices(shape: tf.Tensor, depth: Any, flat: tf.Tensor) -> tf.Tensor:
    """The inverse for indices: ``[number, depth]``."""
    sizes = shape[:depth]
    steps = _steps(sizes)
    indices = flat[:, None] // steps
    # Not modulo in the first dimension, where -1 must stay what it is.
    return tf.concat([indices[:, :1], indices[:, 1:] % sizes[1:]], 1)


def _steps(sizes: tf.Tensor) -> tf.Tensor:
    """How many elements one step along each dimension is."""
    return tf.math.cumprod(sizes, exclusive=True, reverse=True)


def batch_indices(indices: tf.Tensor) -> tf.Tensor:
    """``batch_scatter_update`` indices as those of ``scatter_nd_update``."""
    indices = tf.cast(indices, tf.int64)
    counts = [tf.range(tf.shape(indices, tf.int64)[axis]) for axis in range(indices.shape.rank)]
    return tf.stack([*tf.meshgrid(*counts, indexing="ij")[:-1], indices], -1)


def are_alike(slices: Sequence[dict[str, Any]]) -> bool:
    """Whether the towers' slices (arguments of ``tf.strided_slice``) are known to be the same."""
    def known(part: Any) -> Any:
        value = part if isinstance(part, int) else tf.get_static_value(part)
        return None if value is None else np.asarray(value).tolist()

    first = {name: known(part) for name, part in slices[0].items()}
    return None not in first.values() and all(
        {name: known(part) for name, part in other.items()} == first for other in slices[1:])


def elements(shape: tf.Tensor, where: dict[str, Any], value: tf.Tensor) -> tf.IndexedSlices:
    """The elements that a strided slice names: their flat positions, and ``value`` for each."""
    numbers = tf.reshape(tf.range(tf.reduce_prod(shape)), shape)
    positions = tf.strided_slice(numbers, **where)
    values = tf.broadcast_to(value, tf.shape(positions))
    return tf.IndexedSlices(tf.reshape(values, [-1]), tf.reshape(positions, [-1]))


def total(parts: Sequence[tf.IndexedSlices], shares: shares_lib.Shares) -> tf.IndexedSlices:
    """Of each element the sum over the towers that have rows and wrote it."""
    written = shares.across(merging.total(merging.filled_slices(parts, shares)))
    positions, place = tf.unique(written.indices)
    return tf.IndexedSlices(
        tf.math.unsorted_segment_sum(written.values, place, tf.size(positions)), positions)


def first(parts: Sequence[tf.IndexedSlices], shares: shares_lib.Shares) -> tf.IndexedSlices:
    """Of each element the value of the first tower that has rows and wrote it."""
    written = shares.across(merging.total(merging.filled_slices(parts, shares)))
    positions, place = tf.unique(written.indices)
    return tf.IndexedSlices(_firsts(written.values, place, tf.size(positions)), positions)


def mean(parts: Sequence[tf.IndexedSlices], shares: shares_lib.Shares) -> tf.IndexedSlices:
    """Of each element the mean, by share of rows, over the towers that have rows and wrote it.

    What they agree on stays exactly what it is.
    """
    def weighed(tower: int, part: tf.IndexedSlices) -> tf.IndexedSlices:
        share = tf.fill(tf.shape(part.values), tf.cast(shares.of(tower), part.values.dtype))
        return tf.IndexedSlices(tf.stack([part.values, share], 1), part.indices)

    written = shares.across(merging.total(
        [weighed(tower, part) for tower, part in enumerate(merging.filled_slices(parts, shares))]))
    values, share = tf.unstack(written.values, axis=1)
    positions, place = tf.unique(written.indices)
    count = tf.size(positions)
    base = _firsts(values, place, count)
    beside = tf.math.unsorted_segment_sum((values - tf.gather(base, place)) * share, place, count)
    whole = tf.math.unsorted_segment_sum(share, place, count)
    return tf.IndexedSlices(base + tf.math.divide_no_nan(beside, whole), positions)


def _firsts(values: tf.Tensor, place: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Of the values with the same ``place`` the first."""
    return tf.gather(values, tf.math.unsorted_segment_min(tf.range(tf.size(place)), place, count))
