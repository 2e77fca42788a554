"""Optimizers in replica functions, as both Kerases have them: merge first, then Keras' code once.

Goes in: a tower's gradients and their variables.  Comes out: one update of the one copy, with the
sum of the towers' gradients, as in every ``tf.distribute`` strategy.  Keras itself clips, decays
and accumulates before it sums, which is another result than one device's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts, losses, refused
from towerstrategy._keras import adopting
from towerstrategy.merge import merging
from towerstrategy.placement import homes as homes_lib, scopes
from towerstrategy.variables.rules import held_variable


def _by_share(change: Callable[..., Any], original: Callable[..., Any], loss: Any) -> Any:
    """In a tower ``change`` of it and ``loss``; of all rows a loss stays as it is."""
    tower = contexts.splitting_tower()
    if tower is None:
        return loss if contexts.outside_of_towers() is not None else original(loss)
    return change(tower, loss)


# The hooks for ``scale_loss_for_distribution``: a tower's mean counts by its share; and for
# ``unscale_loss_for_distribution``: a tower's mean again, for a metric.
scale_loss = functools.partial(_by_share, losses.scaled)
unscale_loss = functools.partial(_by_share, losses.unscaled)


def apply(optimizer: Any, names: Any, gradients: Sequence[Any], targets: Sequence[Any],
          update: Callable[[Sequence[Any]], Any], rules: Sequence[str]) -> Any:
    """``update``, which is Keras' own code, of gradients that are those of all towers.

    In a tower among several they are merged by ``rules``, see :func:`merge_then`; ``targets`` are
    the variables, Keras' own or TensorFlow's.
    """
    adopting.take_optimizer(optimizer, names)
    tower = contexts.splitting_tower()
    if tower is None:
        with _merged_if_alone(gradients):
            return update(gradients)
    return merge_then(tower, gradients, list(map(held_variable, targets)), update, rules)


@contextlib.contextmanager
def _merged_if_alone(gradients: Sequence[Any]) -> Iterator[None]:
    """For an optimizer in the only tower there is, or outside of towers: nothing is to be merged.

    Without it Keras would all-reduce the gradients, which it does inside of ``tf.cond`` where it
    accumulates them or scales the loss, and there is no sync point; outside of towers it
    would look for a replica context.

    Raises:
      ValueError: outside of towers, gradients that differ between towers or machines.
    """
    tower, outside = contexts.current_tower(), contexts.outside_of_towers()
    if tower is not None:
        with contexts.OneReplicaContext(tower.strategy):
            yield
    elif outside is not None:
        _check_one_copy(outside, gradients)
        with contexts.OneReplicaContext(outside), tf.device(outside.extended.merge_device):
            yield
    else:
        yield


def _check_one_copy(strategy: tf.distribute.Strategy, gradients: Sequence[Any]) -> None:
    """Raises where gradients that an optimizer gets outside of towers are not one a variable."""
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


def merge_then(tower: contexts.TowerContext, gradients: Sequence[Any], variables_: Sequence[Any],
               update: Callable[[list[Any]], Any], rules: Sequence[str]) -> Any:
    """Sums the towers' gradients, then runs the optimizer's own single-device code once.

    Args:
      tower: where the optimizer was called, with these gradients, tensors, slices or None.
      variables_: the resource variables they belong to.
      update: takes the merged gradients; runs in a :class:`contexts.OneReplicaContext`.
      rules: how gradients are merged, one a variable: "sum"; "agreed" where the caller has merged
        them; "max" where one is the next value of its variable (in float8 layers).

    Raises:
      RuntimeError: in a branch, a loop or a nested function, where no sync point can be.
      ValueError: a variable that is not the strategy's.
    """
    if not tower.can_merge:
        raise RuntimeError(contexts.NESTED_MERGE)
    _check_made_in_scope(tower.strategy, variables_)
    homes = [homes_lib.home_of(variable) for variable in variables_]
    totals = [tower.call.total(value, home) if rule == "sum" else None
              for value, home, rule in zip(gradients, homes, rules)]

    def merged(strategy: tf.distribute.Strategy, *grouped: Any) -> Any:
        if "agreed" not in rules:
            tower.call.check_gradients(gradients, variables_)
        one_each = merging.gradients(
            [None if value is None else
             [_tf.select_replica(number, value) for number in range(tower.count)]
             for value in grouped], homes, tower.shares,
            [rule if total is None else "total" for total, rule in zip(totals, rules)])
        with contexts.OneReplicaContext(strategy), tf.name_scope(scopes.UPDATE):
            return update(one_each)

    return tower.merge_call(merged, args=tuple(
        value if total is None else total for value, total in zip(gradients, totals)))


def _check_made_in_scope(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> None:
    """Raises where an optimizer in a tower is given a variable of no strategy, or of another."""
    for variable in variables:
        if getattr(variable, "_distribute_strategy", None) is not strategy:
            raise ValueError(
                f"variable {variable.name!r} is trained in the function given to the run of "
                f"{strategy!r}, but was not made in its scope. Make it, or its model, in the scope "
                "(with strategy.scope():), or give the model to strategy.adopt(model) before.")
