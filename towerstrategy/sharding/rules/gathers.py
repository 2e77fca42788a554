"""Gathers and scatters, and sums of segments.

Goes in: an operation.  Comes out: its plan.  Where all examples have the same indices, or an index
names the row that it is in, each tower scatters its own; rows that are scattered into a replicated
tensor add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.dimensions import DIMS, MIXED, but, by_names
from towerstrategy.sharding.rules.own_rows import in_own_rows
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Partial, Sharded, Size, Spec

EXAMPLES = 32  # of a tower, as their number is not known


def _sends_less(op: Op, given: Spec) -> bool:
    """Whether what a tower's examples have of a table is less than the table."""
    size, shape = op.inputs[0].shape.num_elements(), op.outputs[0].shape
    if size is None or not isinstance(given, Sharded):
        return False
    others = [length for dim, length in enumerate(shape) if dim != given.dim]
    return None in others or size > EXAMPLES * (given.times or 1) * math.prod(others)


@rule("GatherV2")
def gather(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if isinstance(specs[0], Size):
        return shapes.moved_sizes(op, specs)
    ranks, batch = (op.rank(0), op.rank(1)), op.attr("batch_dims")
    axes = op.axes(2, ranks[0])
    if axes is None or None in ranks or batch < 0:
        return None
    own = None if axes[0] or batch else in_own_rows(op, specs, 1, 0)
    if own is not None:
        return own
    front, behind = DIMS[:axes[0]], DIMS[axes[0] + 1:ranks[0]]
    chosen = DIMS.upper()[:ranks[1] - batch]
    plan = by_names(op, specs, [f"{front}{MIXED}{behind}", front[:batch] + chosen],
                    [front + chosen + behind], gathers=True)
    if plan is not None and plan.takes[0] == REPLICATED and _sends_less(op, plan.gives[0]):
        plan.near = 0
    return plan


@rule("GatherNd", "ResourceGatherNd")
def gather_nd(op: Op, specs: Sequence[Spec]) -> Plan | None:
    names = but([-1], op.rank(1), "")
    return in_own_rows(op, specs, 1, 0, column=0) or by_names(op, specs, [None, names], [names])


@rule("LookupTableFind", "LookupTableFindV2", "ResourceGather")
def lookup(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each tower asks the one table."""
    if op.type == "ResourceGather" and op.attr("batch_dims"):
        return None
    return by_names(op, specs, [None, DIMS], [DIMS])


@rule("LowerBound", "UpperBound")
def search_sorted(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each value for itself, among the sorted numbers of its row."""
    return by_names(op, specs, [f"a{MIXED}", "ab"], ["ab"])


@rule("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd", "SegmentSumV2",
      "SegmentMaxV2", "SegmentMinV2", "SegmentProdV2", "SparseSegmentSum", "SparseSegmentMean",
      "SparseSegmentSqrtN")
def sorted_segments(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Sums over the first dimension: each row for itself in another."""
    return by_names(op, specs, [MIXED + DIMS], [MIXED + DIMS])


@rule("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin",
      "UnsortedSegmentProd")
def unsorted_segment(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Of rows behind the segments each is for itself."""
    rank = op.rank(1)
    reduction = {"Sum": "sum", "Max": "max", "Min": "min"}.get(op.type[len("UnsortedSegment"):])
    own = in_own_rows(op, specs, 1, 2, [0], into=True)
    return own if own is not None or rank is None else by_names(
        op, specs, [DIMS, DIMS[:rank]], [MIXED + DIMS[rank:]],
        Partial(reduction) if reduction else None)


@rule("ScatterNd")
def scatter_nd(op: Op, specs: Sequence[Spec]) -> Plan | None:
    truth = op.inputs[1].dtype.is_bool  # of entries with the same indices: whether any is true
    names = but([-1], op.rank(0), "")
    return in_own_rows(op, specs, 0, 2, [1], column=0, into=True) or by_names(
        op, specs, [names, names], [""], Partial("or") if truth else SUM)


@rule("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMax",
      "TensorScatterMin")
def into_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Of the dimensions that indices name none is the rows', or the first, by their own number."""
    own = in_own_rows(op, specs, 1, 0, [2], column=0, into=True)
    ranks = op.rank(0), op.rank(2)
    if own is not None:
        return own
    named = op.inputs[1].shape[-1] if op.rank(1) else None
    if None in ranks or named is None:
        return None
    rest = DIMS[:ranks[0] - named]  # the last dimensions of updates, too
    into, updates = (rest.rjust(rank, MIXED) for rank in ranks)
    return by_names(op, specs, [into, None, updates], [into], padded=True)


@rule("XlaDynamicUpdateSlice")
def update_slice(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Of as many rows, as in a cache of keys: what is put where it fits begins at the first."""
    return by_names(op, specs, [DIMS, DIMS], [DIMS]) if specs[0] == specs[1] else None


@rule("DenseBincount")
def bincount(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """How many there are of each number, in all rows or in each."""
    rank, shape = op.rank(0), op.inputs[2].shape
    unweighted = shape.rank == 1 and shape[0] == 0
    if rank == 1 and op.attr("binary_output") or not unweighted and (
            shape.rank != rank or rank == 1 and not isinstance(specs[2], Sharded)):
        return None
    return by_names(op, specs, ["a", None, None if unweighted else "a"],
                    ["a" if rank == 2 else ""], SUM if rank == 1 else None)
