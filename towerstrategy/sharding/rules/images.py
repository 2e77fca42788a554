"""Operations on images that are not in :mod:`contractions`: warps, crops, boxes, pooling by argmax.

Goes in: an operation.  Comes out: its plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from towerstrategy.sharding.rules.contractions import rows_first
from towerstrategy.sharding.rules.elementwise import is_plain
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Sharded, Spec


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def warp(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A transform for each image, or one for all."""
    found = {spec for spec in specs[:2] if isinstance(spec, Sharded)}
    if len(found) != 1 or not all(map(is_plain, specs[2:])) or op.rank(1) != 2:
        return None
    (spec,) = found
    if spec.dim or not isinstance(specs[0], Sharded):
        return None
    transforms: Spec = spec if specs[1] == spec else dataclasses.replace(spec, broadcast=True)
    return Plan([spec, transforms, *[REPLICATED] * (len(specs) - 2)], [spec])


@rule("CropAndResize")
def crop(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A tower crops its boxes; of which image, is counted in the whole batch."""
    found = {spec for spec in specs[1:3] if isinstance(spec, Sharded)}
    if len(found) != 1 or not is_plain(specs[0]) or not is_plain(specs[3]):
        return None
    (spec,) = found
    return None if spec.dim else Plan([REPLICATED, spec, spec, REPLICATED], [spec])


@rule("DrawBoundingBoxes", "DrawBoundingBoxesV2", "CombinedNonMaxSuppression")
def boxes(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0, 1], [True] * len(op.outputs))


@rule("ScaleAndTranslate", "ExtractGlimpseV2")
def placed(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0] if op.type == "ScaleAndTranslate" else [0, 2])


@rule("ScaleAndTranslateGrad")
def placed_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0, 1])


@rule("MaxPoolWithArgmax")
def pool_with_places(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Places are counted within an image."""
    return None if op.attr("include_batch_in_index") else rows_first(op, specs, [0])


@rule("MaxPoolGradWithArgmax")
def pool_with_places_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if op.attr("include_batch_in_index"):
        return None
    return rows_first(op, specs, [0, 1, 2])


@rule("MaxPoolGradV2")
def pool_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0, 1, 2])


@rule("Dilation2DBackpropInput")
def dilation_input_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0, 2])


@rule("Dilation2DBackpropFilter")
def dilation_filter_gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return rows_first(op, specs, [0, 2], [False])
