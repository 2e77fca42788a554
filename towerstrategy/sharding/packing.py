"""Small tensors that cross from one device to others together, as one tensor.

Goes in: the nodes of a partitioned step, before they are imported, and the static shapes of what
crosses.  Comes out: the same nodes, where small tensors of one shape that cross from one device to
the same others are packed there and unpacked where they arrive: a model's small weights, gradients
and statistics.  Each tensor that crosses has a price of its own, whatever its size.

What goes together may not depend on one another, or the step could never run.  So each node has a
*level*: how many tensors have crossed, one after another, before it.  All that is packed has one
level, and whoever takes it has a higher one: no cycle can close.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from towerstrategy.sharding import homes, relays
from towerstrategy.sharding.builder import Builder, Crossings, Node, Ref
from towerstrategy.sharding.towers import Towers

LARGEST = 2**16  # bytes; copying what is larger costs more than its crossing alone
FEWEST = 3


class _Group(NamedTuple):
    """What crosses together."""

    level: int
    source: str
    targets: tuple[str, ...]
    dtype: tf.DType
    shape: tuple[int, ...]


def finish(towers: Towers) -> None:
    """Packs what the towers' builder has collected, where what crosses may wait.

    Not where micro-batches or stages are to begin before others end; what crosses machines is
    packed by :mod:`across`.
    """
    if (towers.across.workers is None and len(set(towers.devices)) == len(towers.rows)
            and max(map(len, towers.rows)) == 1):
        pack(towers.builder, homes.ONCE)
    relays.hand_on(towers.builder, towers.near)
    relays.go_round(towers.builder, towers.ways)


def pack(builder: Builder, scope: str) -> None:
    """Packs what crosses, among the nodes that ``builder`` has collected.

    Args:
      builder: the nodes, each behind those that it needs.
      scope: a prefix for the names of new nodes.
    """
    crossings = builder.crossings(
        ref for ref, shape in builder.shapes.items() if _is_small(ref, shape))
    groups: dict[_Group, list[Ref]] = {}
    levels = _levels(builder.nodes)
    for ref, takers in crossings.items():
        group = _Group(levels[ref.node], builder.device(ref), tuple(sorted(takers)), ref.dtype,
                       builder.shapes[ref])
        groups.setdefault(group, []).append(ref)
    for group, refs in groups.items():
        if len(refs) >= FEWEST:
            _pack(builder, group, refs, crossings, scope)


def _is_small(ref: Ref, shape: Sequence[int]) -> bool:
    """Whether it may be packed; what is no float is shapes, which kernels take from the host."""
    return ref.dtype.is_floating and 0 < ref.dtype.size * math.prod(shape) <= LARGEST


def _levels(nodes: Mapping[str, Node]) -> dict[str, int]:
    """How many tensors cross, one after another, before each node."""
    levels: dict[str, int] = {}
    for name, node in nodes.items():
        level = 0
        for text in node.input:
            before = text if text in levels else text.lstrip("^").partition(":")[0]
            if before in nodes:
                apart = node.device and nodes[before].device not in ("", node.device)
                level = max(level, levels.get(before, 0) + bool(apart))
        levels[name] = level
    return levels


def _pack(builder: Builder, group: _Group, refs: Sequence[Ref],
          crossings: Crossings, scope: str) -> None:
    packed = builder.make("Pack", refs, group.source, f"{scope}Pack", axis=0)
    for device in group.targets:
        first = builder.make("Unpack", [packed], device, f"{scope}Unpack", num=len(refs), axis=0)
        for index, ref in enumerate(refs):
            for node, place in crossings[ref][device]:
                node.input[place] = first._replace(output=index).input
