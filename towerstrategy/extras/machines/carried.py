"""Strings, ragged and sparse values, as the numbers that collective operations carry.

Goes in: a value of one of these kinds, and an all-gather of dense tensors of numbers.  Comes out:
the values of all workers, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def gather_ragged(value: tf.RaggedTensor, axis: int, workers: int,
                  gather_rows: GatherRows) -> tf.RaggedTensor:
    """The workers' ragged tensors concatenated along ``axis``."""
    lengths = value.nested_row_lengths()
    rows, *parts = gather_rows([value.nrows(tf.int64)[tf.newaxis], *lengths, value.flat_values])
    flat = parts.pop()
    together = tf.RaggedTensor.from_nested_row_lengths(flat, parts, validate=False)
    if axis == 0:
        return together
    ends = tf.unstack(tf.cumsum(rows), workers)
    return tf.concat([together[start:end] for start, end in zip([0, *ends], ends)], axis)


def gather_sparse(value: tf.SparseTensor, axis: int, gather_rows: GatherRows) -> tf.SparseTensor:
    """The workers' sparse tensors concatenated along ``axis``."""
    count = tf.shape(value.indices, tf.int64)[:1]
    indices, values, counts, shapes = gather_rows(
        [value.indices, value.values, count, value.dense_shape[tf.newaxis]])
    before = tf.repeat(tf.cumsum(shapes[:, axis], exclusive=True), counts)
    columns = tf.unstack(indices, value.shape.rank, axis=1)
    columns[axis] += before
    sizes = tf.unstack(tf.reduce_max(shapes, 0), value.shape.rank)
    sizes[axis] = tf.reduce_sum(shapes[:, axis])
    together = tf.SparseTensor(tf.stack(columns, 1), values, tf.stack(sizes))
    return together if axis == 0 else tf.sparse.reorder(together)
