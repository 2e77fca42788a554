"""Rules for texts that are split into words, as many as there are, and made dense again.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Words are found once, with all
rows: it is the host's work, and all rows have as many columns as the longest one.  The number of
rows goes on as a size.  So the dense tensor, of a row of words each, is cut for the towers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import HOST, Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Sharded, Size, Spec, has_known_rows


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
        return [*map(m.on_each, words), m.each(
            lambda tower: m.towers.with_entry(shape, 0, m.own_shape(0, tower, dtype)))]

    return Plan([texts, REPLICATED], [REPLICATED, REPLICATED, texts.size],
                make=make, whole=whole)


@rule("RaggedTensorToTensor")
def to_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Runs once, with all rows, as the longest row may be any tower's; its rows are cut."""
    shape, rows = entries_of(op.inputs[0]), specs[3]
    all_rows = shape is not None and shape.size and shape.flat[0] == -1
    if op.attr("row_partition_types")[0] != b"FIRST_DIM_SIZE" or not isinstance(rows, Size) \
            or not has_known_rows(rows) or not all_rows or op.out_rank() is None \
            or any(isinstance(spec, (Size, Sharded)) for spec in (*specs[:3], *specs[4:])):
        return None
    return Plan([REPLICATED] * len(specs), [rows.shards(0)], once=True)
