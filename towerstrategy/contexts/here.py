"""Where code runs: in a tower, in a step with all rows, outside of both.

Goes in: nothing, or a variable that is written.  Comes out: the context of the moment, or its
strategy; None where there is none of that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.contexts.tower import TowerContext
from towerstrategy.placement import kind


class OneReplicaContext(tf.distribute.ReplicaContext):
    """The replica context of what is done once: of a step that has all rows, of an update.

    There is one replica, so an all-reduce has nothing to reduce, nor have the reductions that a
    function given to ``merge_call`` asks for.
    """

    stage_run: Any = None  # of the model that runs, see _keras/stages.py

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, 0)

    @property
    def can_merge(self) -> bool:
        """Whether what runs here is in no branch or loop."""
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
    """The context of the tower, or of the step with all rows, that runs here; else None."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, (TowerContext, OneReplicaContext)) else None


def current_tower() -> TowerContext | None:
    """The context of the tower that runs here, or None outside of towers."""
    context = tf.distribute.get_replica_context()
    return context if isinstance(context, TowerContext) else None


def splitting_tower() -> TowerContext | None:
    """The current tower where there are several of them, on any machine; None otherwise.

    With one tower Keras' own single-device code is right as it is.
    """
    tower = current_tower()
    return tower if tower is not None and tower.several else None


def has_all_rows() -> bool:
    """Whether a step is traced here that is written for one device, with all rows."""
    return isinstance(tf.distribute.get_replica_context(), OneReplicaContext)


def outside_of_towers() -> tf.distribute.Strategy | None:
    """The ``TowerStrategy`` in whose scope, and outside of whose towers, this runs; else None."""
    if not (tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context()):
        return None
    strategy = tf.distribute.get_strategy()
    return strategy if kind.is_tower_strategy(strategy) else None


def writer_of(variable: Any) -> TowerContext | None:
    """The tower that writes to a variable of a strategy; None where the write is a plain one.

    Raises:
      ValueError: a tower of another strategy than the variable's.
    """
    tower = current_tower()
    if tower is None:
        return None
    if tower.strategy is not variable._distribute_strategy:
        raise ValueError(
            f"variable {variable.name!r} belongs to another strategy: it was made in the scope of "
            f"{variable._distribute_strategy!r}, but is written in a tower of {tower.strategy!r}.")
    return tower
