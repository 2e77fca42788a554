"""Losses, as both Kerases have them: masks of the whole batch, stand-ins that count for nothing.

Goes in: a tower, and what Keras made of its rows.  Comes out: the tower's part of the whole
batch's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import hooks
from towerstrategy.losses import parts
from towerstrategy.merge import merging
from towerstrategy.towers import contexts


def wrap_own_losses(cls: type, base: type) -> None:
    """Hooks ``compute_loss`` where ``cls``, a model's, overrides that of ``base``, Keras' own."""
    for owner in cls.__mro__[:cls.__mro__.index(base)]:
        if inspect.isfunction(owner.__dict__.get("compute_loss")):
            hooks.wrap(owner, "compute_loss", _own_loss)


def _own_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or tower.own_means:
            return original(self, *args, **kwargs)
        return parts.own_loss(tower, lambda: original(self, *args, **kwargs))

    return compute_loss


def silence_stand_ins(tower: contexts.TowerContext, loss: tf.Tensor) -> tf.Tensor:
    """``loss``, 0 in a tower that works on a stand-in, for steps whose gradients all come of it.

    Such a tower's gradients are 0 then, and nothing has to leave them out where they are merged.
    """
    if not tower.stand_ins or tower.shares.workers is not None:
        return loss
    tower.silenced = True
    return merging.kept(tower.filled, loss)


def is_one_a_row(tower: contexts.TowerContext, loss: Any) -> bool:
    """Whether ``loss`` has a value for each row of a tower, as far as its shape tells."""
    shape, rows = tf.convert_to_tensor(loss).shape, tower.static_rows
    return bool(shape.rank) and rows is not None and shape[0] in (None, rows)


def whole_batch_mask(tower: contexts.TowerContext, weights: tf.Tensor, mask: Any) -> tf.Tensor:
    """Sample weights that hold a tower's ``total / valid`` factor -> those of the whole batch.

    Keras gives the unmasked entries of a batch the weight ``total / valid`` so that the mean over
    all entries is the mean over the unmasked ones; on R towers both counts are the whole batch's.

    Args:
      tower: where this runs.
      weights: what Keras made from this tower's mask.
      mask: this tower's mask, 1 or True for valid entries.
    """
    kept = tf.cast(mask, tf.float64)
    valid, count = tf.reduce_sum(kept), tf.cast(tf.size(kept), tf.float64)
    all_valid, all_count = tower.all_reduce(_tf.ReduceOp.SUM, [valid, count])
    factor = tf.math.divide_no_nan(all_count * valid, all_valid * count)
    return tf.where(valid > 0, weights * tf.cast(factor, weights.dtype), tf.zeros_like(weights))
