"""What each tower has in place of tower 0's tensors and operations.

Goes in: pairs of tower 0's tensor and the other towers'.  Comes out: any value of tower 0's with
the tensors of another tower in it; :class:`NeedsOwnTrace` where they cannot be found.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf


class NeedsOwnTrace(BaseException):
    """The function must be traced for each tower; the message says why.

    Not an ``Exception``, so that the traced code's own handlers do not take it for one of theirs.
    """


class Table:
    """What the other towers have in place of tower 0's tensors and operations."""

    def __init__(self, towers: int) -> None:
        self._others = range(1, towers)
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
        if others is None:
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

    def value(self, first: Any, tower: int) -> Any:
        """``tower``'s counterpart of any value: tensors in it are looked up."""
        if tower == 0:
            return first
        return tf.nest.map_structure(lambda leaf: self._leaf(leaf, tower), first)

    def _leaf(self, leaf: Any, tower: int) -> Any:
        if isinstance(leaf, tf.Tensor):
            return self.tensor(leaf, tower) if not _tf.is_eager(leaf) else leaf
        if isinstance(leaf, tf.Operation):
            return self.operation(leaf, tower)
        if isinstance(leaf, tf.TensorArray) or _tf.is_unread_variable(leaf):
            raise NeedsOwnTrace(f"it hands on a {type(leaf).__name__}, which cannot be looked up")
        if isinstance(leaf, _tf.CompositeTensor) and not isinstance(leaf, _VARIABLES):
            return tf.nest.map_structure(lambda part: self._leaf(part, tower), leaf,
                                         expand_composites=True)
        if _holds_tensors(leaf):
            raise NeedsOwnTrace(f"it hands on tensors inside of a {type(leaf).__name__}, which "
                                "cannot be looked up")
        return leaf


_VARIABLES = (tf.Variable, _tf.DistributedVariable)

# How deep tensors are looked for inside of objects and closures.
_DEPTH = 4


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    """Whether an object or a function holds tensors of a graph, in attributes or its closure."""
    if isinstance(value, (tf.Tensor, _tf.CompositeTensor)) and not isinstance(value, _VARIABLES):
        return depth > 0 and not all(
            map(_tf.is_eager, tf.nest.flatten(value, expand_composites=True)))
    if value is None or isinstance(value, (*_VARIABLES, *_PLAIN, type)) or depth > _DEPTH:
        return False
    if isinstance(value, tf.Module) and depth > 0:
        return False  # layers and models; handed on itself, it may be a distribution
    held: list[Any] = list(vars(value).values()) if hasattr(value, "__dict__") else []
    if isinstance(value, dict):
        held += value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        held += value
    for cell in getattr(value, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell may be empty
            held.append(cell.cell_contents)
    return any(_holds_tensors(part, depth + 1) for part in held)


_PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, tf.DType, tf.TensorShape,
          tf.TypeSpec, tf.Graph, types.ModuleType)
