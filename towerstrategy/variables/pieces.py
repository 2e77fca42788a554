"""Writes to pieces of a variable: slices (``v[a:b].assign``) and elements (``scatter_nd_*``).

Goes in: the indices or slices that towers write to, and their values.  Comes out: the same as
``tf.IndexedSlices`` whose indices are those of ``scatter_nd_*``, a row for each value, so that they
are merged like the rows of other scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.merge import merging, shares as shares_lib

_SEGMENTS = {"sum": tf.math.unsorted_segment_sum, "max": tf.math.unsorted_segment_max,
             "min": tf.math.unsorted_segment_min}


def nd_slices(shape: tf.Tensor, indices: Any, updates: tf.Tensor) -> tf.IndexedSlices:
    """``scatter_nd`` indices and updates with one dimension in place of all but the last.

    ``shape`` is the variable's, an int64 vector.
    """
    indices = tf.cast(indices, tf.int64)
    depth = tf.shape(indices)[-1]
    return tf.IndexedSlices(tf.reshape(updates, tf.concat([[-1], shape[depth:]], 0)),
                            tf.reshape(indices, [-1, depth]))


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
    """The elements that a strided slice names, by their flat positions, and ``value`` for each."""
    numbers = tf.reshape(tf.range(tf.reduce_prod(shape)), shape)
    positions = tf.strided_slice(numbers, **where)
    values = tf.broadcast_to(value, tf.shape(positions))
    return tf.IndexedSlices(tf.reshape(values, [-1]), tf.reshape(positions, [-1]))


def merged(rule: str, parts: Sequence[tf.IndexedSlices],
           shares: shares_lib.Shares) -> tf.IndexedSlices:
    """Of each element one value of those of the towers that have rows and wrote it.

    Args:
      rule: ``"sum"``, ``"max"``, ``"min"``; ``"first"``, of the towers in order; or ``"mean"``, by
        share of rows, of which what they agree on stays exactly what it is.
      parts: :func:`elements` of each tower.
      shares: those of the towers' batch.
    """
    filled = merging.filled_slices(parts, shares)
    if rule == "mean":
        filled = [tf.IndexedSlices(tf.stack([part.values, tf.fill(tf.shape(part.values), tf.cast(
            shares.each[tower], part.values.dtype))], 1), part.indices)
            for tower, part in enumerate(filled)]
    written = shares.across(merging.total(filled))
    positions, place = tf.unique(written.indices)
    count = tf.size(positions)
    if rule in _SEGMENTS:
        return tf.IndexedSlices(_SEGMENTS[rule](written.values, place, count), positions)
    firsts = tf.gather(written.values, tf.math.unsorted_segment_min(
        tf.range(tf.size(place)), place, count))
    if rule == "first":
        return tf.IndexedSlices(firsts, positions)
    values, share = tf.unstack(written.values, axis=1)
    base = firsts[:, 0]
    beside = tf.math.unsorted_segment_sum((values - tf.gather(base, place)) * share, place, count)
    whole = tf.math.unsorted_segment_sum(share, place, count)
    return tf.IndexedSlices(base + tf.math.divide_no_nan(beside, whole), positions)
