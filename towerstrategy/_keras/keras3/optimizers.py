"""Hooks into Keras 3: what an optimizer does with the towers' gradients.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.optimizers import loss_scale_optimizer

from towerstrategy._keras import optimizers as optimizers_rules
from towerstrategy._keras.keras3 import names
from towerstrategy.towers import contexts


def apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            grads = list(grads)
            with optimizers_rules.merged_if_alone(grads):
                return original(self, grads, trainable_variables)
        grads = list(grads)
        targets = list(self._trainable_variables if trainable_variables is None
                       else trainable_variables)
        both = min(len(grads), len(targets))  # of other numbers Keras is to say what is wrong
        targets = targets[:both]
        return optimizers_rules.merge_then(
            tower, grads[:both], [names.tf_variable(target) for target in targets],
            lambda merged: original(self, [*merged, *grads[both:]], trainable_variables),
            overwriting=_overwriting(targets), loss_scale=_loss_scale(self))

    return apply


def apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(self: Any, grads_and_vars: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(self, grads_and_vars)
        grads, targets = optimizers_rules.apart(grads_and_vars)
        return optimizers_rules.merge_then(
            tower, grads, [names.tf_variable(target) for target in targets],
            lambda merged: original(self, zip(merged, targets)),
            overwriting=_overwriting(targets), loss_scale=_loss_scale(self))

    return apply_gradients


def _loss_scale(optimizer: Any) -> float | None:
    """Keras unscales in ``apply``, so the gradients are those of the scaled loss."""
    return 1.0 if isinstance(optimizer, loss_scale_optimizer.LossScaleOptimizer) else None


def _overwriting(targets: Any) -> list[bool]:
    """Which variables' gradients are their next values."""
    return [getattr(target, "overwrite_with_gradient", False) for target in targets]
