"""Matrix products, einsums and biases.

Goes in: an operation.  Comes out: its plan.  Where rows are contracted each tower has a part of a
sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules.elementwise import is_plain
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, Sharded, Spec


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
    plan = _contracted(op, specs, names, [*range(rank - 2), "m", "n"])
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
    if "." in left or "." in out:
        return None
    return _contracted(op, specs, [list(term) for term in left.split(",")], list(out))


def _contracted(op: Op, specs: Sequence[Spec], names: Sequence[Sequence[Any]],
                out: Sequence[Any]) -> Plan | None:
    """A contraction, by labels of the dimensions."""
    sharded = [(index, spec) for index, spec in enumerate(specs) if isinstance(spec, Sharded)]
    if not sharded or any(len(set(term)) < len(term) for term in (*names, out)):
        return None  # nothing to gain, or a diagonal
    # Rows against rows, as all examples beside all: one operand stays sharded, the other is
    # gathered.
    index, first = sharded[0]
    label = names[index][first.dim]
    takes: list[Spec] = []
    for index, (spec, term) in enumerate(zip(specs, names)):
        dim = term.index(label) if label in term else None
        if isinstance(spec, Sharded) and spec.dim == dim and spec.goes_with(first):
            takes.append(spec)
        elif dim is None or isinstance(label, int) and op.inputs[index].shape[dim] == 1:
            takes.append(REPLICATED)
        else:
            takes.append(Sharded(dim, first.times, first.group, broadcast=isinstance(label, int)))
    return Plan(takes, [first.at(out.index(label)) if label in out else SUM])


@rule("BiasAdd")
def bias_add(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, rank = specs[0], op.rank(0)
    if not isinstance(spec, Sharded) or rank is None or not is_plain(specs[1]):
        return None
    channel = 1 if op.attr("data_format") == "NCHW" else rank - 1
    return None if spec.dim == channel else Plan([spec, REPLICATED], [spec])
