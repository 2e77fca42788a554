"""Padding for kernels that fail on no rows: a tower without rows gets one row.

Goes in: the values of an operation's inputs, or of its outputs.  Comes out: the inputs with a row
of padding on each tower that has none; the outputs without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.spec import Sharded, Size, can_be_cut
from towerstrategy.sharding.values import Value


def padded(values: Sequence[Value], ones: Sequence[int]) -> tuple[list[Value], Value]:
    """An operation's inputs, padded (by a 1 for inputs ``ones``); and the first that has rows."""
    rows = next(value for value in values if isinstance(value.spec, Sharded))
    return [_padded(value, int(at in ones)) for at, value in enumerate(values)], rows


def without_padding(value: Value, unpadded: Value) -> Value:
    """An operation's output, without the rows by which ``unpadded``, an input, was padded."""
    spec, towers, rank = value.spec, value.towers, value.shape.rank
    if not isinstance(spec, Sharded) or rank is None:
        return value

    def part(tower: int) -> Ref:
        rows = towers.on_host("Sub", _padding_rows(unpadded, tower), towers.number(1, tf.int32))
        begin = towers.builder.constant([0] * rank, tf.int32, towers.devices[tower])
        return towers.on(tower, "Slice", value.part(tower), begin,
                         towers.vector(tower, rows, spec.dim, rank, -1))

    return Value(towers, spec, value.shape, None, part)


def _padded(value: Value, fill: int) -> Value:
    """The same tensor, with one row of ``fill`` on each tower that has no rows."""
    spec, towers, rank = value.spec, value.towers, value.shape.rank
    if isinstance(spec, Size):
        least = [int(place == spec.at) for place in range(value.shape.num_elements())]
        return Value(towers, spec, value.shape, value.whole, lambda tower: towers.on(
            tower, "Maximum", value.part(tower), towers.builder.constant(
                least, value.part(tower).dtype, towers.devices[tower])))
    if not isinstance(spec, Sharded) or rank is None:
        return value
    dim = spec.dim

    def part(tower: int) -> Ref:
        part = value.part(tower)
        after = towers.vector(tower, _padding_rows(value, tower), dim, rank, 0)
        paddings = towers.on(tower, "Pack", towers.builder.constant(
            [0] * rank, tf.int32, towers.devices[tower]), after, axis=1)
        # Not Pad: oneDNN fuses it with a convolution, which then gives zero rows a wrong shape.
        # PadV2's kernel for GPUs takes the fill value from the host's memory.
        return towers.on(tower, "PadV2", part, paddings, towers.builder.constant(
            "" if part.dtype == tf.string else fill, part.dtype, towers.shapes_on(tower)))

    return value.other(("padded", fill), lambda: Value(
        towers, spec, value.shape, value.whole, part))


def _padding_rows(value: Value, tower: int) -> Ref:
    """1 for a tower without rows of this tensor, else 0; an int32 scalar."""
    spec = value.spec
    assert isinstance(spec, Sharded)
    return value.towers.padding_rows(
        value.towers.size(spec.examples, tf.int64, tower)
        if can_be_cut(spec) else value.size_along(spec.dim, tower))
