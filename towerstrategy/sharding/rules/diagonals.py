"""Rules for diagonals and bands of matrices, such as similarities of all rows to all rows.

Goes in: an op on matrices, and the specs of its inputs.  Comes out: its plan.  The dimensions in
front of the matrices may be sharded.  In one matrix whose rows or columns are sharded, each tower
finds the diagonal by the positions of its rows in the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import DIMS, by_names
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Sharded, Spec, has_known_rows


@rule("MatrixDiagV2", "MatrixDiagV3")
def diag(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, given = _of_one_matrix(op, specs, 1), (op.value(2), op.value(3))
    sizes = {size if size is None else int(size) for size in given}
    if spec is None or op.rank(0) != 1 or sizes != {-1}:
        plan = _along_front(op, specs, _dims(op))
        if plan is not None and spec is not None and {op.inputs[0].shape[-1]} == sizes:
            # Its shape function refuses sizes beside a diagonal whose static shape the copy lost.
            plan.make, plan.alone = lambda m: m.copy([m.parts(0), m.parts(1), *[
                m.constant(-1, tf.int32, EACH)] * 2, m.parts(4)], EACH), 0
        return plan

    def make(m: Any) -> Any:
        columns = _range(m, m.rows(0, tf.int64))
        return [m.make("SelectV2", [
            m.make("Equal", [_along(m, m.positions(0), 0), columns], EACH),
            _along(m, m.parts(0), 0), m.parts(4)], EACH)]

    return Plan([spec, *[REPLICATED] * 4], [spec], make=make)


@rule("MatrixSetDiagV2", "MatrixSetDiagV3")
def set_diag(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = _of_one_matrix(op, specs, 2)
    if spec is None or op.rank(0) != 2:
        return _along_front(op, specs, 2, inputs=2)
    given = specs[1] == spec.at(0)  # else it may have fewer entries than the matrix has rows

    def make(m: Any) -> Any:
        diagonal = m.parts(1)
        if not given:
            size = m.make("Size", [diagonal], EACH, out_type=tf.int64)
            zero, axis = m.constant([0], op.inputs[1].dtype, EACH), m.constant(0, tf.int32, EACH)
            padded = m.make("ConcatV2", [diagonal, zero, axis], EACH)
            at = m.make("Minimum", [m.positions(0), size], EACH)
            diagonal = m.make("GatherV2", [padded, at, axis], EACH)
        return [m.make("SelectV2", [m.make("Equal", _positions(m, spec), EACH),
                                    _along(m, diagonal, spec.dim), m.parts(0)], EACH)]

    return Plan([spec, spec.at(0) if given else REPLICATED, REPLICATED], [spec], make=make)


@rule("MatrixDiagPartV2", "MatrixDiagPartV3")
def diag_part(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Only the diagonal is gathered: it may have fewer entries than the matrix has rows."""
    spec, dtype = _of_one_matrix(op, specs, 1), op.inputs[0].dtype
    if spec is None or op.rank(0) != 2 or not (dtype.is_floating or dtype.is_integer):
        return _along_front(op, specs, 2)

    def make(m: Any) -> Any:
        own = m.make("SelectV2", [m.make("Equal", _positions(m, spec), EACH), m.parts(0),
                                  m.constant(0, dtype, EACH)], EACH)
        rows = m.make("Sum", [own, m.constant(1 - spec.dim, tf.int32, EACH)], EACH)
        whole = m.gathered(rows, spec.at(0), tf.TensorShape([None]))
        size = m.make("Minimum", [m.rows(0, tf.int64), _other_size(m, spec)[0]], HOST)
        diagonal = m.make("Slice", [whole, m.constant([0], tf.int64, None), m.make(
            "Reshape", [size, m.constant([1], tf.int32, None)], None)], None)
        return [diagonal]

    return Plan([spec, REPLICATED, REPLICATED], [REPLICATED], make=make)


@rule("MatrixBandPart")
def band_part(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if op.rank(0) != 2 or not isinstance(spec, Sharded) or not has_known_rows(spec):
        return _along_front(op, specs, 2)

    def make(m: Any) -> Any:
        rows, columns = _positions(m, spec)
        below = m.make("Sub", [rows, columns], EACH)
        inside = [m.make("LogicalOr", [m.make("LessEqual", [distance, limit], EACH), m.make(
            "Less", [limit, m.constant(0, tf.int64, EACH)], EACH)], EACH)
            for distance, limit in zip((below, m.make("Neg", [below], EACH)), (
                m.make("Cast", [m.parts(index)], EACH, DstT=tf.int64) for index in (1, 2)))]
        zero = np.zeros([], op.inputs[0].dtype.as_numpy_dtype)
        return [m.make("SelectV2", [m.make("LogicalAnd", inside, EACH), m.parts(0),
                                    m.constant(zero, op.inputs[0].dtype, EACH)], EACH)]

    return Plan([spec, REPLICATED, REPLICATED], [spec], make=make)


def _of_one_matrix(op: Op, specs: Sequence[Spec], numbers: int) -> Sharded | None:
    """The spec of an op that may take the main diagonal of one matrix; ``numbers`` is an input."""
    spec, diagonals = specs[0], op.value(numbers)
    if not isinstance(spec, Sharded) or diagonals is None or diagonals.any():
        return None
    return spec if has_known_rows(spec) else None


def _along_front(op: Op, specs: Sequence[Spec], last: int | None, inputs: int = 1) -> Plan | None:
    """The plan along the dimensions in front of the ``last`` ones, which the first inputs have."""
    front = None if last is None or op.rank(0) is None else DIMS[:op.rank(0) - last]
    return by_names(op, specs, [front] * inputs, [front])


def _dims(op: Op) -> int | None:
    """How many dimensions diagonals have: several have one of their own, a single one has not."""
    diagonals = op.value(1)
    if diagonals is None:
        return None
    return 1 if diagonals.size == 1 or diagonals.ravel()[0] == diagonals.ravel()[1] else 2


def _positions(m: Any, spec: Sharded) -> list[Any]:
    """Each tower's row numbers and column numbers in the whole matrix, which broadcast."""
    own = _along(m, m.positions(0), spec.dim)
    others = _along(m, _range(m, _other_size(m, spec)), 1 - spec.dim)
    return [own, others] if spec.dim == 0 else [others, own]


def _range(m: Any, limit: Any) -> Any:
    zero, one = (m.constant(number, tf.int64, EACH) for number in (0, 1))
    return m.make("Range", [zero, limit, one], EACH)


def _along(m: Any, vectors: Any, dim: int) -> Any:
    """Each tower's vector as a column (dimension 0) or as a row (dimension 1)."""
    return m.make("Reshape", [vectors, m.constant(
        [-1, 1] if dim == 0 else [1, -1], tf.int32, EACH)], EACH)


def _other_size(m: Any, spec: Sharded) -> list[Any]:
    """The size of a matrix along the dimension that is not sharded, of each tower's part."""
    shapes: list[Any] = m.each(lambda tower: m.own_shape(0, tower, tf.int64))
    sizes: list[Any] = m.entries(shapes, 1 - spec.dim)
    return sizes
