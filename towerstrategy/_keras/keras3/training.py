"""Hooks into Keras 3: ``compile``, the step functions, what they hand back and what they draw.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.trainers import trainer as base_trainer

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy._keras import adopting, hooks, training as training_rules
from towerstrategy._keras.keras3 import names
from towerstrategy.batch import datasets as datasets_lib, prefetching, rows as rows_lib
from towerstrategy.placement import kind
from towerstrategy.variables import rules


def trainer_init(original: Callable[..., Any], self: Any) -> None:
    original(self)
    if training_rules.strategy_of(self, names) is not None:
        hooks.enter_with(self, names.ENTRIES)


def _compiling(model: Any, strategy: Any) -> contextlib.AbstractContextManager[None]:
    """Within, ``jit_compile="auto"`` is for the towers: Keras compiles no strategy's step by it."""
    # On GPUs and not on CPUs, as without a strategy.
    return hooks.having(model, _resolve_auto_jit_compile=lambda: (
        "CPU" not in strategy.extended.placement.kinds
        and bool(base_trainer.model_supports_jit(model))))


compile = functools.partial(training_rules.compile, names, _compiling)


@contextlib.contextmanager
def _towers_alone_compiled(model: Any) -> Iterator[bool]:
    """Within, Keras makes step functions of which XLA compiles what towers do alone, if it does."""
    compiles = training_rules.compiles_towers(model)
    with hooks.having(model, _jit_compile=model._jit_compile and not compiles):
        yield compiles


def is_tf_dataset(original: Callable[..., Any], x: Any) -> bool:
    return isinstance(x, datasets_lib.TowerDataset) or original(x)


def epoch_iterator_init(original: Callable[..., Any], self: Any, distribute_strategy: Any = None,
                        *args: Any, **kwargs: Any) -> None:
    if not kind.is_tower_strategy(distribute_strategy):
        return original(self, distribute_strategy, *args, **kwargs)
    predicting = "y" not in kwargs  # Model.predict alone hands over no labels, not even None
    with distribute_strategy.extended.modes.within(
            in_order=predicting, kept=kwargs.get("steps_per_epoch") is not None):
        original(self, distribute_strategy, *args, **kwargs)
    if isinstance(self._distributed_dataset, datasets_lib.TowerDataset) and predicting \
            and self.steps_per_execution == 1:
        self._distributed_dataset = _Untaken(self._distributed_dataset,
                                             distribute_strategy.extended.modes)


class _Untaken:
    """A distributed dataset whose batches are taken by the step itself, not by Python before it.

    Iterating over it gives the iterator, as often as is asked; the step that takes from it raises
    when it has ended.  For a step that takes none it gives the batches.
    """

    def __init__(self, dataset: datasets_lib.TowerDataset, modes: Any) -> None:
        self._dataset, self._modes = dataset, modes
        self.element_spec = dataset.element_spec
        modes.takes_iterators = False  # until the function is known

    def __iter__(self) -> Iterator[Any]:
        taken, self._modes.takes_iterators = self._modes.takes_iterators, False
        iterator = iter(self._dataset)
        return itertools.repeat(iterator) if taken else iterator


def make_function(original: Callable[..., Any], self: Any, step_function: Any) -> Any:
    """Adopts what was built since ``compile``; splits the plain data of ``*_on_batch``."""
    strategy = training_rules.strategy_of(self, names)
    if strategy is None:
        return original(self, step_function)
    with _towers_alone_compiled(self) as compiles:
        take = step = original(self, step_function)
        if self.steps_per_execution == 1:
            # Keras' way hands each step's logs over in an optional, which Python opens.  The step
            # in it is no function of its own, unless XLA compiles it.
            with hooks.having(self, _run_eagerly=self._run_eagerly or not self.jit_compile):
                bare = original(self, step_function)
            take = _taking(self, bare)
    trains = step_function == self.train_step
    adopting.adopt_state(strategy, self, names)

    def function(iterator: Any) -> Any:
        call = take
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            iterator = (training_rules.split_plain(strategy, data) for data in iterator)
            call = step
        elif isinstance(iterator, prefetching.PrefetchedIterator) and take is step:
            iterator.read_once()  # as Keras' loop over several steps does
        return strategy.extended.call_step(call, iterator, compiles, self if trains else None)

    return function


