"""A call of a replica function, as the contexts of its towers know it: their sync point.

Goes in: what a tower brings to a sync point, or asks of its own.  Comes out: what is merged there,
or the tower's own value.  :class:`Call` is that of a single tower; ``replicas/once`` and
``replicas/threads`` have those of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

NESTED_MERGE = (
    "`merge_call` called while defining a new graph or a tf.function. This happens if the function "
    "passed to `strategy.run()` contains a nested `@tf.function` or a control flow statement "
    "(tf.cond, tf.while_loop, a converted `if` or `for`) with a synchronization point inside, such "
    "as apply_gradients, all_reduce or a write to a variable with aggregation. The towers cannot "
    "sync there. Move the synchronization point out of the nested function, or put the whole "
    "`strategy.run` inside the tf.function or the control flow.")


class Call:
    """One call of a replica function by one tower."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call``: runs ``merge_fn`` once, with what all towers have brought."""
        with _tf.cross_replica_context(self._strategy), \
                tf.device(self._strategy.extended.merge_device):
            return merge_fn(self._strategy, *args, **kwargs)

    def own(self, tower: int, name: str, values: Sequence[Any], dtype: tf.DType) -> Any:
        """What ``tower`` has of the values of one of :data:`known.FACTS`, one a tower."""
        del name, dtype
        return values[tower]

    def ask(self) -> None:
        """A tower looks at its number as a Python number."""

    def note_written(self, variable: Any) -> None:
        """A tower writes ``variable`` where the towers cannot sync."""

    def check_gradients(self, gradients: Sequence[Any], variables: Sequence[Any],
                        asked: bool) -> None:
        """Warns where the sum of the towers' gradients is not one device's."""


def all_values(value: Any, count: int) -> list[Any]:
    """One value a tower, from what ``merge_call`` grouped (it groups the same object into one)."""
    if isinstance(value, (_tf.PerReplica, _tf.Mirrored)):
        return list(value.values)
    return [value] * count


def ending_walks(merge_fn: Callable[..., Any]) -> Callable[..., Any]:
    """``merge_fn`` with results behind which TensorFlow does not look for variables.

    ``ReplicaContext.all_reduce`` has a gradient of its own, for which TensorFlow walks back from
    the result to the tower's input, and, by the other towers' inputs, through all of their graph:
    with each all-reduce anew.  The walk ends where nothing can be differentiated.
    """
    def ended(leaf: Any) -> Any:
        if isinstance(leaf, (_tf.Mirrored, _tf.PerReplica)):
            return type(leaf)(tuple(ended(part) for part in leaf.values))
        return tf.stop_gradient(leaf) if isinstance(leaf, tf.Tensor) else leaf

    return lambda *args, **kwargs: tf.nest.map_structure(ended, merge_fn(*args, **kwargs))
