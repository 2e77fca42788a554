"""Writes of what towers have made of their gradients: sums of several batches, steps of one's own.

Goes in: a tower's value for a variable whose writes are not added up.  Comes out: what one device
would have written, made of the merged gradients (:mod:`remade`); None where the rule for writes
will do.  Gradients of a part of the batch's loss are summed, those of a mean over the tower's rows
count by its share.  A variable that was written so holds the whole batch's, not a tower's part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.losses import provenance
from towerstrategy.merge import merging, remade
from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement import homes as homes_lib
from towerstrategy.towers import contexts


def find(tower: contexts.TowerContext, variable: Any, value: Any) -> remade.Remade | None:
    """How to make ``value``, written to ``variable``, of merged gradients."""
    if adds_up(tower, variable) or not tower.several:
        return None
    look_into_calls(tower)
    return tower.gradients.remade([value], tower.graph, known=True)


def adds_up(tower: contexts.TowerContext, variable: Any) -> bool:
    """Whether what the towers write to ``variable`` is added up, or has another rule of its own.

    Who asked for the number of towers has made of his value what its mean, as he asked for, needs.
    """
    asked = tower.asked or tower.strategy.extended.asked
    return (variable.merges_extremes or variable.aggregation is tf.VariableAggregation.SUM
            or asked and variable.aggregation is tf.VariableAggregation.MEAN)


def look_into_calls(tower: contexts.TowerContext) -> None:
    """Finds the gradients that nested functions have returned; warns of what these make of them.
    """
    for value in tower.gradients.add_of_calls(tower.graph):
        tower.warn_of(
            value,
            "towerstrategy: a function of gradients: {name} is a nested tf.function that takes "
            "gradients and makes something of them which is no multiple, as clipping does. The "
            "towers cannot meet in there: each makes it of its own part of the gradients, so that "
            "it comes out otherwise than on one device. Return the gradients as they are, and "
            "make it of them outside of that function.")


def check_eager(tower: contexts.TowerContext, variable: Any, values: list[Any]) -> None:
    """Warns, once a variable, where eager towers write steps of their own parts of a gradient.

    What eager code makes of a gradient is not known; but a trained variable to which towers that
    have taken one write different values is, as good as always, updated by hand.
    """
    warned = tower.strategy.extended.warned
    if (not tf.executing_eagerly() or not variable.trainable or id(variable) in warned
            or variable.aggregation is not tf.VariableAggregation.NONE
            or not tower.gradients.has_eager_parts()
            or all(np.array_equal(values[0], value) for value in values[1:])):
        return
    warned.add(id(variable))
    warnings.warn(
        f"towerstrategy: eager towers write different values to variable {variable.name!r} after "
        "they took gradients of their parts of the batch's loss. The values are merged as their "
        "mean by share of rows, but gradients of parts add up. Merge the gradients first: "
        'tf.distribute.get_replica_context().all_reduce("SUM", gradients); or call strategy.run '
        "in a tf.function, where that is done for you.", stacklevel=2)


def of_merged(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor | None:
    """``value``, a log, made of the merged gradients; None where it is made of something else."""
    if not tower.several or not tower.can_merge:
        return None
    look_into_calls(tower)
    made = tower.gradients.remade([value], tower.graph, known=True)
    if made is None:
        return None
    return tower.merge_call(lambda _, *grouped: _again(tower, made, grouped),
                            args=tuple(gradient.value for gradient in made.gradients))


def _again(tower: contexts.TowerContext, made: remade.Remade, grouped: Sequence[Any]) -> tf.Tensor:
    return made.again([_merged(gradient, contexts.all_values(value, tower.count), tower.shares)
                       for gradient, value in zip(made.gradients, grouped)])[0]


def write(tower: contexts.TowerContext, variable: Any, made: remade.Remade,
          plain: Callable[[Any], Any]) -> Any:
    """Does a write, given as ``plain``, of what one device makes of its gradients."""
    variable.holds_gradients = True

    def merged(_: Any, *grouped: Any) -> Any:
        with tf.device(homes_lib.home_of(variable)):
            value = _again(tower, made, grouped)
        return plain(value)

    return tower.merge_call(merged, args=tuple(gradient.value for gradient in made.gradients))


def _merged(gradient: remade.Gradient, values: list[Any], shares: shares_lib.Shares) -> Any:
    is_part = gradient.kind is provenance.Kind.PART
    with tf.device(gradient.home):
        return (merging.total_of_filled if is_part else merging.weighted_mean)(values, shares)
