"""Large tensors between many GPUs go by way of one GPU in the other half of them.

Goes in: the nodes of a partitioned step, and towers' parts that are to be added up.  Comes out: the
same, where a weight that more than one tower of the other half takes is sent to one of these, which
hands it on; and where parts of the other half are added up there before they cross.

GPUs that are near each other, by number, hang on the same switch or on the same NVLinks; what is
between the halves is slow (PCI Express, the host), and is crossed once.  No tower holds more by it:
the one that hands a weight on takes it, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.builder import Builder, Ref

LEAST = 2**20  # bytes; what is smaller waits for links less than for one more sync point
FEWEST = 4  # towers

Halves = dict[str, bool]  # by device, in the towers' order: whether it is in the second half


def halves(rows: Sequence[Sequence[str]]) -> Halves:
    """The towers' devices; none where they are few, or a tower is several or no device's."""
    devices = dict.fromkeys(row[0] for row in rows)
    if len(devices) < max(FEWEST, len(rows)) or max(map(len, rows)) > 1:
        return {}
    return {device: 2 * place >= len(devices) for place, device in enumerate(devices)}


def summed(builder: Builder, both: Halves, parts: Sequence[Ref], device: str,
           shape: tf.TensorShape | None) -> Sequence[Ref]:
    """The towers' parts to add up on ``device``: those of the other half as their sum, if large.

    Halves of floats cross as they are, as they are rounded once.
    """
    if device not in both or shape is None or not _is_large(parts[0], shape) \
            or parts[0].dtype not in (tf.float32, tf.float64):
        return parts
    by_device = dict(zip(both, parts, strict=True))
    other = [name for name in both if both[name] != both[device]]
    there = builder.make("AddN", [by_device.pop(name) for name in other],
                         _leader(both, device, other), "merge/half/AddN")
    return [*by_device.values(), there]


def hand_on(builder: Builder, both: Halves) -> None:
    """Sends what is large once to the other half, among the nodes collected so far."""
    large = {ref.input: ref for ref, shape in builder.shapes.items()
             if builder.device(ref) in both and _is_large(ref, shape)}
    takers: dict[Ref, dict[str, list[tuple[Any, int]]]] = {}
    for node in builder.nodes.values() if large else ():
        for place, text in enumerate(node.input):
            ref = large.get(text)
            if ref is not None and both.get(node.device) == (not both[builder.device(ref)]):
                takers.setdefault(ref, {}).setdefault(node.device, []).append((node, place))
    for ref, found in takers.items():
        if len(found) > 1:
            _by_way_of(builder, ref, _leader(both, builder.device(ref), list(found)),
                       [taker for those in found.values() for taker in those])


def _by_way_of(builder: Builder, ref: Ref, leader: str, takers: Sequence[tuple[Any, int]]) -> None:
    # Not Identity: TensorFlow takes that away again, and XLA would hold it back until all that the
    # leader does is done.
    handed_on = builder.make("PlaceholderWithDefault", [ref], leader, "merge/half/handed_on",
                             shape=tf.TensorShape(builder.shapes[ref]))
    for node, place in takers:
        node.input[place] = handed_on.input


def _leader(both: Halves, device: str, others: Sequence[str]) -> str:
    """Who of the other half takes what ``device`` sends: by number, so that all have a share."""
    return others[list(both).index(device) % len(others)]


def _is_large(ref: Ref, shape: Sequence[int | None]) -> bool:
    sizes = tf.TensorShape(shape)
    return bool(ref.dtype.is_floating and sizes.is_fully_defined()
                and math.prod(sizes.as_list()) * ref.dtype.size >= LEAST)
