"""Rules for fused batch normalization, with the statistics of the whole batch.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  In training, a tower's kernel
would take the statistics of the tower's rows.  So the moments of each tower's rows cross, two small
tensors a layer, and each tower normalizes its rows by the moments of all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import DIMS, by_names
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Spec, Variance


def _axes(op: Op) -> tuple[int, list[int]]:
    """The dimension of the channels, and all other dimensions."""
    channel = 1 if op.attr("data_format").startswith("NC") else op.rank(0) - 1
    return channel, [dim for dim in range(op.rank(0)) if dim != channel]


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def fused(op: Op, specs: Sequence[Spec]) -> Plan | None:
    plan = _by_dimension(op, specs, 1, 5)
    if plan is None or plan.takes[1] != REPLICATED or not op.attr("is_training"):
        return plan  # of the other outputs no gradient uses any, or each has its channels
    gives = [*plan.gives]
    gives[4:5] = [Variance()] * len(gives[4:5])
    return Plan(plan.takes, gives, make=_make_normalized)


def _by_dimension(op: Op, specs: Sequence[Spec], images: int, sharded: int) -> Plan | None:
    """The plan of the kernel, if the moments of a tower's rows are those that it needs.

    So they are where each row is a channel, as in layer normalization.  The first ``images`` inputs
    are images; others have a number for each channel, or no entries.  The first output is images,
    and the first ``sharded`` ones have entries for each channel.
    """
    if op.rank(0) is None:
        return None
    rows, channel = DIMS[:op.rank(0)], DIMS[_axes(op)[0]]
    names = [rows if index < images else None if tensor.shape.num_elements() == 0 else channel
             for index, tensor in enumerate(op.inputs[:5])]
    outputs = [rows, *[channel] * (sharded - 1), *[""] * (len(op.outputs) - sharded)]
    plan = by_names(op, specs, names, outputs, REPLICATED, padded=True)
    by_channel = plan is not None and plan.takes[images] != REPLICATED
    return None if by_channel and not (op.type.endswith("V3") and op.attr("is_training")) else plan


def _make_normalized(m: Any) -> list[Any]:
    """Makes the op's outputs: each tower's rows, normalized, and the moments of all rows."""
    dtype = m.op.inputs[1].dtype
    moments = _Moments(m, dtype)
    x = _cast(m, m.parts(0), dtype)
    mean, variance = moments.of_all(x)
    y = moments.normalized(x, [m.whole(1), m.whole(2), mean, variance])
    running = [_running(m, 3, _first(mean)), _running(m, 4, moments.unbiased(_first(variance)))]
    others = [*running, mean, variance, m.constant([], dtype, None)]
    return [_cast(m, y, m.op.inputs[0].dtype), *others[:len(m.op.outputs) - 1]]


def _cast(m: Any, images: list[Any], dtype: tf.DType) -> Any:
    return images if images[0].dtype == dtype else m.make("Cast", [images], EACH, DstT=dtype)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def _running(m: Any, index: int, moment: Any) -> Any:
    """The new running moment: ``moment``, mixed with the old one, which is input ``index``."""
    factor = m.op.attr("exponential_avg_factor")
    if factor == 1.0:
        return moment
    old = m.make("Mul", [m.whole(index), m.constant(1 - factor, moment.dtype, None)], None)
    new = m.make("Mul", [moment, m.constant(factor, moment.dtype, None)], None)
    return m.make("AddV2", [old, new], None)


class _Moments:
    """Makes each channel's moments over the rows and pixels of all towers.

    What crosses is merged on each GPU tower: on one of them, its next layer would be in the queue
    before the result, for which the others then wait.  Many towers, and CPUs, merge it once.
    """

    def __init__(self, m: Any, dtype: tf.DType) -> None:
        self._m, self._dtype = m, dtype
        self._where = EACH if m.towers.exchange else None
        self._channel, self._others = _axes(m.op)
        shape = m.shape(0, tf.int32)
        sizes = m.make("GatherV2", [shape, m.constant(self._others, tf.int32, HOST),
                                    m.constant(0, tf.int32, HOST)], HOST)
        count = m.make("Prod", [sizes, m.constant([0], tf.int32, HOST)], HOST)
        self.count = m.make("Cast", [count], HOST, DstT=dtype)

    def of_all(self, images: list[Any]) -> tuple[Any, Any]:
        """The mean and the variance, from those of each tower, which cross together.

        The variance is the mean of the towers' variances and of their means' squared deviations
        (Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983).
        """
        m, axes = self._m, self._m.constant(self._others, tf.int32, EACH)
        shares = m.make("ExpandDims", [m.make("Pack", m.shares(0, self._dtype), HOST, axis=0),
                                       m.constant(1, tf.int32, HOST)], HOST)

        def mean_of_towers(values: Any) -> Any:  # those without rows have NaN
            return self._total(self.make("MulNoNan", [values, shares]))

        means = m.make("Mean", [images, axes], EACH)
        squares = m.make("SquaredDifference", [images, self._expanded(means)], EACH)
        means, variances = self._stacked([means, m.make("Mean", [squares, axes], EACH)])
        mean = mean_of_towers(means)
        deviations = self.make("SquaredDifference", [means, mean])
        return mean, mean_of_towers(self.make("AddV2", [variances, deviations]))

    def totals(self, vectors: Sequence[list[Any]]) -> list[Any]:
        """The sums of the towers' vectors, which cross together."""
        return list(map(self._total, self._stacked(vectors)))

    def make(self, kind: str, inputs: Sequence[Any]) -> Any:
        """An operation on what has crossed."""
        return self._m.make(kind, inputs, self._where)

    def taken(self, index: int) -> Any:
        """A replicated input, for :meth:`make`."""
        return self._m.whole(index) if self._where is None else self._m.parts(index)

    def _stacked(self, vectors: Sequence[list[Any]]) -> list[Any]:
        """Each of several vectors, of all towers of this worker: a row for each tower."""
        m, count = self._m, len(vectors)
        parts = m.make("Pack", vectors, EACH, axis=0)
        stacked = m.make("Pack", parts, None, axis=1) if self._where is None else m.each(
            lambda tower: m.make("Pack", parts, tower, axis=1))
        first = m.make("Unpack", [stacked], self._where, num=count, axis=0)
        return [[ref._replace(output=index) for ref in first] if isinstance(first, list)
                else first._replace(output=index) for index in range(count)]

    def _total(self, values: Any) -> Any:
        """The sum over the towers of all workers."""
        m = self._m
        here = self.make("Sum", [values, m.constant(0, tf.int32, self._where)])
        return here if isinstance(here, list) else m.towers.across.cross("sum", here, m.home)

    def normalized(self, images: list[Any], moments: Sequence[Any]) -> Any:
        """``(image - mean) / deviation * scale + offset``, from scale, offset, mean, variance."""
        m = self._m
        return m.make("FusedBatchNormV3", [images, *moments], EACH, epsilon=m.op.attr("epsilon"),
                      is_training=False, data_format=m.op.attr("data_format"))

    def unbiased(self, variance: Any) -> Any:
        """The variance times n / (n - 1), with n - 1 at least 1, as in TensorFlow's kernel."""
        m = self._m
        one = m.constant(1, self._dtype, None)
        degrees = m.make("Maximum", [m.make("Sub", [self.count, one], None), one], None)
        return m.make("Mul", [variance, m.make("RealDiv", [self.count, degrees], None)], None)

    def _expanded(self, channels: list[Any]) -> Any:
        """Vectors with a number for each channel, reshaped to broadcast against images."""
        if self._channel == len(self._others):
            return channels
        m = self._m
        shape = [-1 if dim == self._channel else 1 for dim in range(len(self._others) + 1)]
        return m.make("Reshape", [channels, m.constant(shape, tf.int32, EACH)], EACH)


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def fused_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    plan = _by_dimension(op, specs, 2, 3)
    if plan is None or plan.takes[2] != REPLICATED:
        return plan
    if not op.attr("is_training"):
        return dataclasses.replace(plan, gives=[plan.gives[0], SUM, SUM, REPLICATED, REPLICATED])
    variance = specs[4] if isinstance(specs[4], Variance) else REPLICATED
    return Plan([*plan.takes[:4], variance, *plan.takes[5:]], plan.gives, make=_make_gradients)


