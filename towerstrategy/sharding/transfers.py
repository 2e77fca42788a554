"""Fewer and shorter transfers between devices: small tensors are packed, large ones relayed.

Goes in: the nodes of a partitioned step, before they are imported, and parts of a sum.  Comes out:
the same nodes, in which

* small tensors of one shape that cross from one device to the same others are packed at the source
  and unpacked at the target: a model's small weights, gradients and statistics.  Each transfer has
  a fixed cost, whatever its size;
* a large weight that several of many GPUs take is sent once to the other half of them, to one that
  sends it to the others; and parts are added up in the other half before the sum crosses.  Each
  half does the same with its own halves.  GPUs with neighbouring numbers share a switch or NVLinks;
  the connection of the halves is slow (PCI Express, the host).  No tower needs more memory: a relay
  takes the weight itself.

Tensors that are packed together must not depend on each other, or the step would deadlock.  So they
have the same level (see :meth:`Builder.levels`), and their consumers have a higher one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from towerstrategy.sharding.builder import Builder, Consumers, Crossings, Node, Ref

LARGEST_PACKED = 2**16  # bytes; copying a larger tensor costs more than a transfer of its own
FEWEST_PACKED = 3  # tensors
LEAST = 2**20  # bytes; for a smaller tensor one more transfer costs more than a busy link
FEWEST = 4  # towers


class _Group(NamedTuple):
    """The properties that tensors must share to be packed together."""

    level: int
    source: str
    targets: tuple[str, ...]
    dtype: tf.DType
    shape: tuple[int, ...]


def pack(builder: Builder) -> None:
    """Packs small tensors that cross, among the nodes that ``builder`` has collected."""
    crossings = builder.crossings(
        ref for ref, shape in builder.shapes.items() if 0 < _bytes(ref, shape) <= LARGEST_PACKED)
    groups: dict[_Group, list[Ref]] = {}
    levels = builder.levels()
    for ref, consumers in crossings.items():
        group = _Group(levels[ref.node], builder.device(ref), tuple(sorted(consumers)), ref.dtype,
                       builder.shapes[ref])
        groups.setdefault(group, []).append(ref)
    for group, refs in groups.items():
        if len(refs) >= FEWEST_PACKED:
            _pack(builder, group, refs, crossings)


def _pack(builder: Builder, group: _Group, refs: Sequence[Ref], crossings: Crossings) -> None:
    packed = builder.make("Pack", refs, group.source, "merge/Pack", axis=0)
    for device in group.targets:
        first = builder.make("Unpack", [packed], device, "merge/Unpack", num=len(refs), axis=0)
        for index, ref in enumerate(refs):
            _reroute(crossings[ref][device], first._replace(output=index))


def places_of(stage_devices: Sequence[Sequence[str]]) -> dict[str, int]:
    """The place of each tower's device, by number: neighbours are well connected.

    Empty with few devices, with towers of several devices, or with several towers of a device.
    """
    devices = dict.fromkeys(row[0] for row in stage_devices)
    if len(devices) < max(FEWEST, len(stage_devices)) or max(map(len, stage_devices)) > 1:
        return {}
    return {device: place for place, device in enumerate(devices)}


def summed_in_halves(builder: Builder, places: Mapping[str, int], parts: Sequence[Ref], device: str,
                     shape: tf.TensorShape | None) -> Sequence[Ref]:
    """The tensors to add up on ``device``: large parts of the other half are replaced by their sum.

    float16 and bfloat16 are not, because only the whole sum may be rounded.
    """
    if device not in places or shape is None or not shape.is_fully_defined() \
            or parts[0].dtype not in (tf.float32, tf.float64) or _bytes(parts[0], shape) < LEAST:
        return parts
    devices = list(places)

    def terms(group: Sequence[int], place: int) -> list[Ref]:
        """The tensors whose sum, on the device at ``place``, is that of the parts of ``group``."""
        if len(group) == 1:
            return [parts[place]]
        near, far = _halves(group, place)
        relay = _relay(group, place, far)
        far_terms = terms(far, relay)
        if len(far_terms) > 1:
            far_terms = [builder.make("AddN", far_terms, devices[relay], "merge/half/AddN")]
        return [*terms(near, place), *far_terms]

    return terms(range(len(devices)), places[device])


def relay_tensors(builder: Builder, places: Mapping[str, int]) -> None:
    """Sends large tensors once to the other half, among the nodes collected so far."""
    devices = list(places)
    for ref, consumers in builder.crossings(
            ref for ref, shape in builder.shapes.items()
            if builder.device(ref) in places and _bytes(ref, shape) >= LEAST).items():
        _spread(builder, devices, range(len(places)), ref, places[builder.device(ref)], consumers)


def _reroute(consumers: Sequence[tuple[Node, int]], ref: Ref) -> None:
    for node, number in consumers:
        node.input[number] = ref.input


def _spread(builder: Builder, devices: Sequence[str], group: Sequence[int], ref: Ref, place: int,
            consumers: Consumers) -> None:
    """Sends ``ref`` to its consumers in ``group``; the device at ``place`` has or receives it."""
    if len(group) == 1:
        _reroute(consumers.get(devices[place], ()), ref)
        return
    near, far = _halves(group, place)
    _spread(builder, devices, near, ref, place, consumers)
    receivers = [other for other in far if devices[other] in consumers]
    if len(receivers) > 1:
        relay, shape = _relay(group, place, receivers), tf.TensorShape(builder.shapes[ref])
        # Not Identity: TensorFlow removes it, or XLA compiles it into a cluster of the relay, whose
        # outputs are sent when all of it has run.
        relayed = builder.make("PlaceholderWithDefault", [ref], devices[relay],
                               "merge/half/relay", shape=shape)
        builder.note_shape(relayed, shape)
        _spread(builder, devices, far, relayed, relay, consumers)
    elif receivers:
        _spread(builder, devices, receivers, ref, receivers[0], consumers)


def _halves(group: Sequence[int], place: int) -> tuple[Sequence[int], Sequence[int]]:
    """The half of ``group`` that has ``place``, and the other half."""
    middle = (len(group) + 1) // 2
    first, second = group[:middle], group[middle:]
    return (first, second) if place in first else (second, first)


def _relay(group: Sequence[int], place: int, others: Sequence[int]) -> int:
    """The relay among ``others`` for what ``place`` sends: by number, so that each has a share."""
    return others[group.index(place) % len(others)]


def _bytes(ref: Ref, shape: Iterable[int]) -> int:
    """The bytes of a tensor of a known static shape."""
    return int(math.prod(shape) * ref.dtype.size)
