"""Rules for batches concatenated along the rows: two views, or real and generated images.

Goes in: an op that concatenates sharded tensors along the rows, or that slices such a tensor where
one of them ends.  Comes out: a plan with several pieces, or with fewer; each tower concatenates or
slices its own rows.
"""

from __future__ import annotations

import fractions
import math
from collections.abc import Sequence
from typing import Any

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    Sharded,
    Size,
    Sizes,
    Spec,
    concatenated,
    has_known_rows,
    positions,
)


def split_at(op: Op, spec: Sharded, sizes: Spec) -> Plan | None:
    """Plan of a split into parts of these sizes, if each is one of several pieces."""
    pieces, gives = spec.pieces, []
    for size in sizes.each if isinstance(sizes, Sizes) else ():
        count = _pieces_in(op, pieces, 1, size.moved(spec.dim))
        part = concatenated(pieces[:count]) if count else None
        if part is None:
            return None
        gives.append(part)
        pieces = pieces[count:]
    if not gives or pieces or not all(map(has_known_rows, gives)):
        return None

    def make(m: Any) -> Any:
        dtype = op.inputs[1].dtype
        return m.copy([m.parts(0), m.each(lambda tower: m.towers.on_host("Pack", *(
            m.towers.size(part, dtype, tower) for part in gives), axis=0)), m.whole(2)], EACH)

    return Plan([spec, REPLICATED, REPLICATED], gives, make=make, alone=0)


def strided_slice(op: Op, spec: Sharded, specs: Sequence[Spec]) -> Plan | None:
    """Plan of a strided slice of whole pieces."""
    steps, dim, pieces = entries_of(op.inputs[3]), spec.dim, spec.pieces
    masks = any(op.attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis"))
    if steps is None or masks or len(steps) <= dim or steps[dim] != 1:
        return None
    begin = 0 if op.attr("begin_mask") >> dim & 1 else _pieces_in(op, pieces, 1, specs[1])
    end = len(pieces) if op.attr("end_mask") >> dim & 1 else _pieces_in(op, pieces, 2, specs[2])
    return _between(spec, begin, end, specs)


def slice_(op: Op, spec: Sharded, specs: Sequence[Spec]) -> Plan | None:
    """Plan of a ``tf.slice`` of whole pieces: the gradient of a concatenation."""
    pieces, sizes = spec.pieces, shapes.static_sizes(op, 2, specs[2])
    begin = _pieces_in(op, pieces, 1, specs[1])
    if begin is None:
        return None
    if sizes is not None and sizes[spec.dim] == -1:
        return _between(spec, begin, len(pieces), specs)
    count = _pieces_in(op, pieces[begin:], 2, specs[2])
    return None if count is None else _between(spec, begin, begin + count, specs)


def _between(spec: Sharded, begin: int | None, end: int | None,
             specs: Sequence[Spec]) -> Plan | None:
    """Plan of a slice of the pieces ``begin`` to ``end``."""
    if begin is None or end is None or not 0 <= begin < end <= len(spec.pieces):
        return None
    taken = concatenated(spec.pieces[begin:end])
    takes = [each if isinstance(each, Size) and each.at == spec.dim else REPLICATED
             for each in specs[1:]]  # a number of rows for another dimension means all rows
    return Plan([spec, *takes], [taken]) if taken else None


def _pieces_in(op: Op, pieces: Sequence[Sharded], index: int, limit: Spec) -> int | None:
    """How many of the first pieces a size, input ``index``, counts; None if it ends within one."""
    if not pieces:
        return None
    if not isinstance(limit, Size):
        entries = entries_of(op.inputs[index])
        return 0 if entries is not None and entries[pieces[0].dim] == 0 else None
    if limit.at != pieces[0].dim or not limit.times or not pieces[0].times:
        return None
    counted = positions([limit])
    return next((count for count in range(len(pieces) + 1)
                 if positions(pieces[:count]) == counted), None)


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_to_batch(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """For a dilated convolution: the output has one block for each position in a space block."""
    spec, block_shape = specs[0], op.value(1)
    if not isinstance(spec, Sharded) or spec.dim or not spec.times or block_shape is None:
        return None
    count = fractions.Fraction(math.prod(map(int, block_shape)))
    result = spec.repeated(count if op.type == "SpaceToBatchND" else 1 / count)
    return Plan([spec, REPLICATED, REPLICATED], [result]) if result else None
