"""Fused batch normalization: one device's statistics, by small sums that cross.

Goes in: an operation.  Comes out: its plan.  In training a tower's kernel would normalize by its
own rows; here the towers' sums over their rows are added up, and each normalizes by all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import MIXED, by_names, is_plain, one_sharded
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Sharded, Spec, Variance


def _axes(op: Op) -> tuple[int, list[int]] | None:
    """The dimension of channels, and all others."""
    rank = op.rank(0)
    if rank is None:
        return None
    channel = 1 if op.attr("data_format").startswith("NC") else rank - 1
    return channel, [dim for dim in range(rank) if dim != channel]


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, axes = specs[0], _axes(op)
    if not isinstance(spec, Sharded) or axes is None:
        return None
    others = [REPLICATED] * (len(op.outputs) - 1)
    if spec.dim == axes[0]:
        return _by_channels(op, specs, axes[0], 1, 5)
    if not all(map(is_plain, specs[1:])):
        return None
    takes: list[Spec] = [spec, *[REPLICATED] * (len(specs) - 1)]
    if not op.attr("is_training"):
        # Further outputs are the moments that were given, and what gradients do not use.
        return Plan(takes, [spec, *others], padded=True)
    gives: list[Spec] = [spec, *others]
    gives[4:5] = [Variance()] * len(others[3:4])
    return Plan(takes, gives, make=lambda m: _normalized(m, axes))


def _by_channels(op: Op, specs: Sequence[Spec], channel: int, images: int,
                 made: int) -> Plan | None:
    """Each row is a channel, as where layers are normalized: its statistics are its own.

    Args:
      op: the operation.
      specs: the specs of its inputs.
      channel: the dimension of channels.
      images: how many of the first inputs are images; others have a number a channel, or none.
      made: how many of the outputs are, or have a number a channel.
    """
    if not op.type.endswith("V3") or not op.attr("is_training"):
        return None
    rows = f"{MIXED * channel}a"
    names = [rows if index < images else None if tensor.shape.num_elements() == 0 else "a"
             for index, tensor in enumerate(op.inputs[:5])]
    outputs = [rows, *["a"] * (made - 1), *[""] * (len(op.outputs) - made)]
    return by_names(op, specs, names, outputs, REPLICATED, padded=True)


def _normalized(m: Any, axes: tuple[int, list[int]]) -> list[list[Any]]:
    """The towers' rows, normalized by all rows, and the moments of all rows."""
    kind = m.op.inputs[1].dtype
    sums = _Sums(m, axes, kind)
    x = m.each(lambda tower: sums.cast(m.part(0, tower), tower))
    mean = sums.mean(sums.total(sums.parts(x)))
    centered = m.each(lambda tower: m.make("Sub", [x[tower], sums.spread(mean, tower)], tower))
    variance = sums.variance(centered)
    scale = m.make("Mul", [sums.inverse(variance), m.whole(1)], None)

    def one(tower: int) -> Any:
        scaled = m.make("Mul", [centered[tower], sums.spread(scale, tower)], tower)
        shifted = m.make("AddV2", [scaled, sums.spread(m.part(2, tower), tower)], tower)
        return sums.cast(shifted, tower, m.op.inputs[0].dtype)

    outputs = [m.each(one)]
    running = [_running(m, 3, mean), _running(m, 4, sums.unbiased(variance))]
    moments = [*running, mean, variance, m.constant([], kind, None)]
    return outputs + [[moment] * len(m.towers) for moment in moments[:len(m.op.outputs) - 1]]


def _running(m: Any, index: int, moment: Any) -> Any:
    """A moment of all rows, mixed with the one that was given."""
    if "exponential_avg_factor" not in m.op.operation.node_def.attr:
        return moment
    factor = m.op.attr("exponential_avg_factor")
    if factor == 1.0:
        return moment
    old = m.make("Mul", [m.whole(index), m.constant(1 - factor, moment.dtype, None)], None)
    new = m.make("Mul", [moment, m.constant(factor, moment.dtype, None)], None)
    return m.make("AddV2", [old, new], None)


