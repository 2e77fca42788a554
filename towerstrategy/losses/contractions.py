"""Sums over rows by other operations than ``Sum``: products of matrices, segments, bins.

Goes in: an operation of the graph that is being traced.  Comes out: the tensors whose rows it adds
up, each to a term of its own, or none; whether it puts rows into other rows, as a product of rows
with rows does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import row_axes

_NONE: tuple[tf.Tensor, ...] = ()
_GRADIENTS = "gradient"  # which have sums of their own


class Walk(Protocol):
    """What is asked of who looks at the graph, see :class:`provenance.Walk`."""

    def is_steady(self, value: Any) -> bool:
        """Whether ``value`` comes of weights and constants alone."""

    def is_multiple_of_rows(self, size: int) -> bool:
        """Whether a dimension of ``size`` may be that of the batch's rows."""

    def is_row_count(self, size: int) -> bool:
        """Whether there may be as many rows."""

    def takes_rows(self, value: tf.Tensor, axes: tf.Tensor, reduced: tf.Tensor) -> bool:
        """Whether reducing ``value`` over ``axes`` reduces the batch's rows."""


# Functions of all rows that are no sum; what says how often there is each of them.
EXTREMES = frozenset({"Max", "Min", "Prod", "EuclideanNorm"})
_COUNTED = frozenset({"UniqueWithCounts", "UniqueWithCountsV2"})

_Rows = Callable[[Walk, tf.Operation], Sequence[tf.Tensor]]


def rows_of(walk: Walk, operation: tf.Operation) -> Sequence[tf.Tensor]:
    """The tensors whose rows ``operation`` adds up; none where its value is no such sum."""
    look = _SUMS.get(operation.type)
    return _NONE if look is None else look(walk, operation)


def axis_of(walk: Walk, value: tf.Tensor) -> int | None:
    """The dimension of ``value`` that the batch's rows are in; None where they are in none."""
    if walk.is_steady(value) or not value.shape.rank:
        return None
    likely = [axis for axis, size in enumerate(value.shape)
              if size is None or walk.is_multiple_of_rows(size)]
    if len(likely) < 2:
        return likely[0] if likely else None
    found = _axis_of_sizes(value.op) if value.op.type == "Reshape" else None
    return row_axes.axis_in(value) if found is None else found


def _axis_of_sizes(operation: tf.Operation) -> int | None:
    """The dimension of what is reshaped as ``tf.tensordot`` does it, to products of sizes."""
    sizes = operation.inputs[1]
    for place, size in enumerate(sizes.op.inputs if sizes.op.type == "Pack" else ()):
        named = size.op.inputs[0].op if size.op.type == "Prod" else size.op
        if named.type == "GatherV2" and named.inputs[0].op.type == "Shape":
            taken = tf.get_static_value(named.inputs[1])
            if taken is not None and row_axes.axis_in(named.inputs[0].op.inputs[0]) in taken:
                return place
    return None


def is_coupled(walk: Walk, rows: tf.Tensor) -> bool:
    """Whether a sum or mean over rows, or another row, goes into ``rows``, behind no layer."""
    return any(_GRADIENTS not in tensor.op.name and not walk.is_steady(tensor)
               and _puts_together(walk, tensor) for tensor in row_axes.near(rows))


def _puts_together(walk: Walk, value: tf.Tensor) -> bool:
    """Whether the operation is known to put several rows into one."""
    operation = value.op
    if operation.type in row_axes.REDUCED or (
            operation.type in EXTREMES and value.dtype.is_floating):
        rows, axes = operation.inputs
        return tf.get_static_value(axes) is not None and walk.takes_rows(rows, axes, value)
    if operation.type in _COUNTED and value.value_index == 2:
        return axis_of(walk, operation.inputs[0]) == 0
    look = _COUPLING.get(operation.type)
    return bool(rows_of(walk, operation)) or look is not None and look(walk, operation)


