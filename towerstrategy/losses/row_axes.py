"""Where the batch's rows are in a tensor, and whether all of a tower's are there.

Goes in: a tensor of the graph that is being traced.  Comes out: the dimension that its rows are
in, as operations have moved it; whether a mask has chosen some of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import tensorflow as tf

# Those that give on what they get: a term goes through, whatever it is.
SAME = frozenset({"Identity", "CheckNumerics", "EnsureShape", "PreventGradient", "Snapshot",
                   "Cast", "Neg", "Reshape", "Squeeze", "ExpandDims"})
REDUCED = {"Sum": tf.reduce_sum, "Mean": tf.reduce_mean}

_REDUCING = frozenset({*REDUCED, "All", "Any", "EuclideanNorm", "Max", "Min", "Prod"})

# Those that say how many rows there are, not what is in them.
SIZES = ("Shape", "Size", "Rank")

# Those that make of each element one.
_ELEMENTWISE = SAME - {"Reshape", "Squeeze", "ExpandDims"} | frozenset({
    "Abs", "AddV2", "Add", "Sub", "Mul", "RealDiv", "DivNoNan", "Square", "SquaredDifference",
    "Exp", "Log", "Log1p", "Sqrt", "Pow", "Maximum", "Minimum", "Relu", "Sigmoid", "Tanh",
    "Softplus", "SelectV2", "StopGradient"})
_DIAGONALS = frozenset({"DiagPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3"})
# What names some of the rows; what begins a layer, behind which there is no loss.
_SELECTING = frozenset({"Where", "DynamicPartition"})
_DISTINCT = frozenset({"ListDiff", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
_OF_WEIGHTS = frozenset({"MatMul", "BatchMatMulV2", "Einsum", "BiasAdd", "Conv2D", "ResourceGather",
                         "FusedBatchNormV3", "ReadVariableOp"})

# Operations that a loss is made of behind what it reduces, at the most.
_NEAR = 40


def axis_in(value: tf.Tensor, steps: int = _NEAR) -> int | None:
    """The dimension of ``value`` that may be the batch's: the first, unless it was moved.

    None where there is none left.
    """
    operation, rank = value.op, value.shape.rank
    if rank == 0:
        return None
    if rank is None or not steps:
        return 0
    if operation.type == "Pack":
        axis, inner = operation.get_attr("axis") % rank, axis_in(operation.inputs[0], steps - 1)
        return None if inner is None else inner + (axis <= inner)
    if operation.type in ("Bincount", "DenseBincount"):
        return None
    if operation.type in _DIAGONALS:
        return None if rank == 1 else axis_in(operation.inputs[0], steps - 1)
    if operation.type in ("Einsum", "MatMul"):
        return _axis_of_product(operation, steps)
    if operation.type == "Transpose" or operation.type in _REDUCING:
        inner, known = axis_in(operation.inputs[0], steps - 1), tf.get_static_value(
            operation.inputs[1])
        before = operation.inputs[0].shape.rank
        if known is None or before is None or inner is None:
            return 0 if inner is not None else None
        axes = [axis % before for axis in known.reshape([-1])]
        if operation.type == "Transpose":
            return axes.index(inner)
        if inner in axes:
            return None
        return inner if operation.get_attr("keep_dims") else inner - sum(
            axis < inner for axis in axes)
    same = [part for part in operation.inputs if part.shape.rank == rank]
    return axis_in(same[0], steps - 1) if operation.type in _ELEMENTWISE and same else 0


def _axis_of_product(operation: tf.Operation, steps: int) -> int | None:
    """The dimension that the first factor's rows are in behind a product; None if summed over."""
    own = axis_in(operation.inputs[0], steps - 1)
    if operation.type == "MatMul":
        return None if own is None or own != operation.get_attr("transpose_a") else 0
    terms, result = operation.get_attr("equation").decode().replace(" ", "").split("->")
    first = terms.split(",")[0]
    if "." in terms or own is None or own >= len(first):
        return own
    return result.index(first[own]) if first[own] in result else None


def is_selected(rows: tf.Tensor) -> bool:
    """Whether ``rows`` are some of a tower's, as those that a mask leaves: how many, a step knows.
    """
    return any(tensor.op.type in _SELECTING for tensor in near(rows))


def is_deduplicated(rows: tf.Tensor) -> bool:
    """Whether of equal ``rows`` one is left: the towers' numbers of them do not add up."""
    return any(tensor.op.type in _DISTINCT for tensor in near(rows))


def near(rows: tf.Tensor) -> Iterator[tf.Tensor]:
    """``rows`` and what they were made of, a few operations far, up to layers."""
    waiting, seen = [rows], set[int]()
    while waiting and len(seen) < _NEAR:
        tensor = waiting.pop(0)
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        yield tensor
        if tensor.op.type not in (*_OF_WEIGHTS, *SIZES):
            waiting.extend(tensor.op.inputs)


def is_named(operation: tf.Operation, kind: str) -> bool:
    """Whether this is of ``kind``, or the constant that TensorFlow makes in its place."""
    name = operation.name.rpartition("/")[2]
    return operation.type == kind or (
        operation.type == "Const" and (name == kind or name.startswith(f"{kind}_")))


def added(operation: tf.Operation, parts: list[tf.Tensor]) -> tf.Tensor:
    """What an operation that adds up, or stacks, makes of other ``parts``."""
    if operation.type == "Pack":
        return tf.stack(parts, operation.get_attr("axis"))
    if operation.type == "Sub":
        return parts[0] - parts[1]
    return functools.reduce(tf.add, parts)
