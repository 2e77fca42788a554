"""``compile`` and train steps: the code that both Kerases share.

Goes in: Keras' own ``compile``, a model, or a step's data.  Comes out: an adopted model,
sub-batches, or whether XLA compiles a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import losses
from towerstrategy._keras import adopting, state
from towerstrategy.placement import kind


def compile(names: Any, compiling: Callable[..., contextlib.AbstractContextManager[None]],
            original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """The hook for ``compile``: adopts a model in a strategy's scope, or one that has a strategy.

    ``compiling(model, strategy)`` is the context in which Keras' own ``compile`` runs.
    """
    scope = tf.distribute.get_strategy()
    strategy = scope if kind.is_tower_strategy(scope) else strategy_of(self, names)
    args, kwargs = losses.inner_losses((args, kwargs))
    if strategy is None:
        return original(self, *args, **kwargs)
    owner = getattr(self, names.OWNER)
    adopting.check_owner(strategy, f"model {self.name!r}", owner)
    adopting.check_variables(strategy, self, state.variables_of(self, names))
    with strategy.scope():
        setattr(self, names.OWNER, strategy)
        try:
            with compiling(self, strategy):
                original(self, *args, **kwargs)
            adopting.adopt(strategy, self, names)
        except Exception:
            setattr(self, names.OWNER, owner)
            raise


def strategy_of(model: Any, names: Any) -> Any:
    """The ``TowerStrategy`` of a model; None if it has none."""
    strategy = getattr(model, names.OWNER, None)
    return strategy if kind.is_tower_strategy(strategy) else None


def split_data(strategy: tf.distribute.Strategy, data: Any) -> Any:
    """A step's data as sub-batches; data that is split already is returned as it is."""
    is_split = any(isinstance(leaf, tf.distribute.DistributedValues)
                   for leaf in tf.nest.flatten(data))
    return data if is_split else strategy.extended.inputs.split(data)


def compiles_towers(model: Any) -> bool:
    """Whether XLA compiles each tower's part of a model's steps, not the steps as a whole."""
    strategy = model.distribute_strategy
    return (bool(model.jit_compile) and kind.is_tower_strategy(strategy)
            and not strategy.extended.compiles_whole)
