"""Derivatives by the weights that a replica function takes: gradients, Jacobians, products of them.

Goes in: what is handed to ``tf.GradientTape.gradient`` and ``jacobian``, ``tf.gradients``,
``tf.hessians`` and ``tf.autodiff.ForwardAccumulator``.  Comes out: what these return; the tower
remembers it, with what the differentiated loss was, so that what is made of it is made of the
merged ones (:mod:`remade`).

The derivative of a sum is the sum of the derivatives: so what comes of a tower's part of the loss
is a part, too, be it of the first or of the second order.  The derivative of another function of a
gradient is not: it has to be one of the merged gradient, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import contractions, given_back, parts, provenance
from towerstrategy.merge import remade
from towerstrategy.placement import homes as homes_lib
from towerstrategy.towers import contexts
from towerstrategy.variables import by_gradients, one_copy, rules

MESSAGE = "towerstrategy: a function of gradients: "
_MEANS = frozenset({provenance.Kind.MEAN, provenance.Kind.MIXED, provenance.Kind.WEIGHTS})
_UNSCALED = _MEANS | {provenance.Kind.COUNTED}
_UNKNOWN = frozenset({provenance.Kind.OTHER})


def install() -> None:
    """Wraps what derivatives are taken with, once; outside of towers it stays what it is."""
    _tf.wrap_derivatives(_gradient, _jacobian, _of_graphs, _hessians, _tangents, _forward)


def _gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None,
                 *args: Any, **kwargs: Any) -> Any:
        tower = _noting_tower()
        if tower is None:
            return original(self, target, sources, output_gradients, *args, **kwargs)
        output_gradients = _merged(tower, output_gradients)
        result = original(self, target, sources, output_gradients, *args, **kwargs)
        _note(tower, target, sources, result, output_gradients)
        return result

    return gradient


def _jacobian(original: Callable[..., Any]) -> Callable[..., Any]:
    def jacobian(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        tower = _noting_tower()
        if tower is None:
            return original(self, target, sources, *args, **kwargs)
        with tower.gradients.paused():  # it takes the gradient of each element of the target
            result = original(self, target, sources, *args, **kwargs)
        if target.shape.rank == 0 or _kinds(tower, target) != _UNKNOWN:
            _note(tower, target, sources, result)
        return result

    return jacobian


def _of_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """For ``tf.gradients``, which returns a list."""
    def of_graphs(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **kwargs: Any) -> Any:
        tower = _noting_tower()
        if tower is None:
            return original(ys, xs, grad_ys, *args, **kwargs)
        grad_ys = _merged(tower, grad_ys)
        result = original(ys, xs, grad_ys, *args, **kwargs)
        _note(tower, ys, xs, result, grad_ys, of_tensors=False)
        return result

    return of_graphs


def _hessians(original: Callable[..., Any]) -> Callable[..., Any]:
    def hessians(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(ys, xs, *args, **kwargs)
        tower = _noting_tower()
        if tower is not None:
            _note(tower, ys, xs, result, of_tensors=False)
        return result

    return hessians


def _tangents(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, primals: Any, tangents: Any) -> None:
        tower = _noting_tower()
        original(self, primals, tangents if tower is None else _merged(tower, tangents))

    return __init__


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def jvp(self: Any, primals: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, primals, *args, **kwargs)
        tower = _noting_tower()
        if tower is not None:
            for primal, value in zip(tf.nest.flatten(primals), tf.nest.flatten(result)):
                kind = _kind([_kinds(tower, primal)])
                if kind is not None and value is not None and not tower.own_means:
                    home = tower.strategy.extended.merge_device
                    tower.gradients.add(remade.Gradient(value, home, kind))
        return result

    return jvp


def _noting_tower() -> contexts.TowerContext | None:
    tower = contexts.splitting_tower()
    return None if tower is None or tower.gradients.is_paused else tower


def _merged(tower: contexts.TowerContext, given: Any) -> Any:
    """``given``, a nest of vectors to multiply with, made of merged gradients where it is of any.
    """
    def merged(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or _tf.is_eager(value):
            return value
        whole = by_gradients.of_merged(tower, value)
        return value if whole is None else whole

    return None if given is None else tf.nest.map_structure(merged, given)


def _note(tower: contexts.TowerContext, target: Any, sources: Any, result: Any,
          vectors: Any = None, of_tensors: bool = True) -> None:
    """Remembers derivatives, and the variables by which an unscaled mean is differentiated."""
    held = [rules.held_variable(source) for source in tf.nest.flatten(sources)]
    homes = [_home(tower, each, of_tensors) for each in held]
    if not any(homes):
        return
    kinds = [_kinds(tower, loss) for loss in tf.nest.flatten(target)]
    if any(not _UNSCALED.isdisjoint(each) for each in kinds):
        tower.suspects |= {id(each) for each in held if isinstance(each, one_copy.TowerVariable)}
    for loss in tf.nest.flatten(target):
        _check_rows(tower, loss)
    if vectors is None:  # else it is part of another, as where a function is recomputed
        given_back.check(tower, target)
        kinds = [_kinds_of_sum(tower, loss) if each == _UNKNOWN else each
                 for loss, each in zip(tf.nest.flatten(target), kinds)]
    known = not tower.own_means and _are_steady(vectors)
    kind = _kind(kinds) if known else None
    for home, value in zip(homes, tf.nest.flatten(result)):
        if home and value is not None:
            tower.gradients.add(remade.Gradient(value, home, kind))


def _home(tower: contexts.TowerContext, source: Any, of_tensors: bool) -> str | None:
    """Where the derivatives by ``source`` are merged; None for what is not made of weights alone.
    """
    if isinstance(source, one_copy.TowerVariable):
        return homes_lib.home_of(source)
    is_traced = isinstance(source, tf.Tensor) and not _tf.is_eager(source)
    if of_tensors and is_traced and source.dtype.is_floating and (
            parts.walk(tower).is_of_weights(source)):
        home: str = tower.strategy.extended.merge_device
        return home
    return None


def _are_steady(vectors: Any) -> bool:
    """Whether vectors that a derivative is multiplied with are the same on all towers."""
    given = [each for each in tf.nest.flatten(vectors) if isinstance(each, tf.Tensor)]
    walk = provenance.Walk()
    return not given or not tf.executing_eagerly() and all(map(walk.is_steady, given))


def _kind(kinds: Iterable[provenance.Kinds]) -> provenance.Kind | None:
    """What the sum of losses of these kinds is: a part, a mean, or None where it is neither."""
    every = frozenset[provenance.Kind]().union(*kinds) - {provenance.Kind.CONSTANT}
    if every == {provenance.Kind.PART}:
        return provenance.Kind.PART
    return provenance.Kind.MEAN if every and every <= _MEANS else None


def _kinds(tower: contexts.TowerContext, target: Any) -> provenance.Kinds:
    """The kinds of the terms of what is differentiated: a scalar, or something of gradients."""
    if not isinstance(target, tf.Tensor) or not target.dtype.is_floating:
        return _UNKNOWN
    if _tf.is_eager(target):
        return frozenset({provenance.Kind.PART}) if tower.is_scaled(target) else _UNKNOWN
    of_gradients = tower.gradients.kinds(target, tower.graph, tower.is_agreed)
    if of_gradients is not None:
        has_terms = provenance.Kind.OTHER in of_gradients
        if provenance.Kind.MIXED in of_gradients or has_terms and target.shape.rank != 0:
            _warn(tower, target)
            return _UNKNOWN
        if not has_terms:
            return of_gradients
    return _UNKNOWN if target.shape.rank != 0 else _kinds_of_scalar(tower, target)


def _are_rows(tower: contexts.TowerContext, losses: Any) -> bool:
    """Whether what is differentiated is traced, and may have a value a row."""
    return bool(isinstance(losses, tf.Tensor) and not _tf.is_eager(losses)
                and losses.dtype.is_floating and losses.shape.rank and not tower.is_scaled(losses))


def _check_rows(tower: contexts.TowerContext, losses: Any) -> None:
    """Warns, once for an operation, of losses, one a row, that are made of other rows, too."""
    if not _are_rows(tower, losses) or not tower.several or not tower.can_merge:
        return
    walk = parts.walk(tower)
    if contractions.axis_of(walk, losses) is not None and contractions.is_coupled(walk, losses):
        tower.warn_of(
            losses,
            "towerstrategy: in a step of your own, {name} is differentiated, which has a value a "
            "row and puts other rows into each: a tower has those of its own rows alone, so that "
            "it comes out otherwise than on one device. Gather the rows first, with "
            "towerstrategy.whole_batch, and differentiate "
            "strategy.scale_loss(tf.reduce_sum(losses)), or the mean.")


def _kinds_of_sum(tower: contexts.TowerContext, losses: Any) -> provenance.Kinds:
    """The kinds of the sum of ``losses``, which a gradient is taken of: one a row, or of others."""
    if not _are_rows(tower, losses):
        return _UNKNOWN
    walk = parts.walk(tower)
    are_parts = (contractions.axis_of(walk, losses) is not None
                 and not contractions.is_coupled(walk, losses)
                 and provenance.Kind.COUNTED not in walk.kinds(losses))
    return frozenset({provenance.Kind.PART}) if are_parts else _UNKNOWN


def _kinds_of_scalar(tower: contexts.TowerContext, loss: tf.Tensor) -> provenance.Kinds:
    extended = tower.strategy.extended
    return parts.kinds(tower, loss, extended._num_replicas_in_sync if extended.asked else None)


def _warn(tower: contexts.TowerContext, target: tf.Tensor) -> None:
    """Says, once for an operation, that a derivative will be another than on one device."""
    tower.warn_of(
        target,
        MESSAGE + "{name}, which is differentiated here, is made of gradients that the towers "
        "have not merged, and is no multiple of them: a penalty on their norm, a loss at weights "
        "that they have moved. Each tower makes it of its own part of the gradients, so that it "
        "comes out otherwise than on one device. Merge them first, gradients = "
        'tf.distribute.get_replica_context().all_reduce("SUM", gradients), and give '
        "strategy.scale_loss what you make of them.")