def _matrices(walk: Walk, operation: tf.Operation) -> Sequence[tf.Tensor]:
    one, other = operation.inputs
    if operation.type == "MatMul":
        moved = (operation.get_attr("transpose_a"), operation.get_attr("transpose_b"))
    else:
        moved = (operation.get_attr("adj_x"), operation.get_attr("adj_y"))
    if {one.shape.rank, other.shape.rank} != {2}:
        return _NONE
    return _contracted(walk, (one, 0 if moved[0] else 1), (other, 1 if moved[1] else 0))


def _subscripts(walk: Walk, operation: tf.Operation) -> Sequence[tf.Tensor]:
    terms, result = operation.get_attr("equation").decode().replace(" ", "").split("->")
    pairs = list(zip(terms.split(","), operation.inputs))
    if "." in terms or any(len(term) != value.shape.rank for term, value in pairs):
        return _NONE
    of_rows = {term[axis] for term, value in pairs
               if (axis := axis_of(walk, value)) is not None}
    if len(of_rows) != 1 or not of_rows.isdisjoint(result):
        return _NONE
    summed, = of_rows
    return _contracted(walk, *((value, term.index(summed)) for term, value in pairs
                               if summed in term))


def _contracted(walk: Walk, *along: tuple[tf.Tensor, int]) -> Sequence[tf.Tensor]:
    """The tensors that have rows in the dimensions over which a product adds up.

    None where another dimension has them, or where one row counts for more than another by its
    place in the tower's.
    """
    found = [axis_of(walk, value) for value, _ in along]
    if all(axis is None for axis in found) or any(
            own not in (None, axis) for own, (_, axis) in zip(found, along)):
        return _NONE
    rows = []
    for own, (value, _) in zip(found, along):
        if own is not None:
            rows.append(value)
        elif not _is_even(value):
            return _NONE
    return rows


def _is_even(value: tf.Tensor) -> bool:
    """Whether all elements are one number."""
    if value.op.type in ("Fill", "OnesLike"):
        return True
    known = tf.get_static_value(value)
    return known is not None and np.unique(known).size == 1


def _placed(walk: Walk, operation: tf.Operation) -> Sequence[tf.Tensor]:
    """Of what puts values to places, both by row, in something of a size of its own."""
    *along, size = operation.inputs
    return _by_first(walk, along, walk.is_steady(size)
                     and not _may_have_rows(walk, operation.outputs[0]))


def _bins(walk: Walk, operation: tf.Operation) -> Sequence[tf.Tensor]:
    values, size, weights = operation.inputs
    if operation.type == "DenseBincount" and (
            operation.get_attr("binary_output") or values.shape.rank != 1):
        return _NONE
    has_weights = weights.shape.num_elements() != 0
    return _by_first(walk, (values, weights) if has_weights else (values,),
                     _is_fixed(walk, size))


def _is_fixed(walk: Walk, size: tf.Tensor) -> bool:
    """Whether a number is the same on all towers; it may be held between two bounds."""
    if walk.is_steady(size):
        return True
    if size.op.type != "Minimum" or size.op.inputs[1].op.type != "Maximum":
        return False
    most, least = (tf.get_static_value(each) for each in (
        size.op.inputs[0], size.op.inputs[1].op.inputs[0]))
    return most is not None and least is not None and int(most) <= int(least)


def _histogram(walk: Walk, operation: tf.Operation) -> Sequence[tf.Tensor]:
    values, *others = operation.inputs
    has_rows = axis_of(walk, values) is not None
    return [values] if has_rows and all(map(walk.is_steady, others)) else _NONE


def _added_to(walk: Walk, operation: tf.Operation) -> Sequence[tf.Tensor]:
    held, indices, updates = operation.inputs
    known = tf.get_static_value(held)
    return _by_first(walk, (indices, updates), known is not None and not known.any())


def _may_have_rows(walk: Walk, value: tf.Tensor) -> bool:
    """Whether what stands in another place than before may stand by row again."""
    return not value.shape.rank or value.shape[0] is None or walk.is_row_count(value.shape[0])


def _by_first(walk: Walk, along: Sequence[tf.Tensor],
              is_fixed: bool) -> Sequence[tf.Tensor]:
    """Those of ``along`` that have rows; none unless these are in the first dimension."""
    axes = [axis_of(walk, value) for value in along]
    if not is_fixed or not {0, None} >= set(axes) or set(axes) == {None}:
        return _NONE
    return [value for value, axis in zip(along, axes) if axis == 0]


