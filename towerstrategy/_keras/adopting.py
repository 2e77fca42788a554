"""Adopting a model, built in any scope or none, into a strategy; the same for both Kerases.

Goes in: a strategy, a model that is compiled in its scope or given to it, and the names of the
model's Keras (``keras3.names`` or ``tf_keras.names``).  Comes out: the same model, or a twin of it,
whose variables, optimizers and metrics are the strategy's; or an error before anything has changed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts, losses
from towerstrategy._keras import hooks, stages, state
from towerstrategy.placement import kind
from towerstrategy.variables import one_copy, rules

_log = logging.getLogger("towerstrategy")
_MISSING = object()


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
    check_owner(strategy, f"model {self.name!r}", owner)
    check_variables(strategy, self, state.variables_of(self, names))
    with strategy.scope():
        setattr(self, names.OWNER, strategy)
        try:
            with compiling(self, strategy):
                original(self, *args, **kwargs)
            adopt(strategy, self, names)
        except Exception:
            setattr(self, names.OWNER, owner)
            raise


def adopt(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Any:
    """See ``TowerStrategy.adopt``."""
    check_owner(strategy, f"model {model.name!r}", getattr(model, names.OWNER))
    resident, local = adopt_state(strategy, model, names)
    setattr(model, names.OWNER, strategy)
    hooks.wrap_methods(model, names.ENTRIES)
    strategy.extended.homes.spread(resident)
    forget_functions(model)  # those traced before do not run on towers
    _log.info("adopted model %r for %s: %s variables with one copy, %s tower-local ones",
              model.name, strategy.extended.placement.title, len(resident), len(local))
    return model


def forget_functions(model: Any) -> None:
    """Drops the model's train, test and predict functions; Keras makes and traces new ones."""
    for name in ("train_function", "test_function", "predict_function", "train_tf_function"):
        if name in vars(model):
            setattr(model, name, None)


def make_twin(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Any:
    """A twin of ``model``, another object of its class, that trains on the strategy's towers.

    The attributes that ``compile`` and ``fit`` set are its own.  It shares all others, so it saves
    the same files as the model.  Building the twin builds the model.
    """
    check_owner(strategy, f"model {model.name!r}", getattr(model, names.OWNER))
    training_state = names.TRAINING_STATE
    twin = object.__new__(type(model))
    shared = {name: value for name, value in vars(model).items() if name not in training_state}
    vars(twin).update(shared, **{name: value for name, value in vars(names.TRAINER()).items()
                                 if name in training_state and name not in names.ENTRIES})
    if "_checkpoint" in vars(twin):  # of tf_keras
        vars(twin)["_checkpoint"] = tf.train.Checkpoint(root=weakref.ref(twin))
    _tf.share_dependencies(twin, model, training_state)

    def shared_afterwards(build: Callable[..., Any]) -> Callable[..., Any]:
        """``build``, which then copies to the twin the attributes of the model that it changed."""
        @functools.wraps(build)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = build(*args, **kwargs)
            for name, value in list(vars(model).items()):
                before = shared.get(name, _MISSING)
                changed = name not in training_state and value is not before
                if changed and vars(twin).get(name, _MISSING) is before:
                    shared[name] = vars(twin)[name] = value
            _tf.share_dependencies(twin, model, training_state)
            return result

        return call

    vars(twin).update({name: shared_afterwards(getattr(model, name)) for name in names.BUILDERS
                       if hasattr(model, name)})
    return adopt(strategy, twin, names)


def adopt_state(strategy: tf.distribute.Strategy, model: Any,
                names: Any) -> tuple[list[Any], list[Any]]:
    """Adopts a model's existing variables; returns those with one copy and the tower-local ones."""
    metrics, optimizers = state.metrics_of(model, names), state.optimizers_of(model, names)
    saved = state.saved_variables(model, names)
    check_variables(strategy, model, [*saved, *(rules.held_variable(
        variable) for metric in metrics for variable in names.variables_of(metric))])
    for optimizer in optimizers:
        check_owner(strategy, f"optimizer {getattr(optimizer, 'name', '')!r} of model "
                              f"{model.name!r}", getattr(optimizer, names.OWNER_OF_OPTIMIZER, None))
    for optimizer in optimizers:
        set_owner(optimizer, strategy)
    local = [variable for metric in metrics for variable in names.adopt_metric(strategy, metric)]
    resident = state.resident(saved)
    new = [variable for variable in resident if not isinstance(variable, one_copy.TowerVariable)]
    if strategy.extended.workers is not None:
        state.copy_from_chief(strategy.extended.workers, new)
    for variable in new:
        one_copy.into_tower_variable(variable, strategy)
    stages.settle(strategy, model, names)
    return resident, local


def adopt_optimizer(optimizer: Any, names: Any) -> None:
    """Adopts an optimizer that is called in a tower, if it belongs to no strategy yet."""
    context = contexts.current()
    if context is not None:
        check_owner(context.strategy, f"optimizer {getattr(optimizer, 'name', '')!r}",
                    getattr(optimizer, names.OWNER_OF_OPTIMIZER, None))
        set_owner(optimizer, context.strategy)


def set_owner(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    # tf_keras' LossScaleOptimizer has no such attribute; it asks its inner optimizer.
    if "_distribution_strategy" in vars(optimizer):
        optimizer._distribution_strategy = strategy


def strategy_of(model: Any, names: Any) -> Any:
    """The ``TowerStrategy`` of a model; None if it has none."""
    strategy = getattr(model, names.OWNER, None)
    return strategy if kind.is_tower_strategy(strategy) else None


def compiles_towers(model: Any) -> bool:
    """Whether XLA compiles each tower's part of a model's steps, not the steps as a whole."""
    strategy = model.distribute_strategy
    return (bool(model.jit_compile) and kind.is_tower_strategy(strategy)
            and not strategy.extended.compiles_whole)


def check_owner(strategy: tf.distribute.Strategy, what: str,
                owner: tf.distribute.Strategy | None) -> None:
    """Raises ``ValueError`` if ``what`` belongs to a strategy other than ``strategy``."""
    if owner is None or owner is strategy or (  # TensorFlow has this one where there is none
            type(owner).__name__ == "_DefaultDistributionStrategy"):
        return
    raise ValueError(
        f"{what} belongs to another strategy: it was made or adopted in the scope of {owner!r} and "
        f"cannot be adopted by {strategy!r}. Save the model and load it again, or use the strategy "
        "that it has.")


def check_variables(strategy: tf.distribute.Strategy, model: Any, variables: Iterable[Any]
                    ) -> None:
    """Raises ``ValueError`` if a TensorFlow variable of ``model`` is another strategy's."""
    for variable in variables:
        check_owner(strategy, f"variable {getattr(variable, 'name', variable)!r} of model "
                              f"{model.name!r}", getattr(variable, "_distribute_strategy", None))
