"""Splitting rows over the towers: how many rows each tower gets, and slicing them.

Goes in: a number of rows and of towers, or a tensor and a range of rows.  Comes out: row counts, or
slices.  Rows are split in order and as evenly as possible: with N rows and R towers the first
``N mod R`` towers get ``N // R + 1`` rows, the others ``N // R``.  Towers with unequal shares get
rows in proportion, rounded down; the remaining rows go to the towers with the largest remainders,
of equal ones to the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

Nest = Any
Rows = Any  # an int, or a scalar int64 tensor
Sizes = Any  # the row counts of several towers: a list of ints, or an int64 vector
# Shares as whole numbers, one per tower: a tuple, or an int64 vector; None if all are equal.
Units = Any

# The specs of the tensors that have rows.
SPECS = tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec
# The largest sum of all towers' units: times a number of rows, it must be an int64.
_MOST_UNITS = 2**31


def units_of(shares: Sequence[float]) -> tuple[int, ...] | None:
    """``shares`` as whole numbers in the same proportion; None if all are equal.

    Whole numbers split the same way in pipelines, in eager code and on other machines.

    >>> units_of([3, 1]), units_of([.5, .25, .25]), units_of([2., 2.])
    ((3, 1), (2, 1, 1), None)
    """
    # repr: 0.1 means one tenth, not the nearest binary number.
    exact = [Fraction(repr(float(share))) for share in shares]
    if len(set(exact)) == 1:
        return None
    whole = [int(share * math.lcm(*(part.denominator for part in exact))) for share in exact]
    whole = [share // math.gcd(*whole) for share in whole]
    if sum(whole) <= _MOST_UNITS:
        return tuple(whole)
    total = sum(exact)
    return tuple(max(round(share * (_MOST_UNITS - len(exact)) / total), 1) for share in exact)


def split_rows(rows: Rows, towers: int, units: Units = None) -> Sizes:
    """The number of rows of each tower.

    >>> split_rows(10, 4), split_rows(2, 4), split_rows(10, 2, (3, 1))
    ([3, 3, 2, 2], [1, 1, 0, 0], [8, 2])
    """
    known = isinstance(rows, int) and not tf.is_tensor(units)
    library: Any = np if known else tf.experimental.numpy
    last_first = np.arange(towers, dtype=np.int64)[::-1]
    if units is None:  # two operations only: they run for each batch
        sizes = (rows + last_first) // towers
    else:
        units = library.asarray(units, np.int64)
        wanted, total = rows * units, library.sum(units)  # whole numbers: no rounding loses a row
        sizes = wanted // total
        # Ranks are all different: of equal remainders, the first tower's ranks highest.
        ranks = wanted % total * towers + last_first
        higher = library.sum(ranks[np.newaxis] > ranks[:, np.newaxis], axis=1)
        sizes += library.where(higher < rows - library.sum(sizes), 1, 0)
    return sizes.tolist() if known else sizes


CutRows = Callable[[Rows], Sizes]  # from the rows of a batch, those of each tower


def rows_in(component: Any) -> Rows:
    """The number of rows of a component: an int if known while tracing, else an int64 scalar."""
    static = known_rows(component)
    if static is not None:
        return static
    if isinstance(component, tf.SparseTensor):
        return component.dense_shape[0]
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(out_type=tf.int64)
    shape = tf.shape(component, out_type=tf.int64)
    return shape[0] if component.shape.rank is None else tf.unstack(shape)[0]


def known_rows(component: Any) -> int | None:
    """The number of rows of a component if it is known while tracing; else None."""
    return component.shape[0] if component.shape.rank else None


def has_rows(leaf: Any) -> bool:
    """Whether ``leaf`` is a dense, ragged or sparse tensor."""
    return isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))


def is_absent(spec: Any) -> bool:
    """Whether ``spec`` is the spec of ``None``, an absent component."""
    return not tf.nest.flatten(spec, expand_composites=True)


def vector(numbers: Sequence[Rows]) -> tf.Tensor:
    """``numbers`` as one int64 tensor."""
    return tf.stack([tf.cast(number, tf.int64) for number in numbers])


def cut(tensor: Any, sizes: Sizes, here: slice) -> list[Any]:
    """A component cut into parts of ``sizes`` rows; of these, the ones in the slice ``here``."""
    if isinstance(tensor, tf.Tensor):  # one operation for all towers
        return tf.split(tensor, sizes)[here]
    sizes = sizes if isinstance(sizes, list) else tf.unstack(sizes)
    ranges = list(zip(itertools.accumulate(sizes, initial=0), sizes))
    return [rows_between(tensor, start, size) for start, size in ranges[here]]


def rows_between(tensor: Any, start: Rows, size: Rows) -> Any:
    """``size`` rows of ``tensor``, from row ``start`` on."""
    if isinstance(tensor, tf.SparseTensor):
        rest = tensor.dense_shape[1:]
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(rest)], 0)
        part = tf.sparse.slice(tensor, begin, tf.concat([[tf.cast(size, tf.int64)], rest], 0))
        part.set_shape([size if isinstance(size, int) else None, *tensor.shape[1:]])
        return part
    if isinstance(tensor, tf.RaggedTensor):  # its own slices may assert, which pipelines cannot
        splits, length = tensor.row_splits[start:start + size + 1], tensor.uniform_row_length
        values = rows_between(tensor.values, splits[0], splits[-1] - splits[0])
        return tf.RaggedTensor.from_row_splits(
            values, splits - splits[0], validate=False) if length is None \
            else tf.RaggedTensor.from_uniform_row_length(values, length, size, validate=False)
    return tensor[start:start + size]


def no_rows(spec: tf.TypeSpec) -> Any:
    """A value of ``spec`` with no rows; a scalar 0 if ``spec`` has no first dimension."""
    # Unknown inner dimensions become 1: some operations do not accept 0, even with no rows.
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
