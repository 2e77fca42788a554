"""The rows of all towers, handed to each.

Goes in: a tower's rows.  Comes out: those of all towers, in order; differentiable, with the
gradient of its own rows for each tower.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.contexts.tower import TowerContext, all_values
from towerstrategy.merge import merging


def has_rows(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor, or an array, of a row an example."""
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return leaf.shape.rank != 0
    return hasattr(leaf, "__array__") and not _tf.is_variable(leaf) and getattr(leaf, "ndim", 0) > 0


def rows_of_all(tower: TowerContext, value: Any) -> Any:
    """``value``, a nest of this tower's rows, with the rows of all towers, on every tower.

    The gradient for a tower's rows is the sum over the towers of what each asks for.
    """
    leaves = tf.nest.flatten(value)
    for leaf in leaves:
        if isinstance(leaf, tf.SparseTensor):
            raise TypeError(f"a SparseTensor has no rows to gather: {leaf!r}. Make it dense first.")
        if not has_rows(leaf):
            raise ValueError("whole_batch takes tensors with a row an example in the first "
                             f"dimension, but got {leaf!r}.")
    return tf.nest.pack_sequence_as(value, [_gathered(tower, leaf) for leaf in leaves])


def _gathered(tower: TowerContext, leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        flat, *lengths = (_together(tower, part)
                          for part in (leaf.flat_values, *leaf.nested_row_lengths()))
        return tf.RaggedTensor.from_nested_row_lengths(flat, lengths, validate=False)
    return _together(tower, tf.convert_to_tensor(leaf))


def _together(tower: TowerContext, tensor: tf.Tensor) -> tf.Tensor:
    workers = tower.shares.workers
    parts: list[tf.Tensor] = []
    start: Any = 0  # how many rows the workers before this one have

    def gather(_: Any, brought: Any) -> tf.Tensor:
        nonlocal start
        parts[:] = all_values(brought, tower.count)
        here = tf.concat(parts, 0)
        if workers is None:
            return here
        counts, rows = workers.gather_rows([tf.shape(here)[:1], here])
        start = tf.reduce_sum(counts[:workers.index])
        return rows

    def apart(_: Any, asked: Any) -> Any:
        """Each tower's rows of the sum over all towers."""
        total = merging.total_of_filled(all_values(asked, tower.count), tower.shares)
        own, begin = [], start
        for part in parts:
            size = tf.shape(part)[0] if part.shape[0] is None else part.shape[0]
            own.append(total[begin:begin + size])
            own[-1].set_shape(part.shape[:1].concatenate(total.shape[1:]))
            begin += size
        return own[0] if len(own) == 1 else _tf.PerReplica(tuple(own))

    def gathered(tensor: tf.Tensor) -> Any:
        return tower.merge_call(gather, args=(tensor,))

    @tf.custom_gradient
    def together(tensor: tf.Tensor) -> Any:
        return gathered(tensor), lambda asked: tower.merge_call(apart, args=(asked,))

    return together(tensor) if tensor.dtype.is_floating else gathered(tensor)
