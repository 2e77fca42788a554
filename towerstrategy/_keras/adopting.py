"""Adopting: a model that was built anywhere becomes a strategy's, in both Kerases.

Goes in: a strategy, a model, and how the model's Keras names things (``keras3.names`` or
``tf_keras.names``).  Comes out: the same model, or a second handle on it, whose variables,
optimizers and metrics are the strategy's; or an error before anything has changed.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy._keras import hooks, stages, state
from towerstrategy.placement import kind
from towerstrategy.variables import one_copy, rules

_log = logging.getLogger("towerstrategy")
# Of steps, in tf_keras' models.
_COUNTERS = ("_train_counter", "_test_counter", "_predict_counter")
_MISSING = object()


def adopt(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Any:
    """See ``TowerStrategy.adopt``."""
    check_owner(strategy, f"model {model.name!r}", getattr(model, names.OWNER))
    resident, local = adopt_state(strategy, model, names)
    setattr(model, names.OWNER, strategy)
    hooks.enter_with(model, names.ENTRIES)
    strategy.extended.homes.spread(resident)
    # Functions traced before know nothing of towers.
    forget_functions(model)
    _log.info("adopted model %r for %s: %s variables with one copy, %s tower-local ones",
              model.name, strategy.extended.placement.title, len(resident), len(local))
    return model


def forget_functions(model: Any) -> None:
    for name in ("train_function", "test_function", "predict_function", "train_tf_function"):
        if name in vars(model):
            setattr(model, name, None)


def make_twin(strategy: tf.distribute.Strategy, model: Any, names: Any) -> Any:
    """A second handle on ``model`` that trains on the strategy's towers."""
    check_owner(strategy, f"model {model.name!r}", getattr(model, names.OWNER))
    check_variables(strategy, model, state.variables_of(model, names))
    return adopt(strategy, _twin_of(model, names), names)


def _twin_of(model: Any, names: Any) -> Any:
    """A twin of ``model``: another object of its class, with a training state of its own.

    All that makes the model what it is is shared, so that it saves as the model does; what
    ``compile`` and ``fit`` set is not.  It builds the model where that is built when it is first
    used.
    """
    own = names.TRAINING_STATE
    twin = object.__new__(type(model))
    seen = {name: value for name, value in vars(model).items() if name not in own}
    vars(twin).update(seen, **{name: value for name, value in vars(names.TRAINER()).items()
                               if name in own and name not in names.ENTRIES})
    if "_checkpoint" in vars(twin):  # tf_keras'
        vars(twin)["_checkpoint"] = tf.train.Checkpoint(root=weakref.ref(twin))
    _tf.share_dependencies(twin, model, own)

    def follow() -> None:
        """Takes over what building has changed in the model."""
        for name, value in list(vars(model).items()):
            before = seen.get(name, _MISSING)
            changed = name not in own and value is not before
            if changed and vars(twin).get(name, _MISSING) is before:
                seen[name] = vars(twin)[name] = value
        _tf.share_dependencies(twin, model, own)

    for name in names.BUILDERS:
        if hasattr(model, name):
            vars(twin)[name] = _handed_on(getattr(model, name), follow)
    return twin


def _handed_on(method: Callable[..., Any], follow: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        follow()
        return result

    return call


def adopt_state(strategy: tf.distribute.Strategy, model: Any,
                names: Any) -> tuple[list[Any], list[Any]]:
    """Adopts all variables that there are; returns those with one copy and the tower-local ones."""
    metrics, optimizers = state.metrics_of(model, names), state.optimizers_of(model, names)
    held = state.saved_variables(model, names)
    check_variables(strategy, model, [*held, *(rules.held_variable(
        variable) for metric in metrics for variable in names.variables_of(metric))])
    for optimizer in optimizers:
        check_owner(strategy, f"optimizer {getattr(optimizer, 'name', '')!r} of model "
                              f"{model.name!r}", getattr(optimizer, names.OWNER_OF_OPTIMIZER, None))
    for optimizer in optimizers:
        set_owner(optimizer, strategy)
    local = [variable for metric in metrics for variable in names.adopt_metric(strategy, metric)]
    resident = adopt_variables(strategy, held)
    stages.settle(strategy, model, names)
    adopt_variables(strategy, [vars(model).get(name) for name in _COUNTERS])
    return resident, local


def take_optimizer(optimizer: Any, names: Any) -> None:
    """Makes an optimizer that is called in a tower its strategy's, if no strategy has it."""
    context = contexts.current()
    if context is not None:
        check_owner(context.strategy, f"optimizer {getattr(optimizer, 'name', '')!r}",
                    getattr(optimizer, names.OWNER_OF_OPTIMIZER, None))
        set_owner(optimizer, context.strategy)


def set_owner(optimizer: Any, strategy: tf.distribute.Strategy) -> None:
    # tf_keras' LossScaleOptimizer has none of its own and asks the one inside.
    if "_distribution_strategy" in vars(optimizer):
        optimizer._distribution_strategy = strategy


def check_owner(strategy: tf.distribute.Strategy, what: str,
                owner: tf.distribute.Strategy | None) -> None:
    """Raises ``ValueError`` where ``what`` belongs to a strategy other than ``strategy``."""
    if owner is None or owner is strategy or (
            type(owner).__name__ == "_DefaultDistributionStrategy"):  # TensorFlow's for no strategy
        return
    raise ValueError(
        f"{what} belongs to another strategy: it was made or adopted in the scope of {owner!r} and "
        f"cannot be adopted by {strategy!r}. Save the model and load it again, or use the strategy "
        "that it has.")


def check_variables(strategy: tf.distribute.Strategy, model: Any, held: Iterable[Any]) -> None:
    """Raises ``ValueError`` where a TensorFlow variable of ``model`` is another strategy's."""
    for variable in held:
        check_owner(strategy, f"variable {getattr(variable, 'name', variable)!r} of model "
                              f"{model.name!r}", getattr(variable, "_distribute_strategy", None))


def adopt_variables(strategy: tf.distribute.Strategy, held: Iterable[Any]) -> list[Any]:
    """Makes resource variables the strategy's own, in place; returns those with one copy."""
    resident = state.resident(held)
    new = [variable for variable in resident if not isinstance(variable, one_copy.TowerVariable)]
    if strategy.extended.workers is not None:
        state.take_chiefs(strategy.extended.workers, new)
    for variable in new:
        one_copy.into_tower_variable(variable, strategy)
    return resident


def check_trains_on_towers(model: Any, scope: tf.distribute.Strategy) -> None:
    """Raises ``ValueError`` where a model that is not adopted trains in the scope of towers."""
    if kind.is_tower_strategy(scope):
        raise ValueError(
            f"model {model.name!r} is used inside the scope of {scope!r}, but was built and "
            "compiled outside of it and is not adopted. Compile it inside the scope, or call "
            "strategy.adopt(model), which keeps its optimizer and metrics, state and all.")
