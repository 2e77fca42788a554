"""Hooks into tf_keras: ``compile``, step functions, and callbacks that write files.

Goes in: Keras' own method and its arguments.  Comes out: its result, right for towers, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src import callbacks as keras_callbacks

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy._keras import adopting, callbacks, hooks
from towerstrategy._keras.tf_keras import names
from towerstrategy.batch import datasets as datasets_lib
from towerstrategy.placement import kind

# tf_keras' compile checks that all variables are the strategy's.
compile = functools.partial(
    adopting.compile, names, lambda _, strategy: strategy.extended.modes.within(adopts=True))


def batch_norm_build(original: Callable[..., Any], self: Any, input_shape: Any) -> Any:
    """The hook for ``BatchNormalization.build``: moving statistics have one copy."""
    strategy = tf.distribute.get_strategy()
    if not kind.is_tower_strategy(strategy):
        return original(self, input_shape)
    with tf.variable_creator_scope(_one_copy_of_means):
        return original(self, input_shape)


def _one_copy_of_means(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    """Makes one copy of a variable that tf_keras wants on each tower, with ``MEAN`` aggregation."""
    if kwargs.get("aggregation") == tf.VariableAggregation.MEAN:
        kwargs["synchronization"] = tf.VariableSynchronization.ON_WRITE
    return next_creator(**kwargs)


def divides_batch_sizes(original: Callable[..., Any], strategy: Any) -> bool:
    """The hook for ``global_batch_size_supported``, by which input layers divide batch sizes."""
    return not kind.is_tower_strategy(strategy) and original(strategy)


def call_on_all_rows(original: Callable[..., Any], fn: Callable[..., Any], *args: Any,
                     **kwargs: Any) -> Any:
    """The hook for ``call_replica_local_fn``: a metric that is called outside counts rows once."""
    strategy = contexts.outside_of_towers()
    if strategy is None or any(map(_tf.is_per_replica, tf.nest.flatten((args, kwargs)))):
        return original(fn, *args, **kwargs)
    with contexts.OneReplicaContext(strategy):
        return fn(*args, **kwargs)


def data_handler_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """The hook for ``DataHandler.__init__``: of a generator's first batch, a model is built once.

    And steps are partitioned for batches of Keras' ``batch_size``.
    """
    strategy = tf.distribute.get_strategy()
    with strategy.extended.modes.within(keras_step=True) if kind.is_tower_strategy(strategy) \
            else contextlib.nullcontext():
        original(self, *args, **kwargs)
    datasets_lib.note_batch_rows(self._dataset, self._adapter)


def set_attribute(original: Callable[..., Any], self: Any, name: str, value: Any) -> None:
    """The hook for ``Model.__setattr__``: wraps step functions, and methods of a new model."""
    if name in _FUNCTIONS and value is not None and not hasattr(value, "runs_steps_of"):
        value = _on_towers(self, name, value)
    original(self, name, value)
    if name == names.OWNER and kind.is_tower_strategy(value):
        hooks.wrap_methods(self, names.ENTRIES)


_FUNCTIONS = ("train_function", "test_function", "predict_function")


def _on_towers(model: Any, name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs ``step`` on the towers; ``step`` itself if the model has none."""
    owner, strategy = model._distribution_strategy, model.distribute_strategy
    if not kind.is_tower_strategy(strategy):
        return step
    if owner is not None and name != "predict_function":
        # Variables may have been built after compile, outside of the scope.
        adopting.adopt_state(owner, model, names)
    compiles = adopting.compiles_towers(model)

    @_tf.with_short_tracebacks
    def function(iterator: Any) -> Any:
        # A model that is not adopted runs on the towers of the current scope's strategy.
        current = model.distribute_strategy
        if not kind.is_tower_strategy(current):
            return step(iterator)
        return current.extended.call_step(step, iterator, compiles,
                                          model if name == "train_function" else None)

    function.runs_steps_of = strategy  # type: ignore[attr-defined]
    return function


def set_model(original: Callable[..., Any], self: Any, model: Any) -> None:
    """The hook for ``CallbackList.set_model``: replaces ``BackupAndRestore``."""
    if kind.is_tower_strategy(model.distribute_strategy):
        self.callbacks = [
            callbacks.with_methods(callback, _WholeBackup)
            if isinstance(callback, keras_callbacks.BackupAndRestore)
            and not isinstance(callback, _WholeBackup) else callback
            for callback in self.callbacks]
    original(self, model)


class _WholeBackup(keras_callbacks.BackupAndRestore):
    """A ``BackupAndRestore`` that supports our strategies, and deletes a backup in one step."""

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
