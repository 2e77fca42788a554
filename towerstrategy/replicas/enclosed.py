"""The towers' work as a function of its own, inside of the one that is being traced.

Goes in: what makes tensors, as a Python function.  Comes out: what it returned, with tensors of the
caller's graph, and the one operation there that calls it.

So nothing is left behind when the function turns out to be of no use, and a gradient tape around
the call sees one operation, whatever threads the towers were traced in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import results

Finish = Callable[[tf.Graph], None]


def run(make: Callable[[], Any],
        finish: Finish | None = None) -> tuple[Any, tf.Operation | None]:
    """What ``make`` returns, and the operation that calls its function (None if it has none).

    Args:
      make: makes tensors.
      finish: called with the function's graph when all is made, or None.
    """
    holder: list[Any] = []

    @tf.function(autograph=False)
    def run_towers() -> list[tf.Tensor]:
        _tf.call_once()
        with _tf.variables_of_caller(), _tf.operation_seeds_of_caller():
            result = make()
        if finish is not None:
            finish(tf.compat.v1.get_default_graph())
        tensors: list[tf.Tensor] = []
        holder[:] = [tf.nest.map_structure(lambda leaf: _take_out(leaf, tensors), result)]
        return tensors

    tensors = list(run_towers())
    operation = tensors[0].op if tensors else None
    return tf.nest.map_structure(lambda leaf: _put_back(leaf, tensors, operation),
                                 holder[0]), operation


class _Slot:
    """Stands for a tensor that the towers' function returns."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Slots:
    """Stands for a distributed or composite value whose tensors the function returns."""

    def __init__(self, original: Any, parts: list[Any]) -> None:
        self.original = original
        self.parts = parts


def _take_out(leaf: Any, tensors: list[tf.Tensor]) -> Any:
    """Moves the tensors of ``leaf`` to ``tensors``."""
    if isinstance(leaf, tf.Tensor) and not _tf.is_eager(leaf):
        tensors.append(leaf)
        return _Slot(len(tensors) - 1)
    if _tf.is_variable(leaf):
        return leaf
    if isinstance(leaf, (_tf.PerReplica, _tf.Mirrored)):
        return _Slots(leaf, [_take_out(part, tensors) for part in leaf.values])
    if isinstance(leaf, _tf.CompositeTensor):
        flat = tf.nest.flatten(leaf, expand_composites=True)
        return _Slots(leaf, [_take_out(part, tensors) for part in flat])
    return leaf


def _put_back(leaf: Any, tensors: list[tf.Tensor], operation: tf.Operation | None) -> Any:
    """The inverse of :func:`_take_out`, with the tensors of the caller's graph."""
    if isinstance(leaf, _Slot):
        return tensors[leaf.index]
    if isinstance(leaf, tf.Operation):
        return operation
    if not isinstance(leaf, _Slots):
        return leaf
    parts = [_put_back(part, tensors, operation) for part in leaf.parts]
    if isinstance(leaf.original, results.TowerResults):
        return leaf.original.with_values(parts)
    if isinstance(leaf.original, (_tf.PerReplica, _tf.Mirrored)):
        return type(leaf.original)(parts)
    return tf.nest.pack_sequence_as(leaf.original, parts, expand_composites=True)
