"""Strings, ragged and sparse values, as the numbers that collective operations carry.

Goes in: a value of one of these kinds, and an all-gather of dense tensors of numbers.  Comes out:
the values of all workers, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Tensors, of which rows may differ in number between workers -> each of all workers.
GatherRows = Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]


def numbers_of(strings: tf.Tensor) -> list[tf.Tensor]:
    """Strings as the length of each, in their shape, and all their bytes."""
    bytes_ = tf.strings.bytes_split(tf.reshape(strings, [-1])).flat_values
    codes = tf.reshape(tf.io.decode_raw(bytes_, tf.uint8), [-1])
    return [tf.strings.length(strings), codes]


def strings_of(lengths: tf.Tensor, codes: tf.Tensor) -> tf.Tensor:
    """The inverse of :func:`numbers_of`."""
    letters = tf.constant([bytes([code]) for code in range(256)])
    split = tf.RaggedTensor.from_row_lengths(tf.gather(letters, tf.cast(codes, tf.int32)),
                                             tf.reshape(lengths, [-1]), validate=False)
    strings = tf.reshape(tf.strings.reduce_join(split, -1), tf.shape(lengths))
    strings.set_shape(lengths.shape)
    return strings


def gather(value: tf.RaggedTensor | tf.SparseTensor, axis: int, workers: int,
           gather_rows: GatherRows) -> Any:
    """The workers' ragged or sparse tensors, all of one kind, concatenated along ``axis``."""
    parts = tf.nest.flatten(value, expand_composites=True)
    lengths = tf.stack([tf.shape(part, tf.int64)[0] for part in parts])
    counts, *gathered = gather_rows([lengths[tf.newaxis], *parts])
    each = zip(*(tf.split(part, counts[:, number], num=workers)
                 for number, part in enumerate(gathered)))
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.concat(axis, [tf.SparseTensor(*own) for own in each], True)
    return tf.concat([tf.RaggedTensor.from_nested_row_splits(flat, splits, validate=False)
                      for flat, *splits in each], axis)
