"""Rows of a batch over the towers: where each tower's begin, how many they are, cutting them out.

Goes in: a number of rows and of towers, or a tensor and a range of rows.  Comes out: starts and
sizes, or those rows.  Rows are split in order and as evenly as they go: with N rows and R towers
the first ``N mod R`` towers get ``N // R + 1`` rows, the others ``N // R``.  Towers of unequal
shares get rows in proportion: each the whole part of what it should have, the rows that are left
going to the largest remainders, of equal ones to the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf

Nest = Any
Rows = Any  # an int, or a scalar int64 tensor
Units = Any  # whole numbers, one a tower: a tuple, or an int64 vector; None where all are equal

# The most units of all towers together: times a number of rows they are to be an int64.
_MOST_UNITS = 2**31


def units_of(shares: Sequence[float]) -> tuple[int, ...] | None:
    """``shares`` as whole numbers in the same proportion, which split alike wherever it is done.

    None where all are equal.

    >>> units_of([3, 1]), units_of([.5, .25, .25]), units_of([2., 2.])
    ((3, 1), (2, 1, 1), None)
    """
    # Of 0.1 what was written counts, and not the nearest binary number.
    exact = [Fraction(repr(float(share))) for share in shares]
    if len(set(exact)) == 1:
        return None
    whole = [int(share * math.lcm(*(part.denominator for part in exact))) for share in exact]
    whole = [share // math.gcd(*whole) for share in whole]
    if sum(whole) <= _MOST_UNITS:
        return tuple(whole)
    total = sum(exact)
    return tuple(max(round(share * (_MOST_UNITS - len(exact)) / total), 1) for share in exact)


def split_rows(rows: Rows, towers: int, units: Units = None) -> tuple[list[Rows], list[Rows]]:
    """Where each tower's rows start and how many they are: ints or scalar tensors, as ``rows`` is.

    >>> split_rows(10, 4)
    ([0, 3, 6, 8], [3, 3, 2, 2])
    >>> split_rows(2, 4)
    ([0, 1, 2, 2], [1, 1, 0, 0])
    >>> split_rows(10, 2, (3, 1))
    ([0, 8], [8, 2])
    """
    if units is not None:
        return _split_by(rows, towers, units)
    base, extra = rows // towers, rows % towers
    if isinstance(rows, int):
        starts = [tower * base + min(tower, extra) for tower in range(towers)]
        return starts, [base + int(tower < extra) for tower in range(towers)]
    # One operation for all towers: each batch pays for them.
    numbers = np.arange(towers, dtype=rows.dtype.as_numpy_dtype)
    starts = numbers * base + tf.minimum(numbers, extra)
    sizes = base + tf.cast(extra > numbers, rows.dtype)
    return tf.unstack(starts), tf.unstack(sizes)


def _split_by(rows: Rows, towers: int, units: Units) -> tuple[list[Rows], list[Rows]]:
    """:func:`split_rows` by the largest remainder, in whole numbers: no rounding can lose a row."""
    if isinstance(rows, int) and isinstance(units, tuple):
        total = sum(units)
        sizes = [rows * unit // total for unit in units]
        largest = sorted(range(towers), key=lambda tower: (-(rows * units[tower] % total), tower))
        for tower in largest[:rows - sum(sizes)]:
            sizes[tower] += 1
        return [sum(sizes[:tower]) for tower in range(towers)], sizes
    rows = tf.constant(rows, tf.int64) if isinstance(rows, int) else rows
    units = tf.cast(units, tf.int64)
    wanted, total = tf.cast(rows, tf.int64) * units, tf.reduce_sum(units)
    floors = wanted // total
    # Of equal remainders the first tower's is the larger one.
    ranks = wanted % total * towers + np.arange(towers, dtype=np.int64)[::-1]
    larger = tf.cast(ranks[tf.newaxis] > ranks[:, tf.newaxis], tf.int64)
    extra = tf.cast(rows, tf.int64) - tf.reduce_sum(floors)
    found = tf.cast(floors + tf.cast(tf.reduce_sum(larger, 1) < extra, tf.int64), rows.dtype)
    return tf.unstack(tf.cumsum(found, exclusive=True)), tf.unstack(found, towers)


def opened(starts: list[Rows], sizes: list[Rows]) -> tuple[list[Rows], list[Rows]]:
    """The same numbers as tensors, by which cut parts have an open first dimension."""
    known = tf.constant([starts, sizes], tf.int64)
    both = tf.compat.v1.placeholder_with_default(known, known.shape)
    return tf.unstack(both[0]), tf.unstack(both[1])


# Rows of a batch -> where this machine's towers' rows start, how many they are, and the counts that
# sub-batches carry; None for those of this machine's.
CutRows = Callable[[Rows], tuple[list[Rows], list[Rows], "Sequence[Rows] | None"]]


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


def is_absent(spec: Any) -> bool:
    """Whether ``spec`` is that of ``None``, a component that a dataset leaves out."""
    return not tf.nest.flatten(spec, expand_composites=True)


def vector(numbers: Sequence[Rows]) -> tf.Tensor:
    """``numbers`` as one int64 tensor; the one that they were taken out of, where there is one."""
    first = numbers[0]
    if isinstance(first, tf.Tensor) and not _tf.is_eager(first) and first.op.type == "Unpack" \
            and first.dtype == tf.int64 and len(first.op.outputs) == len(numbers) \
            and all(mine is own for mine, own in zip(numbers, first.op.outputs)):
        return first.op.inputs[0]
    return tf.stack([tf.cast(number, tf.int64) for number in numbers])


class Cuts:
    """Cuts each component of a batch of ``rows`` into the towers' parts."""

    def __init__(self, rows: Rows, starts: Sequence[Rows], sizes: Sequence[Rows]) -> None:
        self._parts = list(zip(starts, sizes))
        self._known = all(isinstance(number, int) for part in self._parts for number in part)
        ends = [start + size for start, size in self._parts] if self._known else []
        self._in_a_row = ends[-1:] == [rows] and starts[0] == 0 and ends[:-1] == list(starts[1:])
        self._bounds: list[tuple[tf.Tensor, tf.Tensor]] = []

    def of(self, tensor: Any) -> list[Any]:
        """The towers' parts of a component."""
        if not isinstance(tensor, tf.Tensor) or self._known and not self._in_a_row:
            return [rows_between(tensor, start, size) for start, size in self._parts]
        if self._known:  # one operation for all towers
            sizes = [size for _, size in self._parts]
            return tf.split(tensor, len(sizes) if len(set(sizes)) == 1 else sizes)
        if not self._bounds:  # once for all components, as vectors of one number
            starts, sizes = map(vector, zip(*self._parts))
            count = len(self._parts)
            self._bounds = list(zip(tf.split(starts, count), tf.split(starts + sizes, count)))
        return [tf.strided_slice(tensor, start, end, [1]) for start, end in self._bounds]


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


def no_rows(spec: tf.TypeSpec) -> Any:
    """A value of ``spec`` with no rows; a scalar 0 where it has none to have.

    An open length is 1: there are operations that take none of 0, even of no rows.
    """
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = [size or 0 for size in spec.shape.as_list()[1:]]
        flat = tf.zeros([0] + inner[spec.ragged_rank:], spec.dtype)
        splits = [tf.zeros([1], spec.row_splits_dtype)] * spec.ragged_rank
        return tf.RaggedTensor.from_nested_row_splits(flat, splits)
    if not isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)) or not spec.shape.rank:
        return tf.zeros([], getattr(spec, "dtype", tf.float32))
    shape = [0, *(1 if size is None else size for size in spec.shape.as_list()[1:])]
    if isinstance(spec, tf.SparseTensorSpec):
        nowhere = np.zeros([0, len(shape)], np.int64)
        return tf.SparseTensor(nowhere, tf.zeros([0], spec.dtype), shape)
    return tf.zeros(shape, spec.dtype)
