"""Hooks into Keras 3: layers that look at more than their rows.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend import config as keras_config
from keras.src.backend.common import stateless_scope
from keras.src.layers.preprocessing.image_preprocessing import cut_mix, mix_up

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import batch_norm
from towerstrategy._keras.keras3 import names
from towerstrategy.placement import homes as homes_lib
from towerstrategy.towers import contexts, draws, whole
from towerstrategy.variables import one_copy


def moments(original: Callable[..., Any]) -> Callable[..., Any]:
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        tower = batch_norm.synchronizing(self)
        if tower is None:
            return batch_norm.of_own_rows(inputs, original(self, inputs, mask))
        axes = self._reduction_axes
        epsilon = 0. if mask is None else keras_config.epsilon()
        _, mean, variance = batch_norm.moments(tower, inputs, axes, mask, epsilon)
        return tf.squeeze(mean, axes), tf.squeeze(variance, axes)

    return _moments


def take(original: Callable[..., Any]) -> Callable[..., Any]:
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        table = names.tf_variable(x)
        tower = contexts.splitting_tower()
        if tower is None or axis != 0 or not isinstance(table, one_copy.TowerVariable):
            return original(x, indices, axis=axis)
        with tower.at(homes_lib.home_of(table)):
            return original(x, indices, axis=axis)

    return take


def added(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Hooks ``assign_add`` or ``assign_sub``, as ``name`` says."""
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def assign_added(self: Any, value: Any) -> Any:
            held = names.held(self)
            if (contexts.splitting_tower() is None or stateless_scope.in_stateless_scope()
                    or not isinstance(held, one_copy.TowerVariable)
                    or held.aggregation != tf.VariableAggregation.SUM):
                return original(self, value)
            getattr(held, name)(self._convert_to_tensor(value, dtype=self.dtype))
            return self.value

        return assign_added

    return hook


def mix(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, data: Any, training: bool = True) -> Any:
        tower = contexts.splitting_tower()
        mixes = isinstance(self, (mix_up.MixUp, cut_mix.CutMix)) and training
        if tower is None or not mixes or not (tower.draws_rows and tower.can_merge):
            return original(self, data, training)
        return whole.own_rows_of(tower, lambda rows: original(self, rows, training), data)

    return call


def choose(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_random_transformation(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or not tower.draws_rows:
            return original(self, *args, **kwargs)
        before = random.getstate()

        def again() -> None:
            random.setstate(before)

        random.setstate(tower.for_all(("random", id(self)), lambda: before, again))
        return original(self, *args, **kwargs)

    return get_random_transformation


def of_no_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = contexts.splitting_tower()
        with contextlib.nullcontext() if tower is None else tower.drawing_alike():
            return original(self, *args, **kwargs)

    return drawn


def histogram(original: Callable[..., Any]) -> Callable[..., Any]:
    def _custom_histogram_fixed_width(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts, tower = original(self, *args, **kwargs), contexts.splitting_tower()
        if tower is None or not tower.can_merge:
            return counts
        return tower.all_reduce(_tf.ReduceOp.SUM, counts)

    return _custom_histogram_fixed_width


def shuffle(original: Callable[..., Any]) -> Callable[..., Any]:
    def shuffle(x: Any, axis: int = 0, seed: Any = None) -> Any:
        tower = None
        if contexts.splitting_tower() is not None and axis == 0:
            x = tf.convert_to_tensor(x)
            tower = draws.shuffling_tower(x)
        if tower is None:
            return original(x, axis, seed)
        return whole.own_rows_of(tower, lambda rows: original(rows, axis, seed), x)

    return shuffle


def next_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    def next(self: Any, ordered: bool = True) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(self, ordered)
        if tower.draws_rows and tower.can_merge and not _is_written_alone(tower, self.state):
            return tower.for_all(("seed", id(self)), lambda: once(tower, self, ordered))
        with tower.strategy.extended.writes_alike():
            seed = original(self, ordered)
        return tower.own_seed(seed)

    def once(tower: contexts.TowerContext, generator: Any, ordered: bool) -> Any:
        # No meeting: recurrent cells keep their masks from one call of theirs to the next, which
        # another tower that runs meanwhile would find.
        with _tf.cross_replica_context(tower.strategy):
            return original(generator, ordered)

    return next


def _is_written_alone(tower: contexts.TowerContext, variable: Any) -> bool:
    """Whether a nested function may have written ``variable`` since the towers last met."""
    held = names.tf_variable(variable)
    return any(other is held for other in tower.strategy.extended.written_alone())
