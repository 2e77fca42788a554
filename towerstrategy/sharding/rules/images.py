"""Rules for ops on batches of images: convolutions, pooling, resizing, warps, boxes.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Images are sharded along the
first dimension.  The gradient of a filter is a partial sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from towerstrategy.sharding.rules.dimensions import but, by_names
from towerstrategy.sharding.rules.own_rows import in_own_rows
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Sharded, Size, Spec

# A padding for kernels of CPUs only: oneDNN gives wrong shapes for no rows, or lacks an output.
_PADDED: dict[str, bool | str] = {"Conv2DBackpropInput": False, "Conv2D": "CPU",
                                  "Conv2DBackpropFilter": "CPU"}
# An op type -> the name of each input's first dimension, and of the outputs', see by_names.
_NAMES: dict[str, tuple[str, Sequence[str]]] = {
    **dict.fromkeys((
        "Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D",
        "MaxPoolV2", "MaxPoolWithArgmax", "Dilation2D", "LRN", "ResizeBilinear",
        "ResizeNearestNeighbor", "ResizeNearestNeighborGrad", "ResizeBicubic", "ResizeArea",
        "ScaleAndTranslate", "AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV",
        "SpaceToDepth", "DepthToSpace", "ExtractImagePatches", "ExtractVolumePatches"), ("a", "a")),
    **dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad", "ScaleAndTranslateGrad",
                     "DrawBoundingBoxes", "DrawBoundingBoxesV2", "CombinedNonMaxSuppression"),
                    ("aa", "a")),
    **dict.fromkeys(("ExtractGlimpseV2", "Dilation2DBackpropInput"), ("a_a", "a")),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "Dilation2DBackpropFilter",
                     "DepthwiseConv2dNativeBackpropFilter"), ("a_a", [""])),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPool3DGradGrad",
                     "MaxPoolGradV2", "MaxPoolGradWithArgmax", "LRNGrad"), ("aaa", "a")),
}


@rule(*_NAMES)
def image(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if op.type == "ExtractVolumePatches" and op.out_rank() != op.rank(0):
        return None  # TensorFlow infers a wrong rank for volumes of unknown sizes
    if op.type.endswith("WithArgmax") and op.attr("include_batch_in_index"):
        return None  # the indices count through all images
    if op.rank(0) in (None, 1) or None in map(op.out_rank, range(len(op.outputs))):
        return None  # padding needs the ranks; one pixel's channels are no rows
    return by_names(op, specs, *_NAMES[op.type], SUM, padded=_PADDED.get(op.type, True))


@rule("AdjustContrastv2")
def contrast(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The mean is over height and width, also of one image that has no dimension before them."""
    names = but([-3, -2], op.rank(0))
    return by_names(op, specs, [names], [names], padded=True)


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput",
      "AvgPoolGrad", "AvgPool3DGrad")
def input_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Input 0 is the output's shape: a tower's, or the batch's, with the tower's rows put in."""
    gradient = specs[-1]
    if not isinstance(gradient, Sharded) or gradient.dim or op.rank(-1) is None \
            or op.out_rank() != op.rank(-1):
        return None
    middle: list[Spec] = [REPLICATED] * (len(specs) - 2)
    padded = _PADDED.get(op.type, True)
    shape, length = specs[0], op.inputs[0].shape.num_elements()
    if length == op.rank(-1) - 2:  # neither the batch nor the channels
        shape = REPLICATED
    elif length != op.rank(-1):
        return None
    elif not isinstance(shape, Size) or shape.at or shape.shards(0) != gradient:
        shape = gradient.size
    return Plan([shape, *middle, gradient], [gradient], padded=padded)


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def warp(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """There is one transform for each image, or one for all images."""
    return by_names(op, specs, [range(1), range(1)], [range(1)]) if op.rank(1) == 2 else None


@rule("CropAndResize")
def crop(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower crops its own boxes, from its own images, or from all if boxes may be in any."""
    return in_own_rows(op, specs, 2, 0, [1]) or by_names(op, specs, [None, "a", "a"], ["a"])


@rule("CropAndResizeGradImage", "CropAndResizeGradBoxes")
def crop_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Like :func:`crop`; the gradient of images that other towers may crop is a partial sum."""
    if op.type.endswith("Image"):
        return in_own_rows(op, specs, 2, 3, [0, 1], into=True) or by_names(
            op, specs, "aaa", [""], SUM)
    return in_own_rows(op, specs, 3, 1, [0, 2]) or by_names(op, specs, ["a", None, "a", "a"], ["a"])
