"""The state of a model: its variables, metrics and optimizers; and a table of them.

Goes in: a model, and how its Keras names things.  Comes out: what it holds; and, for people to
read, where what is not trained by gradients is kept, and how towers' writes are merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement.workers import Workers
from towerstrategy.variables import rules

Line = tuple[str, str, str]


def variables_of(model: Any, names: Any) -> list[Any]:
    """The TensorFlow variables of ``model``, those of its metrics and optimizers left out."""
    own = {id(variable) for metric in metrics_of(model, names)
           for variable in names.variables_of(metric)}
    return [rules.held_variable(variable) for variable in names.variables_of(model)
            if id(variable) not in own]


def metrics_of(model: Any, names: Any) -> list[Any]:
    """The model's metrics, those given to ``compile`` and not built yet among them."""
    listed = getattr(model, "metrics", None)  # its own may need what it makes after compile
    given = [*(names.MODEL.metrics.fget(model) if listed is None else listed),
             *names.compiled_metrics(model)]
    return list({id(part): part for part in given if isinstance(part, names.METRIC)}.values())


def optimizers_of(model: Any, names: Any) -> list[Any]:
    """The optimizers that the model holds, a GAN's several among them, and those inside them."""
    values = vars(model).values()
    held = [part for value in values for part in (value if isinstance(value, list) else [value])
            if isinstance(part, names.OPTIMIZERS)]
    return [*held, *(part.inner_optimizer for part in held if hasattr(part, "inner_optimizer"))]


def optimizer_variables(optimizer: Any) -> list[Any]:
    held = optimizer.variables  # a method of tf_keras' old ones
    return list(map(rules.held_variable,
                    held() if callable(held) and not isinstance(held, list) else held))


def saved_variables(model: Any, names: Any) -> list[Any]:
    """The variables that the weights' files hold: of the model, then of its optimizers."""
    return [*variables_of(model, names), *(
        variable for optimizer in optimizers_of(model, names)
        for variable in optimizer_variables(optimizer))]


def resident(variables: Iterable[Any]) -> list[Any]:
    """Those of ``variables`` that are resource variables, each once."""
    return list({id(variable): variable for variable in variables
                 if isinstance(variable, _tf.BaseResourceVariable)}.values())


def take_chiefs(workers: Workers, variables: Sequence[Any]) -> None:
    """Gives variables, the same on every machine, the first machine's values."""
    values = workers.chiefs([variable.read_value() for variable in variables])
    for variable, value in zip(variables, values):
        variable.assign(value)


def lines(strategy: tf.distribute.Strategy, model: Any, names: Any) -> list[Line]:
    """Name, where it is kept, how it is merged."""
    if getattr(model, names.OWNER) is not strategy:
        raise ValueError(f"model must be one of this strategy, but {model.name!r} is not: compile "
                         "it in the strategy's scope, or call strategy.adopt(model).")
    metrics = metrics_of(model, names)
    counted = {id(variable) for metric in metrics for variable in metric.variables}
    own = [variable for variable in model.variables if id(variable) not in counted]
    trained = sum(variable.trainable for variable in own)
    return [(f"{trained:,} trained weights", "one copy", "gradients: sum of all rows'"),
            *(_line(variable) for variable in own if not variable.trainable),
            *(_line(variable, metric.name) for metric in metrics for variable in metric.variables)]


def _line(variable: Any, owner: str = "") -> Line:
    name = str(getattr(variable, "path", variable.name)).partition(":")[0]
    name = f"{owner}/{name}" if owner and "/" not in name else name
    if getattr(variable, "overwrite_with_gradient", False):
        return name, "one copy", "largest"
    return name, *rules.in_words(rules.held_variable(variable))
