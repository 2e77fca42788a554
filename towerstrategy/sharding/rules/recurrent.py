"""Rules for cuDNN's recurrent layers, which LSTM and GRU are on GPUs.

Goes in: an operation.  Comes out: its plan.  Rows are apart in all but the weights' gradient, which
is a sum over them.  What the kernel keeps for its gradient is each tower's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from towerstrategy.sharding.rules.dimensions import MIXED, Names, by_names
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, ListOf, Spec

_LENGTHS = 4  # the input that says how long each sequence is
_KEPT = 2  # what the kernel keeps: the last outputs, and the last inputs of the gradient


@rule("CudnnRNNV3")
def recurrent(op: Op, specs: Sequence[Spec]) -> Plan | None:
    rows = _rows(op)
    plan = _by_rows(op, specs, [*rows, None, "b"], [*rows, "", ""])
    return plan and dataclasses.replace(plan, gives=[*plan.gives[:-_KEPT], *[ListOf()] * _KEPT])


@rule("CudnnRNNBackpropV3")
def gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    rows, kept = _rows(op), list(specs[-_KEPT:])
    if not all(isinstance(spec, ListOf) for spec in kept):
        return None
    plan = _by_rows(op, [*specs[:-_KEPT], *[REPLICATED] * _KEPT],
                    [*rows, None, "b", *rows, *rows], [*rows, ""])
    return plan and dataclasses.replace(plan, takes=[*plan.takes[:-_KEPT], *kept],
                                        gives=[*plan.gives[:-1], SUM])


def _rows(op: Op) -> list[Names]:
    """The dimensions of sequences, and of the one or two states of each."""
    middle = f"{MIXED}b{MIXED}"
    names = middle if op.attr("time_major") else f"b{MIXED * 2}"
    return [names, names, names if op.attr("rnn_mode") == "lstm" else ""]


def _by_rows(op: Op, specs: Sequence[Spec], inputs: Sequence[Names | None],
             outputs: Sequence[Names]) -> Plan | None:
    if op.attr("dropout"):
        return None  # draws by a state of its own
    plan = by_names(op, specs, inputs, outputs, REPLICATED, padded=True)
    # A sequence has to have an entry, that of a padding as well.
    return plan and dataclasses.replace(plan, ones=[_LENGTHS])
