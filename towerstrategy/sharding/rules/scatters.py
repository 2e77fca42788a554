"""Scatters into a tensor.

Goes in: an operation.  Comes out: its plan.  What is scattered to places that are the same for all
examples is scattered for each example; that of rows, into what is the same for all towers, adds up.
"""

from __future__ import annotations

from collections.abc import Sequence

from towerstrategy.sharding.rules.elementwise import is_plain
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, Sharded, Spec


@rule("TensorScatterUpdate", "TensorScatterAdd", "TensorScatterSub", "TensorScatterMax",
      "TensorScatterMin")
def into_tensor(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """Of the dimensions that indices name none is the rows'."""
    into, updates = specs[0], specs[2]
    ranks = [op.rank(index) for index in range(3)]
    if None in ranks or not is_plain(specs[1]):
        return None
    named = op.inputs[1].shape[-1]
    if named is None or not ranks[1]:
        return None
    # Of updates the last dimensions are those of the tensor that are not named.
    behind = ranks[2] - (ranks[0] - named)
    placed = [into] if isinstance(into, Sharded) else []
    if isinstance(updates, Sharded):
        if updates.dim < behind:
            return None
        placed.append(updates.at(updates.dim - behind + named))
    if not placed or any(spec != placed[0] for spec in placed) or placed[0].dim < named:
        return None
    spec = placed[0]
    takes: list[Spec] = [spec, REPLICATED, spec.at(spec.dim - named + behind)]
    return Plan(takes, [spec], padded=True)
