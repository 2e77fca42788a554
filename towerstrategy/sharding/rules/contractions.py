"""Matrix products, einsums and biases.

Goes in: an operation.  Comes out: its plan.  Where rows are contracted each tower has a part of a
sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.dimensions import but, by_names
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import SUM, Spec


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matmul(op: Op, specs: Sequence[Spec]) -> Plan | None:
    ranks: list[Any] = [op.rank(0), op.rank(1)]
    if None in ranks:
        return None
    flags = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
    rank = max(ranks)
    # Labels of each operand's dimensions: batch dimensions by place, then rows, contracted,
    # columns.
    names: list[list[Any]] = []
    for number, labels in enumerate((["m", "k"], ["k", "n"])):
        if op.attr(flags[number]):
            labels.reverse()
        own = ranks[number] - 2
        names.append([*range(rank - 2 - own, rank - 2), *labels])
    plan = by_names(op, specs, names, [[*range(rank - 2), "m", "n"]], SUM, gathers=True)
    if plan is not None and op.type == "MatMul" and op.attr("transpose_b"):
        plan.whole = _swapped
    return plan


def _swapped(m: Any) -> list[Any]:
    """``a bᵀ`` as ``(b aᵀ)ᵀ``: on CPUs a product copies the second operand to transpose it."""
    product = m.make("MatMul", [m.whole(1), m.whole(0)], None,
                     transpose_b=not m.op.attr("transpose_a"))
    return [m.make("Transpose", [product, m.constant([1, 0], tf.int32, None)], None)]


@rule("Einsum")
def einsum(op: Op, specs: Sequence[Spec]) -> Plan | None:
    left, out = op.attr("equation").replace(" ", "").split("->")
    terms = [*left.split(","), out]
    *names, made = (_named(term, tensor.shape.rank) for term, tensor in zip(
        terms, [*op.inputs, op.outputs[0]]))
    if made is None or None in names or ("." in left) > ("." in out):
        return None
    return by_names(op, specs, names, [made], SUM, gathers=True)


def _named(term: str, rank: int | None) -> list[str | int] | None:
    """The dimensions of a term; those that "..." stands for are counted from their last."""
    before, dots, after = term.partition("...")
    if len({*before, *after}) < len(before + after) or dots and rank is None:
        return None  # a diagonal
    return [*before, *range(len(before + after) - (rank or 0) if dots else 0, 0), *after]


@rule("BiasAdd")
def bias_add(op: Op, specs: Sequence[Spec]) -> Plan | None:
    names = of_channels(op)
    return by_names(op, specs, [names], [names])


@rule("BiasAddGrad")
def bias_add_grad(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return Plan(specs, [SUM]) if specs[0] == SUM else by_names(
        op, specs, [of_channels(op)], [""], SUM)


def of_channels(op: Op) -> str | None:
    """Names of dimensions, but for that of channels."""
    return but([1 if op.attr("data_format").startswith("NC") else -1], op.rank(0))
