"""Rules for batches concatenated along the rows: two views, or real and generated images.

Goes in: an op that concatenates sharded tensors along the rows, or that slices such a tensor at
multiples of the batch's size.  Comes out: a plan with several blocks, or with the single block
that a batch is; each tower concatenates or slices its own rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Sharded, Size, Spec


def concatenated(specs: Sequence[Spec]) -> Sharded | None:
    """The spec of tensors of these specs, concatenated along the rows; None if it has none."""
    single = {dataclasses.replace(spec, blocks=1) if isinstance(spec, Sharded) and spec.times
              else None for spec in specs}
    block = single.pop() if len(single) == 1 else None
    return None if block is None or len(specs) < 2 else dataclasses.replace(
        block, blocks=sum(spec.blocks for spec in specs if isinstance(spec, Sharded)))


def split(spec: Sharded, count: int) -> Sharded | None:
    """The spec of each of ``count`` equal parts along the rows; None if these cut a block."""
    return None if spec.blocks % count else dataclasses.replace(
        spec, blocks=spec.blocks // count)


def strided_slice(op: Op, spec: Sharded, specs: Sequence[Spec]) -> Plan | None:
    """Plan of a strided slice of whole blocks."""
    steps, dim = entries_of(op.inputs[3]), spec.dim
    masks = any(op.attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis"))
    if steps is None or masks or len(steps) <= dim or steps[dim] != 1:
        return None
    begin = 0 if op.attr("begin_mask") >> dim & 1 else _blocks_before(op, spec, 1, specs[1])
    end = spec.blocks if op.attr("end_mask") >> dim & 1 else _blocks_before(op, spec, 2, specs[2])
    return _between(spec, begin, end, specs)


def slice_(op: Op, spec: Sharded, specs: Sequence[Spec]) -> Plan | None:
    """Plan of a ``tf.slice`` of whole blocks: the gradient of a concatenation."""
    begin, sizes = _blocks_before(op, spec, 1, specs[1]), shapes.static_sizes(op, 2, specs[2])
    if begin is None:
        return None
    if sizes is not None and sizes[spec.dim] == -1:
        return _between(spec, begin, spec.blocks, specs)
    count = _blocks_before(op, spec, 2, specs[2])
    return None if count is None else _between(spec, begin, begin + count, specs)


def _between(spec: Sharded, begin: int | None, end: int | None,
             specs: Sequence[Spec]) -> Plan | None:
    """Plan of a slice of the blocks ``begin`` to ``end``."""
    if begin is None or end is None or not 0 <= begin < end <= spec.blocks:
        return None
    takes = [each if isinstance(each, Size) and each.at == spec.dim else REPLICATED
             for each in specs[1:]]  # a number of rows for another dimension means all rows
    return Plan([spec, *takes], [dataclasses.replace(spec, blocks=end - begin)])


def _blocks_before(op: Op, spec: Sharded, index: int, limit: Spec) -> int | None:
    """How many blocks lie before a slice's limit, input ``index``; None if it is within a block."""
    if not isinstance(limit, Size):
        entries = entries_of(op.inputs[index])
        return 0 if entries is not None and entries[spec.dim] == 0 else None
    if limit.at != spec.dim or not limit.times or not spec.times or limit.times % spec.times:
        return None
    number = limit.times // spec.times
    return number * limit.blocks if limit.group == spec.group else None


@rule("ConcatOffset")
def concat_offset(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Offsets of the inputs of a concatenation, along the rows each a multiple of the rows."""
    axes, sizes = op.axes(0, op.inputs[1].shape[0]), [
        size for size in specs[1:] if isinstance(size, Size)]
    axis = axes[0] if axes else None
    if axis is not None and len(sizes) == len(specs) - 1 and sizes[0].at != axis \
            and len({size.moved(size.at) for size in sizes}) == 1:  # an axis beside the rows
        return Plan([REPLICATED, *sizes], [REPLICATED] * len(op.outputs))
    joined = concatenated([size.shards(size.at) for size in sizes])
    if axis is None or joined is None or joined.dim != axis or len(sizes) < len(specs) - 1:
        return None
    before = itertools.accumulate(size.blocks for size in sizes[:-1])
    return Plan([REPLICATED, *sizes], [REPLICATED, *(
        Size(joined.dim, (joined.times or 0) * count, joined.group) for count in before)])


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_to_batch(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """For a dilated convolution: the output has one block for each position in a space block."""
    spec, block_shape = specs[0], op.value(1)
    if not isinstance(spec, Sharded) or spec.dim or not spec.times or block_shape is None:
        return None
    count = math.prod(map(int, block_shape))
    before, after = (1, count) if op.type == "SpaceToBatchND" else (count, 1)
    return Plan([spec, REPLICATED, REPLICATED], [dataclasses.replace(spec, blocks=after)]) \
        if spec.blocks == before else None
