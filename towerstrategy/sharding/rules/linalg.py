"""Operations on vectors and matrices, the last dimension or two, and Fourier transforms.

Goes in: an operation.  Comes out: its plan.  Examples stay where they are in front of these
dimensions; along them nothing is done in parts, but what is solved for each column.
"""

from __future__ import annotations

from collections.abc import Sequence

from towerstrategy.sharding.rules.dimensions import MIXED, by_names
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import Spec

# An operation's type -> for each of its first inputs how many dimensions an example has.
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
# Likewise where all inputs have the first one's dimensions in front, be they known or not.
_ALIKE = {"MatrixSetDiag": (2, 1), "Cross": (1, 1)}


@rule(*_LAST, *_ALIKE)
def in_front(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return _in_front(op, specs, {**_LAST, **_ALIKE}[op.type], broadcasts=op.type in _LAST)


@rule("MatrixTriangularSolve", "BatchMatrixTriangularSolve", "MatrixSolve", "MatrixSolveLs",
      "TridiagonalSolve")
def solve(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each example for itself, and each column that is solved for."""
    rank = op.rank(1)
    columns = [] if rank is None else [*range(rank - 2), MIXED, "c"]
    return by_names(op, specs, [columns[:-2], columns], [columns]) \
        if columns and op.rank(0) == rank else None


@rule("MatrixDiagV2", "MatrixDiagV3", "MatrixSetDiagV2", "MatrixSetDiagV3")
def of_diagonals(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Of one diagonal, or of several, which have a dimension of their own."""
    sets = op.type.startswith("MatrixSet")
    named = op.value(2 if sets else 1)
    if named is None:
        return None
    dims = 1 if named.size == 1 or named.ravel()[0] == named.ravel()[1] else 2
    return _in_front(op, specs, (2, dims) if sets else (dims,))


def _in_front(op: Op, specs: Sequence[Spec], last: Sequence[int],
              broadcasts: bool = False) -> Plan | None:
    """Each example for itself.

    Args:
      op: the operation.
      specs: the specs of its inputs.
      last: for each of the first inputs how many dimensions an example has; those all have the same
        dimensions in front. Further inputs are the same for all towers.
      broadcasts: whether the operation takes other dimensions in front, too; where it does not all
        have those of the first input, be they known or not.
    """
    ranks = [op.rank(index) for index in range(len(last if broadcasts else last[:1]))]
    in_front = {None if rank is None else rank - own for rank, own in zip(ranks, last)}
    if None in in_front or len(in_front) > 1:
        return None  # where inputs are broadcast, dimensions are not in the same places
    front = range(in_front.pop() or 0)
    return by_names(op, specs, [front] * len(last), [front])
