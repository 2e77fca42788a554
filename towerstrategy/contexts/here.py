"""Where code runs: in a tower, in a step that has all rows, or outside of both.

Goes in: nothing, or a variable that is written.  Comes out: the current context, or its strategy;
None if there is none of this kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.contexts.tower import TowerContext
from towerstrategy.placement import kind


class OneReplicaContext(tf.distribute.ReplicaContext):
    """The replica context of code that runs once: a step that has all rows, or an update.

    There is one replica, so ``all_reduce`` and ``all_gather`` return their argument.
    """

    stage_run: Any = None  # of the model that is being called, see _keras/stages.py

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, 0)

    @property
    def can_merge(self) -> bool:
        """Whether this code is outside of branches and loops."""
        return not _tf.is_in_control_flow()

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del reduce_op, options
        return value

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        del axis, options
        return value

    def __enter__(self) -> None:
        self._mode = self._strategy.extended.modes.within(one_replica=True)
        self._mode.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._mode.__exit__(None, None, None)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with _tf.cross_replica_context(self._strategy):
            return merge_fn(self._strategy, *args, **kwargs)


AnyContext = Union[TowerContext, OneReplicaContext]


def current() -> AnyContext | None:
    """The context of the current tower, or of the current step with all rows; else None."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, (TowerContext, OneReplicaContext)) else None


def current_tower() -> TowerContext | None:
    """The context of the current tower; None outside of towers."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, TowerContext) else None


def splitting_tower() -> TowerContext | None:
    """The current tower if a step runs on several devices; else None.

    On one device Keras' own code is right as it is.
    """
    tower = current_tower()
    return tower if tower is not None and tower.several else None


def has_all_rows() -> bool:
    """Whether this code is in a step that is written for one device and has all rows."""
    return isinstance(tf.distribute.get_replica_context(), OneReplicaContext)


def outside_of_towers() -> tf.distribute.Strategy | None:
    """The ``TowerStrategy`` whose scope this code is in, if it is outside of its towers."""
    if not (tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context()):
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if kind.is_tower_strategy(strategy) else None


def writer_of(variable: Any) -> TowerContext | None:
    """The current tower, which writes ``variable``; None outside of towers.

    Raises:
      ValueError: the tower and the variable belong to different strategies.
    """
    tower = current_tower()
    if tower is None:
        return None
    if tower.strategy is not variable._distribute_strategy:
        raise ValueError(
            f"variable {variable.name!r} belongs to another strategy: it was made in the scope of "
            f"{variable._distribute_strategy!r}, but is written in a tower of {tower.strategy!r}.")
    return tower
