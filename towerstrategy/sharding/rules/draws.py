"""Rules for random ops: a tower draws, for its rows, the numbers that one device would draw.

Goes in: a random op and the specs of its inputs.  Comes out: its plan.

TensorFlow's generator, Philox, is counter based: each counter always gives the same group of four
numbers (two of 64 bits).  So a tower advances the counter by the groups of earlier rows, and draws
its own rows: bit for bit the numbers of one device.  Distributions that need a varying number of
random bits reserve counters for each number.  An op whose kernel keeps a state runs once, for all
rows, and its output is cut for the towers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.dimensions import is_plain
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    Replicated,
    Sharded,
    Size,
    Spec,
    has_known_rows,
    in_one_piece,
)

_PHILOX = (tf.random.Algorithm.PHILOX.value, tf.random.Algorithm.AUTO_SELECT.value)
# Op type -> how many counters its kernel reserves for each number, where the number of random bits
# varies (GuardedPhiloxRandom::ReserveRandomOutputs).
_RESERVED = {"StatelessTruncatedNormalV2": 256 // 4}


@rule("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2",
      "StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2", size=0)
def draw(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size, algorithm = specs[0], op.value(3)
    if not isinstance(size, Size) or not all(map(is_plain, specs[1:])) or algorithm is None \
            or int(algorithm) not in _PHILOX or not in_one_piece(size):
        return None
    sizes = shapes.static_sizes(op, 0, size)
    if sizes is None or any(before != 1 for before in sizes[:size.at]):
        return None  # the numbers of a tower's rows are not consecutive
    width = 1
    for other in sizes[size.at + 1:]:
        width = -1 if other is None or other < 0 or width < 0 else width * int(other)
    return Plan([size, *[REPLICATED] * (len(specs) - 1)], [size.shards(size.at)],
                make=lambda m: [_make_draws(m, width)], alone=0)


@rule("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", size=0)
def draw_by_state(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return _drawn_once(op, specs) if all(map(is_plain, specs[1:])) else None


@rule("StatelessRandomGammaV3", "StatelessRandomPoisson", "StatelessRandomBinomial",
      "StatelessParameterizedTruncatedNormal", size=0)
def draw_by_parameters(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return _drawn_once(op, specs, alone=0) if all(
        isinstance(spec, (Sharded, Replicated)) for spec in specs[1:]) else None


def _drawn_once(op: Op, specs: Sequence[Spec], alone: int | None = None) -> Plan | None:
    """The plan of draws for all rows of a shape, which are cut for the towers."""
    size = specs[0]
    if not isinstance(size, Size) or not has_known_rows(size) or op.out_rank() is None:
        return None
    return Plan([REPLICATED] * len(specs), [size.shards(size.at)], once=True, alone=alone)


@rule("RandomShuffle", "Multinomial", "StatelessMultinomial")
def draw_of_rows(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Runs once, with all rows: the draws of a row depend on the draws before."""
    spec = specs[0]
    if not isinstance(spec, Sharded) or op.out_rank() is None \
            or op.type != "RandomShuffle" and spec.dim:
        return None
    return Plan([REPLICATED] * len(specs), [spec], once=True,
                alone=None if op.type == "RandomShuffle" else 0)


def _make_draws(m: Any, width: int) -> Any:
    """Makes each tower's draws; ``width`` is how many numbers a row has, negative if unknown."""
    shapes = m.parts(0)
    if not m.towers.draws_rows:  # each tower has numbers of its own, by the counter's higher half
        steps = m.each(lambda tower: m.constant([0, m.towers.first + tower], tf.uint64, None))
        return _draw(m, shapes, m.make("AddV2", [m.whole(2), steps], None))
    group = 2 if m.op.outputs[0].dtype.size == 8 else 4
    rows = m.offsets(0, tf.int64)
    before = [m.towers.times(number, width) for number in rows] if width >= 0 \
        else m.make("Mul", [rows, _width(m)], None)
    counters = _advanced_counters(m, before, group)
    if width >= 0 and width % group == 0:
        return _draw(m, shapes, counters)
    return _draw_within_group(m, shapes, _product(m, shapes), before, counters, group)


def _product(m: Any, shape: Any) -> Any:
    """The product of a shape's sizes, as int64."""
    product = m.make("Prod", [shape, m.constant([0], tf.int32, None)], None)
    of_int32 = m.op.inputs[0].dtype == tf.int32
    return m.make("Cast", [product], None, DstT=tf.int64) if of_int32 else product


def _width(m: Any) -> Any:
    """How many numbers are drawn for a row."""
    begin, size = (m.constant([entry], tf.int32, None) for entry in (m.inputs[0].spec.at + 1, -1))
    return _product(m, m.make("Slice", [m.part(0, 0), begin, size], None))


def _advanced_counters(m: Any, before: Any, group: int) -> Any:
    """The counters for towers with ``before`` numbers before their own, ``group`` a counter."""
    groups = m.make("FloorDiv", [before, m.constant(group, tf.int64, None)], None)
    reserved = _RESERVED.get(m.op.type)
    if reserved is not None:
        groups = m.make("Mul", [groups, m.constant(reserved * group, tf.int64, None)], None)
    steps = m.make("Pack", [groups, m.constant(0, tf.int64, None)], None, axis=0)
    return m.make("AddV2", [m.whole(2), m.make("Cast", [steps], None, DstT=tf.uint64)], None)


def _draw(m: Any, shapes: Any, counters: Any) -> Any:
    others = map(m.parts, range(3, len(m.op.inputs)))
    return m.copy([shapes, m.parts(1), counters, *others], EACH)[0]


def _draw_within_group(m: Any, shapes: Any, counts: Any, before: Any, counters: Any,
                       group: int) -> Any:
    """Draws whole groups of numbers, and cuts off the numbers of the towers before."""
    skipped = m.make("FloorMod", [before, m.constant(group, tf.int64, None)], None)
    one = m.constant([1], tf.int32, None)
    lengths = m.make("AddV2", [counts, m.constant(group - 1, tf.int64, None)], None)
    flat_shapes = m.make("Reshape", [lengths, one], None)
    if m.op.inputs[0].dtype == tf.int32:
        flat_shapes = m.make("Cast", [flat_shapes], None, DstT=tf.int32)
    flat = _draw(m, flat_shapes, counters)
    begin, size = (m.make("Reshape", [number, one], None) for number in (skipped, counts))
    return m.make("Reshape", [m.make("Slice", [flat, begin, size], EACH), shapes], EACH)
