"""Gathers and scatters, and sums of segments.

Goes in: an operation.  Comes out: its plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.elementwise import is_plain, one_sharded
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Partial, Sharded, Size, Spec

EXAMPLES = 32  # of a tower, as their number is not known


def _is_larger(table: tf.TensorShape, entries: tf.TensorShape, spec: Sharded) -> bool:
    """Whether sending a table costs more than what a tower's examples have of it."""
    size = table.num_elements() if table.rank is not None else None
    others = [length for dim, length in enumerate(entries) if dim != spec.dim]
    return size is not None and (
        None in others or size > EXAMPLES * (spec.times or 1) * math.prod(others))


@rule("GatherV2")
def gather(op: Op, specs: Sequence[Spec]) -> Plan | None:
    values, indices = specs[0], specs[1]
    ranks, batch = (op.rank(0), op.rank(1)), op.attr("batch_dims")
    axes = op.axes(2, ranks[0])
    if isinstance(values, Size):
        return shapes.moved(op, specs)
    if axes is None or None in ranks or batch < 0:
        return None
    axis = axes[0]
    if isinstance(values, Sharded) and isinstance(indices, Sharded):
        if batch and values.dim < batch and values == indices:
            return Plan([values, indices, REPLICATED], [values])
        return None
    if isinstance(indices, Sharded) and is_plain(values):
        if indices.dim < batch:
            return Plan([indices, indices, REPLICATED], [indices])
        given = indices.at(axis - batch + indices.dim)
        larger = _is_larger(op.inputs[0].shape, op.outputs[0].shape, given)
        return Plan([REPLICATED, indices, REPLICATED], [given], near=0 if larger else None)
    if isinstance(values, Sharded) and is_plain(indices) and axis != values.dim:
        if values.dim < batch:
            return Plan([values, values, REPLICATED], [values])
        moved = values.dim if values.dim < axis else values.dim + ranks[1] - batch - 1
        return Plan([values, REPLICATED, REPLICATED], [values.at(moved)])
    return None


@rule("GatherNd", "ResourceGatherNd")
def gather_nd(op: Op, specs: Sequence[Spec]) -> Plan | None:
    values, indices = specs
    if is_plain(values) and isinstance(indices, Sharded) and op.rank(1) is not None \
            and indices.dim < op.rank(1) - 1:
        return Plan([REPLICATED, indices], [indices])
    return None


@rule("LookupTableFind", "LookupTableFindV2")
def lookup(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower asks the one table."""
    keys = specs[1]
    if not isinstance(keys, Sharded) or not is_plain(specs[2]):
        return None
    return Plan([REPLICATED, keys, REPLICATED], [keys])


@rule("ResourceGather")
def resource_gather(op: Op, specs: Sequence[Spec]) -> Plan | None:
    indices = specs[1]
    if not isinstance(indices, Sharded) or op.attr("batch_dims"):
        return None
    return Plan([REPLICATED, indices], [indices])


@rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd", "SegmentSumV2",
      "SegmentMaxV2", "SegmentMinV2", "SegmentProdV2", "SparseSegmentSum", "SparseSegmentMean",
      "SparseSegmentSqrtN")
def sorted_segments(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Sums over the first dimension: each row for itself in another."""
    spec = specs[0]
    if not isinstance(spec, Sharded) or not spec.dim or not all(map(is_plain, specs[1:])):
        return None
    return Plan([spec, *[REPLICATED] * (len(specs) - 1)], [spec])


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin",
      "UnsortedSegmentProd")
def unsorted_segment(op: Op, specs: Sequence[Spec]) -> Plan | None:
    data, segments = specs[0], specs[1]
    spec = one_sharded((data, segments))
    if spec is None or not is_plain(specs[2]) or op.rank(1) is None:
        return None
    rank = op.rank(1)
    if spec.dim >= rank:  # behind the segments, each row for itself
        return Plan([spec, REPLICATED, REPLICATED], [spec.at(spec.dim - rank + 1)])
    reduction = {"Sum": "sum", "Max": "max", "Min": "min"}.get(op.type[len("UnsortedSegment"):])
    return Plan([spec, spec, REPLICATED], [Partial(reduction)]) if reduction else None


@rule("ScatterNd")
def scatter_nd(op: Op, specs: Sequence[Spec]) -> Plan | None:
    indices, updates = specs[0], specs[1]
    spec = one_sharded((indices, updates))
    if spec is None or not is_plain(specs[2]) or op.rank(0) is None:
        return None
    if spec.dim >= op.rank(0) - 1:
        return None
    truth = op.inputs[1].dtype.is_bool  # of entries with the same indices: whether any is true
    return Plan([spec, spec, REPLICATED], [Partial("or") if truth else SUM])


def _counted(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """How many there are of each number, in all rows."""
    if op.attr("binary_output") or not is_plain(specs[1]):
        return None
    if op.inputs[2].shape.rank != 1:
        return None
    if op.inputs[2].shape[0] == 0:
        return Plan([specs[0], REPLICATED, REPLICATED], [SUM])
    return Plan([specs[0], REPLICATED, specs[0]], [SUM]) if specs[2] == specs[0] else None


@rule("Bincount", "DenseBincount")
def bincount(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if op.type != "DenseBincount" or not isinstance(spec, Sharded) or not is_plain(specs[1]):
        return None
    if op.rank(0) == 1:
        return _counted(op, specs)
    shape = op.inputs[2].shape  # that of what is counted, or there are none
    if spec.dim or op.rank(0) != 2 or shape.rank is None or shape.rank == 1 and shape[0] != 0:
        return None
    return Plan([spec, REPLICATED, spec if shape.rank == 2 else REPLICATED], [spec])
