"""Whether a tensor has a value for each row of a batch, made of that row alone.

Goes in: a tensor of the graph that is being traced, and what its function was given.  Comes out:
whether an operation in between may have put several rows together: a mean over rows, a selection
of them, a product of rows with rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import numpy as np
import tensorflow as tf

from towerstrategy.losses import provenance, row_axes

Moves = Callable[[tf.Operation, list[bool]], bool]


def is_by_row(walk: provenance.Walk, rows: tf.Tensor, given: Container[int]) -> bool:
    """Whether each value of ``rows`` is made of one row of what was given.

    Args:
      walk: looks at the graph.
      rows: a tensor.
      given: the ids of the tensors behind which not to look.
    """
    return not any(_puts_together(walk, each.op) for each in _made_of(rows, given))


def is_coupled(walk: provenance.Walk, rows: tf.Tensor, given: Container[int]) -> bool:
    """Whether a value of ``rows`` is, without a doubt, made of several rows of what was given."""
    return any(_puts_together(walk, each.op) for each in _made_of(rows, given)
               if each.op.type in _SURE and _is_told(each.op))


def _is_told(operation: tf.Operation) -> bool:
    reduces = _MOVES[operation.type] is _MOVES["Sum"]
    return not reduces or tf.get_static_value(operation.inputs[1]) is not None


def _puts_together(walk: provenance.Walk, operation: tf.Operation) -> bool:
    moves = _MOVES.get(operation.type)
    if moves is None:
        return False
    steady = [walk.is_steady(value) or walk.is_size(value) for value in operation.inputs]
    return not all(steady) and moves(operation, steady)


def _made_of(value: tf.Tensor, given: Container[int]) -> Iterator[tf.Tensor]:
    """``value`` and what it was made of, up to what was given and to sizes."""
    waiting, seen = [value], set[int]()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen or id(tensor) in given:
            continue
        seen.add(id(tensor))
        yield tensor
        if tensor.op.type not in row_axes.SIZES:
            waiting.extend(tensor.op.inputs)


def _always(operation: tf.Operation, steady: list[bool]) -> bool:
    del operation, steady
    return True


def _along(place: int) -> Moves:
    """Whether the axes that input ``place`` names may have the rows' among them."""
    def is_along(operation: tf.Operation, steady: list[bool]) -> bool:
        del steady
        shapes = (operation.inputs[0].shape, operation.outputs[0].shape)
        axes = tf.get_static_value(operation.inputs[place])
        if axes is None or None in (shapes[0].rank, shapes[1].rank):
            return True
        rank = max(shape.rank for shape in shapes)
        return 0 in [axis % max(rank, 1) for axis in axes.reshape([-1])]

    return is_along


