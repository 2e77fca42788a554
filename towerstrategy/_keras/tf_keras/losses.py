"""Hooks into tf_keras: how a loss is scaled, masked and tracked.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src import backend
from tf_keras.src import losses as keras_losses
from tf_keras.src.engine import training
from tf_keras.src.utils import losses_utils

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import losses as losses_rules
from towerstrategy._keras import over_rows as over_rows_rules
from towerstrategy.losses import marks, one_number, over_rows, own_losses, parts
from towerstrategy.towers import contexts, one_replica


def scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_loss_for_distribution(loss_value: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return loss_value if contexts.outside_of_towers() is not None else original(loss_value)
        return parts.scaled(tower, loss_value)

    return scale_loss_for_distribution


def apply_valid_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    means = (losses_utils.ReductionV2.AUTO, losses_utils.ReductionV2.SUM_OVER_BATCH_SIZE)

    def apply_valid_mask(losses: Any, sw: Any, mask: Any, reduction: Any) -> Any:
        weights = original(losses, sw, mask, reduction)
        tower = contexts.splitting_tower()
        if tower is None or mask is None or reduction not in means:
            return weights
        weights = losses_rules.whole_batch_mask(tower, weights, mask)
        return marks.mark_made_of(weights, (sw, mask))

    return apply_valid_mask


def compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        tower = contexts.splitting_tower()
        if tower is None or loss is None:
            return loss
        if tower.own_means:  # an override's super()
            return tower.mark_mean(loss)
        if not _is_keras_own(self):
            return loss
        return tower.mark_scaled(losses_rules.silence_stand_ins(tower, loss))

    return compute_loss


def _is_keras_own(model: Any) -> bool:
    """Whether all gradients of ``model``'s step come of the loss that tf_keras computes."""
    return (type(model).train_step is training.Model.train_step
            and type(model).compute_loss is training.Model.compute_loss)


def compute_weighted_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    means = (losses_utils.ReductionV2.AUTO, losses_utils.ReductionV2.SUM_OVER_BATCH_SIZE)

    def compute_weighted_loss(losses: Any, sample_weight: Any = None, reduction: Any = means[1],
                              name: Any = None) -> Any:
        tower = contexts.splitting_tower()
        if tower is not None and isinstance(losses, tf.Tensor):
            losses = one_number.whole(tower, losses, reduction not in means,
                                      sample_weight is not None)
            own_losses.check_number(tower, losses, reduction)
        loss = original(losses, sample_weight, reduction, name)
        if tower is None or loss.shape.rank != 0:
            return loss
        # A mean of one or two rows does not show in the graph: its number of rows is a constant.
        if reduction in means:
            return tower.mark_mean(loss)
        values = losses if isinstance(losses, tf.Tensor) else loss
        return parts.summed_values(tower, values, loss)

    return compute_weighted_loss


def loss_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if contexts.splitting_tower() is None:
            return original(self, y_true, y_pred, sample_weight)
        return over_rows_rules.loss_of_rows(functools.partial(original, self), y_true, y_pred,
                                            sample_weight)

    return __call__


def get_reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_reduction(self: Any) -> Any:
        if not one_replica.has_all_rows():
            return original(self)
        with _tf.no_strategy():
            return original(self)

    return _get_reduction


class One(int):
    """How many replicas there are for losses that are a tower's own means."""


def losses_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None,
                 regularization_losses: Any = None) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(self, y_true, y_pred, sample_weight, regularization_losses)

        def own() -> Any:
            added = [parts.added(tower, _floating(loss)) for loss in regularization_losses or ()]
            return _own_mean(tower, original, self, y_true, y_pred, sample_weight, added)

        return own() if tower.own_means else parts.own_loss(tower, own)

    return __call__


def _floating(loss: Any) -> tf.Tensor:
    loss = tf.convert_to_tensor(loss)
    return loss if loss.dtype.is_floating else tf.cast(loss, backend.floatx())


def _own_mean(tower: Any, loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``loss`` returns where it takes its tower for the only one."""
    with tower.strategy.extended.counted_as(One(1)):
        result = loss(*args, **kwargs)
    return result if result is None else tower.mark_mean(result)


class LossByRule(keras_losses.Loss):
    """A compiled loss of which a rule makes the tower's part: of all rows, or of its own call."""

    def __init__(self, inner: Any, rule: Callable[..., Any]) -> None:
        super().__init__(inner.reduction, inner.name)
        self.inner, self.rule = inner, rule
        self._allow_sum_over_batch_size = True

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return self.rule(self.inner, y_true, y_pred, sample_weight)


def get_loss_object(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_loss_object(self: Any, loss: Any) -> Any:
        if isinstance(loss, over_rows.OverRows):
            return LossByRule(original(self, loss.inner), over_rows_rules.loss_of_all)
        made = original(self, loss)
        if made is not None and type(made).__call__ != keras_losses.Loss.__call__:
            return LossByRule(made, over_rows_rules.loss_with_own_call)
        return made

    return _get_loss_object
