"""The powers of ``rules/scaling``, each by running its operation with an input that is scaled."""

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from towerstrategy.sharding.rules import scaling

SCALE = 3.0


def some(*shape):
    return tf.constant(np.random.RandomState(sum(shape)).rand(*shape))


def ints(*values):
    return tf.constant(values, tf.int32)


CONV = {"strides": [1, 1, 1, 1], "padding": "VALID"}
CONV3 = {"strides": [1, 1, 1, 1, 1], "padding": "VALID"}
POOL = {"ksize": [1, 2, 2, 1], **CONV}
RAW = tf.raw_ops
# An operation's type -> what calls it with its inputs, in their order, and these.
SAMPLES = {
    "Mul": (lambda x, y: RAW.Mul(x=x, y=y), some(2, 3), some(2, 3)),
    "MulNoNan": (lambda x, y: RAW.MulNoNan(x=x, y=y), some(2, 3), some(2, 3)),
    "MatMul": (lambda a, b: RAW.MatMul(a=a, b=b), some(2, 3), some(3, 4)),
    "BatchMatMul": (lambda x, y: RAW.BatchMatMul(x=x, y=y), some(2, 2, 3), some(2, 3, 4)),
    "BatchMatMulV2": (lambda x, y: RAW.BatchMatMulV2(x=x, y=y), some(2, 2, 3), some(3, 4)),
    "Einsum": (lambda a, b: RAW.Einsum(inputs=[a, b], equation="ij,jk->ik"), some(2, 3),
               some(3, 4)),
    "Conv2D": (lambda a, b: RAW.Conv2D(input=a, filter=b, **CONV), some(2, 4, 4, 2),
               some(2, 2, 2, 3)),
    "Conv3D": (lambda a, b: RAW.Conv3D(input=a, filter=b, **CONV3), some(1, 3, 3, 3, 1),
               some(2, 2, 2, 1, 2)),
    "DepthwiseConv2dNative": (
        lambda a, b: RAW.DepthwiseConv2dNative(input=a, filter=b, **CONV), some(2, 4, 4, 2),
        some(2, 2, 2, 1)),
    "Conv2DBackpropInput": (
        lambda s, f, g: RAW.Conv2DBackpropInput(input_sizes=s, filter=f, out_backprop=g, **CONV),
        ints(2, 4, 4, 2), some(2, 2, 2, 3), some(2, 3, 3, 3)),
    "Conv3DBackpropInputV2": (
        lambda s, f, g: RAW.Conv3DBackpropInputV2(input_sizes=s, filter=f, out_backprop=g, **CONV3),
        ints(1, 3, 3, 3, 1), some(2, 2, 2, 1, 2), some(1, 2, 2, 2, 2)),
    "DepthwiseConv2dNativeBackpropInput": (
        lambda s, f, g: RAW.DepthwiseConv2dNativeBackpropInput(
            input_sizes=s, filter=f, out_backprop=g, **CONV),
        ints(2, 4, 4, 2), some(2, 2, 2, 1), some(2, 3, 3, 2)),
    "Conv2DBackpropFilter": (
        lambda x, s, g: RAW.Conv2DBackpropFilter(input=x, filter_sizes=s, out_backprop=g, **CONV),
        some(2, 4, 4, 2), ints(2, 2, 2, 3), some(2, 3, 3, 3)),
    "Conv3DBackpropFilterV2": (
        lambda x, s, g: RAW.Conv3DBackpropFilterV2(input=x, filter_sizes=s, out_backprop=g,
                                                   **CONV3),
        some(1, 3, 3, 3, 1), ints(2, 2, 2, 1, 2), some(1, 2, 2, 2, 2)),
    "DepthwiseConv2dNativeBackpropFilter": (
        lambda x, s, g: RAW.DepthwiseConv2dNativeBackpropFilter(
            input=x, filter_sizes=s, out_backprop=g, **CONV),
        some(2, 4, 4, 2), ints(2, 2, 2, 1), some(2, 3, 3, 2)),
    **{name: (lambda x, y, name=name: getattr(RAW, name)(x=x, y=y), some(2, 3), some(2, 3))
       for name in ("RealDiv", "Div", "DivNoNan", "Xdivy")},
    **{name: (lambda g, x, name=name: getattr(RAW, name)(gradients=g, features=x), some(2, 3),
              some(2, 3))
       for name in ("ReluGrad", "Relu6Grad", "SoftplusGrad", "SoftsignGrad", "LeakyReluGrad")},
    **{name: (lambda g, x, name=name: getattr(RAW, name)(gradients=g, outputs=x), some(2, 3),
              some(2, 3)) for name in ("EluGrad", "SeluGrad")},
    **{name: (lambda x, a, name=name: getattr(RAW, name)(input=x, axis=a), some(2, 3), ints(0))
       for name in ("Mean", "Sum")},
    "BiasAddGrad": (lambda g: RAW.BiasAddGrad(out_backprop=g), some(2, 3)),
    "Relu": (lambda x: RAW.Relu(features=x), some(2, 3)),
    "LeakyRelu": (lambda x: RAW.LeakyRelu(features=x), some(2, 3)),
    "Abs": (lambda x: RAW.Abs(x=x), some(2, 3)),
    "AvgPool": (lambda x: RAW.AvgPool(value=x, **POOL), some(2, 4, 4, 2)),
    "MaxPool": (lambda x: RAW.MaxPool(input=x, **POOL), some(2, 4, 4, 2)),
    "Cumsum": (lambda x, a: RAW.Cumsum(x=x, axis=a), some(2, 3), tf.constant(1)),
    "GatherV2": (lambda x, i, a: RAW.GatherV2(params=x, indices=i, axis=a), some(4, 3),
                 ints(1, 3), tf.constant(0)),
    "GatherNd": (lambda x, i: RAW.GatherNd(params=x, indices=i), some(4, 3), ints([1], [3])),
    "UnsortedSegmentSum": (
        lambda x, i, n: RAW.UnsortedSegmentSum(data=x, segment_ids=i, num_segments=n), some(3, 2),
        ints(0, 1, 0), tf.constant(2)),
    "SegmentSum": (lambda x, i: RAW.SegmentSum(data=x, segment_ids=i), some(3, 2), ints(0, 0, 1)),
    "StridedSlice": (lambda x, b, e, s: RAW.StridedSlice(input=x, begin=b, end=e, strides=s),
                     some(4, 2), ints(1), ints(3), ints(1)),
    "Slice": (lambda x, b, s: RAW.Slice(input=x, begin=b, size=s), some(4), ints(1), ints(2)),
    "Pad": (lambda x, p: RAW.Pad(input=x, paddings=p), some(4), ints([1, 1])),
    "Reshape": (lambda x, s: RAW.Reshape(tensor=x, shape=s), some(4, 2), ints(8)),
    "Transpose": (lambda x, p: RAW.Transpose(x=x, perm=p), some(4, 2), ints(1, 0)),
    "BroadcastTo": (lambda x, s: RAW.BroadcastTo(input=x, shape=s), some(2), ints(3, 2)),
    "Tile": (lambda x, m: RAW.Tile(input=x, multiples=m), some(2), ints(3)),
    "ExpandDims": (lambda x, a: RAW.ExpandDims(input=x, axis=a), some(2), tf.constant(0)),
    "Squeeze": (lambda x: RAW.Squeeze(input=x), some(2, 1)),
    "Identity": (lambda x: RAW.Identity(input=x), some(2)),
    "Neg": (lambda x: RAW.Neg(x=x), some(2)),
    "Cast": (lambda x: RAW.Cast(x=x, DstT=tf.float32), some(2)),
    "StopGradient": (lambda x: RAW.StopGradient(input=x), some(2)),
    "ReverseV2": (lambda x, a: RAW.ReverseV2(tensor=x, axis=a), some(3), ints(0)),
    "Roll": (lambda x, s, a: RAW.Roll(input=x, shift=s, axis=a), some(3), ints(1), ints(0)),
    **{name: (lambda y, d, name=name: getattr(RAW, name)(y=y, dy=d), some(2, 3), some(2, 3))
       for name in ("SigmoidGrad", "TanhGrad", "SqrtGrad", "RsqrtGrad")},
    "AvgPoolGrad": (lambda s, g: RAW.AvgPoolGrad(orig_input_shape=s, grad=g, **POOL),
                    ints(2, 4, 4, 2), some(2, 3, 3, 2)),
    "ScatterNd": (lambda i, u, s: RAW.ScatterNd(indices=i, updates=u, shape=s), ints([0], [0]),
                  some(2, 2), ints(3, 2)),
    "MaxPoolGrad": (lambda x, y, g: RAW.MaxPoolGrad(orig_input=x, orig_output=y, grad=g, **POOL),
                    some(2, 4, 4, 2), RAW.MaxPool(input=some(2, 4, 4, 2), **POOL),
                    some(2, 3, 3, 2)),
    "StridedSliceGrad": (
        lambda n, b, e, s, g: RAW.StridedSliceGrad(shape=n, begin=b, end=e, strides=s, dy=g),
        ints(4), ints(1), ints(3), ints(1), some(2)),
    "FusedBatchNormGradV3": (
        lambda g, x, s, m, v, r: RAW.FusedBatchNormGradV3(
            y_backprop=g, x=x, scale=s, reserve_space_1=m, reserve_space_2=v,
            reserve_space_3=r)[:3],
        *[tf.cast(value, tf.float32) for value in (
            some(2, 3, 3, 2), some(2, 3, 3, 2), some(2), some(2), some(2), some(1))]),
    "Reciprocal": (lambda x: RAW.Reciprocal(x=x), some(2)),
}


class ScalingTest(parameterized.TestCase):

    @parameterized.named_parameters((name, name) for name in SAMPLES)
    def test_as_said(self, name):
        """Else a replica function's right gradient is warned of, or a wrong one is not."""
        call, *inputs = SAMPLES[name]
        graph = tf.Graph()
        with graph.as_default():
            given = [tf.constant(value.numpy()) for value in inputs]
            made = tf.nest.flatten(call(*given))
        claimed = [scaling.degree(made[0].op, index) for index in range(len(inputs))]
        self.assertTrue(any(claimed))
        before = tf.nest.flatten(call(*inputs))
        for index, power in enumerate(claimed):
            if power is None:
                continue
            scaled = [value * SCALE if place == index else value
                      for place, value in enumerate(inputs)]
            for one, other in zip(tf.nest.flatten(call(*scaled)), before):
                np.testing.assert_allclose(one, other * SCALE ** power, rtol=1e-4, atol=1e-6)

    def test_all_are_proved(self):
        """Else a claim of the table is nobody's."""
        self.assertEmpty({*scaling._LINEAR, *scaling._INVERSE} - set(SAMPLES))


if __name__ == "__main__":
    absltest.main()