def _sliced(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether a slice takes some of the rows, or puts a dimension before them."""
    del steady
    masks = {name: operation.get_attr(f"{name}_mask") & 1
             for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    strides = tf.get_static_value(operation.inputs[3])
    whole = masks["begin"] and masks["end"] and strides is not None and strides[0] == 1
    return bool(not masks["ellipsis"] and (masks["new_axis"] or masks["shrink_axis"] or not whole))


def _transposed(operation: tf.Operation, steady: list[bool]) -> bool:
    del steady
    order = tf.get_static_value(operation.inputs[1])
    return order is None or order.size > 0 and order[0] != 0


def _multiplied(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether a product of matrices is not one of rows with a matrix of weights."""
    return not steady[1] or operation.get_attr("transpose_a")


def _subscripted(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether terms with rows, or the result, do not all begin with the rows' subscript."""
    terms = operation.get_attr("equation").decode().replace("->", ",").split(",")
    return len({term[:1] for term, is_steady in zip(terms, [*steady, False])
                if not is_steady}) > 1


def _taken(place: int) -> Moves:
    """Whether pieces along an axis, which input ``place`` names, may be taken out of the rows."""
    def is_taken(operation: tf.Operation, steady: list[bool]) -> bool:
        axis = tf.get_static_value(operation.inputs[place])
        rows = operation.inputs[0 if place else 1]
        if axis is None or rows.shape.rank is None:
            return True
        return not steady[0 if place else 1] and axis.item() % max(rows.shape.rank, 1) == 0

    return is_taken


def _gathered(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether a gather is from the rows; with dimensions of a batch each row is its own."""
    return not operation.get_attr("batch_dims") and _taken(2)(operation, steady)


def _from_rows(operation: tf.Operation, steady: list[bool]) -> bool:
    del operation
    return not steady[0]


def _cut(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether ``tf.slice`` leaves rows out."""
    del steady
    begin, size = (tf.get_static_value(value) for value in operation.inputs[1:])
    return begin is None or size is None or bool(begin[0] != 0 or size[0] != -1)


def _reshaped(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether values of several rows come into one: it has more of them, or the rows are behind."""
    del steady
    before, after = operation.inputs[0].shape, operation.outputs[0].shape
    if not before.rank or after.rank is None:
        return before.rank is None
    if after.rank and after[0] == 1 != before[0]:
        return True
    old, new = (shape[1:].num_elements() for shape in (before, after))
    return bool(after.rank and old and new and (new > old or old % new))


def _repeated(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether a tile puts the rows behind themselves."""
    del steady
    times = tf.get_static_value(operation.inputs[1])
    return times is None or times.size > 0 and times[0] != 1


def _enlarged(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether there are rows that nobody has given."""
    del steady
    sizes = tf.get_static_value(operation.inputs[1])
    return sizes is None or bool(np.any(sizes[0]))


def _stacked(operation: tf.Operation, steady: list[bool]) -> bool:
    del steady
    rank = operation.outputs[0].shape.rank
    return rank is None or operation.get_attr("axis") % rank == 0


def _unstacked(operation: tf.Operation, steady: list[bool]) -> bool:
    del steady
    rank = operation.inputs[0].shape.rank
    return rank is None or operation.get_attr("axis") % rank == 0


def _joined(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether something that is no row is put behind the rows."""
    axis = tf.get_static_value(operation.inputs[-1])
    rank = operation.outputs[0].shape.rank
    along = axis is None or rank is None or axis.item() % rank == 0
    return along and any(steady[:-1])


def _broadcast(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether rows become columns, as those of a vector do beside a matrix."""
    rank = operation.outputs[0].shape.rank
    return any(not is_steady and value.shape.rank != 0 and value.shape.rank != rank
               for value, is_steady in zip(operation.inputs, steady))


def _of_vector(operation: tf.Operation, steady: list[bool]) -> bool:
    del steady
    return operation.inputs[0].shape.rank == 1


def _of_matrix(operation: tf.Operation, steady: list[bool]) -> bool:
    del steady
    return operation.inputs[0].shape.rank in (None, 2)


# How to tell whether an operation may put several rows into one value; others never do.
_MOVES: dict[str, Moves] = {
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin",
                     "EuclideanNorm", "Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2",
                     "ExpandDims"), _along(1)),
    **dict.fromkeys(("Where", "Unique", "UniqueV2", "DynamicPartition", "SegmentSum", "SegmentMean",
                     "SegmentMax", "SegmentMin", "SegmentProd", "SegmentSumV2", "SegmentMaxV2",
                     "SegmentMinV2", "SegmentProdV2", "SparseSegmentSum", "SparseSegmentMean",
                     "UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin",
                     "UnsortedSegmentProd", "ScatterNd", "TensorScatterUpdate", "TensorScatterAdd",
                     "TensorScatterMax", "TensorScatterMin", "TensorScatterSub", "Bincount",
                     "DenseBincount", "HistogramFixedWidth", "Roll", "RandomShuffle", "L2Loss",
                     "FusedBatchNormV3"), _always),
    # What is in a function, a branch or a loop is not looked at.
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "Case",
                     "StatelessCase", "While", "StatelessWhile"), _always),
    **dict.fromkeys(("TopKV2", "Softmax", "LogSoftmax", "NthElement", "MatrixDiagV3", "FFT",
                     "RFFT"), _of_vector),
    **dict.fromkeys(("Svd", "Qr", "SelfAdjointEigV2", "Eig", "Cholesky", "MatrixInverse",
                     "MatrixDeterminant", "LogMatrixDeterminant", "MatrixSolve", "Lu",
                     "MatrixExponential", "MatrixDiagPartV3", "MatrixBandPart"), _of_matrix),
    **dict.fromkeys(("AddV2", "Add", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "Maximum",
                     "Minimum", "SquaredDifference", "Pow", "MulNoNan", "Xdivy", "Xlogy", "Equal",
                     "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd",
                     "LogicalOr", "SelectV2", "BroadcastTo", "FloorMod", "FloorDiv"), _broadcast),
    "StridedSlice": _sliced, "Slice": _cut, "Transpose": _transposed, "Einsum": _subscripted,
    "MatMul": _multiplied, "GatherV2": _gathered, "GatherNd": _from_rows, "Reshape": _reshaped,
    "Tile": _repeated, "Pad": _enlarged, "PadV2": _enlarged, "MirrorPad": _enlarged,
    "Split": _taken(0), "SplitV": _taken(2), "Pack": _stacked, "Unpack": _unstacked,
    "ConcatV2": _joined}

# Of these those that nothing else is done by.
_SURE = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm", "Cumsum", "MatMul",
                   "Einsum", "ReverseV2"})
