"""Packs small tensors that cross between the same devices into one tensor.

Goes in: the nodes of a partitioned step, before they are imported, and the static shapes of the
tensors that cross.  Comes out: the same nodes, in which small tensors of one shape that cross from
one device to the same others are packed at the source and unpacked at the target: a model's small
weights, gradients and statistics.  Each transfer has a fixed cost, whatever its size.

Tensors that are packed together must not depend on each other, or the step would deadlock.  So each
node has a *level*: the largest number of transfers on a path to it.  Packed tensors have the same
level and their consumers a higher one, so there is no cycle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towerstrategy.sharding import relays
from towerstrategy.sharding.builder import Builder, Crossings, Ref
from towerstrategy.sharding.towers import Towers

LARGEST = 2**16  # bytes; copying a larger tensor costs more than a transfer of its own
FEWEST = 3  # tensors in a pack


class _Group(NamedTuple):
    """The properties that tensors must share to be packed together."""

    level: int
    source: str
    targets: tuple[str, ...]
    dtype: tf.DType
    shape: tuple[int, ...]


def finish(towers: Towers) -> None:
    """Packs and relays tensors among the nodes that the towers' builder has collected.

    With micro-batches or stages it packs nothing, as these must begin before others end; tensors
    that cross machines are packed by :mod:`across`.
    """
    if (towers.across.workers is None and len(set(towers.devices)) == len(towers.stage_devices)
            and max(map(len, towers.stage_devices)) == 1):
        pack(towers.builder)
    relays.relay_tensors(towers.builder, towers.places)
    relays.relay_rows(towers.builder, towers.detours)


def pack(builder: Builder) -> None:
    """Packs small tensors that cross, among the nodes that ``builder`` has collected."""
    crossings = builder.crossings(
        ref for ref, shape in builder.shapes.items() if _is_small(ref, shape))
    groups: dict[_Group, list[Ref]] = {}
    levels = builder.levels()
    for ref, consumers in crossings.items():
        group = _Group(levels[ref.node], builder.device(ref), tuple(sorted(consumers)), ref.dtype,
                       builder.shapes[ref])
        groups.setdefault(group, []).append(ref)
    for group, refs in groups.items():
        if len(refs) >= FEWEST:
            _pack(builder, group, refs, crossings)


def _is_small(ref: Ref, shape: Sequence[int]) -> bool:
    """Whether a tensor may be packed: not integers, which are shapes that stay on the host."""
    return ref.dtype.is_floating and 0 < ref.dtype.size * math.prod(shape) <= LARGEST


def _pack(builder: Builder, group: _Group, refs: Sequence[Ref], crossings: Crossings) -> None:
    packed = builder.make("Pack", refs, group.source, "merge/Pack", axis=0)
    for device in group.targets:
        first = builder.make("Unpack", [packed], device, "merge/Unpack", num=len(refs), axis=0)
        for index, ref in enumerate(refs):
            for node, place in crossings[ref][device]:
                node.input[place] = first._replace(output=index).input
