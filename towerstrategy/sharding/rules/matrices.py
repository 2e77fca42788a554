"""Rules for ops that an equation describes as it does an einsum, such as products of matrices.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  An op that contracts the rows
makes partial sums.  Of an op on vectors or matrices, the last one or two dimensions, the dimensions
in front may be sharded, and the columns that a linear system is solved for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import but, by_equation, by_names
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import SUM, Spec

# An op type -> the names of its dimensions, see by_equation.
_EQUATIONS: dict[str, str] = {
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT", "MatrixDiag", "IsotonicRegression"),
                    "..._->..."),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D", "Cholesky", "MatrixInverse",
                     "MatrixDeterminant", "LogMatrixDeterminant", "MatrixSquareRoot",
                     "MatrixLogarithm", "Qr", "Svd", "SelfAdjointEigV2", "Eig", "Lu",
                     "MatrixDiagPart"), "...__->..."),
    **dict.fromkeys(("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D"), "...___->..."),
    # Each system, and each column on its right-hand side, is solved by itself.
    **dict.fromkeys(("MatrixTriangularSolve", "BatchMatrixTriangularSolve", "MatrixSolve",
                     "MatrixSolveLs", "TridiagonalSolve"), "...__,..._c->..._c"),
    "CholeskyGrad": "...__,...__->...", "TridiagonalMatMul": "...__,...__,...__,...__->...",
    "MatrixSetDiag": "...__,..._->...", "Cross": "..._,..._->...",
    # Each value is looked up in the sorted numbers of its row.
    **dict.fromkeys(("LowerBound", "UpperBound"), "a_,ab->ab"),
    **dict.fromkeys(("InTopKV2", "SparseSoftmaxCrossEntropyWithLogits"), "a,a->a"),
}


@rule(*_EQUATIONS)
def named(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return by_equation(op, specs, _EQUATIONS[op.type])


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(op: Op, specs: Sequence[Spec]) -> Plan | None:
    flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    first, second = map(op.attr, flags)
    plan = by_equation(op, specs, f"...{'km' if first else 'mk'},...{'nk' if second else 'kn'}"
                       "->...mn", SUM, gathers=True)
    if plan is not None and op.type == "MatMul" and second:
        plan.whole = _swapped
    return plan


def _swapped(m: Any) -> list[Any]:
    """``a bᵀ`` as ``(b aᵀ)ᵀ``: CPU kernels copy the second operand in order to transpose it."""
    product = m.make("MatMul", [m.whole(1), m.whole(0)], None,
                     transpose_b=not m.op.attr("transpose_a"))
    return [m.make("Transpose", [product, m.constant([1, 0], tf.int32, None)], None)]


@rule("Einsum")
def einsum(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return by_equation(op, specs, op.attr("equation").replace(" ", ""), SUM, gathers=True)


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
