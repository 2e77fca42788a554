"""Redistribution of tensors of several pieces, such as batches concatenated along the rows.

Goes in: a value and a spec with several pieces.  Comes out: nodes that split a tower's part into
its slices of each piece, or that take a tower's slices of all pieces from the whole tensor.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.spec import Sharded
from towerstrategy.sharding.towers import Towers


def split(value: Any, spec: Sharded, tower: int) -> Ref:
    """The slices of a tower's part of a ``values.Value``: the outputs of one node."""
    towers, part, count = value.towers, value.part(tower), len(spec.pieces)
    axis = towers.builder.constant(spec.dim, tf.int32, towers.devices[tower])
    if len({*spec.pieces}) == 1:
        node: Ref = towers.on(tower, "Split", axis, part, num_split=count)
        return node
    examples = dataclasses.replace(spec, times=1)
    times = times_of(towers, spec, rows_of(value, tower), towers.size(examples, tf.int64, tower))
    sizes = towers.on_host("Pack", *(
        towers.on_host("Mul", towers.size(piece, tf.int64, tower), times)
        for piece in examples.pieces), axis=0)
    node = towers.on(tower, "SplitV", part, sizes, axis, num_split=count)
    return node


def slices(value: Any, wanted: Sharded, has_rows: bool, tower: int) -> Ref:
    """A tower's slices of all pieces of the whole tensor; if its size there is 1, all of it.

    Unless the tensor is known to have all rows (``has_rows``), the last tower fails, or what uses
    its slices does, if there are too many or too few, as on one device.
    """
    towers: Towers = value.towers
    whole: Ref = value.whole()
    if towers.replicas == 1:
        return whole
    make, number, examples = towers.on_host, towers.number, dataclasses.replace(wanted, times=1)
    rows = value.rows_in(wanted.dim)
    times = times_of(towers, wanted, rows, towers.size(examples, tf.int64))
    is_one = make("Equal", rows, number(1)) \
        if wanted.broadcast and value.shape[wanted.dim] is None else None
    if is_one is not None:
        times = make("SelectV2", is_one, number(0), times)
    ranges, first, others = [], number(0), number(0)
    for piece in examples.pieces:
        assert isinstance(piece.group, str) and piece.times
        begin = make("AddV2", first, towers.times(
            towers.offset(tower, tf.int64, piece.group), piece.times))
        end = make("AddV2", begin, towers.size(piece, tf.int64, tower))
        ranges.append(make("Range", *(make("Mul", at, times) for at in (begin, end)), number(1)))
        first = make("AddV2", first, towers.size(piece, tf.int64))
    if not has_rows and towers.first + tower == towers.replicas - 1:
        others = make("Sub", rows, make("Mul", first, times))
        others = make("AddV2", others, others)  # not 1, which would broadcast
    if is_one is not None:
        others = make("SelectV2", is_one, number(1), others)
    ranges.append(make("Range", number(0), others, number(1)))
    positions = make("ConcatV2", *ranges, number(0, tf.int32), N=len(ranges))
    return towers.on(tower, "GatherV2", whole, positions, number(wanted.dim, tf.int32))


def rows_of(value: Any, tower: int) -> Ref:
    """The size of a tower's part of a sharded ``values.Value`` along its rows."""
    towers: Towers = value.towers
    shape = towers.on(tower, "Shape", value.part(tower), out_type=tf.int64)
    return towers.on_host("GatherV2", shape, *(
        towers.number(number, tf.int32) for number in (value.spec.dim, 0)))


def times_of(towers: Towers, spec: Sharded, rows: Ref, examples: Ref) -> Ref:
    """How many positions of each example there are in ``rows`` of so many examples."""
    return towers.number(spec.times) if spec.times is not None else towers.on_host(
        "FloorDiv", rows, towers.on_host("Maximum", examples, towers.number(1)))
