"""How the outputs of an op scale with one of its inputs: the degree of homogeneity.

Goes in: an op and the index of an input.  Comes out: the power p such that this input times c
makes the outputs times c ** p; None if there is none.  ``tests/sharding/scaling_test.py`` proves
the table.  :func:`plan_of_parts` applies linear ops to the parts of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from towerstrategy.sharding.rules.registry import Op, Plan, plan_of
from towerstrategy.sharding.spec import REPLICATED, SUM, Replicated, Spec

# An op type -> the inputs of degree 1: linear in each of them while the others stay the same.
_LINEAR: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Mul", "MulNoNan", "MatMul", "BatchMatMul", "BatchMatMulV2",
                     "BatchMatMulV3", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative",
                     "Cross"), (0, 1)),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2",
                     "DepthwiseConv2dNativeBackpropInput"), (1, 2)),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2",
                     "DepthwiseConv2dNativeBackpropFilter"), (0, 2)),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan", "Xdivy", "ReluGrad", "Relu6Grad", "EluGrad",
                     "SeluGrad", "LeakyReluGrad", "SoftplusGrad", "SoftsignGrad", "Mean", "Sum",
                     "BiasAddGrad", "Relu", "LeakyRelu", "Abs", "AvgPool", "MaxPool", "Cumsum",
                     "GatherV2", "GatherNd", "UnsortedSegmentSum", "SegmentSum", "StridedSlice",
                     "Slice", "Pad", "Reshape", "Transpose", "BroadcastTo", "Tile", "ExpandDims",
                     "Squeeze", "Identity", "Neg", "StopGradient", "Cast", "ReverseV2", "Roll",
                     "AdjustContrastv2", "AvgPool3D", "BatchToSpaceND", "CheckNumerics",
                     "CheckNumericsV2", "DepthToSpace", "EnsureShape",
                     "ExtractImagePatches", "ExtractVolumePatches", "FFT", "FFT2D", "FFT3D",
                     "FakeQuantWithMinMaxArgsGradient", "FakeQuantWithMinMaxVarsGradient",
                     "FakeQuantWithMinMaxVarsPerChannelGradient", "FusedBatchNormGrad",
                     "FusedBatchNormGradV2", "IFFT", "IFFT2D", "IFFT3D", "IRFFT", "IRFFT2D",
                     "IRFFT3D", "ImageProjectiveTransformV2",
                     "LRNGrad", "MatrixBandPart", "MatrixDiag", "MatrixDiagPart", "MirrorPad",
                     "MirrorPadGrad", "RFFT", "RFFT2D", "RFFT3D", "ResizeArea",
                     "ResizeBicubic", "ResizeBicubicGrad", "ResizeBilinear",
                     "ResizeBilinearGrad", "ResizeNearestNeighbor", "ResizeNearestNeighborGrad",
                     "ReverseSequence", "ScaleAndTranslate", "ScaleAndTranslateGrad",
                     "SegmentMean", "SpaceToBatchND", "SpaceToDepth", "SparseSegmentMean",
                     "SparseSegmentSqrtN", "SparseSegmentSum", "Xlog1py", "Xlogy"), (0,)),
    **dict.fromkeys(("SigmoidGrad", "TanhGrad", "SqrtGrad", "RsqrtGrad", "AvgPoolGrad",
                     "ScatterNd", "AvgPool3DGrad", "CholeskyGrad", "InvGrad", "MatrixSolve",
                     "MatrixSolveLs", "MatrixTriangularSolve", "MaxPoolGradWithArgmax",
                     "ReciprocalGrad", "TridiagonalSolve"), (1,)),
    **dict.fromkeys(("MaxPoolGrad", "MaxPoolGradV2", "MaxPoolGradGrad", "MaxPool3DGrad",
                     "MaxPool3DGradGrad", "Dilation2DBackpropFilter",
                     "Dilation2DBackpropInput"), (2,)),
    "SparseTensorDenseMatMul": (1, 3),
    "TridiagonalMatMul": (3,),
    "StridedSliceGrad": (4,),
    "FusedBatchNormGradV3": (0,),
}
_INVERSE: dict[str, int] = {"RealDiv": 1, "Div": 1, "DivNoNan": 1, "Xdivy": 1, "Reciprocal": 0}
# Ops that add up, concatenate or choose among their inputs: linear in all of them together.
ADDITIVE = frozenset({"AddN", "AddV2", "Add", "Sub", "ConcatV2", "Pack", "Select", "SelectV2",
                      "Complex", "MatrixDiagV2", "MatrixDiagV3", "MatrixDiagPartV2",
                      "MatrixDiagPartV3", "MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3",
                      "TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub"})
# Homogeneous ops that are not linear: f(x + y) is not f(x) + f(y).
_NOT_ADDITIVE = frozenset({"Abs", "Relu", "LeakyRelu", "MaxPool"})
# Linear inputs that, if zero, give zero whatever the factor: parts that add up to zero do not.
_ABSORBING = frozenset({("Xdivy", 0), ("Xlogy", 0), ("Xlog1py", 0), ("MulNoNan", 1)})


# An op type -> the input that makes the output zero if it is zero.
_ZERO_INPUT = {"Fill": 1, "BroadcastTo": 0, "Cast": 0, "SelectV2": 1, "Identity": 0,
               "OptionalGetValue": 0}


def is_zero(tensor: tf.Tensor) -> bool:
    """Whether a tensor is known to be zero, so that it may also be a part of a sum."""
    operation = tensor.op
    if operation.type == "ZerosLike":
        return True
    if operation.type in _ZERO_INPUT and _keeps_zero(operation, _ZERO_INPUT[operation.type]):
        return is_zero(operation.inputs[_ZERO_INPUT[operation.type]])
    value = tf.get_static_value(tensor)
    return value is not None and value.dtype.kind in "fc" and not value.any()


def _keeps_zero(operation: tf.Operation, index: int) -> bool:
    return _ZERO_INPUT.get(operation.type) == index and (
        operation.type != "SelectV2" or _is_true(operation.inputs[0].op))


def zero_stays(operation: tf.Operation, index: int) -> bool:
    """Whether the outputs are zero if input ``index`` is."""
    return is_linear(operation, index) or _keeps_zero(operation, index)


def _is_true(operation: tf.Operation) -> bool:
    """Whether an op compares a tensor without NaNs with itself, as ``tf.recompute_grad`` does."""
    if operation.type != "Equal":
        return False
    first, second = operation.inputs
    return first.name == second.name and not is_number(first)


def is_number(tensor: tf.Tensor) -> bool:
    """Whether a tensor can be a part of a sum: it is neither an index nor a condition."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def is_linear(operation: tf.Operation, index: int) -> bool:
    """Whether parts of a sum, as input ``index``, make parts of the outputs' sums."""
    return operation.type not in _NOT_ADDITIVE and degree(operation, index) == 1


