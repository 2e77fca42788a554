"""Reductions: over the rows they give a part of the result on each tower.

Goes in: an operation.  Comes out: its plan.  A mean over rows is a tower's sum over the batch's
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.elementwise import aligned, is_plain, one_sharded
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Axes, Partial, Sharded, Size, Spec

_PARTS = {"Sum": "sum", "Max": "max", "Min": "min", "All": "and", "Any": "or"}


def _remaining(spec: Sharded, axes: Sequence[int], keep: bool) -> Sharded:
    """Where the rows are when these axes, not among them the rows', are reduced."""
    return spec if keep else spec.at(spec.dim - sum(axis < spec.dim for axis in axes))


def _by_axes(spec: Sharded, axes: Axes, keep: bool) -> Spec | None:
    """Where the rows are when a gradient is summed over the axes of a broadcast."""
    reduced = axes.reduced
    if spec.dim >= len(reduced) or reduced[spec.dim] is None:
        return None
    if reduced[spec.dim]:
        return SUM
    if keep:
        return spec
    if None in reduced[:spec.dim]:
        return None
    return spec.at(spec.dim - sum(map(bool, reduced[:spec.dim])))


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def reduction(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, keep = specs[0], op.attr("keep_dims")
    if isinstance(spec, Size):
        return shapes.product_of_size(op, specs) if op.type == "Prod" else None
    if isinstance(spec, Partial):
        return Plan([spec, REPLICATED], [SUM]) if op.type == "Sum" and spec == SUM else None
    if not isinstance(spec, Sharded):
        return None
    takes: list[Spec] = [spec, REPLICATED]
    if isinstance(specs[1], Axes):
        gives = _by_axes(spec, specs[1], keep) if op.type == "Sum" else None
        return None if gives is None else Plan(takes, [gives])
    axes = op.axes(1, op.rank(0))
    if axes is None:
        return None
    if spec.dim not in axes:
        return Plan(takes, [_remaining(spec, axes, keep)])
    if op.type in _PARTS:
        return Plan(takes, [Partial(_PARTS[op.type])])
    if op.type == "Mean" and op.inputs[0].dtype.is_floating:
        return Plan(takes, [SUM], make=lambda m: _mean(m, spec, axes, keep), alone=-1)
    return None


def _mean(m: Any, spec: Sharded, axes: Sequence[int], keep: bool) -> list[list[Any]]:
    """Means over all other axes, summed over the tower's rows, over the batch's number of rows."""
    dtype = m.op.inputs[0].dtype
    half = dtype in (tf.float16, tf.bfloat16)
    count = m.rows(0, tf.float32) if half else m.rows(0, dtype)
    scale = m.make("Reciprocal", [count], None)

    def one(tower: int) -> Any:
        value = m.part(0, tower)
        if half:  # a count above 2048 is no float16, nor is a long sum
            value = m.make("Cast", [value], tower, DstT=tf.float32)
        others = [axis for axis in axes if axis != spec.dim]
        if others:
            value = m.make("Mean", [value, m.constant(others, tf.int32, tower)], tower,
                           keep_dims=True)
        total = m.make("Sum", [value, m.constant(sorted(set(axes)), tf.int32, tower)], tower,
                       keep_dims=keep)
        mean = m.make("Mul", [total, scale], tower)
        return m.make("Cast", [mean], tower, DstT=dtype) if half else mean

    return [m.each(one)]


@rule("ArgMax", "ArgMin")
def arg_reduction(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, axes = specs[0], op.axes(1, op.rank(0))
    if not isinstance(spec, Sharded) or axes is None or spec.dim in axes:
        return None
    return Plan([spec, REPLICATED], [_remaining(spec, axes, False)])


@rule("L2Loss")
def l2_loss(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return Plan(specs, [SUM]) if isinstance(specs[0], Sharded) else None


@rule("BiasAddGrad")
def bias_add_grad(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, rank = specs[0], op.rank(0)
    if spec == SUM:
        return Plan(specs, [SUM])
    channel = 1 if op.attr("data_format") == "NCHW" else None if rank is None else rank - 1
    if not isinstance(spec, Sharded) or spec.dim == channel or channel is None:
        return None
    return Plan(specs, [SUM])


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def along_an_axis(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Along other axes than the rows' only."""
    spec, axes = specs[0], op.axes(2 if op.type == "Roll" else 1, op.rank(0))
    if not isinstance(spec, Sharded) or axes is None or spec.dim in axes:
        return None
    return Plan([spec, *[REPLICATED] * (len(specs) - 1)], [spec])


@rule("ReverseSequence")
def reverse_sequence(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each sequence for itself, with its length."""
    spec, lengths = specs
    batch, along = op.attr("batch_dim"), op.attr("seq_dim")
    if isinstance(lengths, Sharded):
        rows = lengths.at(batch)
        return None if isinstance(spec, Sharded) and spec != rows else Plan([rows, lengths], [rows])
    if not isinstance(spec, Sharded) or spec.dim == along or not is_plain(lengths):
        return None
    return Plan([spec, spec.at(0) if spec.dim == batch else REPLICATED], [spec])


@rule("Softmax", "LogSoftmax", "TopKV2", "InTopKV2", "NthElement")
def along_the_last_axis(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, rank = specs[0], op.rank(0)
    if op.type == "InTopKV2":
        first = next((s for s in specs if isinstance(s, Sharded)), None)
        if first is None or first.dim:
            return None
        return Plan([first, first, REPLICATED], [first])
    if not isinstance(spec, Sharded) or rank is None or spec.dim == rank - 1:
        return None
    return Plan([spec, *[REPLICATED] * (len(specs) - 1)], [spec] * len(op.outputs))


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Logits and labels are broadcast against each other, sparse labels are not."""
    if op.type == "SoftmaxCrossEntropyWithLogits":
        found = aligned(op, specs, 2)
        if found is None or found[1].dim:
            return None
        return Plan(found[0], [found[1], found[1]])
    spec = one_sharded(specs)
    if spec is None:
        return None
    return None if spec.dim else Plan([spec, spec], [spec, spec])
