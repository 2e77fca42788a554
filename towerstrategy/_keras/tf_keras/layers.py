"""Hooks into tf_keras: layers that look at more than their rows.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy.placement import kind
from towerstrategy.towers import contexts


def batch_norm_build(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(self: Any, input_shape: Any) -> Any:
        strategy = tf.distribute.get_strategy()
        if not kind.is_tower_strategy(strategy):
            return original(self, input_shape)
        with strategy.extended.one_copy_of_means():
            return original(self, input_shape)

    return build


def make_legacy_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_legacy_seed(self: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or not tower.draws_rows:
            return original(self)
        before = self._seed

        def again() -> None:
            self._seed = before

        return tower.for_all(("seed", id(self)), lambda: original(self), again)

    return make_legacy_seed
