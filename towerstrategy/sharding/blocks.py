"""Redistribution of tensors that are several blocks of rows behind each other.

Goes in: a :class:`values.Value` of such a spec, or one to be cut so.  Comes out: the whole tensor,
block by block in the order of the towers; a tower's slices of all blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.spec import Sharded


def opened(shape: tf.TensorShape, along: int) -> tf.TensorShape:
    """A static shape, but for one dimension, which is open."""
    return shape if shape.rank is None else tf.TensorShape(
        [None if dim == along else size for dim, size in enumerate(shape)])


def gathered(value: Any, spec: Sharded, device: str) -> Ref:
    """The whole tensor, on ``device``, from the towers' parts."""
    towers, build = value.towers, value.towers.builder
    split = [build.make("Split", [build.constant(spec.dim, tf.int32, at), part], at,
                        f"{towers.scopes[tower]}Split", num_split=spec.blocks)
             for tower, (part, at) in enumerate(zip(value.parts(), towers.devices))]
    one, shape = dataclasses.replace(spec, group=spec.one_block), opened(value.shape, spec.dim)

    def whole(block: int) -> Ref:
        made: Ref = type(value)(towers, one, shape, None,
                                lambda tower: split[tower]._replace(place=block), device).whole()
        return made

    wholes = [whole(block) for block in range(spec.blocks)]
    axis = build.constant(spec.dim, tf.int32, device)
    made: Ref = build.make("ConcatV2", [*wholes, axis], device, "merge/ConcatV2", N=len(wholes))
    return made


def cut(value: Any, wanted: Sharded, tower: int) -> Ref:
    """A tower's slice of each block of a whole tensor; of one entry for all rows, that."""
    towers, build, host = value.towers, value.towers.builder, value.towers.host
    whole: Ref = value.whole()
    if towers.replicas == 1:
        return whole
    at: Ref = towers.once(("blocks", wanted.blocks, wanted.times, tower),
                          lambda: _places(towers, wanted, tower))
    if wanted.broadcast and value.shape[wanted.dim] is None:
        one = build.constant(1, tf.int64, host)
        last = build.make("Sub", [value.rows_in(wanted.dim), one], host)
        at = build.make("Minimum", [at, last], host)
    axis = build.constant(wanted.dim, tf.int32, host)
    made: Ref = build.make("GatherV2", [whole, at, axis], towers.devices[tower],
                           f"{towers.scopes[tower]}cut")
    return made


def _places(towers: Any, spec: Sharded, tower: int) -> Ref:
    """The positions of a tower's rows in all blocks."""
    build, host = towers.builder, towers.host

    def make(type: str, *inputs: Ref, **attrs: Any) -> Ref:
        made: Ref = build.make(type, inputs, host, **attrs)
        return made

    def number(value: int) -> Ref:
        made: Ref = build.constant(value, tf.int64, host)
        return made

    ranges = []
    for block in range(spec.blocks):
        begin = make("AddV2", make("Mul", towers.total(), number(block)), towers.offset(tower))
        limits = [make("Mul", end, number(spec.times or 1))
                  for end in (begin, make("AddV2", begin, towers.count(tower)))]
        ranges.append(make("Range", *limits, number(1)))
    return make("ConcatV2", *ranges, build.constant(0, tf.int32, host), N=len(ranges))
