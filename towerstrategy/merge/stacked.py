"""Small gradients of one shape, on their way to their variables' home in one piece.

Goes in: a tower's gradients, and where each is to be summed.  Comes out: the same, with a stack in
the place of those that are small and alike; and, of what the stacks have been summed to, each
variable's own.

A gradient crosses to its variable's home, and is summed there, by itself, which for a small one is
nearly all overhead: a model of 150 small layers sends 302 of them from each tower.  What the towers
read is stacked for the same reason, see :mod:`towers.reads`.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import merging
from towerstrategy.placement import homes as homes_lib

# Bytes of a stack: what waits for the last of its gradients.
LARGEST = 2**21


class Stacks:
    """Which of a tower's gradients are stacked.

    Args:
      gradients: those of tower 0, whose stacks the other towers have, too; or None.
      homes: for each the device to sum it on.
      alone: the indices of those that are to stay as they are.
    """

    def __init__(self, gradients: Sequence[Any], homes: Sequence[str],
                 alone: Collection[int] = ()) -> None:
        alike: dict[Any, list[int]] = collections.defaultdict(list)
        for index, (gradient, home) in enumerate(zip(gradients, homes)):
            if index not in alone and _is_small(gradient):
                alike[home, gradient.dtype, tuple(gradient.shape)].append(index)
        self._count = len(gradients)
        self._groups = [(home, part) for (home, *_), group in alike.items()
                        for part in _parts(group, gradients[group[0]]) if len(part) > 1]

    def put(self, gradients: Sequence[Any], homes: Sequence[str]) -> tuple[list[Any], list[str]]:
        """The gradients, None in place of those that are stacked, then the stacks; all homes."""
        rest, stacks = list(gradients), []
        for _, group in self._groups:
            with _tf.not_recorded():
                stacks.append(tf.stack([gradients[index] for index in group]))
            for index in group:
                rest[index] = None
        return [*rest, *stacks], [*homes, *(home for home, _ in self._groups)]

    def apart(self, summed: Sequence[Any]) -> list[Any]:
        """The sums of all gradients, from those of what :meth:`put` has given."""
        found = list(summed[:self._count])
        for (home, group), stack in zip(self._groups, summed[self._count:]):
            with tf.device(home):
                parts = tf.unstack(stack)
            for index, part in zip(group, parts):
                found[index] = part
        return found


def _is_small(gradient: Any) -> bool:
    return (isinstance(gradient, tf.Tensor) and gradient.dtype.is_floating
            and gradient.shape.is_fully_defined()
            and homes_lib.size_of(gradient) <= merging.LARGEST_STACKED)


def _parts(group: Sequence[int], gradient: tf.Tensor) -> Iterator[Sequence[int]]:
    """``group`` in stacks of a size at which the first may leave while others are made."""
    most = max(LARGEST // max(homes_lib.size_of(gradient), 1), 1)
    for start in range(0, len(group), most):
        yield group[start:start + most]
