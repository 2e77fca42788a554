"""Hooks into tf_keras: layers that look at more than their rows.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy.placement import kind


def batch_norm_build(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(self: Any, input_shape: Any) -> Any:
        strategy = tf.distribute.get_strategy()
        if not kind.is_tower_strategy(strategy):
            return original(self, input_shape)
        with strategy.extended.one_copy_of_means():
            return original(self, input_shape)

    return build
