"""Optimizers, as both Kerases have them: merge first, then Keras' own code once.

Goes in: a tower's gradients and their variables.  Comes out: one update of the one copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import loops, own_losses, parts, provenance
from towerstrategy.machines import row_products
from towerstrategy.merge import beside, factors, merging, remade, stacked
from towerstrategy.merge import gradients as gradients_lib
from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement import homes as homes_lib
from towerstrategy.towers import contexts
from towerstrategy.variables import by_gradients

_OVERFLOW = 65520.0  # float16 rounds this to infinity


@contextlib.contextmanager
def merged_if_alone(gradients: Sequence[Any]) -> Iterator[None]:
    """For an optimizer in the only tower there is, or outside of towers: nothing is to be merged.

    Without it Keras would all-reduce the gradients, which it does inside of ``tf.cond`` where it
    accumulates them or scales the loss, and there the towers cannot meet; outside of towers it
    would look for a replica context.

    Raises:
      ValueError: outside of towers, gradients that differ between towers or machines.
    """
    tower, outside = contexts.current_tower(), contexts.outside_of_towers()
    with contextlib.ExitStack() as stack:
        if tower is not None:
            stack.enter_context(contexts.MergedContext(tower.strategy))
        elif outside is not None:
            _check_one_copy(outside, gradients)
            stack.enter_context(contexts.MergedContext(outside))
            stack.enter_context(tf.device(outside.extended.merge_device))
        yield


def _check_one_copy(strategy: tf.distribute.Strategy, gradients: Sequence[Any]) -> None:
    """Raises where gradients that an optimizer gets outside of towers are not one a variable."""
    for gradient in gradients:
        if isinstance(gradient, tf.distribute.DistributedValues):
            raise ValueError(
                f"an optimizer was given a gradient that differs between the towers, {gradient!r}, "
                "outside of them. Call it inside of the function given to strategy.run, where "
                "gradients are merged, or reduce them first: strategy.reduce(\"SUM\", ..., "
                "axis=None).")
    if strategy.extended.workers is not None:
        raise ValueError(
            "an optimizer was called in the strategy's scope, outside of strategy.run, on one of "
            "several machines: its gradients are those of this machine alone, and the machines' "
            "weights would differ from then on. Call it inside of the function given to "
            "strategy.run.")


def merge_then(tower: contexts.TowerContext, gradients: Sequence[Any], variables_: Sequence[Any],
               apply: Callable[[list[Any]], Any], merged_already: bool = False,
               overwriting: Sequence[bool] = (), loss_scale: Any = None) -> Any:
    """Merges the towers' gradients, then runs the optimizer's own single-device code once.

    Args:
      tower: where the optimizer was called.
      gradients: this tower's, one a variable: tensors, ``tf.IndexedSlices`` or None.
      variables_: the resource variables they belong to.
      apply: takes the merged gradients; runs in a :class:`towers.MergedContext`.
      merged_already: whether the caller has merged them, so that the towers agree.  Where they do
        not, there is one copy to update all the same: each tower counts by its share of the rows.
      overwriting: for each variable whether its gradient is its next value (the largest numbers
        seen, in float8 layers).  Of these the towers' maximum is taken, by the rule by which Keras
        accumulates them.
      loss_scale: for an optimizer that looks for overflows, by what the gradients are to be
        multiplied to be those of the scaled loss; else None.
    """
    own_losses.check_applied(tower, variables_, gradients)
    loops.check(tower)
    if not tower.can_merge:
        raise tower.refused()
    gradients, count = list(gradients), tower.count
    of_halves = [loss_scale is not None and _is_of_halves(gradient) for gradient in gradients]
    homes = [homes_lib.home_of(variable) for variable in variables_]

    made = None if merged_already or any(overwriting) else _made_of_others(tower, gradients)
    if made is not None:
        gradients = [None if index in made.places else gradient
                     for index, gradient in enumerate(gradients)]
        gradients += [gradient.value for gradient in made.gradients]
        homes += [gradient.home for gradient in made.gradients]
    held = () if merged_already else _are_held(tower, gradients)

    if made is None and not merged_already and not any(overwriting):
        gradients = [gradient if is_held or tower.gradients.holds(gradient) else
                     parts.gradient(tower, gradient) for gradient, is_held in zip(gradients, held)]
    if tower.uniques:
        gradients = [gradients_lib.told(gradient, tower.uniques) for gradient in gradients]

    placement = tower.strategy.extended.placement
    micro_batches = placement.micro_batches
    # The rows of all micro-batches would be held until the last has come.
    from_factors = placement.on_cpu and micro_batches == 1 and not merged_already
    alone: Sequence[int] = [index for index, is_held in enumerate(held) if is_held]
    if merged_already or any(overwriting) or placement.rows or not tower.is_copied:
        alone = range(len(gradients))
    stacks = stacked.Stacks(gradients, homes, alone)
    gradients, homes = stacks.put(gradients, homes)
    if from_factors and tower.is_copied:  # else towers may differ in what they hand over
        gradients = [factors.apart(gradient) for gradient in gradients]

    def merged(strategy: tf.distribute.Strategy, *grouped: Any) -> Any:
        # Else some weights are updated, and some are not, where an assertion ends the step.
        checks = [] if tower.graph is None or tower.is_copied else _assertions(tower.graph)
        per_variable = [_per_tower(value, count) for value in grouped]
        whole = {**_take_largest(per_variable, homes, tower.shares, overwriting),
                 **_take_held(per_variable, held)}
        summed = (gradients_lib.agreed_gradients(per_variable, homes, tower.shares)
                  if merged_already else
                  gradients_lib.gradients(per_variable, homes, tower.shares, tower.silenced,
                                          from_factors, placement.devices, micro_batches,
                                          placement.relays))
        summed = stacks.apart(summed)
        merge_device = strategy.extended.merge_device
        with tf.device(merge_device), beside.placed(homes, merge_device):
            if made is not None:
                whole |= made.again(summed[len(variables_):])
                summed = summed[:len(variables_)]
            for index, value in whole.items():
                summed[index] = value
            summed = [_overflowing(value, loss_scale) if is_of_halves else value
                      for value, is_of_halves in zip(summed, of_halves)]
            with tf.control_dependencies(checks), contexts.MergedContext(strategy), \
                    tf.name_scope(contexts.UPDATE_SCOPE), \
                    tf.profiler.experimental.Trace(contexts.UPDATE_SCOPE):
                return apply(summed)

    return tower.merge_call(merged, args=tuple(gradients))


def _assertions(graph: tf.Graph) -> list[tf.Operation]:
    """What has been traced that fails where an assertion does; Keras' own are not looked for.

    Towers whose function asserts something are not copied, see :mod:`copies`.
    """
    return [operation for operation in graph.get_operations() if operation.type == "Assert"
            or any(_tf.asserts(graph, name) for name in _tf.functions_of(operation))]


def _is_of_halves(gradient: Any) -> bool:
    """Whether a gradient was computed in float16; eager ones do not tell."""
    if not isinstance(gradient, tf.Tensor) or _tf.is_eager(gradient):
        return False
    operation = gradient.op
    while operation.type in ("Mul", "RealDiv", "Identity"):  # by the loss' scale
        operation = operation.inputs[0].op
    return bool(operation.type == "Cast" and operation.inputs[0].dtype == tf.float16)


def _overflowing(value: tf.Tensor, loss_scale: Any) -> tf.Tensor:
    """``value``, infinite where the whole batch's would have been in float16.

    Each tower's part may be finite where their sum is not, and one device skips the step.
    """
    scaled = tf.abs(value) * tf.cast(loss_scale, value.dtype)
    return tf.where(scaled >= _OVERFLOW, tf.cast(np.inf, value.dtype), value)


def _made_of_others(tower: contexts.TowerContext,
                    gradients: Sequence[Any]) -> remade.Remade | None:
    """How to make those again that the caller has made of a tape's gradients; None if none is."""
    by_gradients.look_into_calls(tower)
    if all(gradient is None or tower.gradients.holds(gradient) for gradient in gradients):
        return None
    return tower.gradients.remade(gradients, tower.graph)