def _make_gradients(m: Any) -> list[Any]:
    """Makes the gradients: the kernel's for constant moments, less the part through the moments.

    That part is ``scale * inverse * (mean(dy) + normal * mean(dy * normal))``: the rows, normalized
    once more.  Input 4 is the variance if :func:`_make_normalized` made it.  Else the variance is
    computed again, as GPU and CPU kernels return different values there.
    """
    dtype = m.op.inputs[2].dtype
    moments = _Moments(m, dtype)
    dy, x = (_cast(m, m.parts(index), dtype) for index in (0, 1))
    mean, empty = moments.taken(3), m.constant([], dtype, None)
    has_variance = isinstance(m.inputs[4].spec, Variance)
    variance = moments.taken(4) if has_variance else moments.of_all(x)[1]
    direct, *partials = _constant_moment_gradients(
        m, [dy, x, m.whole(2), mean, variance, empty])
    d_scale, d_offset = moments.totals(partials)
    epsilon = m.constant(m.op.attr("epsilon"), dtype, None)
    inverse = moments.make("Rsqrt", [moments.make("AddV2", [variance, epsilon])])
    factor = moments.make("RealDiv", [moments.make("Mul", [inverse, m.whole(2)]), moments.count])
    factors = [moments.make("Mul", [total, factor]) for total in (d_scale, d_offset)]
    dx = m.make("Sub", [direct, moments.normalized(x, [*factors, mean, variance])], EACH)
    return [_cast(m, dx, m.op.inputs[1].dtype), d_scale, d_offset, empty, empty]


def _constant_moment_gradients(m: Any, inputs: Sequence[Any]) -> list[Any]:
    """The kernel's gradients for each tower's rows; the kernel needs the channels last."""
    channel, others = _axes(m.op)
    is_last = channel == len(others)
    to_last = [*others, channel]

    def transposed(images: Any, order: Sequence[int]) -> Any:
        return images if is_last else m.make(
            "Transpose", [images, m.constant(order, tf.int32, EACH)], EACH)

    images = [transposed(image, to_last) for image in inputs[:2]]
    outputs = dx = m.make("FusedBatchNormGradV3", [*images, *inputs[2:]], EACH,
                          epsilon=m.op.attr("epsilon"), is_training=False,
                          data_format="NHWC" if len(others) == 3 else "NDHWC")
    if len(others) > 3:  # for no rows, the kernel returns fewer dimensions
        shape = m.make("Shape", [images[1]], EACH, out_type=tf.int32)
        dx = m.make("Reshape", [outputs, shape], EACH)
    dx = transposed(dx, [to_last.index(dim) for dim in range(len(to_last))])
    return [dx, *([ref._replace(output=index) for ref in outputs] for index in (1, 2))]
