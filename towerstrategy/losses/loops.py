"""Loops that go on for as long as the rows of a batch, together, ask for.

Goes in: a tower whose gradients are to be merged.  Comes out: a warning, once for a loop, where how
often it turns shows to depend on a mean, sum or extreme over the tower's rows, such as a residual:
each tower's rows would be done after another number of turns than on one device.  Loops that count,
or that end by the flags of their rows, are nobody's business.
"""

from __future__ import annotations

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import parts, provenance
from towerstrategy.towers import contexts

_COMPARED = frozenset({"Greater", "GreaterEqual", "Less", "LessEqual"})


def check(tower: contexts.TowerContext) -> None:
    """Warns of the loops that the tower has traced so far."""
    if tower.graph is None or tower.static_rows is None:
        return
    for operation in tower.graph.get_operations():
        if operation.type in provenance.LOOPS and _ends_by_rows(tower, operation):
            tower.warn_of(
                operation.outputs[0],
                "towerstrategy: {name} is a loop that ends by a number made of all rows it gets, "
                "such as a mean residual. Each tower has some of the batch's rows, and ends after "
                "a number of turns of its own, so that they come out otherwise than on one device. "
                "Let it end by what each row has come to, keeping rows that are done; turn a fixed "
                "number of times; or give it the rows of all towers, towerstrategy.whole_batch.")


def _ends_by_rows(tower: contexts.TowerContext, loop: tf.Operation) -> bool:
    condition = _tf.graph_of_call(loop, loop.get_attr("cond").name)
    if condition is None:
        return False
    compared = [value for operation in condition.get_operations() if operation.type in _COMPARED
                for value in operation.inputs if value.dtype.is_floating and value.shape.rank == 0]
    walk = parts.walk(tower)
    walk.enter(condition.inputs, loop.outputs)
    return any(not walk.kinds(value).isdisjoint(provenance.OF_ROWS) for value in compared)
