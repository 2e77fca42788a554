"""The state of a model: its variables, metrics and optimizers; and a table of its variables.

Goes in: a model, and the names of its Keras.  Comes out: lists of its parts; and, for
``strategy.describe``, where each variable is kept and how the towers' writes to it are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.variables import rules

Line = tuple[str, str, str]


def variables_of(model: Any, names: Any) -> list[Any]:
    """The TensorFlow variables of ``model``, without those of its metrics and optimizers."""
    of_metrics = {id(variable) for metric in metrics_of(model, names)
                  for variable in names.variables_of(metric)}
    return [rules.held_variable(variable) for variable in names.variables_of(model)
            if id(variable) not in of_metrics]


def metrics_of(model: Any, names: Any) -> list[Any]:
    """The model's metrics, with those that ``compile`` got and that are not built yet."""
    try:
        listed = model.metrics
    except Exception:  # a user's property may fail before the first step
        listed = None
    metrics = [*(names.MODEL.metrics.fget(model) if listed is None else listed),
               *names.compiled_metrics(model)]
    return list({id(part): part for part in metrics if isinstance(part, names.METRIC)}.values())


def optimizers_of(model: Any, names: Any) -> list[Any]:
    """The optimizers in the model's attributes (a GAN has several), and their inner optimizers."""
    values = vars(model).values()
    outer = [part for value in values for part in (value if isinstance(value, list) else [value])
             if isinstance(part, names.OPTIMIZERS)]
    return [*outer, *(part.inner_optimizer for part in outer if hasattr(part, "inner_optimizer"))]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The TensorFlow variables of an optimizer."""
    try:
        variables = optimizer.variables  # a method in tf_keras' legacy optimizers
        if callable(variables) and not isinstance(variables, list):
            variables = variables()
    except Exception:  # a user's property may fail
        return []
    return list(map(rules.held_variable, variables))


def saved_variables(model: Any, names: Any) -> list[Any]:
    """The variables that files of weights hold: the model's, then its optimizers'."""
    return [*variables_of(model, names), *(
        variable for optimizer in optimizers_of(model, names)
        for variable in optimizer_variables(optimizer))]


def resident(variables: Iterable[Any]) -> list[Any]:
    """The resource variables among ``variables``, each once."""
    return list({id(variable): variable for variable in variables
                 if isinstance(variable, _tf.BaseResourceVariable)}.values())


def copy_from_chief(workers: Any, variables: Sequence[Any]) -> None:
    """Sets these variables on every machine to the chief's values."""
    values = workers.chiefs([variable.read_value() for variable in variables])
    for variable, value in zip(variables, values):
        variable.assign(value)


def lines(strategy: tf.distribute.Strategy, model: Any, names: Any) -> list[Line]:
    """A table of a model's variables: the name, where it is kept, how writes are merged."""
    if getattr(model, names.OWNER) is not strategy:
        raise ValueError(f"model must be one of this strategy, but {model.name!r} is not: compile "
                         "it in the strategy's scope, or call strategy.adopt(model).")
    metrics = metrics_of(model, names)
    of_metrics = {id(variable) for metric in metrics for variable in metric.variables}
    others = [variable for variable in model.variables if id(variable) not in of_metrics]
    trained = {id(variable) for variable in model.trainable_weights}
    return [(f"{len(trained):,} trained weights", "one copy", "gradients: sum of all rows'"),
            *(_line(variable) for variable in others if id(variable) not in trained),
            *(_line(variable, metric.name) for metric in metrics for variable in metric.variables)]


def _line(variable: Any, metric: str = "") -> Line:
    name = str(getattr(variable, "path", variable.name)).partition(":")[0]
    name = f"{metric}/{name}" if metric and "/" not in name else name
    if getattr(variable, "overwrite_with_gradient", False):
        return name, "one copy", "largest"
    return name, *rules.in_words(rules.held_variable(variable))
