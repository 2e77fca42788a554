"""Hooks into Keras 3: ``compile``, step functions, their data, and seeds.

Goes in: Keras' own method and its arguments.  Comes out: its result, right for towers, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend, tree
from keras.src.trainers import trainer as base_trainer

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy._keras import adopting, hooks
from towerstrategy._keras.keras3 import names
from towerstrategy.batch import datasets as datasets_lib, prefetching, rows as rows_lib
from towerstrategy.placement import kind
from towerstrategy.variables import rules


def trainer_init(original: Callable[..., Any], self: Any) -> None:
    """The hook for the ``__init__`` of models: wraps the methods of a strategy's model."""
    original(self)
    if adopting.strategy_of(self, names) is not None:
        hooks.wrap_methods(self, names.ENTRIES)


def _resolving_auto_jit(model: Any, strategy: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which ``jit_compile="auto"`` means XLA on GPUs, as without a strategy."""
    return _tf.patched(model, _resolve_auto_jit_compile=lambda: (
        "CPU" not in strategy.extended.placement.kinds
        and bool(base_trainer.model_supports_jit(model))))


compile = functools.partial(adopting.compile, names, _resolving_auto_jit)


@contextlib.contextmanager
def _without_jit_of_step(model: Any) -> Iterator[bool]:
    """Yields whether XLA compiles the towers' parts; if so, Keras makes uncompiled steps here."""
    compiles = adopting.compiles_towers(model)
    with _tf.patched(model, _jit_compile=model._jit_compile and not compiles):
        yield compiles


def is_tf_dataset(original: Callable[..., Any], x: Any) -> bool:
    """The hook for ``is_tf_dataset``: a ``TowerDataset`` is one, too."""
    return isinstance(x, datasets_lib.TowerDataset) or original(x)


def epoch_iterator_init(original: Callable[..., Any], self: Any, distribute_strategy: Any = None,
                        *args: Any, **kwargs: Any) -> None:
    """The hook for ``TFEpochIterator.__init__``: predict steps take their batches themselves.

    And a training step is partitioned for batches of Keras' ``batch_size``.
    """
    if not kind.is_tower_strategy(distribute_strategy):
        return original(self, distribute_strategy, *args, **kwargs)
    with distribute_strategy.extended.modes.within(kept=kwargs.get("steps_per_epoch") is not None):
        original(self, distribute_strategy, *args, **kwargs)
    dataset = self._distributed_dataset
    datasets_lib.note_batch_rows(dataset, self.data_adapter)
    predicting = "y" not in kwargs  # all methods but Model.predict pass labels, or None
    if isinstance(dataset, datasets_lib.TowerDataset) and predicting \
            and self.steps_per_execution == 1:
        self._distributed_dataset = _ReadByStep(dataset, distribute_strategy.extended.modes)


class _ReadByStep:
    """A distributed dataset from which the traced step, not Python, takes the batches.

    Iterating over it yields its iterator again and again.  The step takes a batch from it, and
    raises at its end.  If the step does not take iterators, iterating yields batches.
    """

    def __init__(self, dataset: datasets_lib.TowerDataset, modes: Any) -> None:
        self._dataset, self._modes = dataset, modes
        modes.takes_iterators = False  # ``make_predict_function``, which runs later, may set it

    def __iter__(self) -> Iterator[Any]:
        takes_iterators, self._modes.takes_iterators = self._modes.takes_iterators, False
        iterator = iter(self._dataset)
        return itertools.repeat(iterator) if takes_iterators else iterator


def make_function(original: Callable[..., Any], self: Any, step_function: Any) -> Any:
    """The hook for ``_make_function``: adopts new variables; splits the data of ``*_on_batch``."""
    strategy = adopting.strategy_of(self, names)
    if strategy is None:
        return original(self, step_function)
    with _without_jit_of_step(self) as compiles:
        take = step = original(self, step_function)
        if self.steps_per_execution == 1:
            # Keras' function returns a step's logs in an optional, which Python opens.  Ours calls
            # Keras' step directly; it is a function of its own only if XLA compiles it.
            with _tf.patched(self, _run_eagerly=self._run_eagerly or not self.jit_compile):
                one_step = original(self, step_function)
            take = _with_get_next(self, one_step)
    trains = step_function == self.train_step
    adopting.adopt_state(strategy, self, names)

    def function(iterator: Any) -> Any:
        call = take
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            iterator = (_split(strategy, data) for data in iterator)
            call = step
        elif isinstance(iterator, prefetching.PrefetchedIterator) and take is step:
            iterator = iterator.read_once()  # as Keras' loop over several steps does
        return strategy.extended.call_step(call, iterator, compiles, self if trains else None)

    return function


def _split(strategy: tf.distribute.Strategy, data: Any) -> Any:
    """A step's data as sub-batches; data that is split already is returned as it is."""
    is_split = any(isinstance(leaf, tf.distribute.DistributedValues)
                   for leaf in tf.nest.flatten(data))
    return data if is_split else strategy.extended.inputs.split(data)


def _with_get_next(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A step of ``model`` that takes an iterator, and takes its batch from it."""

    def take(iterator: Any) -> Any:
        return step([iterator.get_next()])

    return take if model.run_eagerly else tf.function(take, reduce_retracing=True, autograph=False)


def make_predict_function(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
    """The hook for ``make_predict_function``: the function of predict steps on towers."""
    with _without_jit_of_step(self) as compiles:
        result, step = original(self, force), self.predict_function
    strategy = self.distribute_strategy
    if not kind.is_tower_strategy(strategy):
        return result
    strategy.extended.modes.takes_iterators = (
        type(self).make_predict_function is names.TRAINER.make_predict_function)
    if not hasattr(step, "is_on_towers"):
        self.predict_function = _predict_on_towers(self, step, compiles)
    return result


def _predict_on_towers(model: Any, step: Callable[..., Any], compiles: bool
                       ) -> Callable[[Any], Any]:
    """A function that runs ``step``, Keras' predict function, on the towers."""
    take = _with_get_next(model, step)

    def function(steps: Any) -> Any:
        # A model that is not adopted predicts on the towers of the current scope's strategy.
        strategy = model.distribute_strategy
        if not kind.is_tower_strategy(strategy):
            return step(steps)
        with strategy.extended.step(compiles):
            if isinstance(steps[0], tf.distribute.DistributedIterator):
                return take(steps[0])
            return step([_split(strategy, data) for data in steps])

    function.is_on_towers = True  # type: ignore[attr-defined]
    return function


def symbolic_build(original: Callable[..., Any], self: Any, iterator: Any = None,
                   data_batch: Any = None) -> Any:
    """The hook for ``_maybe_symbolic_build``: builds before the step is traced, to trace it once.

    It builds model, metrics and optimizer.  A model that cannot be called symbolically is built by
    the trace, as without a strategy; the trace raises the user's errors, too.  So is a model with
    its own step, which may pass other values than the data to the model, its loss and metrics; and
    the optimizer of layers that only a training step calls.
    """
    strategy = adopting.strategy_of(self, names)
    if strategy is None:
        scope = tf.distribute.get_strategy()
        if kind.is_tower_strategy(scope):  # each tower would train the model for itself
            raise ValueError(
                f"model {self.name!r} is used inside the scope of {scope!r}, but was built and "
                "compiled outside of it and is not adopted. Compile it inside the scope, or call "
                "strategy.adopt(model), which keeps its optimizer and metrics, state and all.")
        return original(self, iterator, data_batch)
    if self.train_function is None:
        # The optimizer is built here, for weights that may have been built outside of the scope.
        adopting.adopt_state(strategy, self, names)
    if any(getattr(type(self), step) is not getattr(names.TRAINER, step) or step in vars(self)
           for step in ("train_step", "test_step")):
        return
    if iterator is not None:
        data_batch = iterator._distributed_dataset.element_spec
    with contextlib.suppress(Exception), strategy.scope():
        _build(self, *keras.utils.unpack_x_y_sample_weight(
            tree.map_structure(_as_keras_tensor, data_batch)))


def _build(model: Any, x: Any, y: Any, sample_weight: Any) -> None:
    """Builds a model, its metrics and loss, and its optimizer, as Keras' ``_symbolic_build``.

    It does not call a model whose outputs are known, builds no metrics for outputs that are others
    in training, and the optimizer only behind all layers: it takes no more weights.
    """
    unbuilt = [compute for part, compute in (
        (model._compile_metrics, model.compute_metrics),
        (model._compile_loss, functools.partial(model._compute_loss, training=False)))
        if part is not None and not part.built]
    if unbuilt or not _is_built(model):
        *trained, outputs = _outputs(model, x)
        if any(_described(each) != _described(outputs) for each in trained):
            return
        for compute in unbuilt:
            backend.compute_output_spec(compute, x, y, outputs, sample_weight=sample_weight)
    if _is_built(model) and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _is_built(model: Any) -> bool:
    return all(layer.built for layer in model._flatten_layers())


def _outputs(model: Any, x: Any) -> list[Any]:
    """A model's outputs; in training and in prediction, if they may differ."""
    is_graph = type(model).call in names.GRAPH_CALLS
    known = getattr(getattr(model, "_functional", model), "_outputs_struct", None)  # Sequential's
    if isinstance(known, (list, tuple)) and len(known) == 1:
        known, = known  # as a call does
    if is_graph and "call" not in vars(model) and known is not None and _is_built(model) \
            and not any(None in each.shape[1:] or each.sparse for each in tree.flatten(known)):
        return [known]
    return [backend.compute_output_spec(model, x, training=training)
            for training in ([False] if is_graph else [True, False])]


def _described(outputs: Any) -> Any:
    return tree.map_structure(lambda output: (tuple(output.shape), output.dtype), outputs)


def _as_keras_tensor(component: Any) -> Any:
    """A component of a batch, given itself or by its spec, with an open number of rows."""
    if component is None or rows_lib.is_absent(component) \
            or isinstance(component, tf.OptionalSpec):
        return None
    if isinstance(component, _tf.PerReplicaSpec):
        component = component._component_specs[0]
    shape = tf.TensorShape(component.shape).as_list()
    return keras.KerasTensor((None, *shape[1:]) if shape else (),
                             backend.standardize_dtype(component.dtype))


def next_seed(original: Callable[..., Any], self: Any, ordered: bool = True) -> Any:
    """The hook for ``SeedGenerator.next``: each tower gets a seed of its own."""
    tower = contexts.splitting_tower()
    if tower is None:
        return original(self, ordered)
    state = rules.held_variable(self.state)
    state._alike_on_all = True  # all machines write the same value, so it need not cross
    try:  # not `patched`: the write is a sync point, where other towers' traces are in here, too
        seed = original(self, ordered)
    finally:
        state._alike_on_all = False
    return tower.own_seed(seed)
