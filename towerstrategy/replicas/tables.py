"""What each tower has in place of tower 0's tensors and operations.

Goes in: pairs of tower 0's tensor and the other towers'.  Comes out: any value of tower 0's with
the tensors of another tower in it; :class:`NeedsOwnTrace` where they cannot be found.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import results


class NeedsOwnTrace(BaseException):
    """The function must be traced for each tower; the message says why.

    Not an ``Exception``, so that the traced code's own handlers do not take it for one of theirs.
    """


class Table:
    """What the other towers have in place of tower 0's tensors and operations."""

    def __init__(self, towers: int) -> None:
        self._towers = range(towers)
        self._tensors: dict[str, list[tf.Tensor]] = {}
        self._operations: dict[str, list[tf.Operation]] = {}

    def __contains__(self, name: object) -> bool:
        """Whether the tensor of that name differs between the towers."""
        return name in self._tensors

    def put(self, first: tf.Tensor, others: Sequence[tf.Tensor]) -> None:
        """Says what towers 1.. have in place of ``first``."""
        self._tensors[first.name] = list(others)

    def put_operation(self, first: tf.Operation, others: Sequence[tf.Operation]) -> None:
        """The same for an operation and its outputs."""
        self._operations[first.name] = list(others)
        for index, output in enumerate(first.outputs):
            self.put(output, [other.outputs[index] for other in others])

    def tensor(self, first: tf.Tensor, tower: int) -> tf.Tensor:
        """``tower``'s counterpart of tower 0's ``first``."""
        others = self._tensors.get(first.name)
        if others is None and first.op.name in self._operations:
            raise NeedsOwnTrace(f"operation {first.op.name!r} got outputs after it was copied, as "
                                "a loop or branch does when its gradient is taken")
        if others is None or tower == 0:
            return first
        other = others[tower - 1]
        other.set_shape(first.shape)
        return other

    def operation(self, first: tf.Operation, tower: int) -> tf.Operation:
        others = self._operations.get(first.name)
        return first if others is None or tower == 0 else others[tower - 1]

    def operations_of(self, tower: int) -> set[str]:
        """The names of the copies that ``tower`` has."""
        return {others[tower - 1].name for others in self._operations.values()}

    def values(self, first: Any) -> tuple[Any, ...]:
        """What each tower has in place of any value of tower 0's, whose tensors are looked up."""
        for leaf in tf.nest.flatten(first):
            if isinstance(leaf, tf.TensorArray) or _tf.is_unread_variable(leaf):
                raise NeedsOwnTrace(f"it hands on a {type(leaf).__name__}, which cannot be looked "
                                    "up")
            if not isinstance(leaf, tf.Operation) and _holds_tensors(leaf):
                raise NeedsOwnTrace(f"it hands on tensors inside of a {type(leaf).__name__}, which "
                                    "cannot be looked up")

        def of(tower: int) -> Callable[[Any], Any]:
            return lambda leaf: self.operation(leaf, tower) if isinstance(leaf, tf.Operation) \
                else leaf if _tf.is_eager(leaf) else self.tensor(leaf, tower)

        return first, *(results.map_tensors(of(tower), first) for tower in self._towers[1:])


# How deep tensors are looked for inside of objects and closures, and where they are not.
_DEPTH = 4
_VARIABLES = (tf.Variable, _tf.DistributedVariable)
_CLOSED = (*_VARIABLES, type, types.ModuleType, tf.Graph, tf.TypeSpec)


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    """Whether an object or a function holds tensors of a graph, in attributes or its closure."""
    if isinstance(value, (tf.Tensor, _tf.CompositeTensor)) and not isinstance(value, _VARIABLES):
        return depth > 0 and not all(
            map(_tf.is_eager, tf.nest.flatten(value, expand_composites=True)))
    # Inside of others, modules are layers and models; handed on itself, one may be a distribution.
    if isinstance(value, _CLOSED) or depth > _DEPTH or depth and isinstance(value, tf.Module):
        return False
    held: list[Any] = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, dict):
        held += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        held += value
    for cell in getattr(value, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell may be empty
            held.append(cell.cell_contents)
    return any(_holds_tensors(part, depth + 1) for part in held)
