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
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, rule
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


def _drawn(m: Any, width: int) -> Any:
    """Each tower's draw; ``width`` is how many numbers a row has, negative if that is unknown."""
    shapes = m.parts(0)
    if not m.towers.draws_rows:  # each its own, by the counter's higher half
        own = m.each(lambda tower: m.constant([0, m.towers.first + tower], tf.uint64, None))
        return _copied(m, shapes, m.make("AddV2", [m.whole(2), own], None))
    group = 2 if m.op.outputs[0].dtype.size == 8 else 4
    counts, before = _product(m, shapes), [_before(m)]
    for count in counts[:-1]:
        before.append(m.make("AddV2", [before[-1], count], None))
    counters = _moved_on(m, before, group)
    if width >= 0 and width % group == 0:
        return _copied(m, shapes, counters)
    return _from_within(m, shapes, counts, before, counters, group)


def _product(m: Any, shape: Any) -> Any:
    made = m.make("Prod", [shape, m.constant([0], tf.int32, None)], None)
    of_int32 = m.op.inputs[0].dtype == tf.int32
    return m.make("Cast", [made], None, DstT=tf.int64) if of_int32 else made


def _before(m: Any) -> Any:
    """How many numbers the workers before this one draw."""
    rows = m.earlier(0, tf.int64)
    if m.towers.across.workers is None:
        return rows
    begin, size = (m.constant([place], tf.int32, None) for place in (m.inputs[0].spec.at + 1, -1))
    others = _product(m, m.make("Slice", [m.part(0, 0), begin, size], None))
    return m.make("Mul", [rows, others], None)


def _moved_on(m: Any, before: Any, group: int) -> Any:
    """The counters of towers with so many numbers before their own."""
    groups = m.make("FloorDiv", [before, m.constant(group, tf.int64, None)], None)
    reserved = _RESERVED.get(m.op.type)
    if reserved is not None:
        groups = m.make("Mul", [groups, m.constant(reserved * group, tf.int64, None)], None)
    by = m.make("Pack", [groups, m.constant(0, tf.int64, None)], None, axis=0)
    return m.make("AddV2", [m.whole(2), m.make("Cast", [by], None, DstT=tf.uint64)], None)


def _copied(m: Any, shapes: Any, counters: Any) -> Any:
    others = map(m.parts, range(3, len(m.op.inputs)))
    return m.copy([shapes, m.parts(1), counters, *others], EACH)[0]


def _from_within(m: Any, shapes: Any, counts: Any, before: Any, counters: Any, group: int) -> Any:
    """Draws that begin within a group of numbers: with those before them, which are cut off."""
    extra = m.make("FloorMod", [before, m.constant(group, tf.int64, None)], None)
    one = m.constant([1], tf.int32, None)
    lengths = m.make("AddV2", [counts, m.constant(group - 1, tf.int64, None)], None)
    vectors = m.make("Reshape", [lengths, one], None)
    if m.op.inputs[0].dtype == tf.int32:
        vectors = m.make("Cast", [vectors], None, DstT=tf.int32)
    flat = _copied(m, vectors, counters)
    begin, size = (m.make("Reshape", [number, one], None) for number in (extra, counts))
    return m.make("Reshape", [m.make("Slice", [flat, begin, size], EACH), shapes], EACH)
