"""Rules for cuDNN's recurrent ops, as which LSTM and GRU layers run on GPUs.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Rows do not depend on each other.
The gradient of the weights is a partial sum.  Each tower has the tensors that its own kernel
reserves for the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from towerstrategy.sharding.rules.dimensions import MIXED, Names, by_names
from towerstrategy.sharding.rules.registry import Op, Plan, rule
from towerstrategy.sharding.spec import REPLICATED, SUM, ListOf, Spec

_LENGTHS = 4  # the input that has the length of each sequence
_RESERVED = 2  # how many tensors the kernel reserves: the last outputs, the gradient's last inputs


@rule("CudnnRNNV3")
def recurrent(op: Op, specs: Sequence[Spec]) -> Plan | None:
    rows = _rows(op)
    plan = _by_rows(op, specs, [*rows, None, "b"], [*rows, "", ""])
    return plan and dataclasses.replace(
        plan, gives=[*plan.gives[:-_RESERVED], *[ListOf()] * _RESERVED])


@rule("CudnnRNNBackpropV3")
def gradient(op: Op, specs: Sequence[Spec]) -> Plan | None:
    rows, reserved = _rows(op), list(specs[-_RESERVED:])
    if not all(isinstance(spec, ListOf) for spec in reserved):
        return None
    plan = _by_rows(op, [*specs[:-_RESERVED], *[REPLICATED] * _RESERVED],
                    [*rows, None, "b", *rows, *rows], [*rows, ""])
    return plan and dataclasses.replace(plan, takes=[*plan.takes[:-_RESERVED], *reserved],
                                        gives=[*plan.gives[:-1], SUM])


def _rows(op: Op) -> list[Names]:
    """The names of dimensions of the sequences, the hidden states, and the LSTM's cell states."""
    middle = f"{MIXED}b{MIXED}"
    names = middle if op.attr("time_major") else f"b{MIXED * 2}"
    return [names, names, names if op.attr("rnn_mode") == "lstm" else ""]


def _by_rows(op: Op, specs: Sequence[Spec], inputs: Sequence[Names | None],
             outputs: Sequence[Names]) -> Plan | None:
    if op.attr("dropout"):
        return None  # the kernel keeps a state for its random numbers
    plan = by_names(op, specs, inputs, outputs, REPLICATED, padded=True)
    # No sequence may be empty, so the length of a sequence of padding is 1.
    return plan and dataclasses.replace(plan, ones=[_LENGTHS])