def _squares(walk: Walk, operation: tf.Operation) -> Sequence[tf.Tensor]:
    value, = operation.inputs
    return [value] if axis_of(walk, value) is not None else _NONE


_SUMS: dict[str, _Rows] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matrices),
    **dict.fromkeys(("Bincount", "DenseBincount"), _bins),
    "Einsum": _subscripts, "HistogramFixedWidth": _histogram, "L2Loss": _squares,
    "ScatterNd": _placed, "TensorScatterAdd": _added_to, "UnsortedSegmentSum": _placed}


def _sure_axis(walk: Walk, value: tf.Tensor) -> int | None:
    """As :func:`axis_of`; None where several dimensions may be the rows', and which is not known.
    """
    likely = [size is None or walk.is_multiple_of_rows(size) for size in value.shape]
    is_plain = len(likely) == 2 and (value.shape[0] is None or value.shape.is_fully_defined())
    return axis_of(walk, value) if sum(likely) < 2 or is_plain else None


def _sliced(walk: Walk, operation: tf.Operation) -> bool:
    """Whether a slice, by numbers that are written there, takes some of the rows."""
    value, *bounds = operation.inputs
    masks = {name: operation.get_attr(f"{name}_mask")
             for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    known = [tf.get_static_value(each) for each in bounds]
    if (not value.dtype.is_floating or _sure_axis(walk, value) != 0
            or any(each is None or not each.size for each in known)
            or masks["ellipsis"] & 1 or masks["new_axis"] & 1):
        return False
    (begin, end, stride) = (int(each[0]) for each in known)
    if masks["shrink_axis"] & 1 or stride != 1:
        return True
    asked = [bound for bound, name in ((begin, "begin"), (end, "end")) if not masks[name] & 1]
    return any(bound and not (bound > 0 and walk.is_multiple_of_rows(bound)) for bound in asked)


def _over_last(walk: Walk, operation: tf.Operation) -> bool:
    value = operation.inputs[0]
    return bool(value.shape.rank) and _sure_axis(walk, value) == value.shape.rank - 1


def _carried(walk: Walk, operation: tf.Operation) -> bool:
    """Whether a loop, which gives on something without rows, goes from row to row."""
    body = _tf.graph_of_call(operation, operation.get_attr("body").name)
    return body is not None and any(
        given.dtype.is_floating and result is not inner and given.shape.rank is not None
        and not any(size is None or walk.is_multiple_of_rows(size) for size in given.shape)
        for given, inner, result in zip(operation.inputs, body.inputs, body.outputs))


def _along(walk: Walk, operation: tf.Operation) -> bool:
    value, axes = operation.inputs
    known, own = tf.get_static_value(axes), _sure_axis(walk, value)
    return known is not None and own is not None and own in [
        axis % value.shape.rank for axis in known.reshape([-1])]


def _rows_by_rows(walk: Walk, operation: tf.Operation) -> bool:
    """Whether rows are multiplied with rows, or with what sums over rows have been made to."""
    if {each.shape.rank for each in operation.inputs} != {2}:
        return False
    return all(axis_of(walk, each) is not None or not walk.is_steady(each)
               and is_coupled(walk, each) for each in operation.inputs)


def _terms(walk: Walk, operation: tf.Operation) -> bool:
    terms = operation.get_attr("equation").decode().replace(" ", "").split("->")[0].split(",")
    if any("." in term or len(term) != value.shape.rank
           for term, value in zip(terms, operation.inputs)):
        return False
    return len({term[axis] for term, value in zip(terms, operation.inputs)
                if (axis := axis_of(walk, value)) is not None}) > 1


_COUPLING: dict[str, Callable[[Walk, tf.Operation], bool]] = {
    **dict.fromkeys(("LogSoftmax", "Softmax", "TopKV2"), _over_last),
    **dict.fromkeys(("Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2"), _along),
    **dict.fromkeys(("StatelessWhile", "While"), _carried),
    "Einsum": _terms, "MatMul": _rows_by_rows, "StridedSlice": _sliced}
