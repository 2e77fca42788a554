"""Rules for gathers, scatters and segment reductions.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Where all examples have the same
indices, or each index names its own row, a tower handles its own rows.  Rows that are scattered
into a replicated tensor make a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.cut import cut
from towerstrategy.sharding.rules.dimensions import DIMS, MIXED, but, by_names
from towerstrategy.sharding.rules.own_rows import batch_dims, in_own_rows
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Partial, Sharded, Size, Spec

EXAMPLES = 32  # a guess of how many rows a tower has, which is not known


def _output_is_smaller(op: Op, output: Spec) -> bool:
    """Whether a tower's part of the output probably has fewer entries than the table."""
    size, shape = op.inputs[0].shape.num_elements(), op.outputs[0].shape
    if size is None or not isinstance(output, Sharded):
        return False
    others = [length for dim, length in enumerate(shape) if dim != output.dim]
    return None in others or size > EXAMPLES * (output.times or 1) * math.prod(others)


@rule("GatherV2")
def gather(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if isinstance(specs[0], Size):
        return shapes.computed_sizes(op, specs)
    ranks, batch = (op.rank(0), op.rank(1)), batch_dims(op)
    axes = op.axes(2, ranks[0])
    if axes is None or None in ranks or batch is None:
        return None
    own_rows = None if axes[0] or batch else in_own_rows(op, specs, 1, 0)
    if own_rows is not None:
        return own_rows
    front, behind = DIMS[:axes[0]], DIMS[axes[0] + 1:ranks[0]]
    chosen = DIMS.upper()[:ranks[1] - batch]
    plan = by_names(op, specs, [f"{front}{MIXED}{behind}", front[:batch] + chosen],
                    [front + chosen + behind], gathers=True)
    if plan is not None and plan.takes[0] == REPLICATED and _output_is_smaller(op, plan.gives[0]):
        plan.near = 0
    return plan


@rule("GatherNd", "ResourceGatherNd")
def gather_nd(op: Op, specs: Sequence[Spec]) -> Plan | None:
    names = but([-1], op.rank(1), "")
    return in_own_rows(op, specs, 1, 0, column=0) or by_names(op, specs, [None, names], [names])


@rule("LookupTableFind", "LookupTableFindV2", "ResourceGather")
def lookup(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower looks its rows up in the one table."""
    if op.type == "ResourceGather" and op.attr("batch_dims"):
        return None
    return by_names(op, specs, [None, DIMS], [DIMS])


@rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd", "SegmentSumV2",
      "SegmentMaxV2", "SegmentMinV2", "SegmentProdV2", "SparseSegmentSum", "SparseSegmentMean",
      "SparseSegmentSqrtN")
def sorted_segments(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Reductions over the first dimension; another dimension may have the rows."""
    return by_names(op, specs, [MIXED + DIMS], [MIXED + DIMS])


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin",
      "UnsortedSegmentProd")
def unsorted_segment(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Rows in a dimension with segment numbers are reduced; rows in a later one stay apart."""
    rank = op.rank(1)
    reduction = {"Sum": "sum", "Max": "max", "Min": "min"}.get(op.type[len("UnsortedSegment"):])
    plan = in_own_rows(op, specs, 1, 2, [0], into=True)
    if plan is None and rank is not None:
        plan = by_names(op, specs, [DIMS, DIMS[:rank]], [MIXED + DIMS[rank:]],
                        Partial(reduction) if reduction else None)
    return plan or cut(op, specs, 2)


@rule("ScatterNd")
def scatter_nd(op: Op, specs: Sequence[Spec]) -> Plan | None:
    dtype = op.inputs[1].dtype  # entries with the same indices are added, or combined by "or"
    parts = None if dtype == tf.string else Partial("or") if dtype.is_bool else SUM
    names = but([-1], op.rank(0), "")
    return in_own_rows(op, specs, 0, 2, [1], column=0, into=True) or by_names(
        op, specs, [names, names], [""], parts) or cut(op, specs, 2)


@rule("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMax",
      "TensorScatterMin")
def into_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """The indices name their own rows in the first dimension, or name no sharded dimension."""
    own_rows = in_own_rows(op, specs, 1, 0, [2], column=0, into=True)
    ranks = op.rank(0), op.rank(2)
    if own_rows is not None:
        return own_rows
    indexed = op.inputs[1].shape[-1] if op.rank(1) else None
    if None in ranks or indexed is None:
        return None
    rest = DIMS[:ranks[0] - indexed]  # the last dimensions, of the tensor and of the updates
    into, updates = (rest.rjust(rank, MIXED) for rank in ranks)
    return by_names(op, specs, [into, None, updates], [into], padded=True)


@rule("XlaDynamicUpdateSlice")
def update_slice(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """An update of all rows, as in a cache of keys: it fits only if it begins at the first row."""
    fits = specs[0] == specs[1] and getattr(specs[0], "times", None)
    return by_names(op, specs, [DIMS, DIMS], [DIMS]) if fits else None


@rule("DenseBincount")
def bincount(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Counts over all rows are partial sums; counts for each row are sharded."""
    rank, shape = op.rank(0), op.inputs[2].shape
    unweighted = shape.rank == 1 and shape[0] == 0
    if rank == 1 and op.attr("binary_output") or not unweighted and (
            shape.rank != rank or rank == 1 and not isinstance(specs[2], Sharded)):
        return None
    return by_names(op, specs, ["a", None, None if unweighted else "a"],
                    ["a" if rank == 2 else ""], SUM if rank == 1 else None)