def _taking(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step of ``model`` that takes its batch out of an iterator by itself."""

    def take(iterator: Any) -> Any:
        return step([iterator.get_next()])

    return take if model.run_eagerly else tf.function(take, reduce_retracing=True, autograph=False)


def make_predict_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    result, strategy = _made(original, self, force), self.distribute_strategy
    hooked = names.TRAINER.make_predict_function
    if kind.is_tower_strategy(strategy):
        strategy.extended.modes.takes_iterators = (
            type(self).make_predict_function is hooked
            and hasattr(self.predict_function, "takes_iterators"))
    return result


def _made(original: Callable[..., Any], self: Any, force: bool) -> Any:
    before = self.predict_function
    with _towers_alone_compiled(self) as compiles:
        result, step = original(self, force), self.predict_function
    if step is before or not kind.is_tower_strategy(self.distribute_strategy):
        return result
    take = _taking(self, step)

    def function(steps: Any) -> Any:
        # A model that is not adopted predicts on the towers in whose scope it is called.
        strategy = self.distribute_strategy
        if not kind.is_tower_strategy(strategy):
            return step(steps)
        with strategy.extended.step(compiles):
            if isinstance(steps[0], tf.distribute.DistributedIterator):
                return take(steps[0])
            return step([training_rules.split_plain(strategy, data) for data in steps])

    function.takes_iterators = True  # type: ignore[attr-defined]
    self.predict_function = function
    return function


def symbolic_build(original: Callable[..., Any], self: Any, iterator: Any = None,
                   data_batch: Any = None) -> Any:
    """Builds model, metrics and optimizer before the step is traced: one trace is enough then.

    What cannot be called symbolically, or has a step of its own, which may hand it and its loss
    and metrics something else than the data, is left to the trace, as without a strategy; so are
    the user's errors.
    """
    strategy = training_rules.strategy_of(self, names)
    if strategy is None:
        adopting.check_trains_on_towers(self, tf.distribute.get_strategy())
        return original(self, iterator, data_batch)
    if self.train_function is None:
        # The optimizer is built here, around weights that may have been built outside.
        adopting.adopt_state(strategy, self, names)
    if any(getattr(type(self), step) is not getattr(names.TRAINER, step)
           for step in ("train_step", "test_step")):
        return
    if iterator is not None:
        data_batch = _batch_spec(iterator._distributed_dataset.element_spec)
    with contextlib.suppress(Exception), strategy.scope(), _of_known_outputs(self):
        self._symbolic_build(data_batch=data_batch)


def _of_known_outputs(model: Any) -> contextlib.AbstractContextManager[None]:
    """Within, a functional model that knows its outputs gives tensors like these, if called.

    Keras calls it for their shapes and dtypes alone.
    """
    functional = getattr(model, "_functional", model)  # that of a Sequential
    outputs = getattr(functional, "_outputs_struct", None)
    if outputs is None or type(model).call not in names.OPENED or "call" in vars(model) or any(
            None in each.shape[1:] or each.sparse for each in tree.flatten(outputs)):
        return contextlib.nullcontext()
    return hooks.having(model, call=lambda *_, **__: tree.map_structure(
        lambda each: tf.compat.v1.placeholder(each.dtype, each.shape), outputs))


def _batch_spec(element_spec: Any) -> Any:
    """Shapes and dtypes of a batch of any number of rows, from the spec of its sub-batches."""

    def whole(spec: Any) -> Any:
        if rows_lib.is_absent(spec) or isinstance(spec, tf.OptionalSpec):
            return None
        spec = spec._component_specs[0] if isinstance(spec, _tf.PerReplicaSpec) else spec
        shape = spec.shape.as_list()
        return types.SimpleNamespace(shape=(None, *shape[1:]) if shape else (), dtype=spec.dtype)

    return tree.map_structure(whole, element_spec)


def next_seed(original: Callable[..., Any], self: Any, ordered: bool = True) -> Any:
    tower = contexts.splitting_tower()
    if tower is None:
        return original(self, ordered)
    state = rules.held_variable(self.state)
    state._alike_on_all = True  # every machine counts alike, so what is written need not cross
    try:
        seed = original(self, ordered)
    finally:
        state._alike_on_all = False
    return tower.own_seed(seed)
