"""Whether a tensor has a value for each row of a batch, made of that row alone.

Goes in: a tensor of the graph that is being traced, and what its function was given.  Comes out:
whether an operation in between may have put several rows together: a mean over rows, a selection
of them, a product of rows with rows.  An operation that is not listed here may have.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Container, Sequence

import tensorflow as tf

from towerstrategy.losses import provenance, row_axes

Moves = Callable[[provenance.Walk, tf.Operation, Sequence[bool]], bool]


class Given:
    """Tensors that have a row for each of the batch's: what a function was given, and the model's.

    Args:
      ids: the ids of what it was given.
      graph: where it was called; None to know of no more.
      made: the names of the operations that were made there since.
    """

    def __init__(self, ids: Container[int], graph: tf.Graph | None = None,
                 made: Container[str] = ()) -> None:
        self._ids, self._graph, self._made = ids, graph, made

    def __contains__(self, tensor: tf.Tensor) -> bool:
        # Keras takes the logits from behind a softmax.
        return id(tensor) in self._ids or (
            tensor.graph is self._graph and tensor.op.name not in self._made)


def is_by_row(walk: provenance.Walk, rows: tf.Tensor, given: Given) -> bool:
    """Whether each value of ``rows`` is made of one row of what was given."""
    return not _Search(walk, given).puts_together(rows)


def is_coupled(walk: provenance.Walk, rows: tf.Tensor, given: Given) -> bool:
    """Whether a value of ``rows`` is, without a doubt, made of several rows of what was given."""
    return _Search(walk, given, sure=True).puts_together(rows)


class _Holds(enum.IntEnum):
    """What a tensor holds."""

    SAME = 0  # whatever the rows are
    NUMBERS = 1  # how many rows there are, or which of them one is
    ROWS = 2


class _Search:
    """Goes back from a tensor to what was given; sees each tensor once.

    Args:
      walk: looks at the graph.
      given: the tensors behind which not to look.
      sure: whether what only may put rows together does not count.
    """

    def __init__(self, walk: provenance.Walk, given: Given, sure: bool = False) -> None:
        self._walk, self._given, self._sure = walk, given, sure
        self._holds: dict[int, _Holds] = {}
        self._seen: list[tf.Tensor] = []  # so that no id becomes another's
        self._calls: dict[int, tf.Operation] = {}

    def puts_together(self, value: tf.Tensor) -> bool:
        """Whether an operation behind ``value`` puts rows together, or counts them."""
        waiting = [(value, False)]
        while waiting:
            tensor, is_known = waiting.pop()
            if id(tensor) in self._holds:
                continue
            sources = self._sources(tensor)
            if not is_known and sources:
                waiting.append((tensor, True))
                waiting.extend((each, False) for each in sources)
                continue
            self._seen.append(tensor)
            held = [self._holds[id(each)] for each in sources]
            self._holds[id(tensor)] = holds = self._held(tensor, held)
            if held and holds is _Holds.ROWS and self._moves(tensor, held):
                return True
        return not self._sure and self._holds[id(value)] is _Holds.NUMBERS

    def _sources(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """What ``tensor`` was made of; nothing where that is not looked at."""
        if self._walk.is_outside(tensor) or tensor in self._given:
            return []
        origin = self._walk.origin(tensor)
        if origin is not tensor:
            return [origin]
        if tensor.op.type == "IdentityN":  # what a gradient of its own is given through
            return [tensor.op.inputs[tensor.value_index]]
        inner = self._walk.inside(tensor) if tensor.op.type in provenance.CALLS else None
        return list(tensor.op.inputs) if inner is None else [inner]

    def _held(self, tensor: tf.Tensor, held: Sequence[_Holds]) -> _Holds:
        if self._walk.is_outside(tensor):
            return _Holds.SAME
        if tensor in self._given:
            return _Holds.SAME if self._walk.is_steady(tensor) else _Holds.ROWS
        kind = tensor.op.type
        if not held:
            steady = provenance.is_steady_source(tensor.op) or kind == "Placeholder" and (
                self._walk.origin(tensor) is not tensor)
            return _Holds.SAME if steady else _Holds.ROWS
        if kind in row_axes.SIZES:
            return min(max(held), _Holds.NUMBERS)
        if kind == "StridedSlice" and (axis := self._walk.length_along(tensor)) is not None:
            return _Holds.SAME if axis else _Holds.NUMBERS
        if kind in _SPREAD and held[_SPREAD[kind]] is _Holds.SAME:
            return _Holds.SAME
        return max(held)

    def _moves(self, tensor: tf.Tensor, held: Sequence[_Holds]) -> bool:
        operation = tensor.op
        if self._walk.origin(tensor) is not tensor or operation.type == "IdentityN":
            return False
        if self._sure and not _is_sure(operation):
            return False
        if operation.type in provenance.CALLS:
            # A second call's arguments would be taken for the first one's.
            inner = self._walk.inside(tensor)
            return (inner is None
                    or self._calls.setdefault(id(inner.graph), operation) is not operation)
        moves = _MOVES.get(operation.type, _always)
        if any(each is _Holds.NUMBERS and (value.dtype.is_floating or moves is _broadcast)
               for each, value in zip(held, operation.inputs)):
            return True
        return moves(self._walk, operation, [each is not _Holds.ROWS for each in held])


# What nothing is done by but putting rows together.
_REDUCING = frozenset({"Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm", "Cumsum", "ReverseV2"})


def _is_sure(operation: tf.Operation) -> bool:
    if operation.type in _REDUCING:
        return tf.get_static_value(operation.inputs[1]) is not None
    return operation.type in ("MatMul", "Einsum")


# Those that repeat an input as often as a shape says, and which input it is.
_SPREAD = {"Fill": 1, "BroadcastTo": 0, "Tile": 0, "Reshape": 0}


def _always(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    del walk, operation, steady
    return True


def _never(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    del walk, operation, steady
    return False


def _broadcast(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether the rows of one input stand in another dimension than those of another one."""
    del walk
    ranks = {value.shape.rank for value, is_steady in zip(operation.inputs, steady)
             if not is_steady and value.shape.rank}
    return len(ranks) > 1


