"""Rules for ops on matrices, which an equation describes as it does an einsum; for diagonals.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  An op that contracts the rows
makes partial sums.  Of an op on vectors or matrices, the last one or two dimensions, the dimensions
in front may be sharded, and the columns that a linear system is solved for.  In one matrix whose
rows or columns are sharded, such as similarities of all rows to all rows, each tower finds the
diagonal by the positions of its rows in the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import but, by_equation, by_names
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Sharded, Spec, has_known_rows

# An op type -> the names of its dimensions, see by_equation.
_EQUATIONS: dict[str, str] = {
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT", "MatrixDiag", "IsotonicRegression"),
                    "..._->..."),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D", "Cholesky", "MatrixInverse",
                     "MatrixDeterminant", "LogMatrixDeterminant", "MatrixSquareRoot",
                     "MatrixLogarithm", "Qr", "Svd", "SelfAdjointEigV2", "Eig", "Lu",
                     "MatrixDiagPart", "MatrixBandPart"), "...__->..."),
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
    dots = "" if op.type == "MatMul" else "..."  # a matrix, also where its rank is unknown
    left, right = "km" if first else "mk", "nk" if second else "kn"
    plan = by_equation(op, specs, f"{dots}{left},{dots}{right}->{dots}mn", SUM, gathers=True)
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


@rule("MatrixDiagV2", "MatrixDiagV3")
def diag(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, given = _of_one_matrix(op, specs, 1), (op.value(2), op.value(3))
    sizes = {size if size is None else int(size) for size in given}
    if spec is None or op.rank(0) != 1 or sizes != {-1}:
        places = op.value(1)  # of one diagonal, or of the first and the last one of several
        plan = None if places is None else by_equation(
            op, specs, f"...{'_' * len({*places.flat})}->...")
        if plan is not None and spec is not None and {op.inputs[0].shape[-1]} == sizes:
            # Its shape function refuses sizes beside a diagonal whose static shape the copy lost.
            plan.make, plan.alone = lambda m: m.copy([m.parts(0), m.parts(1), *[
                m.constant(-1, tf.int32, EACH)] * 2, m.parts(4)], EACH), 0
        return plan

    return Plan([spec, *[REPLICATED] * 4], [spec], make=lambda m: [m.make("SelectV2", [
        _diagonal(m, spec, m.rows(0, tf.int32)), _along(m, m.parts(0), 0), m.parts(4)], EACH)])


@rule("MatrixSetDiagV2", "MatrixSetDiagV3")
def set_diag(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = _of_one_matrix(op, specs, 2)
    if spec is None or op.rank(0) != 2:
        names = but([-2, -1], op.rank(0))
        return by_names(op, specs, [names, names], [names])
    given = specs[1] == spec.at(0)  # else it may have fewer entries than the matrix has rows

    def make(m: Any) -> Any:
        diagonal = m.parts(1)
        if not given:
            size = m.make("Size", [diagonal], EACH, out_type=tf.int64)
            zero, axis = m.constant([0], op.inputs[1].dtype, EACH), m.constant(0, tf.int32, EACH)
            padded = m.make("ConcatV2", [diagonal, zero, axis], EACH)
            at = m.make("Minimum", [m.positions(0), size], EACH)
            diagonal = m.make("GatherV2", [padded, at, axis], EACH)
        return [m.make("SelectV2", [_diagonal(m, spec, _other_size(m, spec)),
                                    _along(m, diagonal, spec.dim), m.parts(0)], EACH)]

    return Plan([spec, spec.at(0) if given else REPLICATED, REPLICATED], [spec], make=make)


@rule("MatrixDiagPartV2", "MatrixDiagPartV3")
def diag_part(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Only the diagonal is gathered: it may have fewer entries than the matrix has rows."""
    spec, dtype = _of_one_matrix(op, specs, 1), op.inputs[0].dtype
    if spec is None or op.rank(0) != 2 or not (dtype.is_floating or dtype.is_integer):
        return by_equation(op, specs, "...__->...")

    def make(m: Any) -> Any:
        others = _other_size(m, spec)
        own = m.make("SelectV2", [_diagonal(m, spec, others), m.parts(0),
                                  m.constant(0, dtype, EACH)], EACH)
        rows = m.make("Sum", [own, m.constant(1 - spec.dim, tf.int32, EACH)], EACH)
        whole = m.gathered(rows, spec.at(0), tf.TensorShape([None]))
        size = m.make("Minimum", [m.rows(0, tf.int32), others[0]], HOST)
        return [m.make("Slice", [whole, m.constant([0], tf.int32, None), m.make(
            "Reshape", [size, m.constant([1], tf.int32, None)], None)], None)]

    return Plan([spec, REPLICATED, REPLICATED], [REPLICATED], make=make)


def _of_one_matrix(op: Op, specs: Sequence[Spec], numbers: int) -> Sharded | None:
    """The spec of an op that may take the main diagonal of one matrix; ``numbers`` is an input."""
    spec, diagonals = specs[0], op.value(numbers)
    if not isinstance(spec, Sharded) or diagonals is None or diagonals.any():
        return None
    return spec if has_known_rows(spec) else None


def _diagonal(m: Any, spec: Sharded, size: Any) -> Any:
    """Which entries of a tower's part are on the diagonal; ``size``: of the other dimension."""
    yes, no = (m.constant(value, tf.bool, EACH) for value in (True, False))
    return m.make("OneHot", [m.positions(0), size, yes, no], EACH, axis=spec.dim - 1)


def _along(m: Any, vectors: Any, dim: int) -> Any:
    """Each tower's vector as a column (dimension 0) or as a row (dimension 1)."""
    return m.make("Reshape", [vectors, m.constant(
        [-1, 1] if dim == 0 else [1, -1], tf.int32, EACH)], EACH)


def _other_size(m: Any, spec: Sharded) -> list[Any]:
    """The size of a matrix along the dimension that is not sharded, of each tower's part."""
    shapes: list[Any] = m.each(lambda tower: m.own_shape(0, tower, tf.int32))
    sizes: list[Any] = m.entries(shapes, 1 - spec.dim)
    return sizes
