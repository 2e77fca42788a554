"""Rules for reductions: over the rows they make partial results.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  A mean over rows is a partial
sum: each tower divides the sum over its rows by the batch's number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.dimensions import DIMS, MIXED, but, by_names, once_and_cut
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    SUM,
    Axes,
    Partial,
    Sharded,
    Size,
    Sizes,
    Spec,
    can_be_cut,
)

_PARTIAL = {"Sum": "sum", "Max": "max", "Min": "min", "All": "and", "Any": "or"}


def _reduced(op: Op, axes: Spec) -> Sequence[bool | None] | None:
    """For each dimension, whether it is reduced, or None; None if nothing is known."""
    if isinstance(axes, Axes):
        return axes.reduced
    values, rank = entries_of(op.inputs[1]), op.rank(0)
    if values is None or None in values or rank is None:
        return None
    known = {axis % max(rank, 1) for axis in values.flat}
    return [dim in known for dim in range(rank)]


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def reduction(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, keep = specs[0], op.attr("keep_dims")
    if isinstance(spec, Sizes) and op.type in ("Max", "Min"):
        return shapes.extreme_of_sizes(op, spec)
    if isinstance(spec, Size):
        plan = shapes.computed_sizes(op, specs)
        of_all = op.type == "Prod" and op.rank(0) == 1 and op.out_rank() == 0  # unknown numbers
        return Plan([spec, REPLICATED], [Size(0, None, spec.group)]) \
            if plan is None and of_all else plan
    reduced = _reduced(op, specs[1])
    # The gradient of a broadcast is a sum over its axes; without axes it changes nothing.
    passes = op.type == "Sum" and reduced is not None and all(each is False for each in reduced)
    if isinstance(spec, Partial):
        return Plan([spec, REPLICATED], [SUM], passes=passes) \
            if op.type == "Sum" and spec == SUM else None
    if not isinstance(spec, Sharded) or reduced is None \
            or isinstance(specs[1], Axes) and op.type != "Sum":
        return None
    if isinstance(specs[1], Axes) and op.rank(0) is not None:  # of the dimensions in front
        reduced = [*reduced, *[False] * (op.rank(0) - len(reduced))]
    if None in reduced:
        if not keep:  # the dimensions behind the first unknown one may move
            reduced = reduced[:reduced.index(None)]
    elif op.rank(0) == len(reduced) and (op.out_rank() is None or isinstance(specs[1], Axes)):
        op.outputs[0].set_shape([  # TensorFlow does not know the axes
            1 if each else size for size, each in zip(op.inputs[0].shape, reduced)
            if keep or not each])
    put = MIXED if keep else ""
    if op.type == "Mean" and op.inputs[0].dtype.is_floating and reduced[spec.dim]:
        axes = [dim for dim, each in enumerate(reduced) if each]
        return Plan([spec, REPLICATED], [SUM], make=lambda m: _make_mean(m, spec, axes, keep),
                    alone=-1)
    plan = by_names(op, specs, ["".join(MIXED if each is None else DIMS[dim]
                                        for dim, each in enumerate(reduced))], [
        "".join(put if each else DIMS[dim] for dim, each in enumerate(reduced))],
        Partial(_PARTIAL[op.type]) if op.type in _PARTIAL else None)
    return plan and dataclasses.replace(plan, passes=passes)


def _make_mean(m: Any, spec: Sharded, axes: Sequence[int], keep: bool) -> list[list[Any]]:
    """Makes the mean over all other axes, summed over the tower's rows, over the batch's rows.

    Of rows that a mask chose the sum comes first: XLA cannot compile the mean over one such row.
    """
    dtype = m.op.inputs[0].dtype
    half = dtype in (tf.float16, tf.bfloat16)
    scale = m.make("Reciprocal", [m.rows(0, tf.float32 if half else dtype)], None)
    value, others = m.parts(0), [axis for axis in axes if axis != spec.dim]
    if half:  # a float16 cannot hold a count above 2048, or a long sum
        value = m.make("Cast", [value], EACH, DstT=tf.float32)
    first, second, over = ("Mean", "Sum", others) if can_be_cut(spec) else (
        "Sum", "Mean", [spec.dim])
    if others:
        value = m.make(first, [value, m.constant(over, tf.int32, EACH)], EACH, keep_dims=True)
    total = m.make(second if others else "Sum", [value, m.constant(axes, tf.int32, EACH)], EACH,
                   keep_dims=keep)
    mean = m.make("Mul", [total, scale], EACH)
    return [m.make("Cast", [mean], EACH, DstT=dtype) if half else mean]


@rule("ArgMax", "ArgMin")
def arg_reduction(op: Op, specs: Sequence[Spec]) -> Plan | None:
    rank = op.rank(0)
    axes = op.axes(1, rank)
    return by_names(op, specs, [but(axes, rank)], [but(axes, rank, "")])


@rule("L2Loss")
def l2_loss(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return by_names(op, specs, [DIMS], [""], SUM)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def along_an_axis(op: Op, specs: Sequence[Spec]) -> Plan | None:
    names = but(op.axes(2 if op.type == "Roll" else 1, op.rank(0)), op.rank(0))
    return _by_names_or_once(op, specs, names)


def _by_names_or_once(op: Op, specs: Sequence[Spec], names: str | None) -> Plan | None:
    """The plan by names; without one, the op runs once and its output is cut for the towers."""
    plan, spec = by_names(op, specs, [names], [names]), specs[0]
    return once_and_cut(op, specs, spec) if plan is None and isinstance(spec, Sharded) else plan


@rule("ReverseSequence")
def reverse_sequence(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Each sequence is reversed by itself, by its length."""
    batch, along = op.attr("batch_dim"), op.attr("seq_dim")
    names = f"{DIMS[:along]}{MIXED}{DIMS[along + 1:]}"
    return by_names(op, specs, [names, names[batch]], [names])


@rule("Softmax", "LogSoftmax")
def softmax(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return _by_names_or_once(op, specs, but([-1], op.rank(0)))


@rule("TopKV2", "NthElement")
def along_the_last_axis(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A sort is a top-k of all entries; along the rows it runs once, and its output is cut."""
    names, spec, count = but([-1], op.rank(0), ""), specs[0], specs[1]
    if isinstance(spec, Sharded) and isinstance(count, Size) and spec.dim + 1 == op.rank(0) \
            and count.shards(spec.dim) == spec and spec.times:
        return once_and_cut(op, specs, spec)
    return by_names(op, specs, [names], [names])


@rule("SoftmaxCrossEntropyWithLogits")
def cross_entropy(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Logits and labels are broadcast against each other."""
    if op.outputs[0].shape[:1] == [1]:  # of one row of labels and unknown logits TensorFlow says so
        return None
    return by_names(op, specs, [range(1)] * 2, [range(1)], gathers=True)
