"""Hooks into Keras 3: how a loss is scaled, masked and tracked.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import losses as keras_losses
from keras.src.trainers import trainer as base_trainer

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import losses as losses_rules
from towerstrategy.losses import own_losses, parts
from towerstrategy.towers import contexts


def scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_loss_for_distribution(value: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return value if contexts.outside_of_towers() is not None else original(value)
        return parts.scaled(tower, value)

    return scale_loss_for_distribution


def unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_loss_for_distribution(value: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return value if contexts.outside_of_towers() is not None else original(value)
        if value.shape.rank != 0:  # not reduced, so not scaled
            return value
        return parts.unscaled(tower, value)

    return unscale_loss_for_distribution


def apply_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = original(sample_weight, mask, dtype, reduction)
        tower = contexts.splitting_tower()
        if tower is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        return losses_rules.whole_batch_mask(tower, weights, mask)

    return apply_mask


def reduce_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_values(values: Any, sample_weight: Any = None,
                      reduction: Any = "sum_over_batch_size") -> Any:
        tower = contexts.splitting_tower()
        if tower is not None and reduction not in (None, "none") and values.shape == (0,):
            # Keras gives no rows back as they are, and the towers' losses would differ in shape.
            values = tf.reduce_sum(values, keepdims=True)
        if tower is None:
            return original(values, sample_weight, reduction)
        if values.shape.rank == 0:
            own_losses.check_number(tower, values, reduction)
        if reduction in (None, "none", "sum"):
            loss = original(values, sample_weight, reduction)
            return parts.summed(tower, loss) if loss.shape.rank == 0 else loss
        if values.shape.rank == 0:
            return parts.scaled(tower, values)
        if reduction != "mean_with_sample_weight" or sample_weight is None:
            return original(values, sample_weight, reduction)
        weight = tf.reduce_sum(tf.cast(sample_weight, tf.float64))
        all_weight = tower.all_reduce(_tf.ReduceOp.SUM, weight)
        with tower.weighted(tf.math.divide_no_nan(weight, all_weight)):
            return original(values, sample_weight, reduction)

    return reduce_values


def compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        tower = contexts.splitting_tower()
        if tower is None or loss is None:
            return loss
        if tower.own_means:  # an override's super()
            return tower.mark_mean(loss)
        if _is_keras_own(self):
            loss = losses_rules.silence_stand_ins(tower, loss)
        return tower.mark_scaled(loss)

    return compute_loss


def compiled_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = contexts.splitting_tower()
        unreduced = any(getattr(loss, "reduction", "mean") in (None, "none")
                        for loss in tree.flatten(self._user_loss))
        if tower is None or tower.own_means or not unreduced:
            return original(self, *args, **kwargs)
        return parts.own_loss(tower, lambda: original(self, *args, **kwargs))

    return call


def _is_keras_own(model: Any) -> bool:
    """Whether all gradients of ``model``'s step come of the loss that Keras computes."""
    return (type(model).train_step is tf_trainer.TensorFlowTrainer.train_step
            and type(model).compute_loss is base_trainer.Trainer.compute_loss)


def with_own_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def with_own_losses(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or tower.is_copied:
            return original(self, *args, **kwargs)
        shared = self._losses
        vars(self)["_losses"] = tower.losses_of(self)  # past Keras' own tracking of lists
        try:
            return original(self, *args, **kwargs)
        finally:
            vars(self)["_losses"] = shared

    return with_own_losses


# Losses that are made of all rows of a batch at once; with axes given, the first two are not.
_COUPLED = {"dice": keras_losses.Dice, "tversky": keras_losses.Tversky,
            "circle": keras_losses.Circle}


def warn_of_coupled_rows(model: Any) -> None:
    """Warns of losses that see one tower's rows where one device's see the whole batch's."""
    given = model._compile_loss._user_loss if model._compile_loss is not None else None
    for loss in tree.flatten(given):
        name = next((name for name, cls in _COUPLED.items() if isinstance(loss, cls)
                     or str(getattr(loss, "__name__", loss)).lower() == name), None)
        axis = getattr(loss, "axis", None)
        if name is None or (axis is not None and 0 not in tree.flatten(axis)):
            continue
        warnings.warn(
            f"model {model.name!r} is compiled with the loss {name!r}, which puts all rows of a "
            "batch into one number. On several towers it is computed on each tower's rows, and the "
            "mean of the towers' losses is trained: not what one device computes. Use a strategy "
            "of one tower to have that"
            + (", or give the loss the axes of one row, as axis=(1, 2, 3)." if name != "circle"
               else "."), UserWarning, stacklevel=3)
