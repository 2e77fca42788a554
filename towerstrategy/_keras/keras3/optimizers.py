"""Hooks into Keras 3: optimizers merge the towers' gradients and update by kernels.

Goes in: Keras' own method and its arguments.  Comes out: its result, right for towers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import adam, sgd

from towerstrategy._keras import one_pass, optimizers as optimizers_rules
from towerstrategy._keras.keras3 import names
from towerstrategy.placement import kind


def _sgd(optimizer: Any, *args: Any) -> one_pass.Kernel | None:
    # Without a momentum Keras 3 leaves slots of an earlier one alone; the kernel would write them.
    unused = optimizer.momentums and not optimizer.momentum
    return None if unused else one_pass.sgd(optimizer, *args)


# Keras' ``update_step`` -> the kernel that does the same.
_KERNELS: dict[Any, one_pass.Rule] = {
    sgd.SGD.update_step: _sgd,
    adam.Adam.update_step: one_pass.adam,
}


def apply(original: Callable[..., Any], self: Any, grads: Any,
          trainable_variables: Any = None) -> Any:
    """The hook for ``apply``: merges the gradients first."""
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    targets = self._trainable_variables if trainable_variables is None else trainable_variables
    both = min(len(grads), len(targets))  # if they differ, Keras raises
    return optimizers_rules.apply(
        self, names, grads[:both], targets[:both],
        lambda merged: original(self, [*merged, *grads[both:]], trainable_variables),
        ["max" if getattr(target, "overwrite_with_gradient", False) else "sum"
         for target in targets[:both]])


def distributed_update_step(original: Callable[..., Any], self: Any, distribution: Any,
                            grads_and_vars: Any, learning_rate: Any) -> Any:
    """The hook for ``_distributed_tf_update_step``: by a kernel if there is one, else by Keras."""
    if not kind.is_tower_strategy(distribution):
        return original(self, distribution, grads_and_vars, learning_rate)
    is_keras_own = all(getattr(getattr(self, name), "__func__", None) is getattr(
        tf_optimizer.TFOptimizer, name) for name in ("assign", "assign_add", "assign_sub"))
    step = one_pass.Step(self, _KERNELS if is_keras_own else {}, learning_rate)
    remaining = [(gradient, target) for gradient, target in grads_and_vars
                 if step.rule is None or not step.update(
                     target, gradient, self._get_variable_index(target))]
    return original(self, distribution, remaining, learning_rate)
