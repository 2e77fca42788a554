"""Cutting a row of layers into stages.

Goes in: what each layer costs, in the order in which they run.  Comes out: a stage for each, such
that the costliest stage costs least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Cost(NamedTuple):
    """The bytes that a layer costs its stage.

    Attributes:
      held: what is there once: weights, gradients and slots.
      in_flight: what is there for each micro-batch that the stage holds: activations.
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
