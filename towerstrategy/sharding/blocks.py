"""Redistribution of tensors that are several concatenated blocks of rows (``spec.Blocks``).

Goes in: a :class:`values.Value` that is sharded so, or is to be.  Comes out: the whole tensor,
block by block, each in the order of the towers; or a tower's slices of all blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.spec import Sharded
from towerstrategy.sharding.towers import Towers


def opened(shape: tf.TensorShape, along: int) -> tf.TensorShape:
    """A static shape in which the size of one dimension is unknown."""
    return shape if shape.rank is None else tf.TensorShape(
        [None if dim == along else size for dim, size in enumerate(shape)])


def gathered(value: Any, spec: Sharded, device: str) -> Ref:
    """The whole tensor, concatenated on ``device`` from the towers' parts."""
    towers: Towers = value.towers
    build = towers.builder
    split = [towers.on(tower, "Split", build.constant(spec.dim, tf.int32, towers.devices[tower]),
                       part, num_split=spec.blocks) for tower, part in enumerate(value.parts())]
    block_spec = dataclasses.replace(spec, group=spec.one_block)
    shape = opened(value.shape, spec.dim)

    def whole(block: int) -> Ref:
        ref: Ref = type(value)(towers, block_spec, shape, None,
                               lambda tower: split[tower]._replace(output=block), device).whole()
        return ref

    wholes = [whole(block) for block in range(spec.blocks)]
    axis = build.constant(spec.dim, tf.int32, device)
    ref: Ref = build.make("ConcatV2", [*wholes, axis], device, "merge/ConcatV2", N=len(wholes))
    return ref


def cut(value: Any, wanted: Sharded, tower: int) -> Ref:
    """A tower's slices of all blocks of a whole tensor; if its size there is 1, all of it."""
    towers: Towers = value.towers
    whole: Ref = value.whole()
    if towers.replicas == 1:
        return whole
    positions = _positions(towers, wanted, tower)
    if wanted.broadcast and value.shape[wanted.dim] is None:
        last = towers.on_host("Sub", value.rows_in(wanted.dim), towers.number(1))
        positions = towers.on_host("Minimum", positions, last)
    return towers.on(tower, "GatherV2", whole, positions, towers.number(wanted.dim, tf.int32))


def _positions(towers: Towers, spec: Sharded, tower: int) -> Ref:
    """The positions of a tower's rows in all blocks."""
    make, number = towers.on_host, towers.number
    ranges = []
    for block in range(spec.blocks):
        begin = make("AddV2", make("Mul", towers.total(), number(block)), towers.offset(tower))
        limits = [make("Mul", end, number(spec.times or 1))
                  for end in (begin, make("AddV2", begin, towers.count(tower)))]
        ranges.append(make("Range", *limits, number(1)))
    return make("ConcatV2", *ranges, number(0, tf.int32), N=len(ranges))
