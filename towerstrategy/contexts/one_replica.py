"""The replica contexts of what is done once, where there is one replica and nothing left to merge.

Goes in: a strategy.  Comes out: the context of a step that is traced once with all rows, and of one
whose gradients are merged already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf


class MergedContext(tf.distribute.ReplicaContext):
    """The replica context of a step whose gradients are merged already.

    Code written for one replica of many runs in it once, as on a single device: an all-reduce has
    nothing left to reduce, and a ``merge_call`` finds the merged values.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, 0)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _tf.cross_replica_context(self._strategy):
            return merge_fn(self._strategy, *args, **kwargs)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        del axis, options
        return value


class OneReplicaContext(MergedContext):
    """The replica context of a step that is traced once, with all rows: there is one replica.

    A ``merge_call`` runs as in a program without a strategy: so objects that were made in the scope
    and objects that were made outside of it, an optimizer's variables for one, are both served.
    """

    stage_run: Any = None  # of the model that runs, see _keras/stages.py

    def __enter__(self) -> None:
        self._mode = self._strategy.extended.modes.within(one_replica=True)
        self._mode.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._mode.__exit__(None, None, None)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _tf.no_strategy():
            return merge_fn(self._strategy, *args, **kwargs)
