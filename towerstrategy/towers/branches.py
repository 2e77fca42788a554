"""Branches in which an optimizer is applied: all towers take the same one, together.

Goes in: a ``tf.cond`` of a replica function, or an ``if`` that autograph has made one, in a branch
of which an optimizer is called, as gradients are accumulated by hand.  Comes out: one ``tf.cond``
where the towers meet, done once, as one device does it.

The towers cannot meet inside of a branch, so they meet around it.  That is one device's only where
nothing in it is a tower's own: the predicate and what the branches use has to come of variables and
constants, of what was merged before, or of gradients, which are merged in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import provenance
from towerstrategy.merge import gradients as gradients_lib
from towerstrategy.merge import remade
from towerstrategy.towers import contexts
from towerstrategy.variables import alone

_DIFFERS = (
    "an optimizer is called in a branch of tf.cond (or of an `if` that autograph converts) inside "
    "of the function given to strategy.run. All towers have to take the same branch then, as there "
    "is one update, but {what} may differ between them: it comes of one tower's rows or of a "
    "variable that each tower has for itself. Make it of variables with one copy "
    "(optimizer.iterations, a counter), or merge it before the branch: "
    'tf.distribute.get_replica_context().all_reduce("SUM", value).')


def install() -> None:
    """Wraps TensorFlow's branches, once; outside of towers they stay what they are."""
    _tf.wrap_cond(_cond)


def _cond(original: Callable[..., Any]) -> Callable[..., Any]:
    def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any],
             name: str = "cond") -> Any:
        tower = contexts.splitting_tower()
        if tower is None or tower.graph is None or not tower.can_merge:
            return original(pred, true_fn, false_fn, name)
        try:
            with tower.in_branch(pred):
                return original(pred, true_fn, false_fn, name)
        except RuntimeError as error:
            # No class of its own: autograph would give users one of its errors in place of it.
            if error is not tower.refusal:
                raise
            return _around(tower, lambda known: original(known, true_fn, false_fn, name),
                           tf.convert_to_tensor(pred), error)

    return cond


def _around(tower: contexts.TowerContext, branch: Callable[[tf.Tensor], Any], pred: tf.Tensor,
            cause: Exception) -> Any:
    """What ``branch`` gives, called once for all towers, of merged gradients."""
    same = _Same(tower)
    if not same.has(pred):
        raise RuntimeError(_DIFFERS.format(what="its predicate")) from cause
    used = _used(tower, branch, pred)
    own = [tensor for tensor in used if not same.has(tensor)]
    made = tower.gradients.remade(own, tower.graph) if own else None
    for place, tensor in enumerate(own):
        if made is None or place not in made.places:
            raise RuntimeError(_DIFFERS.format(what=f"{tensor!r}, which it uses,")) from cause

    def merged(strategy: tf.distribute.Strategy, known: Any, *grouped: Any) -> Any:
        known = contexts.all_values(known, tower.count)[0]
        with tf.device(strategy.extended.merge_device):
            instead = {} if made is None else made.again(_merged(tower, made, grouped))
        graph = tf.compat.v1.get_default_graph()
        before = _tf.operation_count(graph)
        with contexts.MergedContext(strategy), tf.device(strategy.extended.merge_device):
            result = branch(known)
        added = graph.get_operations()[before:]
        _check_sums(tower, graph, added)
        _give(added, {own[place].name: value for place, value in instead.items()})
        return result

    parts = () if made is None else tuple(gradient.value for gradient in made.gradients)
    return tower.merge_call(merged, args=(pred, *parts))


class _Same:
    """Which tensors have one value on all towers."""

    def __init__(self, tower: contexts.TowerContext) -> None:
        self._walk = provenance.Walk(
            is_whole=lambda value: tower.is_whole(value) or tower.is_agreed(value))
        self._local = {id(part.handle) for parts in tower.strategy.extended.tower_local_parts()
                       for part in parts}

    def has(self, value: tf.Tensor) -> bool:
        behind = self._walk.behind(value)
        return behind is not None and self._local.isdisjoint(behind)


def _used(tower: contexts.TowerContext, branch: Callable[[tf.Tensor], Any],
          pred: tf.Tensor) -> list[Any]:
    """The tensors that ``branch`` captures, found out by a trace for nothing else."""
    with contexts.MergedContext(tower.strategy), \
            tf.device(tower.strategy.extended.merge_device):
        trace = tf.function(lambda: branch(pred), autograph=False).get_concrete_function()
    return [outer for outer, _ in _tf.captures_of(trace.graph) if outer is not pred]


def _merged(tower: contexts.TowerContext, made: remade.Remade,
            grouped: Sequence[Any]) -> Sequence[Any]:
    placement = tower.strategy.extended.placement
    return gradients_lib.gradients(
        [contexts.all_values(value, tower.count) for value in grouped],
        [gradient.home for gradient in made.gradients], tower.shares, tower.silenced,
        towers=placement.devices, micro_batches=placement.micro_batches)


def _check_sums(tower: contexts.TowerContext, graph: tf.Graph,
                added: Sequence[tf.Operation]) -> None:
    """Raises where a branch writes what is to be summed over the towers, which are not in it."""
    by_handle = alone.by_handle(graph, tower.strategy.extended.variables())
    for operation in added:
        for resource in _tf.written_resources(operation):
            variable = by_handle.get(resource.name)
            if variable is not None and variable.aggregation is tf.VariableAggregation.SUM:
                raise RuntimeError(
                    f"variable {variable.name!r} has aggregation=SUM and is written in a branch in "
                    "which an optimizer is called, too. That branch is done once for all towers: "
                    "there is nothing to sum. Write it outside of the branch.")


def _give(added: Sequence[tf.Operation], instead: dict[str, tf.Tensor]) -> None:
    """Hands the branches merged gradients in place of a tower's own."""
    for operation in added:
        for index, tensor in enumerate(operation.inputs):
            value = instead.get(tensor.name)
            if value is None:
                continue
            if not tensor.shape.is_compatible_with(value.shape):
                raise RuntimeError(
                    "an optimizer is given a sparse gradient (tf.IndexedSlices) in a branch of "
                    "tf.cond, in a function that was traced for one number of rows, which is not "
                    f"that of all towers: {tensor.shape} for {value.shape}. Make it dense before "
                    "the branch: tf.convert_to_tensor(gradient).")
            _tf.set_input(operation, index, value)
