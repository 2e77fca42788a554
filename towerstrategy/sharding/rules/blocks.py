"""Rules for rows behind rows: two views, or real and generated images, as one batch.

Goes in: operations that put sharded tensors behind each other along the rows, and that take them
apart again, at a number of rows.  Comes out: plans of :class:`spec.Blocks`, or of the one block
that a batch is; each tower does the same with its own rows.
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


def behind_each_other(specs: Sequence[Spec]) -> Sharded | None:
    """Tensors of these specs along the rows; None where that has no spec."""
    alike = {_some(spec, 1) if isinstance(spec, Sharded) and spec.times else None for spec in specs}
    first = alike.pop() if len(alike) == 1 else None
    return None if first is None or len(specs) < 2 else _some(
        first, sum(spec.blocks for spec in specs if isinstance(spec, Sharded)))


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
    takes = [each if isinstance(each, Size) and each.at == spec.dim else REPLICATED
             for each in specs[1:]]  # what counts rows along another dimension counts all of them
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
    axis, sizes = op.value(0), [size for size in specs[1:] if isinstance(size, Size)]
    whole = behind_each_other([size.shards(size.at) for size in sizes])
    if axis is None or whole is None or whole.dim != int(axis) or len(sizes) < len(specs) - 1:
        return None
    before = itertools.accumulate(size.blocks for size in sizes[:-1])
    return Plan([REPLICATED, *sizes], [REPLICATED, *(
        Size(whole.dim, (whole.times or 0) * count, whole.one_block) for count in before)])


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_to_batch(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Some of each example's positions behind others of it, and back: a dilated convolution."""
    spec, strides = specs[0], op.value(1)
    if not isinstance(spec, Sharded) or spec.dim or not spec.times or strides is None:
        return None
    count = math.prod(map(int, strides))
    before, after = (1, count) if op.type == "SpaceToBatchND" else (count, 1)
    return Plan([spec, REPLICATED, REPLICATED], [_some(spec, after)]) \
        if spec.blocks == before else None
