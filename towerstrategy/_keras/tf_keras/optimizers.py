"""Hooks into tf_keras: optimizers merge the towers' gradients and update by kernels.

Goes in: Keras' own method and its arguments.  Comes out: its result, right for towers, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src.optimizers import adam, adamw, sgd

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy._keras import one_pass, optimizers as optimizers_rules
from towerstrategy._keras.tf_keras import names
from towerstrategy.placement import kind

# Keras' ``update_step`` -> the kernel that does the same.
_KERNELS: dict[Any, one_pass.Rule] = {
    sgd.SGD.update_step: one_pass.sgd,
    adam.Adam.update_step: one_pass.adam,
    adamw.AdamW.update_step: one_pass.adam,
}


def get_reduction(original: Callable[..., Any], self: Any) -> Any:
    """The hook for ``Loss._get_reduction``: allows means of all rows, in a step or outside."""
    if not contexts.has_all_rows() and contexts.outside_of_towers() is None:
        return original(self)
    with _tf.patched(self, _allow_sum_over_batch_size=True):
        return original(self)


def apply_gradients(original: Callable[..., Any], self: Any, grads_and_vars: Any, *args: Any,
                    **kwargs: Any) -> Any:
    """The hook for ``apply_gradients``: merges the gradients first."""
    grads_and_vars = list(grads_and_vars)
    targets = [target for _, target in grads_and_vars]
    return optimizers_rules.apply(
        self, names, [gradient for gradient, _ in grads_and_vars], targets,
        lambda merged: original(self, list(zip(merged, targets)), *args, **kwargs),
        ["agreed" if _are_merged(original, args, kwargs) else "sum"] * len(targets))


def _are_merged(original: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether these arguments of ``apply_gradients`` say that the gradients are merged."""
    arguments = inspect.signature(original).bind(None, None, *args, **kwargs).arguments
    arguments = {**arguments, **arguments.get("kwargs", {})}
    return bool(arguments.get("skip_gradients_aggregation", False)
                or not arguments.get("experimental_aggregate_gradients", True))


def supports_loss_scaling(original: Callable[..., Any]) -> bool:
    """The hook for ``strategy_supports_loss_scaling``: a ``TowerStrategy`` does."""
    return kind.is_tower_strategy(tf.distribute.get_strategy()) or original()


def distributed_apply(original: Callable[..., Any], self: Any, distribution: Any, *args: Any,
                      **kwargs: Any) -> Any:
    """The hook for ``_distributed_apply_gradients_fn``: by kernels where there are some."""
    if not kind.is_tower_strategy(distribution):
        return original(self, distribution, *args, **kwargs)
    update, step = self._update_step, one_pass.Step(self, _KERNELS, self.learning_rate)

    # With GPUs, Keras lets XLA compile each variable's update, and passes a key.  XLA cannot read
    # a variable of another device, and the learning rate may be on another one.
    def update_step(gradient: Any, variable: Any, key: int | None = None) -> None:
        del key
        index = self._index_dict.get(self._var_key(variable))
        if index is None or not step.update(variable, gradient, index):
            update(gradient, variable)

    with _tf.patched(self, _update_step=update_step, _update_step_xla=update_step):
        return original(self, distribution, *args, **kwargs)
