"""Random draws of a number for each row: a tower draws its rows of what one device draws.

Goes in: an operation that draws.  Comes out: its plan.

TensorFlow's generator, Philox, is counter based: each counter gives a group of four numbers (two
of 64 bits), whoever asks.  So a tower moves the counter on by the groups before its rows, and draws
its own: bit for bit one device's.  Distributions that need a varying number of random bits have
counters reserved for each number.  What draws by a state of its own draws once for all rows, of
which each tower takes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.dimensions import is_plain
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Sharded, Size, Spec

_PHILOX = (tf.random.Algorithm.PHILOX.value, tf.random.Algorithm.AUTO_SELECT.value)
# Counters for each number, of distributions that take a varying number of random bits
# (GuardedPhiloxRandom::ReserveRandomOutputs).
_RESERVED = {"StatelessTruncatedNormalV2": 256 // 4}


@rule("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2",
      "StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2")
def draw(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size, algorithm = specs[0], op.value(3)
    if not isinstance(size, Size) or not all(map(is_plain, specs[1:])) or algorithm is None \
            or int(algorithm) not in _PHILOX or size.blocks > 1:
        return None
    sizes = shapes.static_sizes(op, 0, size)
    if sizes is None or any(before != 1 for before in sizes[:size.at]):
        return None  # a tower's numbers are not one behind the other
    width = 1
    for other in sizes[size.at + 1:]:
        width = -1 if other is None or other < 0 or width < 0 else width * int(other)
    return Plan([size, *[REPLICATED] * (len(specs) - 1)], [size.shards(size.at)],
                make=lambda m: [_drawn(m, width)], alone=0)


@rule("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal")
def draw_by_state(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size = specs[0]
    if not isinstance(size, Size) or size.group or not size.times or op.out_rank() is None \
            or not all(map(is_plain, specs[1:])):
        return None
    return Plan([REPLICATED] * len(specs), [size.shards(size.at)], once=True)


@rule("RandomShuffle", "Multinomial", "StatelessMultinomial")
def draw_of_rows(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Of all rows, as the draws are one after another."""
    spec = specs[0]
    if not isinstance(spec, Sharded) or spec.one_block or op.out_rank() is None \
            or op.type != "RandomShuffle" and spec.dim:
        return None
    return Plan([REPLICATED] * len(specs), [spec], once=True,
                alone=None if op.type == "RandomShuffle" else 0)


def _drawn(m: Any, width: int) -> list[Any]:
    """Each tower's draw; ``width`` is how many numbers a row has, negative if that is unknown."""
    if not m.towers.draws_rows:  # each its own, by the counter's higher half
        return m.each(lambda tower: _copied(m, m.part(0, tower), m.make("AddV2", [
            m.whole(2), m.constant([0, m.towers.first + tower], tf.uint64, None)], None), tower))
    group = 2 if m.op.outputs[0].dtype.size == 8 else 4
    whole_groups = width >= 0 and width % group == 0
    drawn, before = [], _before(m)
    for tower in range(len(m.towers)):
        shape = m.part(0, tower)
        own = m.make("Prod", [shape, m.constant([0], tf.int32, None)], None)
        count = own if own.dtype == tf.int64 else m.make("Cast", [own], None, DstT=tf.int64)
        counter = _moved_on(m, before, group)
        if whole_groups:
            drawn.append(_copied(m, shape, counter, tower))
        else:
            drawn.append(_from_within(m, shape, count, before, counter, tower, group))
        before = m.make("AddV2", [before, count], None)
    return drawn


def _before(m: Any) -> Any:
    """How many numbers the workers before this one draw."""
    rows, shape = m.earlier(0, tf.int64), m.part(0, 0)
    if m.towers.across.workers is None:
        return rows
    begin, size = (m.constant([place], tf.int32, None) for place in (m.inputs[0].spec.at + 1, -1))
    others = m.make("Prod", [m.make("Slice", [shape, begin, size], None),
                             m.constant([0], tf.int32, None)], None)
    if others.dtype != tf.int64:
        others = m.make("Cast", [others], None, DstT=tf.int64)
    return m.make("Mul", [rows, others], None)


def _moved_on(m: Any, before: Any, group: int) -> Any:
    """The counter of a tower with so many numbers before its own."""
    groups = m.make("FloorDiv", [before, m.constant(group, tf.int64, None)], None)
    reserved = _RESERVED.get(m.op.type)
    if reserved is not None:
        groups = m.make("Mul", [groups, m.constant(reserved * group, tf.int64, None)], None)
    by = m.make("Pack", [groups, m.constant(0, tf.int64, None)], None, axis=0)
    return m.make("AddV2", [m.whole(2), m.make("Cast", [by], None, DstT=tf.uint64)], None)


def _copied(m: Any, shape: Any, counter: Any, tower: int) -> Any:
    others = [m.part(index, tower) for index in range(3, len(m.op.inputs))]
    return m.copy([shape, m.part(1, tower), counter, *others], tower)[0]


def _from_within(m: Any, shape: Any, count: Any, before: Any, counter: Any, tower: int,
                 group: int) -> Any:
    """A draw that begins within a group of numbers: with those before it, which are cut off."""
    extra = m.make("FloorMod", [before, m.constant(group, tf.int64, None)], None)
    one = m.constant([1], tf.int32, None)
    length = m.make("AddV2", [count, m.constant(group - 1, tf.int64, None)], None)
    vector = m.make("Reshape", [length, one], None)
    if shape.dtype != tf.int64:
        vector = m.make("Cast", [vector], None, DstT=shape.dtype)
    flat = _copied(m, vector, counter, tower)
    begin, size = (m.make("Reshape", [number, one], None) for number in (extra, count))
    return m.make("Reshape", [m.make("Slice", [flat, begin, size], tower), shape], tower)
