"""Rules for matrices: products, einsums and biases, ops on the last dimensions, Fourier transforms.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  An op that contracts the rows
makes partial sums.  Of an op on vectors or matrices, the last one or two dimensions, the dimensions
in front may be sharded, and the columns that a linear system is solved for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import MIXED, but, by_names
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import SUM, Spec

# An op type -> for each of its first inputs, how many dimensions a vector, matrix, ... has.
_LAST: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT", "MatrixDiag", "IsotonicRegression"), (1,)),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D", "Cholesky", "MatrixInverse",
                     "MatrixDeterminant", "LogMatrixDeterminant", "MatrixSquareRoot",
                     "MatrixLogarithm", "Qr", "Svd", "SelfAdjointEigV2", "Eig", "Lu",
                     "MatrixDiagPart"), (2,)),
    **dict.fromkeys(("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D"), (3,)),
    "CholeskyGrad": (2, 2), "TridiagonalMatMul": (2, 2, 2, 2),
}
# Likewise, for ops that do not broadcast the dimensions in front.
_SAME_FRONT = {"MatrixSetDiag": (2, 1), "Cross": (1, 1)}


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(op: Op, specs: Sequence[Spec]) -> Plan | None:
    ranks: list[Any] = [op.rank(0), op.rank(1)]
    if None in ranks:
        return None
    flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    rank = max(ranks)
    # Each operand has batch dimensions, which broadcast, and two others; k is contracted.
    names: list[list[Any]] = []
    for index, labels in enumerate((["m", "k"], ["k", "n"])):
        if op.attr(flags[index]):
            labels.reverse()
        batch = ranks[index] - 2
        names.append([*range(rank - 2 - batch, rank - 2), *labels])
    plan = by_names(op, specs, names, [[*range(rank - 2), "m", "n"]], SUM, gathers=True)
    if plan is not None and op.type == "MatMul" and op.attr("transpose_b"):
        plan.whole = _swapped
    return plan


def _swapped(m: Any) -> list[Any]:
    """``a bᵀ`` as ``(b aᵀ)ᵀ``: CPU kernels copy the second operand in order to transpose it."""
    product = m.make("MatMul", [m.whole(1), m.whole(0)], None,
                     transpose_b=not m.op.attr("transpose_a"))
    return [m.make("Transpose", [product, m.constant([1, 0], tf.int32, None)], None)]


@rule("Einsum")
def einsum(op: Op, specs: Sequence[Spec]) -> Plan | None:
    left, out = op.attr("equation").replace(" ", "").split("->")
    terms = [*left.split(","), out]
    *names, output = (_names(term, tensor.shape.rank) for term, tensor in zip(
        terms, [*op.inputs, op.outputs[0]]))
    if output is None or None in names or ("." in left) > ("." in out):
        return None
    return by_names(op, specs, names, [output], SUM, gathers=True)


def _names(term: str, rank: int | None) -> list[str | int] | None:
    """The names of a term's dimensions; dimensions of "..." are numbered, the last one is -1."""
    before, dots, after = term.partition("...")
    if len({*before, *after}) < len(before + after) or dots and rank is None:
        return None  # the term takes a diagonal, or has an unknown number of dimensions
    return [*before, *range(len(before + after) - (rank or 0) if dots else 0, 0), *after]


@rule("BiasAdd")
def bias_add(op: Op, specs: Sequence[Spec]) -> Plan | None:
    names = _all_but_channels(op)
    return by_names(op, specs, [names], [names])


@rule("BiasAddGrad")
def bias_add_grad(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return Plan(specs, [SUM]) if specs[0] == SUM else by_names(
        op, specs, [_all_but_channels(op)], [""], SUM)


def _all_but_channels(op: Op) -> str | None:
    """The names of all dimensions but the channels."""
    return but([1 if op.attr("data_format").startswith("NC") else -1], op.rank(0))


@rule(*_LAST, *_SAME_FRONT)
def batched(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return along_front(op, specs, {**_LAST, **_SAME_FRONT}[op.type], broadcasts=op.type in _LAST)


@rule("MatrixTriangularSolve", "BatchMatrixTriangularSolve", "MatrixSolve", "MatrixSolveLs",
      "TridiagonalSolve")
def solve(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each system, and each column on its right-hand side, is solved by itself."""
    rank = op.rank(1)
    columns = [] if rank is None else [*range(rank - 2), MIXED, "c"]
    return by_names(op, specs, [columns[:-2], columns], [columns]) \
        if columns and op.rank(0) == rank else None


def along_front(op: Op, specs: Sequence[Spec], last: Sequence[int | None],
                broadcasts: bool = False) -> Plan | None:
    """The plan of an op that may be sharded along the dimensions in front.

    ``last`` has, for each of the first inputs, how many dimensions are behind these; further inputs
    are the same for all towers.  With ``broadcasts`` the dimensions in front broadcast; else all
    these inputs have as many of them as the first one, even if their ranks are unknown.
    """
    if None in last:
        return None
    ranks = [op.rank(index) for index in range(len(last if broadcasts else last[:1]))]
    fronts = {None if rank is None else rank - count for rank, count in zip(ranks, last)}
    if None in fronts or len(fronts) > 1:
        return None  # inputs that are broadcast have different dimensions in front
    front = range(fronts.pop() or 0)
    return by_names(op, specs, [front] * len(last), [front])
