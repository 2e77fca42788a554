"""Operations on images, which have the rows first: convolutions, pooling, sizes, warps, boxes.

Goes in: an operation.  Comes out: its plan.  A filter's gradient is a part of a sum on each tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import by_names
from towerstrategy.sharding.rules.own_rows import in_own_rows
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Sharded, Size, Spec

# An operation's type -> which of its inputs have rows.
_ROWS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys((
        "Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D",
        "MaxPoolV2", "MaxPoolWithArgmax", "Dilation2D", "LRN", "ResizeBilinear",
        "ResizeNearestNeighbor", "ResizeNearestNeighborGrad", "ResizeBicubic", "ResizeArea",
        "ScaleAndTranslate", "AdjustContrastv2", "AdjustHue", "AdjustSaturation", "HSVToRGB",
        "RGBToHSV", "SpaceToDepth", "DepthToSpace", "ExtractImagePatches",
        "ExtractVolumePatches"), (0,)),
    **dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad", "ScaleAndTranslateGrad",
                     "DrawBoundingBoxes", "DrawBoundingBoxesV2", "CombinedNonMaxSuppression"),
                    (0, 1)),
    **dict.fromkeys(("ExtractGlimpseV2", "Dilation2DBackpropInput"), (0, 2)),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPool3DGradGrad",
                     "MaxPoolGradV2", "MaxPoolGradWithArgmax", "LRNGrad"), (0, 1, 2)),
}


@rule(*_ROWS)
def image(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if op.type == "ExtractVolumePatches" and op.out_rank() != op.rank(0):
        return None  # of volumes of unknown sizes TensorFlow says a wrong rank
    if op.type.endswith("WithArgmax") and op.attr("include_batch_in_index"):
        return None  # places are counted through all images
    return _rows_first(op, specs, _ROWS[op.type], "a")


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter",
      "Dilation2DBackpropFilter")
def filter_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return _rows_first(op, specs, (0, 2), "")


def _rows_first(op: Op, specs: Sequence[Spec], data: Sequence[int], out: str) -> Plan | None:
    """The inputs ``data`` have the rows first, all else is the same for all."""
    if op.rank(data[0]) is None or any(op.out_rank(at) is None for at in range(len(op.outputs))):
        return None  # a row of padding needs them
    names = ["a" if index in data else None for index in range(len(specs))]
    return by_names(op, specs, names, [out], SUM, padded=True)


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput",
      "AvgPoolGrad", "AvgPool3DGrad")
def input_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The first input is the shape of the result: the tower's, or with the tower's rows put in."""
    gradient = specs[-1]
    if not isinstance(gradient, Sharded) or gradient.dim or op.rank(-1) is None \
            or op.out_rank() != op.rank(-1):
        return None
    middle: list[Spec] = [REPLICATED] * (len(specs) - 2)
    padded = op.type != "Conv2DBackpropInput"  # whose kernels look first whether there is anything
    if isinstance(specs[0], Size) and specs[0].at == 0 and specs[0].shards(0) == gradient \
            and op.inputs[0].shape.is_fully_defined():
        return Plan([specs[0], *middle, gradient], [gradient], padded=padded)
    return Plan([REPLICATED, *middle, gradient], [gradient], make=_with_own_rows, alone=0,
                padded=padded)


def _with_own_rows(m: Any) -> list[list[Any]]:
    last = len(m.op.inputs) - 1
    dtype = m.op.inputs[0].dtype
    own = m.make("Shape", [m.parts(last)], EACH, out_type=dtype)
    first, rest = (m.constant([place], dtype, EACH) for place in (0, 1))
    rows = m.make("Slice", [own, first, rest], EACH)
    size = m.make("Slice", [m.parts(0), rest, m.constant([-1], dtype, EACH)], EACH)
    shape = m.make("ConcatV2", [rows, size, m.constant(0, tf.int32, EACH)], EACH)
    made: list[list[Any]] = m.copy([shape, *map(m.parts, range(1, last + 1))], EACH)
    return made


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def warp(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A transform for each image, or one for all."""
    return by_names(op, specs, [range(1), range(1)], [range(1)]) if op.rank(1) == 2 else None


@rule("CropAndResize")
def crop(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A tower crops its boxes: of its own images, or of any, which are counted in the batch."""
    return in_own_rows(op, specs, 2, 0, [1]) or by_names(op, specs, [None, "a", "a"], ["a"])


@rule("CropAndResizeGradImage", "CropAndResizeGradBoxes")
def crop_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Likewise."""
    if op.type.endswith("Image"):
        return in_own_rows(op, specs, 2, 3, [0, 1], into=True) or by_names(
            op, specs, "aaa", [""], SUM)
    return in_own_rows(op, specs, 3, 1, [0, 2]) or by_names(op, specs, ["a", None, "a", "a"], ["a"])
