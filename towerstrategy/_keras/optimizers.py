"""Optimizers in replica functions, for both Kerases: merge gradients, then run Keras' code once.

Goes in: a tower's gradients and their variables.  Comes out: one update of the one copy, with the
sum of the towers' gradients, as in every ``tf.distribute`` strategy.  Keras alone would clip, decay
and accumulate before the sum, which gives another result than on one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts, losses, refused
from towerstrategy._keras import adopting
from towerstrategy.merge import merging
from towerstrategy.placement import homes as homes_lib, scopes
from towerstrategy.variables.rules import held_variable


def _by_share(change: Callable[..., Any], original: Callable[..., Any], loss: Any) -> Any:
    """``change(tower, loss)`` in a tower; a loss over all rows is returned as it is."""
    tower = contexts.splitting_tower()
    if tower is None:
        return loss if contexts.outside_of_towers() is not None else original(loss)
    return change(tower, loss)


# The hook for ``scale_loss_for_distribution``: multiplies a tower's mean by its share of the rows.
# That for ``unscale_loss_for_distribution``: turns it into the tower's mean again, for a metric.
scale_loss = functools.partial(_by_share, losses.scaled)
unscale_loss = functools.partial(_by_share, losses.unscaled)


def apply(optimizer: Any, names: Any, gradients: Sequence[Any], targets: Sequence[Any],
          update: Callable[[Sequence[Any]], Any], rules: Sequence[str]) -> Any:
    """Calls ``update``, Keras' own code, with the merged gradients, in a context of one replica.

    ``gradients`` (tensors, slices or None) and ``targets`` (variables, of Keras or of TensorFlow)
    are a tower's if a tower calls the optimizer.  ``rules`` say how each gradient is merged: "sum";
    "agreed" if the caller has merged it; "max" if it is the next value of its variable (float8).
    """
    adopting.adopt_optimizer(optimizer, names)
    tower, outside = contexts.current_tower(), contexts.outside_of_towers()
    if tower is not None and tower.several:
        return _merge_then(tower, gradients, list(map(held_variable, targets)), update, rules)
    # There is nothing to merge.  Keras would all-reduce the gradients, in a ``tf.cond`` if it
    # accumulates them or scales the loss, where no sync point can be; outside of towers it would
    # need a replica context.
    with contextlib.ExitStack() as stack:
        if tower is not None:
            stack.enter_context(contexts.OneReplicaContext(tower.strategy))
        elif outside is not None:
            _check_one_copy(outside, gradients)
            stack.enter_context(contexts.OneReplicaContext(outside))
            stack.enter_context(tf.device(outside.extended.merge_device))
        return update(gradients)


def _check_one_copy(strategy: tf.distribute.Strategy, gradients: Sequence[Any]) -> None:
    """Raises if gradients that an optimizer gets outside of towers are not merged yet."""
    for gradient in gradients:
        if isinstance(gradient, tf.distribute.DistributedValues):
            raise ValueError(
                "an optimizer was given a gradient that differs between the towers, "
                f"{refused.shown(gradient)}, outside of them. Call it inside of the function given "
                "to strategy.run, where gradients are merged, or reduce them first: "
                "strategy.reduce(\"SUM\", ..., axis=None).")
    if strategy.extended.workers is not None and not strategy.extended.modes.one_replica:
        raise ValueError(
            "an optimizer was called in the strategy's scope, outside of strategy.run, on one of "
            "several machines: its gradients are those of this machine alone, and the machines' "
            "weights would differ from then on. Call it inside of the function given to "
            "strategy.run.")


def _merge_then(tower: contexts.TowerContext, gradients: Sequence[Any], variables: Sequence[Any],
                update: Callable[[list[Any]], Any], rules: Sequence[str]) -> Any:
    """:func:`apply` in one of several towers.

    Raises:
      RuntimeError: a branch, a loop or a nested function calls it: no sync point can be there.
      ValueError: a variable is not the strategy's.
    """
    _check_made_in_scope(tower.strategy, variables)
    # A tower-local variable may hold gradients: each tower gives its part.
    gradients = [tf.convert_to_tensor(value) if isinstance(value, tf.Variable) else value
                 for value in gradients]
    homes = [homes_lib.home_of(variable) for variable in variables]
    totals = [tower.call.total(value, home) if rule == "sum" else None
              for value, home, rule in zip(gradients, homes, rules)]

    def merge_and_update(strategy: tf.distribute.Strategy, *grouped: Any) -> Any:
        if "agreed" not in rules:
            tower.call.check_gradients(gradients, variables)
        merged = merging.gradients(
            [None if value is None else
             [_tf.select_replica(number, value) for number in range(tower.count)]
             for value in grouped], homes, tower.shares,
            [rule if total is None else "total" for total, rule in zip(totals, rules)])
        with contexts.OneReplicaContext(strategy), tf.name_scope(scopes.UPDATE):
            return update(merged)

    return tower.merge_call(merge_and_update, args=tuple(
        value if total is None else total for value, total in zip(gradients, totals)))


def _check_made_in_scope(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> None:
    """Raises ``ValueError`` if an optimizer in a tower gets a variable not of this strategy."""
    for variable in variables:
        if getattr(variable, "_distribute_strategy", None) is not strategy:
            raise ValueError(
                f"variable {variable.name!r} is trained in the function given to the run of "
                f"{strategy!r}, but was not made in its scope. Make it, or its model, in the scope "
                "(with strategy.scope():), or give the model to strategy.adopt(model) before.")
