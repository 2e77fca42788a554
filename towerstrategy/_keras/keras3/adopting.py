"""TODO
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.layers.rnn import rnn
from keras.src.trainers import trainer as base_trainer

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import adopting as adopting_rules
from towerstrategy._keras import losses as losses_rules
from towerstrategy._keras import twin
from towerstrategy._keras.keras3 import metrics as metrics_lib
from towerstrategy._keras.keras3 import names
from towerstrategy.variables import tower_local


def adopt(strategy: tf.distribute.Strategy, model: Any) -> str:
    """See ``TowerStrategy.adopt``."""
    adopting_rules.check_owner(strategy, f"model {model.name!r}", model._distribute_strategy)
    resident, local = adopt_state(strategy, model)
    model._distribute_strategy = strategy
    without_xla = bool(model._jit_compile) and not strategy.extended.placement.compiles
    if without_xla:
        model.jit_compile = False
    strategy.extended.spread(resident)
    # Functions traced before know nothing of towers.
    names.forget_functions(model)
    return adopting_rules.adopted_sentence(strategy, model, resident, local, without_xla)


def make_twin(strategy: tf.distribute.Strategy, model: Any) -> Any:
    """A second handle on ``model``, the strategy's."""
    adopting_rules.check_owner(strategy, f"model {model.name!r}", model._distribute_strategy)
    adopting_rules.check_variables(strategy, model, names.held_variables(model))
    state = {name: value for name, value in vars(tf_trainer.TensorFlowTrainer()).items()
             if name in names.TRAINING_STATE}
    made = twin.make(model, names.TRAINING_STATE, state, {"build": lambda: not model.built})
    adopt(strategy, made)
    return made


def adopt_state(strategy: tf.distribute.Strategy, model: Any) -> tuple[list[Any], list[Any]]:
    """Adopts all variables that there are; returns those with one copy and the tower-local ones."""
    adopting_rules.check_no_states(strategy, model, rnn.RNN)
    metrics, optimizers = names.metrics_of(model), names.optimizers_of(model)
    local = {id(variable): variable for metric in metrics for variable in metric.variables}
    held = [names.held(variable)
            for part in (model, *optimizers) for variable in part.variables
            if id(variable) not in local]
    adopting_rules.check_variables(strategy, model, held)
    adopting_rules.check_variables(strategy, model, map(names.held, local.values()))
    for optimizer in optimizers:
        adopting_rules.check_owner(strategy, f"optimizer {optimizer.name!r} of model {model.name!r}",
                           optimizer._distribution_strategy)
    for optimizer in optimizers:
        optimizer._distribution_strategy = strategy
    for metric in metrics:
        metrics_lib.wrap_result(type(metric))
    losses_rules.wrap_own_losses(type(model), base_trainer.Trainer)
    for variable in local.values():
        _adopt_metric_variable(strategy, variable)
    return adopting_rules.adopt_variables(strategy, held), list(local.values())


def _adopt_metric_variable(strategy: tf.distribute.Strategy, variable: Any) -> None:
    value = variable._value
    if isinstance(value, _tf.BaseResourceVariable) and strategy.num_replicas_in_sync > 1:
        variable._value = tower_local.make_tower_local(strategy, value)