def _along(place: int, of: int = 0) -> Moves:
    """Whether the axes of input ``of`` that input ``place`` names may be the rows', too."""
    def is_along(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
        del walk, steady
        axes = tf.get_static_value(operation.inputs[place])
        return _has_first(None if axes is None else axes.reshape([-1]), operation, of)

    return is_along


def _by_axis(name: str) -> Moves:
    """Whether the axes that an attribute names may have the rows' among them."""
    def is_along(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
        del walk, steady
        axes = operation.get_attr(name)
        return _has_first(axes if isinstance(axes, list) else [axes], operation, 0)

    return is_along


def _has_first(axes: Sequence[int] | None, operation: tf.Operation, of: int) -> bool:
    ranks = [value.shape.rank for value in (operation.inputs[of], operation.outputs[0])]
    if axes is None or None in ranks:
        return True
    return 0 in [axis % max(*ranks, 1) for axis in axes]


def _sliced(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether a slice takes some of the rows, or puts a dimension before them."""
    del walk, steady
    masks = {name: operation.get_attr(f"{name}_mask") & 1
             for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    strides = tf.get_static_value(operation.inputs[3])
    whole = masks["begin"] and masks["end"] and strides is not None and strides[0] == 1
    return bool(not masks["ellipsis"] and (masks["new_axis"] or masks["shrink_axis"] or not whole))


def _cut(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether ``tf.slice`` takes some of the rows."""
    del walk, steady
    begin, size = (tf.get_static_value(value) for value in operation.inputs[1:])
    return begin is None or size is None or begin[0] != 0 or size[0] != -1


def _reshaped(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether several rows, or parts of several, come to stand in one."""
    del steady
    (value, shape), made = operation.inputs, operation.outputs[0]
    wanted = tf.get_static_value(shape, partial=True)
    known = [None if size is None else int(size) for size in ([] if wanted is None else wanted)]
    if not walk.may_be_rows(made) or (known[:1] == [1] and -1 in known):
        return True
    if not made.shape.rank or not value.shape.rank:
        return False
    one, other = value.shape[1:], made.shape[1:]
    return (one.is_fully_defined() and other.is_fully_defined()
            and math.prod(one) % max(math.prod(other), 1) != 0)


def _transposed(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    del walk, steady
    order = tf.get_static_value(operation.inputs[1])
    return order is None or order.size > 0 and order[0] != 0


def _multiplied(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether a product of matrices is not one of rows with a matrix of weights."""
    del walk
    return not steady[1] or operation.get_attr("transpose_a")


def _multiplied_each(walk: provenance.Walk, operation: tf.Operation,
                     steady: Sequence[bool]) -> bool:
    """As for matrices; but each row may have matrices of its own."""
    del walk
    ranks = {value.shape.rank for value, is_steady in zip(operation.inputs, steady)
             if not is_steady}
    return len(ranks) > 1 or not ranks.isdisjoint({None, 2})


def _subscripted(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether terms with rows, or the result, do not all begin with the rows' subscript."""
    del walk
    terms = operation.get_attr("equation").decode().replace("->", ",").split(",")
    return len({term[:1] for term, is_steady in zip(terms, [*steady, False])
                if not is_steady}) > 1


def _gathered(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether rows are taken from rows, and not each from a table or from itself."""
    if operation.get_attr("batch_dims"):
        return False
    return not (steady[0] if _along(2)(walk, operation, steady) else steady[1])


def _of_table(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether what is looked up is not in a table that is the same for all rows."""
    del walk, operation
    return not steady[0]


def _tiled(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    del walk, steady
    times = tf.get_static_value(operation.inputs[1], partial=True)
    return times is None or times[0] is None or int(times[0]) != 1


def _padded(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    del walk, steady
    widths = tf.get_static_value(operation.inputs[1])
    return widths is None or bool(widths[0].any())


def _spread(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    del walk, steady
    return operation.inputs[0].shape.rank != operation.outputs[0].shape.rank


def _filtered(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
    """Whether not images alone, but filters too are made of rows."""
    del walk, operation
    return not all(steady[1:])


def _below(rank: int) -> Moves:
    """Whether what works on the last dimensions of a tensor of that rank works on the rows'."""
    def is_below(walk: provenance.Walk, operation: tf.Operation, steady: Sequence[bool]) -> bool:
        del walk, steady
        return operation.inputs[0].shape.rank in (None, *range(rank))

    return is_below


# Those that make of each element one.
_UNARY = frozenset({
    "Abs", "Acos", "Acosh", "Angle", "Asin", "Asinh", "Atan", "Atanh", "BesselI0e", "BesselI1e",
    "Bitcast", "Bucketize", "Cast", "Ceil", "CheckNumerics", "ComplexAbs", "Conj", "Cos",
    "Cosh", "Digamma", "Elu", "EnsureShape", "Erf", "Erfc", "Erfinv", "Exp", "Expm1", "Floor",
    "Identity", "Imag", "Inv", "Invert", "IsFinite", "IsInf", "IsNan", "LeakyRelu", "Lgamma",
    "Log", "Log1p", "LogicalNot", "Ndtri", "Neg", "OnesLike", "PreventGradient", "Real",
    "Reciprocal", "Relu", "Relu6", "Rint", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin",
    "Sinh", "Snapshot", "Softplus", "Softsign", "Sqrt", "Square", "StopGradient", "Tan", "Tanh",
    "ZerosLike"})
# Of the elements of several tensors, in the same place.
_BROADCAST = frozenset({
    "Add", "AddN", "AddV2", "ApproximateEqual", "Atan2", "Betainc", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "ClipByValue", "Complex", "Div", "DivNoNan", "EluGrad", "Equal", "FloorDiv",
    "FloorMod", "Greater", "GreaterEqual", "Igamma", "Igammac", "InvGrad", "LeakyReluGrad",
    "Less", "LessEqual", "LogicalAnd", "LogicalOr", "Maximum", "Minimum", "Mod", "Mul",
    "MulNoNan", "NextAfter", "NotEqual", "Polygamma", "Pow", "RealDiv", "ReciprocalGrad",
    "Relu6Grad", "ReluGrad", "RsqrtGrad", "Select", "SelectV2", "SeluGrad", "SigmoidGrad",
    "SoftplusGrad", "SoftsignGrad", "SqrtGrad", "SquaredDifference", "Sub", "TanhGrad",
    "TruncateDiv", "TruncateMod", "Xdivy", "Xlog1py", "Xlogy", "Zeta"})
ELEMENTWISE = _UNARY | _BROADCAST

# How to tell whether an operation may put several rows into one value.
_MOVES: dict[str, Moves] = {
    **dict.fromkeys(_UNARY, _never), **dict.fromkeys(_BROADCAST, _broadcast),
    **dict.fromkeys((
        "All", "Any", "ArgMax", "ArgMin", "Cumprod", "Cumsum", "CumulativeLogsumexp",
        "EuclideanNorm", "ExpandDims", "Max", "Mean", "Min", "Prod", "ReverseV2", "Sum"),
        _along(1)),
    **dict.fromkeys(("Pack", "Unpack"), _by_axis("axis")),
    **dict.fromkeys((
        "AvgPool", "AvgPool3D", "BiasAdd", "Conv", "Conv2D", "Conv3D", "DepthwiseConv2dNative",
        "Dilation2D", "MaxPool", "MaxPool3D"), _filtered),
    **dict.fromkeys((
        "AdjustContrastv2", "AdjustHue", "AdjustSaturation", "DepthToSpace", "ExtractImagePatches",
        "HSVToRGB", "LRN", "RGBToHSV", "ResizeArea", "ResizeBicubic", "ResizeBilinear",
        "ResizeNearestNeighbor", "SpaceToDepth"), _below(4)),
    **dict.fromkeys((
        "FFT", "IFFT", "IRFFT", "InTopK", "InTopKV2", "LogSoftmax", "MatrixDiagV3", "RFFT",
        "Softmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits",
        "TopKV2"), _below(2)),
    **dict.fromkeys((
        "Cholesky", "FFT2D", "IFFT2D", "IRFFT2D", "LogMatrixDeterminant", "MatrixBandPart",
        "MatrixDeterminant", "MatrixDiagPartV3", "MatrixInverse", "MatrixSetDiagV3", "MatrixSolve",
        "MatrixTriangularSolve", "Qr", "RFFT2D", "SelfAdjointEigV2", "Svd"), _below(3)),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _multiplied_each),
    **dict.fromkeys(("GatherNd", "ResourceGather"), _of_table),
    **dict.fromkeys(("MirrorPad", "Pad", "PadV2"), _padded),
    "BroadcastTo": _spread, "Einsum": _subscripted, "GatherV2": _gathered, "MatMul": _multiplied,
    "OneHot": _by_axis("axis"), "Reshape": _reshaped, "Slice": _cut,
    "ConcatV2": _along(-1), "Split": _along(0, of=1), "SplitV": _along(2),
    "Squeeze": _by_axis("squeeze_dims"),
    "StridedSlice": _sliced, "Tile": _tiled, "Transpose": _transposed}
