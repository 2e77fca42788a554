"""Writes of what towers have made of their rows: counts, sums of features, ratios of such.

Goes in: a tower's value for a variable whose writes are not added up.  Comes out: what one device
would have written, where the value is made of sums over rows (:mod:`totals`); None where the rule
for writes will do, as for means over rows, or has to.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from towerstrategy.losses import parts, terms
from towerstrategy.towers import contexts
from towerstrategy.variables import by_gradients

_STEPPING = ("scatter_add", "scatter_sub", "scatter_nd_add", "scatter_nd_sub")
# Batch norm's are those of each tower's rows, unless it is synchronized.
_LOCAL = ("moving_mean", "moving_variance")

# Keras has tower 0 write the learning rate: who sets it of a loss means that of the batch.
_FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA

_TOGETHER = (
    "towerstrategy: what the towers write to variable {variable!r}, {name!r}, puts rows "
    "of the batch together in a way that is not made again of the rows of all towers: it gets "
    "{rule}, which is not what one device writes. Gather the rows first, with "
    "towerstrategy.whole_batch; say what it holds, with strategy.merge_rule(variable, \"max\") "
    "or \"min\"; or make it with the tf.VariableAggregation that it needs.")
_ALONE = (
    "towerstrategy: variable {variable!r} is written in a branch, a loop or a nested tf.function, "
    "where the towers cannot meet, and what is written there, {name!r}, or whether it is, depends "
    "on all rows that a tower has: it gets {rule}, which is not what one device writes. Make the "
    "value outside, and write it there, as by variable.assign(tf.where(condition, value, "
    "variable)). Sums over rows alone may be added in there, by assign_add.")


def of_all(tower: contexts.TowerContext, variable: Any, value: Any) -> tf.Tensor | None:
    """What one device writes to ``variable`` where the tower writes ``value``."""
    if by_gradients.adds_up(tower, variable) or _is_local(variable):
        return None
    if variable.aggregation is _FIRST:
        return parts.of_all_or_mean(tower, value)
    whole = parts.of_all(tower, value)
    if whole is None and parts.is_of_rows(tower, value):
        _warn(tower, variable, value)
    return whole


def of_all_at(tower: contexts.TowerContext, variable: Any, value: Any,
              *places: Any) -> tf.Tensor | None:
    """As :func:`of_all`, where ``value`` goes to a place in the variable.

    Args:
      tower: which writes.
      variable: to which it writes.
      value: a tensor.
      *places: the indices, or bounds; None comes out unless they are the same on all towers.
    """
    if by_gradients.adds_up(tower, variable) or not all(
            parts.is_steady(tower, place) for place in places):
        return None
    whole = by_gradients.of_merged(tower, value)
    if whole is None:
        whole = parts.of_all_or_mean(tower, value)
    if whole is None and parts.is_of_rows(tower, value):
        _warn(tower, variable, value)
    return whole


def note_alone(tower: contexts.TowerContext, variable: Any, value: Any, is_step: bool) -> None:
    """Notes a write where the towers cannot meet: steps by sums over rows are to be added up.

    Warns, once a variable, where one device would write something else.

    Args:
      tower: which writes.
      variable: to which it writes, in a branch, a loop or a nested function.
      value: the value, or step, that it writes.
      is_step: whether the value is added to what the variable holds, or taken from it.
    """
    if by_gradients.adds_up(tower, variable) or _is_local(variable):
        return
    kinds = parts.kinds_alone(tower, value)
    is_part = is_step and kinds == terms.PARTS and tower.strategy.extended.workers is None
    variable.alone_adds |= {is_part}
    if (not is_part and not kinds.isdisjoint(parts.OTHER_THAN_MEANS)
            or len(variable.alone_adds) > 1
            or any(parts.is_of_own_rows(tower, each) for each in tower.predicates)):
        _warn(tower, variable, value, _ALONE)


def _is_local(variable: Any) -> bool:
    return bool(variable.name.partition(":")[0].endswith(_LOCAL))


def part_of_next(tower: contexts.TowerContext, variable: Any, value: Any) -> Any:
    """What a tower adds to the next value of a variable whose writes are added up.

    The value that the variable had, as a moving average has it for a term, is one of all towers'
    and not one a tower.  Who asked for the number of towers has divided by it.
    """
    if (variable.aggregation is not tf.VariableAggregation.SUM or variable.merges_extremes
            or tower.asked or tower.strategy.extended.asked
            or not parts.is_made_of(tower, value, variable)):
        return value
    part = parts.of_terms(tower, value)
    return value if part is None else part


def are_added(tower: contexts.TowerContext, variable: Any, method_name: str, indices: Any,
              updates: Any) -> bool:
    """Whether slices that are written have one for each row, so that those of all towers add up."""
    return (method_name in _STEPPING and variable.dtype.is_floating
            and variable.aggregation is tf.VariableAggregation.NONE
            and parts.are_rows(tower, indices, updates))


def check_part(tower: contexts.TowerContext, variable: Any, value: Any) -> None:
    """Warns, once a variable, of a number that is no sum, where the towers' are added up."""
    if (variable.aggregation is not tf.VariableAggregation.SUM or variable._extreme is not None
            or variable.shape.rank != 0 or id(variable) in tower.strategy.extended.warned
            or not parts.is_no_sum(tower, value)):
        return
    tower.strategy.extended.warned.add(id(variable))
    warnings.warn(
        f"towerstrategy: what {variable.name!r} keeps, {contexts.plain_name(value.op.name)!r}, is "
        "made of each tower's rows and is no sum over them, but the towers' are added up, as the "
        "variable's aggregation says: it comes out otherwise than on one device. Keep sums and "
        "make the number of them in result(); or, of the largest or smallest, say "
        'strategy.merge_rule(variable, "max") or "min".', UserWarning, stacklevel=2)


def _warn(tower: contexts.TowerContext, variable: Any, value: tf.Tensor,
          message: str = _TOGETHER) -> None:
    """Says, once a variable, that it will hold something else than on one device."""
    warned = tower.strategy.extended.warned
    if id(variable) in warned:
        return
    warned.add(id(variable))
    rule = ("the mean of the towers' values by share of rows"
            if variable.dtype.is_floating else "the first tower's value")
    name = contexts.plain_name(value.op.name)
    warnings.warn(message.format(variable=variable.name, name=name, rule=rule), UserWarning,
                  stacklevel=2)
