"""Hooks into Keras 3: how a loss is scaled, masked and tracked.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.losses import loss as loss_module
from keras.src.losses import losses as keras_losses
from keras.src.trainers import trainer as base_trainer

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import losses as losses_rules
from towerstrategy._keras import over_rows as over_rows_rules
from towerstrategy.losses import marks, one_number, over_rows, own_losses, parts
from towerstrategy.towers import contexts


def scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_loss_for_distribution(value: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return value if contexts.outside_of_towers() is not None else original(value)
        return parts.scaled(tower, value)

    return scale_loss_for_distribution


def added(original: Callable[..., Any]) -> Callable[..., Any]:
    def _aggregate_additional_loss(self: Any, loss: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(self, loss)
        total = base_trainer.Trainer._aggregate_additional_loss(self, loss)
        # Of what is traced the graph tells more than the shape.
        by_rows = _tf.is_eager(total) and losses_rules.is_one_a_row(tower, loss)
        return (parts.summed if by_rows else parts.added)(tower, total)

    return _aggregate_additional_loss


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
        weights = losses_rules.whole_batch_mask(tower, weights, mask)
        return marks.mark_made_of(weights, (sample_weight, mask))

    return apply_mask


def reduce_weighted_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_weighted_values(values: Any, sample_weight: Any = None, mask: Any = None,
                               reduction: Any = "sum_over_batch_size", dtype: Any = None) -> Any:
        tower = contexts.splitting_tower()
        if tower is not None and isinstance(values, tf.Tensor):
            weighted = sample_weight is not None or mask is not None
            values = one_number.whole(tower, values, reduction in (None, "none", "sum"), weighted)
        return original(values, sample_weight, mask, reduction, dtype)

    return reduce_weighted_values


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
            return parts.summed_values(tower, values, loss) if loss.shape.rank == 0 else loss
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
_COUPLED = ((keras_losses.dice, keras_losses.tversky, keras_losses.circle),
            (keras_losses.Dice, keras_losses.Tversky, keras_losses.Circle))


def loss_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if contexts.splitting_tower() is None:
            return original(self, y_true, y_pred, sample_weight)
        rule = (over_rows_rules.loss_of_all if _couples_rows(self)
                else over_rows_rules.loss_of_rows)
        return rule(functools.partial(original, self), y_true, y_pred, sample_weight)

    return __call__


def _couples_rows(loss: Any) -> bool:
    """Whether one of Keras' own losses puts the rows of a batch into one number."""
    functions, classes = _COUPLED
    if not isinstance(loss, classes) and not any(
            getattr(loss, "fn", None) is function for function in functions):
        return False
    axis = getattr(loss, "axis", None)
    return axis is None or 0 in tree.flatten(axis)


class LossByRule(loss_module.Loss):
    """A compiled loss of which a rule makes the tower's part: of all rows, or of its own call."""

    def __init__(self, inner: Any, rule: Callable[..., Any]) -> None:
        super().__init__(inner.name, inner.reduction, inner.dtype)
        self.inner, self.rule = inner, rule

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return self.rule(self.inner, y_true, y_pred, sample_weight)


def get_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_loss(identifier: Any, y_true: Any, y_pred: Any) -> Any:
        if isinstance(identifier, over_rows.OverRows):
            inner = original(identifier.inner, y_true, y_pred)
            return LossByRule(inner, over_rows_rules.loss_of_all)
        loss = original(identifier, y_true, y_pred)
        if isinstance(loss, loss_module.Loss) and type(loss).__call__ != loss_module.Loss.__call__:
            return LossByRule(loss, over_rows_rules.loss_with_own_call)
        return loss

    return get_loss
