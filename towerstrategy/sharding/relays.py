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
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from towerstrategy.sharding.builder import Builder, Ref

if TYPE_CHECKING:
    from towerstrategy.sharding.values import Towers

LEAST = 2**20  # bytes; what is smaller waits for links less than for one more meeting
FEWEST = 4  # towers


def halves(towers: Towers) -> list[list[str]]:
    """The towers' devices by half; nothing where that does not pay, or a tower is several."""
    devices = list(dict.fromkeys(towers.devices))
    if (towers.on_cpu or len(devices) < FEWEST or len(devices) < len(towers.rows)
            or max(map(len, towers.rows)) > 1):
        return []
    middle = (len(devices) + 1) // 2
    return [devices[:middle], devices[middle:]]


def summed(towers: Towers, parts: Sequence[Ref], device: str, shape: tf.TensorShape | None
           ) -> list[Ref]:
    """Parts to add up on ``device``: those of the other half as their sum, if they are large.

    Halves of floats cross as they are, as they are rounded once.
    """
    other = _other_half(halves(towers), device)
    if not other or len(parts) < len(towers.devices) or shape is None \
            or parts[0].dtype not in (tf.float32, tf.float64) or not _is_large(parts[0], shape):
        return list(parts)
    by_device = dict(zip(towers.devices, parts))
    leader = other[towers.devices.index(device) % len(other)]
    there = towers.builder.make("AddN", [by_device.pop(name) for name in other], leader,
                                "merge/half/AddN")
    return [*by_device.values(), there]


def hand_on(towers: Towers) -> None:
    """Sends what is large once to the other half, among the nodes collected so far."""
    both, builder = halves(towers), towers.builder
    if not both:
        return
    devices = {node.name: node.device for node in builder.nodes}
    large = {ref.input: ref for ref, shape in builder.shapes.items()
             if _is_large(ref, shape) and devices[ref.node] in towers.devices}
    takers: dict[Ref, dict[str, list[tuple[Any, int]]]] = {}
    for node in builder.nodes:
        for place, text in enumerate(node.input):
            ref = large.get(text)
            if ref is not None and node.device in _other_half(both, devices[ref.node]):
                takers.setdefault(ref, {}).setdefault(node.device, []).append((node, place))
    for ref, found in takers.items():
        if len(found) > 1:
            source = towers.devices.index(devices[ref.node])
            _by_way_of(builder, ref, list(found)[source % len(found)],
                       [taker for those in found.values() for taker in those])


def _by_way_of(builder: Builder, ref: Ref, leader: str, takers: Sequence[tuple[Any, int]]) -> None:
    # Not Identity: TensorFlow takes that away again, and XLA would hold it back until all that the
    # leader does is done.
    handed_on = builder.make("PlaceholderWithDefault", [ref], leader, "merge/half/handed_on",
                             shape=tf.TensorShape(builder.shapes[ref]))
    for node, place in takers:
        node.input[place] = handed_on.input


def _other_half(both: Sequence[Sequence[str]], device: str) -> Sequence[str]:
    """The half without ``device``; nothing where it is in none."""
    if not any(device in half for half in both):
        return []
    return next(half for half in both if device not in half)


def _is_large(ref: Ref, shape: Sequence[int | None]) -> bool:
    sizes = tf.TensorShape(shape)
    return bool(ref.dtype.is_floating and sizes.is_fully_defined()
                and math.prod(sizes.as_list()) * ref.dtype.size >= LEAST)
