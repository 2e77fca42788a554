"""The state of a model, for people to read: what is kept where, and how towers' writes are merged.

Goes in: a model, and how its Keras names things.  Comes out: a line for each variable that is not
trained by gradients, and one for all that are.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy.variables import rules

Line = tuple[str, str, str]


def lines(strategy: tf.distribute.Strategy, model: Any, names: Any) -> list[Line]:
    """Name, where it is kept, how it is merged.

    Raises:
      ValueError: the model is not the strategy's.
    """
    if getattr(model, names.OWNER) is not strategy:
        raise ValueError(f"model must be one of this strategy, but {model.name!r} is not: compile "
                         "it in the strategy's scope, or call strategy.adopt(model).")
    counted = {id(variable) for metric in names.metrics_of(model) for variable in metric.variables}
    own = [variable for variable in model.variables if id(variable) not in counted]
    trained = sum(variable.trainable for variable in own)
    found = [(f"{trained:,} trained weights", "one copy", "gradients: sum of all rows'")]
    for variable in own:
        if not variable.trainable:
            found.append(_line(_name(variable), variable))
    for metric in names.metrics_of(model):
        for variable in metric.variables:
            name = _name(variable)
            found.append(_line(name if "/" in name else f"{metric.name}/{name}", variable))
    return found


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name)).partition(":")[0]


def _line(name: str, variable: Any) -> Line:
    if getattr(variable, "overwrite_with_gradient", False):
        return name, "one copy", "largest"
    return name, *rules.in_words(rules.held_variable(variable))
