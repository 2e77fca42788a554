"""Traces tower 0 once, and makes the operations of all towers from its trace.

Goes in: the replica function and its arguments, while a ``tf.function`` is traced.  Comes out: its
results, grouped.  Tower 0 runs in the calling thread, and at its sync points the function given to
``merge_call`` runs at once, with each tower's own tensors (:class:`replica.PerTowerTensors`).  When
all is traced, :mod:`replica` makes the towers' operations from the trace.

:class:`NeedsOwnTrace` says why a function has to be traced for each tower.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts, warned
from towerstrategy.batch import sub_batches
from towerstrategy.merge import results, shares as shares_lib
from towerstrategy.sharding import contract, replica, step, traffic
from towerstrategy.sharding.replica_plans import NeedsOwnTrace
from towerstrategy.variables import alone, rules, tower_local


def call(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any,
         shares: shares_lib.Shares) -> Any:
    """:func:`calls.call_each` by one trace, or :class:`NeedsOwnTrace` if one cannot serve all."""
    one_trace = _Once(strategy, shares)
    try:
        with step.no_garbage():
            return one_trace.run(fn, args, kwargs)
    except NeedsOwnTrace:
        _initialize(one_trace.created)
        raise


class _Once(contexts.Call):
    """One call of the replica function, traced for tower 0 and run by all towers."""

    def __init__(self, strategy: tf.distribute.Strategy, shares: shares_lib.Shares) -> None:
        super().__init__(strategy, shares)
        self.created: list[tuple[Any, Any]] = []  # the new variables, with their initial values
        self._opened = False  # whether a value's number of rows is unknown in the trace
        self._warning: Warning | None = None  # a warning that the user has turned into an error
        self.contract = contract.Contract(strategy.extended.placement.kinds)
        self._count = len(strategy.extended.worker_devices)
        self._error_note = strategy.extended.placement.note(0, shares.in_words(0))

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        returned: list[Any] = []
        name = getattr(fn, "__name__", "replica")
        _tf.trace(lambda: returned.append(self._trace(fn, args, kwargs)), [], name)
        result, = returned
        return self._run_on_all(result, name)

    def _trace(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Traces ``fn`` for tower 0 in the current graph, and returns its result."""
        self._graph: Any = tf.compat.v1.get_default_graph()
        filled = self.shares.filled if self.shares.may_be_empty else ()
        self._per_tower = replica.PerTowerTensors(self._graph, filled)
        first = self._strategy.extended.first_replica
        with _tf.as_in_caller(), contexts.TowerContext(self, 0), tf.device(None), \
                _tf.graph_seeded(first), tf.variable_creator_scope(self._note_variable):
            args, kwargs = tf.nest.map_structure(self._enter, (args, kwargs))
            self._per_tower.end_stretch()
            try:
                result = fn(*args, **kwargs)
            except NeedsOwnTrace:
                raise
            except Exception as error:
                if self._warning:  # AutoGraph raises another error in its place
                    raise self._warning from error
                if self._opened:  # may be the cause; if not, the towers' own traces fail, too
                    raise NeedsOwnTrace("it fails if the number of rows, which differs between "
                                        f"the towers, is unknown: {error}") from error
                _tf.add_note(error, self._error_note, traced=True)
                raise
            self._end_stretch()
        return result

    def _run_on_all(self, result: Any, name: str) -> Any:
        """Makes all towers' operations; returns ``result``, tower 0's, with all towers' values."""
        per_tower = self._per_tower
        _check_plain(result)
        self._graph.outputs = [leaf for leaf in results.tensors_in(result)
                               if leaf.graph is self._graph]
        graph = tf.compat.v1.get_default_graph()
        _tf.hand_on_functions(self._graph, graph)
        layout = per_tower.layout(self.contract, traffic.of_strategy(
            self._strategy, None, in_run=True))
        towers = step.towers_of(self._strategy, graph, lambda *_: None)
        partition = replica.ReplicaPartition(towers)
        values = partition.run(layout, per_tower.inputs(towers))
        outputs = {(id(leaf), tower): (value.part(tower), leaf)
                   for leaf, value in zip(self._graph.outputs, values)
                   for tower in range(self._count if per_tower.differs(leaf) else 1)}
        tensors, done = step.finished(self._strategy, partition, outputs.values(), name)
        tensor_of, all_done = dict(zip(outputs, tensors)), tf.group(*done)

        def of_tower(tower: int, leaf: Any) -> Any:
            if isinstance(leaf, tf.Operation):
                return all_done
            return tensor_of.get((id(leaf), tower), tensor_of.get((id(leaf), 0), leaf))

        return _tf.regroup(
            tuple(results.map_tensors(functools.partial(of_tower, tower), result)
                  for tower in range(self._count)),
            functools.partial(results.TowerResults, shares=self.shares))

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call`` of tower 0, which stands for all towers: ``merge_fn`` runs at once."""
        if tf.executing_eagerly():
            raise NeedsOwnTrace("it syncs with the other towers in tf.init_scope")
        controls = _tf.control_dependencies_of(self._graph)
        self._end_stretch()
        with self._merging(controls):
            args, kwargs = map(_tf.regroup, map(self._of_all_towers, (args, kwargs)))
            tower_note = self._error_note
            self._error_note = self._strategy.extended.placement.merge_note
            result = merge_fn(self._strategy, *args, **kwargs)
            self._error_note = tower_note
        with _tf.not_recorded():
            entered = tf.nest.map_structure(self._enter, result)
        self._per_tower.end_sync()
        return entered

    def _of_all_towers(self, value: Any) -> tuple[Any, ...]:
        """Each tower's value for a value of tower 0, at a sync point."""
        _check_plain(value)

        def of_tower(tower: int, leaf: Any) -> Any:
            return self._per_tower.of_tower(leaf, tower) if tf.is_symbolic_tensor(leaf) else leaf

        return tuple(results.map_tensors(functools.partial(of_tower, tower), value)
                     for tower in range(self._count))

    @contextlib.contextmanager
    def _merging(self, controls: Sequence[Any]) -> Iterator[None]:
        """In this context, operations run once, after ``controls``, and no tape records them."""
        with _tf.not_recorded(), _tf.cross_replica_context(self._strategy), \
                tf.control_dependencies(None), tf.control_dependencies(controls), \
                tf.name_scope(""), tf.device(None):
            yield

    def _end_stretch(self) -> None:
        """Handles tower 0's operations since its last sync point, and merges writes among them."""
        stretch, variables = self._per_tower.stretch(), self._strategy.extended.variables()
        for handle in self._per_tower.enter_handles([
                each for each in variables if isinstance(each, tower_local.TowerLocalVariable)]):
            self.contract.put(handle, contract.UNKNOWN)  # each tower has a value of its own
        self.contract.look_at(stretch)
        written = alone.divert(self._graph, stretch, variables)
        self._per_tower.end_stretch()
        if written:
            handles = {id(handle) for _, handle in written.values()}
            with self._merging([operation for operation in stretch if any(
                    id(tensor) in handles for tensor in operation.inputs)]):
                alone.merge_written(self.shares, [
                    {key: (variable, self._per_tower.of_tower(handle, tower))
                     for key, (variable, handle) in written.items()}
                    for tower in range(self._count)])
            self._per_tower.end_sync()

    def of_tower(self, tower: int, name: str, values: Sequence[Any]) -> Any:
        """A tensor that has each tower's value, also while a branch or a loop is traced."""
        del tower
        tensor = self._enter_values(list(values))
        if tf.is_symbolic_tensor(tensor):
            self.contract.put(tensor, contract.KNOWN.get(name, contract.UNKNOWN))
        return tensor

    def total(self, value: Any, device: str) -> tf.Tensor | None:
        differs = tf.is_symbolic_tensor(value) and isinstance(value, tf.Tensor) \
            and not tf.executing_eagerly() and self._per_tower.differs(value)
        return self._per_tower.total(value, device) if differs else None

    def note_number_read(self) -> None:
        raise NeedsOwnTrace("it reads its replica id as a Python number")

    def check_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        evenly = self.shares.are_equal or not self.shares.are_known
        for gradient, variable in zip(gradients, variables):
            problem = self.contract.problem(gradient, self.knows_replica_count, evenly)
            if problem and variable._warned_of != problem:
                self._warn(problem, variable)
                variable._warned_of = problem
            if problem:
                return

    def _warn(self, problem: str, variable: Any) -> None:
        try:
            warned.warn(
                f"in the function given to strategy.run, {problem}. Each tower sees its own rows "
                "there, and the towers' gradients are summed, so the gradient of "
                f"{variable.name!r} differs from the gradient on one device. To get one device's "
                "result, decorate the step with strategy.function in place of tf.function and "
                "strategy.run; or scale a mean over the tower's rows by strategy.scale_loss, or "
                "gather rows by towerstrategy.whole_batch. If it divides by the number of "
                "replicas, it must read this number itself.")
        except Warning as error:
            self._warning = error
            raise

    def _note_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = next_creator(**kwargs)
        self.created.append((variable, kwargs["initial_value"]))
        return variable

    def _enter(self, leaf: Any) -> Any:
        """Replaces a per-replica value by tensors that have each tower's part."""
        if not _tf.is_per_replica(leaf):
            return leaf
        first = leaf.values[0]
        if all(part is first for part in leaf.values):
            return first
        structure = self._structure(leaf.values)
        parts = [tf.nest.flatten(part, expand_composites=True) for part in leaf.values]
        has_rows = isinstance(leaf, sub_batches.SubBatches) and isinstance(first, tf.Tensor)
        tensors = [self._enter_values(list(components), has_rows) for components in zip(*parts)]
        state = contract.ROWS if has_rows else contract.SAME if isinstance(
            leaf, _tf.Mirrored) else contract.UNKNOWN
        for tensor in tensors:
            if tf.is_symbolic_tensor(tensor):
                self.contract.put(tensor, state)
        return tf.nest.pack_sequence_as(structure, tensors, expand_composites=True)

    def _structure(self, parts: Sequence[Any]) -> Any:
        """A structure, or type spec, that all towers' parts of a per-replica value have."""
        try:
            specs = [tf.type_spec_from_value(part) for part in parts]
        except (TypeError, AttributeError):  # an AttributeError if tf.IndexedSlices hold lists
            raise NeedsOwnTrace("a value that differs between the towers is no tensor: "
                                f"{parts[0]!r}") from None
        if all(spec == specs[0] for spec in specs):
            return parts[0]
        self._opened = True
        opened = [sub_batches.with_any_rows(spec) for spec in specs]
        if any(spec != opened[0] for spec in opened):
            raise NeedsOwnTrace(f"a value's static shape differs between the towers: {specs}")
        return opened[0]

    def _enter_values(self, values: list[Any], has_rows: bool = False) -> Any:
        """A tensor in the trace that is ``values[r]`` on tower r.

        Its number of rows is unknown, so the contract can tell which tensors count rows.
        """
        if all(value is values[0] for value in values):
            return values[0]
        if not all(isinstance(value, (tf.Tensor, np.generic)) for value in values):
            raise NeedsOwnTrace("a value that differs between the towers is no tensor: "
                                f"{values[0]!r}")
        shape = tf.TensorShape(values[0].shape)
        if has_rows or any(value.shape != shape for value in values):
            self._opened = True
            shape = tf.TensorShape([None]).concatenate(shape[1:])
        return self._per_tower.enter(values, shape)


# Types whose attributes hold no tensors that differ between towers.
_PLAIN = (tf.Tensor, tf.Operation, _tf.CompositeTensor, tf.DType, tf.TensorShape, tf.TypeSpec,
          enum.Enum, type)


def _check_plain(value: Any) -> None:
    """Raises if an object in a nest may hold tensors in its attributes or its closure."""
    for leaf in tf.nest.flatten(value):
        if _tf.is_unread_variable(leaf) or (
                hasattr(leaf, "__dict__") and not isinstance(leaf, _PLAIN)
                and not _tf.is_variable(rules.held_variable(leaf))):
            raise NeedsOwnTrace(f"it hands on a {type(leaf).__name__}, in which tensors cannot "
                                "be looked up")


def _initialize(created: list[tuple[Any, Any]]) -> None:
    """Initializes variables whose initial values were lost with the graph that created them."""
    with tf.init_scope():
        for variable, initial_value in created:
            # Other machines may not be here, so this one cannot get its value from them.
            initial_value = getattr(variable, "chiefs_initial_value", initial_value)
            value = initial_value() if callable(initial_value) else initial_value
            for part in getattr(variable, "_values", (variable,)):
                _tf.ResourceVariable.assign(part, tower_local.to_dtype(value, part.dtype))
