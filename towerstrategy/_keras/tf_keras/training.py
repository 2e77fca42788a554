"""Hooks into tf_keras: ``compile``, the step functions, and what they hand back.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tf_keras.src.engine import training
from tf_keras.src.metrics import base_metric

from towerstrategy._keras import adopting, over_rows, stages
from towerstrategy._keras import training as training_rules
from towerstrategy._keras.tf_keras import names
from towerstrategy.batch import datasets as datasets_lib
from towerstrategy.losses import parts
from towerstrategy.placement import kind
from towerstrategy.towers import contexts


def data_handler_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        x = args[0] if args else kwargs.get("x")
        training_rules.check_dataset(x, tf.distribute.get_strategy())
        original(self, *args, **kwargs)

    return __init__


def configure_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
    def _configure_dataset_and_inferred_steps(self: Any, strategy: Any, x: Any, *args: Any,
                                              **kwargs: Any) -> Any:
        if not kind.is_tower_strategy(strategy):
            return original(self, strategy, x, *args, **kwargs)
        with strategy.extended.stand_ins():
            result = original(self, strategy, x, *args, **kwargs)
        if isinstance(self._dataset, datasets_lib.TowerDataset):
            self._dataset = self._dataset.with_stand_ins()
        return result

    return _configure_dataset_and_inferred_steps


def single_batch_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    def single_batch_iterator(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        if not kind.is_tower_strategy(strategy):
            return original(strategy, *args, **kwargs)
        with strategy.extended.stand_ins():
            return original(strategy, *args, **kwargs)

    return single_batch_iterator


reduce_per_replica = training_rules.reducing(training.concat)


_HOLDERS = {"loss": ("compiled_loss", ["_user_losses", "_losses"]),
            "metrics": ("compiled_metrics", ["_user_metrics", "_metrics"]),
            "weighted_metrics": ("compiled_metrics", ["_user_weighted_metrics",
                                                      "_weighted_metrics"])}


def compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        scope = tf.distribute.get_strategy()
        strategy = scope if kind.is_tower_strategy(scope) else self._distribution_strategy
        if not kind.is_tower_strategy(strategy):
            return over_rows.compiling(original, _HOLDERS, self, args, kwargs)
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
            over_rows.compiling(original, _HOLDERS, self, args, kwargs)
            stages.settle(strategy, self, names)  # the optimizer, and so its slots, are known now

    return compile


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

            train = attribute == "train_function"
            function = _in_step(strategy, self, step, train,
                                logs_of="train_step" if train else "test_step")
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


def _in_step(strategy: Any, model: Any, step: Callable[..., Any], train: bool = False,
             logs_of: str = "") -> Callable[..., Any]:
    compiles = bool(model.jit_compile) and not strategy.extended.placement.compiles

    def function(iterator: Any) -> Any:
        with _logging(model, logs_of):
            if train:
                return strategy.extended.train_step(lambda: step(iterator), compiles)
            with strategy.extended.step(compiles):
                return step(iterator)

    return function


@contextlib.contextmanager
def _logging(model: Any, name: str) -> Iterator[None]:
    """Within, what the method ``name`` of ``model`` returns are means by rows, to be put together.

    An attribute of the model hides the method: what overrides it may call ``super()``'s.
    """
    if not name or model.distribute_reduction_method != "auto":
        yield
        return
    attributes, own = vars(model), getattr(model, name)
    before = attributes.get(name)

    def step(data: Any) -> Any:
        logs = own(data)
        tower = contexts.splitting_tower()
        if tower is not None:
            logs = tf.nest.map_structure(lambda log: parts.logged(tower, log), logs)
        return logs

    attributes[name] = step
    try:
        yield
    finally:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before