def is_linear_in(operation: tf.Operation, indices: Sequence[int]) -> bool:
    """Whether the outputs are linear in these inputs together, while the others stay the same."""
    return operation.type in ADDITIVE or len(indices) == 1 and is_linear(operation, indices[0])


def degree(operation: tf.Operation, index: int) -> int | None:
    """The power to which input ``index`` scales the outputs; None if there is none."""
    if _INVERSE.get(operation.type) == index:
        return -1
    if index in _LINEAR.get(operation.type, ()):  # integers are rounded
        return 1 if is_number(operation.outputs[0]) else None
    specs = [REPLICATED] * len(operation.inputs)
    plan = plan_of(Op(operation), [*specs[:index], SUM, *specs[index + 1:]])
    linear = plan is not None and all(spec == SUM for spec in plan.gives)
    return 1 if linear else None


def plan_of_parts(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The plan in which each tower applies a linear op to its parts of sums; None if there is none.

    Outside of loops it is cheaper to add up the parts first. In a loop, the towers would have to do
    so in each iteration.
    """
    sums = [index for index, spec in enumerate(specs) if spec == SUM]
    if not sums or not all(spec == SUM or isinstance(spec, Replicated) for spec in specs) \
            or not all(map(is_number, (*op.outputs, *map(op.inputs.__getitem__, sums)))):
        return None
    takes = [SUM if spec == SUM else REPLICATED for spec in specs]
    if op.type in ADDITIVE:
        takes = [SUM if is_number(tensor) else REPLICATED for tensor in op.inputs]
    elif len(sums) > 1 or (op.type, sums[0]) in _ABSORBING \
            or not is_linear(op.operation, sums[0]) \
            or op.outputs[0].dtype.real_dtype.size < op.inputs[sums[0]].dtype.real_dtype.size:
        return None
    return Plan(takes, [SUM] * len(op.outputs))
