"""Hooks into tf_keras: ``compile``, the step functions, and callbacks that write files.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src import callbacks as keras_callbacks

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import adopting, callbacks, hooks, training as training_rules
from towerstrategy._keras.tf_keras import names
from towerstrategy.placement import kind


def data_handler_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    strategy = tf.distribute.get_strategy()
    if not kind.is_tower_strategy(strategy):
        return original(self, *args, **kwargs)
    # Model.predict alone hands over no labels, not even None.
    with strategy.extended.modes.within(in_order=len(args) < 2 and "y" not in kwargs):
        original(self, *args, **kwargs)


# tf_keras looks in compile whether all variables are the strategy's.
compile = functools.partial(
    training_rules.compile, names, lambda _, strategy: strategy.extended.modes.within(adopts=True))


def batch_norm_build(original: Callable[..., Any], self: Any, input_shape: Any) -> Any:
    strategy = tf.distribute.get_strategy()
    if not kind.is_tower_strategy(strategy):
        return original(self, input_shape)
    with tf.variable_creator_scope(_one_copy_of_means):
        return original(self, input_shape)


def _one_copy_of_means(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    """Makes what tf_keras wants a part of on each tower, with their mean, as one copy."""
    if kwargs.get("aggregation") == tf.VariableAggregation.MEAN:
        kwargs["synchronization"] = tf.VariableSynchronization.ON_WRITE
    return next_creator(**kwargs)


def set_attribute(original: Callable[..., Any], self: Any, name: str, value: Any) -> None:
    """Wraps functions that run steps; puts hooks into a model that is made in the scope."""
    if name in _FUNCTIONS and value is not None and not hasattr(value, "in_step_of"):
        value = _in_step(self, name, value)
    original(self, name, value)
    if name == names.OWNER and kind.is_tower_strategy(value):
        hooks.enter_with(self, names.ENTRIES)


_FUNCTIONS = ("train_function", "test_function", "predict_function")


def _in_step(model: Any, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    strategy = model._distribution_strategy
    if name == "predict_function":
        strategy = model.distribute_strategy
    elif strategy is None:
        adopting.check_trains_on_towers(model, tf.distribute.get_strategy())
    if not kind.is_tower_strategy(strategy):
        return step
    if name != "predict_function":
        # What was built after compile, outside of the scope.
        adopting.adopt_state(strategy, model, names)
    compiles = training_rules.compiles_towers(model)

    @_tf.with_short_tracebacks
    def function(iterator: Any) -> Any:
        return strategy.extended.call_step(step, iterator, compiles,
                                           model if name == "train_function" else None)

    function.in_step_of = strategy  # type: ignore[attr-defined]
    return function


def set_model(original: Callable[..., Any], self: Any, model: Any) -> None:
    if kind.is_tower_strategy(model.distribute_strategy):
        self.callbacks = [
            callbacks.with_methods(callback, _WholeBackup)
            if isinstance(callback, keras_callbacks.BackupAndRestore)
            and not isinstance(callback, _WholeBackup) else callback
            for callback in self.callbacks]
    original(self, model)


class _WholeBackup(keras_callbacks.BackupAndRestore):
    """A ``BackupAndRestore`` that knows our strategies, and deletes a backup at once."""

    def on_train_begin(self, logs: Any = None) -> None:
        supported = self._supported_strategies  # type: ignore[has-type]
        self._supported_strategies = (*supported, kind.Kind)
        super().on_train_begin(logs)

    def on_train_end(self, logs: Any = None) -> None:
        state = self._training_state
        if (self.delete_checkpoint
                and state.write_checkpoint_manager is state.read_checkpoint_manager):
            callbacks.delete_backup(state.write_checkpoint_manager.directory)
        super().on_train_end(logs)