def _are_held(tower: contexts.TowerContext, gradients: Sequence[Any]) -> list[bool]:
    """Which gradients come of variables that hold the whole batch's, or may do so.

    Eager towers do not tell how they came by a value.
    """
    holders = {id(variable._handle) for variable in tower.strategy.extended.variables()
               if getattr(variable, "holds_gradients", False)}
    walk = provenance.Walk()

    def is_held(gradient: Any) -> bool:
        if isinstance(gradient, tf.Variable):
            return getattr(gradient, "holds_gradients", False)
        if not holders or not isinstance(gradient, tf.Tensor):
            return False
        if _tf.is_eager(gradient):
            return not tower.gradients.holds(gradient)
        behind = walk.behind(gradient)
        return behind is not None and bool(behind) and behind <= holders

    return [is_held(gradient) for gradient in gradients]


def _take_held(per_variable: list[list[Any] | None], held: Sequence[bool]) -> dict[int, Any]:
    """Takes out of ``per_variable`` what the towers have read, not computed; by index, one value.

    It is the same on all of them, which is all that tells it in eager code.
    """
    found: dict[int, Any] = {}
    for index, may_be in enumerate(held):
        values = per_variable[index]
        if may_be and values is not None and not (tf.executing_eagerly() and any(
                not np.array_equal(values[0], value) for value in values[1:])):
            found[index] = values[0]
            per_variable[index] = None
    return found


def _take_largest(per_variable: list[list[Any] | None], homes: Sequence[str],
                  shares: shares_lib.Shares, overwriting: Sequence[bool]) -> dict[int, Any]:
    """Takes the variables' next values out of ``per_variable``; by index, the towers' maximum."""
    found: dict[int, Any] = {}
    for index, overwrites in enumerate(overwriting):
        values = per_variable[index]
        if overwrites and values is not None:
            with tf.device(homes[index]):
                found[index] = merging.extreme("max", values, shares)
            per_variable[index] = None
    return found


def apart(grads_and_vars: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Gradients and variables of pairs of them, of which there may be none."""
    pairs = tuple(grads_and_vars)
    return tuple(gradient for gradient, _ in pairs), tuple(target for _, target in pairs)


def _per_tower(value: Any, count: int) -> list[Any] | None:
    """One gradient a tower from what ``merge_call`` grouped; None where there is none."""
    if value is None:
        return None
    if isinstance(value, (row_products.Product, factors.RowSum)):
        parts = [contexts.all_values(part, count) for part in value]
        return [type(value)(*one) for one in zip(*parts)]
    return contexts.all_values(value, count)