class _Sums:
    """Sums over rows and places of an image, for each channel."""

    def __init__(self, m: Any, axes: tuple[int, list[int]], kind: tf.DType, index: int = 0) -> None:
        self._m, self._kind = m, kind
        self._channel, self._others = axes
        self._count = self._counted(index)

    def _counted(self, index: int) -> Any:
        """How many numbers there are of a channel."""
        m = self._m
        shape = m.shape(index, tf.int32)
        chosen = m.make("GatherV2", [shape, m.constant(self._others, tf.int32, None),
                                     m.constant(0, tf.int32, None)], None)
        count = m.make("Prod", [chosen, m.constant([0], tf.int32, None)], None)
        return m.make("Cast", [count], None, DstT=self._kind)

    def cast(self, value: Any, tower: int | None, kind: tf.DType | None = None) -> Any:
        kind = kind or self._kind
        return value if value.dtype == kind else self._m.make("Cast", [value], tower, DstT=kind)

    def parts(self, images: Sequence[Any]) -> list[Any]:
        """Each tower's sums."""
        m = self._m
        return list(m.each(lambda tower: m.make("Sum", [images[tower], m.constant(
            self._others, tf.int32, tower)], tower)))

    def total(self, parts: Sequence[Any]) -> Any:
        """The sum over all rows, of each tower's."""
        return self._m.towers.add_up(parts, self._m.home)

    def mean(self, total: Any) -> Any:
        return self._m.make("RealDiv", [total, self._count], None)

    def variance(self, centered: Sequence[Any]) -> Any:
        m = self._m
        return self.mean(self.total(self.parts(m.each(
            lambda tower: m.make("Square", [centered[tower]], tower)))))

    def inverse(self, variance: Any) -> Any:
        """One over the deviation."""
        m = self._m
        epsilon = m.constant(m.op.attr("epsilon"), self._kind, None)
        return m.make("Rsqrt", [m.make("AddV2", [variance, epsilon], None)], None)

    def unbiased(self, variance: Any) -> Any:
        """As the kernel has it: over the count less one, which is at least one."""
        m = self._m
        one = m.constant(1, self._kind, None)
        rest = m.make("Maximum", [m.make("Sub", [self._count, one], None), one], None)
        return m.make("Mul", [variance, m.make("RealDiv", [self._count, rest], None)], None)

    def spread(self, of_channels: Any, tower: int) -> Any:
        """One number a channel, to be broadcast to images."""
        if self._channel == len(self._others):
            return of_channels
        m = self._m
        shape = [-1 if dim == self._channel else 1 for dim in range(len(self._others) + 1)]
        return m.make("Reshape", [of_channels, m.constant(shape, tf.int32, tower)], tower)


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def fused_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    axes = _axes(op)
    spec = one_sharded(specs[:2])
    if axes is None or spec is None:
        return None
    if spec.dim == axes[0]:
        return _by_channels(op, specs, axes[0], 2, 3)
    if not all(map(is_plain, specs[2:])):
        return None
    takes: list[Spec] = [spec, spec, *[REPLICATED] * (len(specs) - 2)]
    if not op.attr("is_training"):
        return Plan(takes, [spec, SUM, SUM, REPLICATED, REPLICATED], padded=True)
    known = isinstance(specs[4], Variance)
    return Plan(takes, [spec, *[REPLICATED] * 4], make=lambda m: _gradients(m, axes, known))


def _gradients(m: Any, axes: tuple[int, list[int]], known: bool) -> list[list[Any]]:
    """``scale * inverse * (dy - mean(dy) - centered * inverse ** 2 * mean(dy * centered))``.

    Where the variance is not what :func:`_normalized` gave it is made again, as the kernels of GPUs
    and of CPUs hand on another number; its sum crosses with the two others.
    """
    kind = m.op.inputs[2].dtype
    sums = _Sums(m, axes, kind)
    dy, x = (m.each(lambda tower, index=index: sums.cast(m.part(index, tower), tower))
             for index in (0, 1))
    mean = m.whole(3)
    # Behind dy: else it is made in the forward pass, and held until it is needed.
    centered = m.each(lambda tower: m.make("Sub", [x[tower], sums.spread(mean, tower)], tower,
                                           after=[dy[tower]]))
    along = sums.total(sums.parts(m.each(
        lambda tower: m.make("Mul", [dy[tower], centered[tower]], tower))))
    plain = sums.total(sums.parts(dy))
    inverse = sums.inverse(m.whole(4) if known else sums.variance(centered))
    slope = m.make("Mul", [m.make("Square", [inverse], None), sums.mean(along)], None)
    scale, constant = m.make("Mul", [inverse, m.whole(2)], None), sums.mean(plain)

    def one(tower: int) -> Any:
        first = m.make("Sub", [dy[tower], sums.spread(constant, tower)], tower)
        second = m.make("Mul", [centered[tower], sums.spread(slope, tower)], tower)
        rest = m.make("Sub", [first, second], tower)
        made = m.make("Mul", [rest, sums.spread(scale, tower)], tower)
        return sums.cast(made, tower, m.op.inputs[1].dtype)

    unused = m.constant(0, kind, None)
    once = [m.make("Mul", [along, inverse], None), plain, unused, unused]
    return [m.each(one), *([value] * len(m.towers) for value in once)]
