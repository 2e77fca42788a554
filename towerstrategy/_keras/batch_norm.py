"""Batch norm, as both Kerases have it: which layer takes its statistics from the whole batch.

Goes in: a layer, its input, its mask.  Comes out: mean and variance over the rows of all towers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.losses import marks
from towerstrategy.towers import contexts, statistics


def synchronizing(layer: Any) -> contexts.TowerContext | None:
    """The tower that runs ``layer``, where its statistics are the whole batch's; else None."""
    tower = contexts.splitting_tower()
    if tower is None:
        return None
    everywhere = tower.strategy.extended.synchronize_batch_norm
    return tower if everywhere or layer.synchronized else None


def of_own_rows(inputs: tf.Tensor, found: Any) -> Any:
    """``found``, the statistics of a tower's own ``inputs``, by nature: nobody is told of them."""
    return marks.mark_made_of(found, inputs)


def moments(tower: contexts.TowerContext, inputs: tf.Tensor, axes: Sequence[int], mask: Any = None,
            epsilon: float = 0.) -> tuple[Any, Any, Any]:
    """See :func:`statistics.whole_batch_moments`; ``mask`` has no channels, the last axis."""
    kept = None
    if mask is not None:
        kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
    return statistics.whole_batch_moments(tower, inputs, axes, kept, epsilon)
