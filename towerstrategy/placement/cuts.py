"""Cutting a row of layers into stages.

Goes in: what each layer costs, in the order in which they run.  Comes out: a stage for each, such
that the costliest stage costs least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from towerstrategy import refused

# What stages may be balanced by.
BYTES, TIME = "bytes", "time"


def check(balance: Any, stages: int) -> None:
    """Refuses what stages cannot be balanced by.

    Raises:
      TypeError: it is no string.
      ValueError: it is no choice, or there are no stages to balance.
    """
    refused.check_type("balance", balance, str, f"{BYTES!r} or {TIME!r}")
    if balance not in (BYTES, TIME):
        raise ValueError(f"balance must be {BYTES!r} or {TIME!r}, but got {balance!r}.")
    if stages == 1 and balance != BYTES:
        raise ValueError(
            f"balance={balance!r} says how layers are divided among the stages of a tower, but "
            'devices gives each tower one device. For stages give it lists: [["GPU:0", "GPU:1"]].')


class Cost(NamedTuple):
    """What a layer costs its stage.

    Attributes:
      held: what is there once, such as bytes of weights, gradients and slots, or seconds.
      in_flight: what is there for each micro-batch that the stage holds: bytes of activations.
    """

    held: float
    in_flight: float = 0.


def cut(costs: Sequence[Cost], stages: int, micro_batches: int = 1) -> list[int]:
    """The stage of each of a row of layers; each stage has a layer.

    A stage holds as many micro-batches as there are stages from it to the end, so that early ones
    pay more for activations.  Of cuts that are as good the one with the early layers together.

    Args:
      costs: of each layer, as many as there are stages at least.
      stages: how many.
      micro_batches: how many there are at the most.
    """
    count = len(costs)
    held = np.cumsum([0., *(cost.held for cost in costs)])
    in_flight = np.cumsum([0., *(cost.in_flight for cost in costs)])
    worst = np.full(count + 1, np.inf)
    worst[0] = 0.
    begins: list[np.ndarray] = []
    for stage in range(stages):
        each = (held + in_flight * min(micro_batches, stages - stage))
        reached, begin = np.full(count + 1, np.inf), np.zeros(count + 1, int)
        for end in range(stage + 1, count + 1):
            through = np.maximum(worst[:end], each[end] - each[:end])
            # The latest begin of the best: what costs nothing stays with the stage before.
            begin[end] = end - 1 - int(np.argmin(through[::-1]))
            reached[end] = through[begin[end]]
        worst = reached
        begins.append(begin)
    found, end = [0] * count, count
    for stage in reversed(range(stages)):
        start = int(begins[stage][end])
        found[start:end] = [stage] * (end - start)
        end = start
    return found
