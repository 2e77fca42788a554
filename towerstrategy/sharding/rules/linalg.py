"""Rules for ops on vectors and matrices, the last one or two dimensions, and Fourier transforms.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  The dimensions in front may be
sharded.  The last ones may not, but for the columns that a linear system is solved for.
"""

from __future__ import annotations

from collections.abc import Sequence

from towerstrategy.sharding.rules.dimensions import MIXED, by_names
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import Spec

# An op type -> for each of its first inputs, how many dimensions a vector, matrix, ... has.
_LAST: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT", "MatrixDiag", "IsotonicRegression"), (1,)),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D", "Cholesky", "MatrixInverse",
                     "MatrixDeterminant", "LogMatrixDeterminant", "MatrixSquareRoot",
                     "MatrixLogarithm", "Qr", "Svd", "SelfAdjointEigV2", "Eig", "Lu",
                     "MatrixBandPart", "MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3"),
                    (2,)),
    **dict.fromkeys(("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D"), (3,)),
    "CholeskyGrad": (2, 2), "TridiagonalMatMul": (2, 2, 2, 2),
}
# Likewise, for ops that do not broadcast the dimensions in front.
_SAME_FRONT = {"MatrixSetDiag": (2, 1), "Cross": (1, 1)}


@rule(*_LAST, *_SAME_FRONT)
def batched(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return _batched(op, specs, {**_LAST, **_SAME_FRONT}[op.type], broadcasts=op.type in _LAST)


@rule("MatrixTriangularSolve", "BatchMatrixTriangularSolve", "MatrixSolve", "MatrixSolveLs",
      "TridiagonalSolve")
def solve(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each system, and each column on its right-hand side, is solved by itself."""
    rank = op.rank(1)
    columns = [] if rank is None else [*range(rank - 2), MIXED, "c"]
    return by_names(op, specs, [columns[:-2], columns], [columns]) \
        if columns and op.rank(0) == rank else None


@rule("MatrixDiagV2", "MatrixDiagV3", "MatrixSetDiagV2", "MatrixSetDiagV3")
def diagonals(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Several diagonals have a dimension of their own; a single one has not."""
    sets = op.type.startswith("MatrixSet")
    numbers = op.value(2 if sets else 1)
    if numbers is None:
        return None
    dims = 1 if numbers.size == 1 or numbers.ravel()[0] == numbers.ravel()[1] else 2
    return _batched(op, specs, (2, dims) if sets else (dims,))


def _batched(op: Op, specs: Sequence[Spec], last: Sequence[int],
             broadcasts: bool = False) -> Plan | None:
    """The plan of an op that may be sharded along the dimensions in front.

    ``last`` has, for each of the first inputs, how many dimensions are behind these; further inputs
    are the same for all towers.  With ``broadcasts`` the dimensions in front broadcast; else all
    these inputs have as many of them as the first one, even if their ranks are unknown.
    """
    ranks = [op.rank(index) for index in range(len(last if broadcasts else last[:1]))]
    fronts = {None if rank is None else rank - count for rank, count in zip(ranks, last)}
    if None in fronts or len(fronts) > 1:
        return None  # inputs that are broadcast have different dimensions in front
    front = range(fronts.pop() or 0)
    return by_names(op, specs, [front] * len(last), [front])
