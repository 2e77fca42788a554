"""Dealing rows: where each tower's begin, how many they are, and cutting them out.

Goes in: a number of rows and of towers, or a tensor and a range of rows.  Comes out: starts and
sizes, or those rows.  Rows are dealt in order and as evenly as they go: with N rows and R towers
the first ``N mod R`` towers get ``N // R + 1`` rows, the others ``N // R``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Nest = Any
Rows = Any  # an int, or a scalar int64 tensor


def deal(rows: Rows, towers: int) -> tuple[list[Rows], list[Rows]]:
    """Where each tower's rows start and how many they are.

    Args:
      rows: rows of the batch, an int or a scalar integer tensor.
      towers: how many towers, at least 1.

    Returns:
      ``(starts, sizes)``, ``towers`` items each, ints or scalar tensors as ``rows`` is.

    >>> deal(10, 4)
    ([0, 3, 6, 8], [3, 3, 2, 2])
    >>> deal(2, 4)
    ([0, 1, 2, 2], [1, 1, 0, 0])
    """
    base, extra = rows // towers, rows % towers
    if isinstance(rows, int):
        starts = [tower * base + min(tower, extra) for tower in range(towers)]
        return starts, [base + int(tower < extra) for tower in range(towers)]
    numbers = tf.range(towers, dtype=rows.dtype)  # one operation for all: each batch pays for them
    starts = numbers * base + tf.minimum(numbers, extra)
    sizes = base + tf.cast(numbers < extra, rows.dtype)
    return tf.unstack(starts), tf.unstack(sizes)


# Rows of a batch -> where this machine's towers' rows start, how many they are, and the rows to
# put down with them.
Dealing = Callable[[Rows], tuple[list[Rows], list[Rows], Sequence[Rows]]]


def rows_in(component: Any) -> Rows:
    """The rows of a dense, ragged or sparse component: an int where known, else an int64 scalar."""
    static = known_rows(component)
    if static is not None:
        return static
    if isinstance(component, tf.SparseTensor):
        return component.dense_shape[0]
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(out_type=tf.int64)
    return tf.shape(component, out_type=tf.int64)[0]


def known_rows(component: Any) -> int | None:
    """The rows of a dense, ragged or sparse component where they are known while tracing."""
    return component.shape[0] if component.shape.rank else None


def has_rows(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor of a kind that can have rows."""
    return isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))


def with_stand_ins(rows: Rows, starts: list[Rows],
                    sizes: list[Rows]) -> tuple[list[Rows], list[Rows]]:
    """Starts and sizes that give a tower without rows the batch's last row (if there is any)."""
    if isinstance(rows, int):
        return [min(start, max(rows - 1, 0)) for start in starts], [max(size, 1) for size in sizes]
    one = tf.constant(1, rows.dtype)
    last = tf.maximum(rows - one, 0)
    return (tf.unstack(tf.minimum(tf.stack(starts), last)),
            tf.unstack(tf.maximum(tf.stack(sizes), one)))


def rows_between(tensor: Any, start: Rows, size: Rows) -> Any:
    """``size`` rows of ``tensor`` from ``start``."""
    if isinstance(tensor, tf.SparseTensor):
        rest = tensor.dense_shape[1:]
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(rest)], 0)
        part = tf.sparse.slice(tensor, begin, tf.concat([[tf.cast(size, tf.int64)], rest], 0))
        shape = [size if isinstance(size, int) else None, *tensor.shape.as_list()[1:]]
        return tf.SparseTensor(part.indices, part.values,
                               tf.ensure_shape(part.dense_shape, [len(shape)]))
    return tensor[start:start + size]


def rows_of_zeros(spec: tf.TypeSpec, rows: int = 0) -> Any:
    """A value of ``spec`` with no rows, or with ``rows`` rows of zeros."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = [size or 0 for size in spec.shape.as_list()[1:]]
        flat = tf.zeros([0] + inner[spec.ragged_rank:], spec.dtype)
        rt: Any = flat
        for depth in reversed(range(spec.ragged_rank)):
            count = 1 if depth else rows + 1
            rt = tf.RaggedTensor.from_row_splits(rt, tf.zeros([count], spec.row_splits_dtype))
        return rt
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [rows] + [size or rows for size in spec.shape.as_list()[1:]]
        nowhere = np.zeros([0, len(shape)], np.int64)
        return tf.SparseTensor(nowhere, tf.zeros([0], spec.dtype), shape)
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return tf.zeros([], getattr(spec, "dtype", tf.float32))
    shape = [rows] + [rows if size is None else size for size in spec.shape.as_list()[1:]]
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, spec.dtype)
