"""Rules for operations that run once, with all rows, and make rows that are cut for the towers.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Texts are split into as many
words as there are, and sparse and ragged rows are made dense: all rows have as many columns as the
longest one.  An input with the number of rows tells that the output has the batch's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towerstrategy.sharding.rules.dimensions import by_names
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import HOST, Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Sharded, Size, Spec, has_known_rows


def cut(op: Op, specs: Sequence[Spec], index: int) -> Plan | None:
    """The plan if input ``index`` alone is a number of rows, that of the output."""
    size = specs[index]
    if not isinstance(size, Size) or not has_known_rows(size) or op.out_rank() is None \
            or sum(isinstance(spec, Size) for spec in specs) > 1:
        return None
    return Plan([REPLICATED] * len(specs), [size.shards(size.at)], once=True, alone=0)


@rule("StringSplitV2")
def split(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Words and their places, with all rows, and the shape that these have: rows by words."""
    texts = specs[0]
    if not isinstance(texts, Sharded) or not has_known_rows(texts):
        return None

    def whole(m: Any) -> Any:
        return m.copy([m.whole(0), m.whole(1)], HOST)

    def make(m: Any) -> Any:
        *words, shape = whole(m)
        dtype = op.outputs[2].dtype
        return [*words, m.each(
            lambda tower: m.towers.with_entry(shape, 0, m.own_shape(0, tower, dtype)))]

    return Plan([texts, REPLICATED], [REPLICATED, REPLICATED, texts.size],
                make=make, whole=whole)


@rule("RaggedTensorToTensor")
def ragged_to_dense(op: Op, specs: Sequence[Spec]) -> Plan | None:
    shape = entries_of(op.inputs[0])
    all_rows = shape is not None and shape.size and shape.flat[0] == -1
    counted = op.attr("row_partition_types")[0] == b"FIRST_DIM_SIZE"
    return cut(op, specs, 3) if all_rows and counted else None


@rule("SparseToDense")
def sparse_to_dense(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return cut(op, specs, 1)


@rule("SparseTensorDenseMatMul")
def sparse_product(op: Op, specs: Sequence[Spec]) -> Plan | None:
    rows = specs[2]
    if isinstance(rows, Size):
        return None if rows.at or op.attr("adjoint_a") else cut(op, specs, 2)
    names = "n_" if op.attr("adjoint_b") else "_n"  # a column of the product needs its own alone
    return by_names(op, specs, [None, None, None, names], ["_n"])
