"""``strategy.merge_rule``: variables that merge the towers' values by their maximum or minimum.

Goes in: a variable of a strategy, one copy or tower-local, and ``"max"`` or ``"min"``.  Comes out:
the same variable, with this rule.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy import refused
from towerstrategy.merge import merging
from towerstrategy.variables import one_copy, tower_local, written

# The results of :func:`written.rule_of`, in words.
_WORDS = {"sum": "sum", "mean": "mean by share of rows", "first": "tower 0's", "max": "largest",
          "min": "smallest"}


def held_variable(variable: Any) -> Any:
    """The TensorFlow variable inside a variable of Keras; a plain TensorFlow variable itself."""
    if isinstance(variable, tf.Variable):
        return vars(variable).get("_variable", variable)
    return getattr(variable, "_value", getattr(variable, "_variable", variable))


def in_words(variable: Any) -> tuple[str, str]:
    """Where a variable of a strategy is kept, and how towers' writes are merged, in words."""
    if isinstance(variable, tower_local.TowerLocalVariable):
        rule = variable._extreme or {
            one_copy.Aggregation.SUM: "sum", one_copy.Aggregation.MEAN: "mean"}.get(
                variable.aggregation if variable._values[1:] else None, "first")
        return "a part on each tower", f"{_WORDS[rule]}, when it is read"
    if not isinstance(variable, one_copy.TowerVariable):
        return "one copy", "not written by towers"
    return "one copy", _WORDS[written.rule_of(variable)]


def set_rule(strategy: tf.distribute.Strategy, variable: Any, rule: str) -> None:
    """See ``TowerStrategy.merge_rule``."""
    if rule not in merging.EXTREMES:
        raise ValueError(f"rule must be one of {list(merging.EXTREMES)}, but got {rule!r}. For a "
                         "sum, a mean or the first tower's value make the variable with "
                         "aggregation=tf.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA.")
    held = held_variable(variable)
    if not isinstance(held, (one_copy.TowerVariable, tower_local.TowerLocalVariable)):
        raise refused.wrong_type("variable", variable, "a variable made in the scope of this "
                                 "strategy, or of a model that it has adopted")
    if held._distribute_strategy is not strategy:
        raise ValueError(f"variable {held.name!r} belongs to another strategy: it was made in the "
                         f"scope of {held._distribute_strategy!r}, not of {strategy!r}.")
    if not (held.dtype.is_floating or held.dtype.is_integer):
        raise TypeError(f"variable must hold real numbers to have a {_WORDS[rule]}, but "
                        f"{held.name!r} is of dtype {held.dtype.name}.")
    held._extreme = rule
    if isinstance(held, tower_local.TowerLocalVariable):
        # So that a value assigned from outside of towers goes to each part, not to one part, and
        # value() aggregates the parts.
        held._aggregation = one_copy.Aggregation.MEAN
