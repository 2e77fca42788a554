"""Large tensors between many GPUs go by way of one GPU in the other half of them.

Goes in: the nodes of a partitioned step, and towers' parts that are to be added up.  Comes out: the
same, where a weight that more than one tower of the other half takes is sent to one of these, which
hands it on; and where parts of the other half are added up there before they cross.  So it is
within each half, too.  And rows go by a GPU that reaches both ends where these reach each other
through the host alone: on eight V100s, of which each has NVLinks to four others.

GPUs that are near each other, by number, hang on the same switch or on the same NVLinks; what is
between the halves is slow (PCI Express, the host), and is crossed once.  No tower holds more by it:
the one that hands a weight on takes it, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import tensorflow as tf

from towerstrategy.sharding.builder import Builder, Consumers, Node, Ref

LEAST = 2**20  # bytes; what is smaller waits for links less than for one more sync point
LEAST_ROW = 2**10  # bytes, where nobody knows how many rows there are
FEWEST = 4  # towers


def near(rows: Sequence[Sequence[str]]) -> dict[str, int]:
    """The towers' devices and their places: those that are near each other are side by side.

    None where they are few, or a tower is several or no device's.
    """
    devices = dict.fromkeys(row[0] for row in rows)
    if len(devices) < max(FEWEST, len(rows)) or max(map(len, rows)) > 1:
        return {}
    return {device: place for place, device in enumerate(devices)}


def ways(places: Mapping[str, int], reached: Mapping[int, frozenset[int]]
         ) -> dict[tuple[str, str], str]:
    """By pairs of devices that reach each other through the host alone: one that reaches both.

    Args:
      places: as :func:`near` gives them.
      reached: the numbers of the GPUs that each one reaches.
    """
    found = {}
    numbers = {device: tf.DeviceSpec.from_string(device).device_index for device in places}
    for source, target in itertools.permutations(places if reached else (), 2):
        ends = numbers[source], numbers[target]
        between = [device for device, number in numbers.items()
                   if number in reached.get(ends[0], ()) and ends[1] in reached.get(number, ())]
        if between and ends[1] not in reached[ends[0]]:  # in turn, so that all have a share
            found[source, target] = between[(places[source] + places[target]) % len(between)]
    return found


def go_round(builder: Builder, ways: Mapping[tuple[str, str], str]) -> None:
    """Sends rows by these ways, among the nodes collected so far."""
    for ref, found in builder.crossings(
            ref for ref, known in builder.rows.items() if _has_large_rows(ref, *known)).items():
        for target, takers in found.items():
            way = ways.get((builder.device(ref), target))
            if way:
                _take(takers, builder.make("PlaceholderWithDefault", [ref], way,
                                           "merge/way/handed_on", shape=builder.rows[ref][0]))


def summed(builder: Builder, places: Mapping[str, int], parts: Sequence[Ref], device: str,
           shape: tf.TensorShape | None) -> Sequence[Ref]:
    """The towers' parts to add up on ``device``: those of the other half as their sum, if large.

    Halves of floats cross as they are, as they are rounded once.
    """
    if device not in places or shape is None or not _is_large(parts[0], shape) \
            or parts[0].dtype not in (tf.float32, tf.float64):
        return parts
    devices = list(places)

    def those(group: Sequence[int], place: int) -> list[Ref]:
        """What adds up to the parts of ``group`` and is to be added up on one of them."""
        if len(group) == 1:
            return [parts[place]]
        own, other = _halves(group, place)
        leader = _leader(group, place, other)
        there = those(other, leader)
        if len(there) > 1:
            there = [builder.make("AddN", there, devices[leader], "merge/half/AddN")]
        return [*those(own, place), *there]

    return those(range(len(devices)), places[device])


def hand_on(builder: Builder, places: Mapping[str, int]) -> None:
    """Sends what is large once to the other half, among the nodes collected so far."""
    devices = list(places)
    for ref, takers in builder.crossings(
            ref for ref, shape in builder.shapes.items()
            if builder.device(ref) in places and _is_large(ref, shape)).items():
        _spread(builder, devices, range(len(places)), ref, places[builder.device(ref)], takers)


def _take(takers: Sequence[tuple[Node, int]], ref: Ref) -> None:
    for node, number in takers:
        node.input[number] = ref.input


def _spread(builder: Builder, devices: Sequence[str], group: Sequence[int], ref: Ref, place: int,
            takers: Consumers) -> None:
    """Gives ``ref`` to those of ``group``, of which ``place`` has it or is sent it."""
    if len(group) == 1:
        _take(takers.get(devices[place], ()), ref)
        return
    own, other = _halves(group, place)
    _spread(builder, devices, own, ref, place, takers)
    there = [one for one in other if devices[one] in takers]
    if len(there) > 1:
        leader, shape = _leader(group, place, there), tf.TensorShape(builder.shapes[ref])
        # Not Identity: TensorFlow takes that away again, and XLA would hold it back until all that
        # the leader does is done.
        handed_on = builder.make("PlaceholderWithDefault", [ref], devices[leader],
                                 "merge/half/handed_on", shape=shape)
        builder.note_shape(handed_on, shape)
        _spread(builder, devices, other, handed_on, leader, takers)
    elif there:
        _spread(builder, devices, there, ref, there[0], takers)


def _halves(group: Sequence[int], place: int) -> tuple[Sequence[int], Sequence[int]]:
    """The half of ``group`` that ``place`` is in, and the other one."""
    middle = (len(group) + 1) // 2
    first, second = group[:middle], group[middle:]
    return (first, second) if place in first else (second, first)


def _leader(group: Sequence[int], place: int, others: Sequence[int]) -> int:
    """Who of the other half takes what ``place`` sends: by number, so that all have a share."""
    return others[group.index(place) % len(others)]


def _has_large_rows(ref: Ref, shape: tf.TensorShape, times: int) -> bool:
    sizes = [size for size in shape if size is not None]
    return bool(ref.dtype.is_floating and len(sizes) == shape.rank - 1
                and times * math.prod(sizes) * ref.dtype.size >= LEAST_ROW)


def _is_large(ref: Ref, shape: Sequence[int | None]) -> bool:
    sizes = tf.TensorShape(shape)
    return bool(ref.dtype.is_floating and sizes.is_fully_defined()
                and math.prod(sizes.as_list()) * ref.dtype.size >= LEAST)
