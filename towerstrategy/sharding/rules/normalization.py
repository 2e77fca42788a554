"""Fused batch normalization: one device's statistics, by small sums that cross.

Goes in: an operation.  Comes out: its plan.  In training a tower's kernel would normalize by its
own rows; here the towers' sums over their rows are added up, and each normalizes by all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import MIXED, by_names, is_plain, one_sharded
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, rule
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
    x = sums.images(0)
    mean = sums.mean(x)
    variance = sums.variance(x, mean)
    y = sums.normalized(x, [m.whole(1), m.whole(2), mean, variance])
    running = [_running(m, 3, mean), _running(m, 4, sums.unbiased(variance))]
    moments = [*running, mean, variance, m.constant([], kind, None)]
    return [sums.given(y, 0)] + [
        [moment] * len(m.towers) for moment in moments[:len(m.op.outputs) - 1]]


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
    """Sums over rows and places of an image, for each channel, and what is made of them."""

    def __init__(self, m: Any, axes: tuple[int, list[int]], kind: tf.DType, index: int = 0) -> None:
        self._m, self._kind = m, kind
        self._channel, self._others = axes
        shape = m.shape(index, tf.int32)
        chosen = m.make("GatherV2", [shape, m.constant(self._others, tf.int32, HOST),
                                     m.constant(0, tf.int32, HOST)], HOST)
        count = m.make("Prod", [chosen, m.constant([0], tf.int32, HOST)], HOST)
        self.count = m.make("Cast", [count], None, DstT=kind)

    def images(self, index: int) -> list[Any]:
        """An input of each tower, in the moments' dtype."""
        return self._cast(self._m.parts(index), self._kind)

    def given(self, images: list[Any], index: int) -> list[Any]:
        """Images in the dtype of an input."""
        return self._cast(images, self._m.op.inputs[index].dtype)

    def _cast(self, images: list[Any], dtype: tf.DType) -> Any:
        return images if images[0].dtype == dtype else self._m.make(
            "Cast", [images], EACH, DstT=dtype)

    def mean(self, images: list[Any]) -> Any:
        """The mean of all rows."""
        m = self._m
        parts = m.make("Sum", [images, m.constant(self._others, tf.int32, EACH)], EACH)
        return m.make("RealDiv", [m.towers.add_up(parts, m.home), self.count], None)

    def variance(self, images: list[Any], mean: Any) -> Any:
        return self.mean(self._m.make("SquaredDifference", [images, self._spread(mean)], EACH))

    def normalized(self, images: list[Any], moments: Sequence[Any]) -> Any:
        """``(image - mean) / deviation * scale + offset``, of scale, offset, mean, variance."""
        m = self._m
        return m.make("FusedBatchNormV3", [images, *moments], EACH, epsilon=m.op.attr("epsilon"),
                      is_training=False, data_format=m.op.attr("data_format"))

    def unbiased(self, variance: Any) -> Any:
        """As the kernel has it: over the count less one, which is at least one."""
        m = self._m
        one = m.constant(1, self._kind, None)
        rest = m.make("Maximum", [m.make("Sub", [self.count, one], None), one], None)
        return m.make("Mul", [variance, m.make("RealDiv", [self.count, rest], None)], None)

    def _spread(self, of_channels: Any) -> Any:
        """One number a channel, to be broadcast to images."""
        if self._channel == len(self._others):
            return of_channels
        m = self._m
        shape = [-1 if dim == self._channel else 1 for dim in range(len(self._others) + 1)]
        return m.make("Reshape", [of_channels, m.constant(shape, tf.int32, EACH)], EACH)


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
    """What the kernel gives for moments that stay as they are, less what moves with these.

    That is ``scale * inverse * (mean(dy) + normal * mean(dy * normal))``: the rows, normalized once
    more.  Where the variance is not what :func:`_normalized` gave it is made again, as the kernels
    of GPUs and of CPUs hand on another number.
    """
    kind = m.op.inputs[2].dtype
    sums = _Sums(m, axes, kind)
    dy, x, mean, none = sums.images(0), sums.images(1), m.whole(3), m.constant([], kind, None)
    variance = m.whole(4) if known else sums.variance(x, mean)
    own, *sums_of = _with_given_moments(m, axes, [dy, x, m.whole(2), mean, variance, none])
    of_scale, of_offset = (m.towers.add_up(parts, m.home) for parts in sums_of)
    epsilon = m.constant(m.op.attr("epsilon"), kind, None)
    inverse = m.make("Rsqrt", [m.make("AddV2", [variance, epsilon], None)], None)
    factor = m.make("RealDiv", [m.make("Mul", [inverse, m.whole(2)], None), sums.count], None)
    moved = [m.make("Mul", [total, factor], None) for total in (of_scale, of_offset)]
    dx = m.make("Sub", [own, sums.normalized(x, [*moved, mean, variance])], EACH)
    unused = m.constant(0, kind, None)
    return [sums.given(dx, 1), *([value] * len(m.towers) for value in (
        of_scale, of_offset, unused, unused))]


def _with_given_moments(m: Any, axes: tuple[int, list[int]], inputs: Sequence[Any]) -> list[Any]:
    """The kernel's gradients for each tower's rows; it has the channels last."""
    channel, others = axes
    last = channel == len(others)
    there = [*others, channel]

    def moved(images: Any, order: Sequence[int]) -> Any:
        return images if last else m.make(
            "Transpose", [images, m.constant(order, tf.int32, EACH)], EACH)

    images = [moved(image, there) for image in inputs[:2]]
    first = dx = m.make("FusedBatchNormGradV3", [*images, *inputs[2:]], EACH,
                        epsilon=m.op.attr("epsilon"), is_training=False,
                        data_format="NHWC" if len(others) == 3 else "NDHWC")
    if len(others) > 3:  # of no rows, the kernel gives fewer dimensions
        shape = m.make("Shape", [images[1]], EACH, out_type=tf.int32)
        dx = m.make("Reshape", [first, shape], EACH)
    back = moved(dx, [there.index(dim) for dim in range(len(there))])
    return [back, *([one._replace(output=place) for one in first] for place in (1, 2))]
