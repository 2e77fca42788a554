"""Rules for rows behind rows: two views, or real and generated images, as one batch.

Goes in: operations that put sharded tensors behind each other along the rows, and that take them
apart again, at a number of rows.  Comes out: plans of :class:`spec.Blocks`, or of the one block
that a batch is; each tower does the same with its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Sharded, Size, Spec


def behind_each_other(spec: Sharded, count: int) -> Sharded | None:
    """So many tensors of ``spec`` along the rows; None where that has no spec."""
    return None if count < 2 or not spec.times or spec.blocks > 1 else _some(spec, count)


def part(spec: Sharded, parts: int) -> Sharded | None:
    """One of so many equal parts along the rows; None where a part is not some of the blocks."""
    return None if spec.blocks % parts else _some(spec, spec.blocks // parts)


def _some(spec: Sharded, count: int) -> Sharded:
    return dataclasses.replace(spec, group=spec.some(count))


def strided_slice(op: Op, spec: Sharded, specs: Sequence[Spec]) -> Plan | None:
    """A strided slice from where one block begins to where one ends."""
    steps, dim = entries_of(op.inputs[3]), spec.dim
    masks = any(op.attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis"))
    if steps is None or masks or len(steps) <= dim or steps[dim] != 1:
        return None
    begin = 0 if op.attr("begin_mask") >> dim & 1 else _block_at(op, spec, 1, specs[1])
    end = spec.blocks if op.attr("end_mask") >> dim & 1 else _block_at(op, spec, 2, specs[2])
    return _between(spec, begin, end, specs)


def slice_(op: Op, spec: Sharded, specs: Sequence[Spec]) -> Plan | None:
    """``tf.slice`` of some blocks: the gradient of a concatenation."""
    begin, sizes = _block_at(op, spec, 1, specs[1]), shapes.static_sizes(op, 2, specs[2])
    if begin is None:
        return None
    if sizes is not None and sizes[spec.dim] == -1:
        return _between(spec, begin, spec.blocks, specs)
    count = _block_at(op, spec, 2, specs[2])
    return None if count is None else _between(spec, begin, begin + count, specs)


def _between(spec: Sharded, begin: int | None, end: int | None,
             specs: Sequence[Spec]) -> Plan | None:
    if begin is None or end is None or not begin < end <= spec.blocks:
        return None
    takes = [each if isinstance(each, Size) else REPLICATED for each in specs[1:]]
    return Plan([spec, *takes], [_some(spec, end - begin)])


def _block_at(op: Op, spec: Sharded, index: int, limit: Spec) -> int | None:
    """Before which block a vector of places, an input, comes along the rows; None if in one."""
    if not isinstance(limit, Size):
        entries = entries_of(op.inputs[index])
        return 0 if entries is not None and entries[spec.dim] == 0 else None
    if limit.at != spec.dim or not limit.times or not spec.times or limit.times % spec.times:
        return None
    number = limit.times // spec.times
    return number * limit.blocks if limit.one_block == spec.one_block else None


@rule("ConcatOffset")
def concat_offset(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Where each of some shapes begins along the rows: behind so many blocks."""
    sizes, axis = specs[1:], op.value(0)
    size = sizes[0]
    if not isinstance(size, Size) or axis is None or size.at != int(axis) or not size.times \
            or size.blocks > 1 or any(
                not isinstance(other, Size) or other.shards(0) != size.shards(0)
                or other.at != size.at for other in sizes):
        return None
    return Plan([REPLICATED, *sizes], [REPLICATED, *(
        Size(size.at, size.times * block, size.group) for block in range(1, len(sizes)))])
