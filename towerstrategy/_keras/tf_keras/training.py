"""Hooks into tf_keras: ``compile``, the step functions, and what they hand back.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src.metrics import base_metric

from towerstrategy import losses
from towerstrategy._keras import adopting, stages, training as training_rules
from towerstrategy._keras.tf_keras import names
from towerstrategy.placement import kind


def data_handler_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        x = args[0] if args else kwargs.get("x")
        training_rules.check_dataset(x, tf.distribute.get_strategy())
        original(self, *args, **kwargs)

    return __init__


def compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        scope = tf.distribute.get_strategy()
        strategy = scope if kind.is_tower_strategy(scope) else self._distribution_strategy
        args, kwargs = losses.inner_losses((args, kwargs))
        if not kind.is_tower_strategy(strategy):
            return original(self, *args, **kwargs)
        if kwargs.get("jit_compile"):
            strategy.extended.placement.check_compiles()
        with strategy.scope():
            # tf_keras checks in compile that all variables are the strategy's.
            adopting.adopt(strategy, self, names)
            for part in tf.nest.flatten((args, kwargs)):
                if isinstance(part, base_metric.Metric):
                    adopting.check_variables(strategy, self, names.variables_of(part))
                    names.adopt_metric(strategy, part)
                elif isinstance(part, names.OPTIMIZERS):
                    adopting.check_variables(strategy, self, names.optimizer_variables(part))
                    names.set_owner_of_optimizer(part, strategy)
                    adopting.adopt_variables(strategy, names.optimizer_variables(part))
            original(self, *args, **kwargs)
            stages.settle(strategy, self, names)  # the optimizer, and so its slots, are known now

    return compile


def batch_norm_build(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(self: Any, input_shape: Any) -> Any:
        strategy = tf.distribute.get_strategy()
        if not kind.is_tower_strategy(strategy):
            return original(self, input_shape)
        with strategy.extended.one_copy_of_means():
            return original(self, input_shape)

    return build


def make_function(attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_function(self: Any, force: bool = False) -> Any:
            strategy = self._distribution_strategy
            if strategy is None:
                adopting.check_trains_on_towers(self, tf.distribute.get_strategy())
            if kind.is_tower_strategy(strategy) and (force or getattr(self, attribute) is None):
                # What was built after compile, outside of the scope.
                adopting.adopt_state(strategy, self, names)
            before = getattr(self, attribute)
            result, step = original(self, force), getattr(self, attribute)
            if not kind.is_tower_strategy(strategy) or step is before:
                return result

            function = _in_step(strategy, self, step, attribute == "train_function")
            setattr(self, attribute, function)
            return function

        return make_function

    return hook


def make_predict_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_predict_function(self: Any, force: bool = False) -> Any:
        before = self.predict_function
        result, step = original(self, force), self.predict_function
        strategy = self.distribute_strategy
        if not kind.is_tower_strategy(strategy) or step is before:
            return result
        self.predict_function = _in_step(strategy, self, step)
        return self.predict_function

    return make_predict_function


def _in_step(strategy: Any, model: Any, step: Callable[..., Any],
             train: bool = False) -> Callable[..., Any]:
    compiles = bool(model.jit_compile) and not strategy.extended.placement.compiles

    def function(iterator: Any) -> Any:
        if train:
            return strategy.extended.train_step(lambda: step(iterator), compiles)
        with strategy.extended.step(compiles):
            return step(iterator)

    return function
