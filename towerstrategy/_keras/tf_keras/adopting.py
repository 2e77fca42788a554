"""TODO
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf
from tf_keras.src.engine import training
from tf_keras.src.layers.rnn import base_rnn

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import adopting as adopting_rules
from towerstrategy._keras import losses as losses_rules
from towerstrategy._keras import twin
from towerstrategy._keras.tf_keras import names
from towerstrategy.variables import tower_local


def adopt(strategy: tf.distribute.Strategy, model: Any) -> str:
    """See ``TowerStrategy.adopt``."""
    adopting_rules.check_owner(strategy, f"model {model.name!r}", model._distribution_strategy)
    resident, local = adopt_state(strategy, model)
    model._distribution_strategy = strategy
    without_xla = bool(model._jit_compile) and not strategy.extended.placement.compiles
    if without_xla:
        model._jit_compile = False
    strategy.extended.spread(resident)
    # Functions traced before know nothing of towers.
    names.forget_functions(model)
    return adopting_rules.adopted_sentence(strategy, model, resident, local, without_xla)


def make_twin(strategy: tf.distribute.Strategy, model: Any) -> Any:
    """A second handle on ``model``, the strategy's."""
    adopting_rules.check_owner(strategy, f"model {model.name!r}", model._distribution_strategy)
    adopting_rules.check_variables(strategy, model, names.held_variables(model))
    state = {name: value for name, value in vars(training.Model()).items()
             if name in names.TRAINING_STATE}
    built = {name: lambda: True for name in (
        "build", "_maybe_build", "_set_save_spec", "_build_graph_network_for_inferred_shape")
        if hasattr(model, name)}
    made = twin.make(model, names.TRAINING_STATE, state, built)
    vars(made)["_checkpoint"] = tf.train.Checkpoint(root=weakref.ref(made))
    adopt(strategy, made)
    return made


def adopt_state(strategy: tf.distribute.Strategy, model: Any) -> tuple[list[Any], list[Any]]:
    """Adopts all variables that there are; returns those with one copy and the tower-local ones."""
    adopting_rules.check_no_states(strategy, model, base_rnn.RNN)
    metrics, optimizers = names.metrics_of(model), names.optimizers_of(model)
    losses_rules.wrap_own_losses(type(model), training.Model)
    held = names.held_variables(model)
    slots = [variable for optimizer in optimizers for variable in names.optimizer_variables(optimizer)]
    counters = [model._train_counter, model._test_counter, model._predict_counter]
    adopting_rules.check_variables(strategy, model, [*held, *slots])
    for metric in metrics:
        adopting_rules.check_variables(strategy, model, names.variables_of(metric))
    local: list[Any] = []
    for metric in metrics:
        adopt_metric(strategy, metric, local)
    for optimizer in optimizers:
        adopt_optimizer(strategy, optimizer)
    resident = adopting_rules.adopt_variables(strategy, [*held, *slots])
    adopting_rules.adopt_variables(strategy, counters)
    return resident, local


def adopt_metric(strategy: tf.distribute.Strategy, metric: Any, local: list[Any]) -> None:
    for layer in metric._flatten_layers():
        for variable in list(layer._trainable_weights) + list(layer._non_trainable_weights):
            if (isinstance(variable, _tf.BaseResourceVariable)
                    and strategy.num_replicas_in_sync > 1):
                parts = tower_local.make_tower_local(strategy, variable)
                _replace(layer, variable, parts)
                variable = parts
            local.append(variable)


def _replace(layer: Any, old: Any, new: Any) -> None:
    """Puts ``new`` wherever ``layer`` holds ``old``, checkpoint dependencies included."""
    for weights in (layer._trainable_weights, layer._non_trainable_weights):
        weights[:] = [new if weight is old else weight for weight in weights]
    for name, value in list(vars(layer).items()):
        if value is old:
            layer.__dict__[name] = new
    for reference in list(layer._trackable_children().items()):
        name, child = reference
        if child is old:
            layer._track_trackable(new, name, overwrite=True)


def adopt_optimizer(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    # A LossScaleOptimizer has none of its own and asks the one inside.
    if "_distribution_strategy" in vars(optimizer):
        optimizer._distribution_strategy = strategy
