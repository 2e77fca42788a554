"""Trace tower 0 once, and have every tower do what it has done.

Goes in: the replica function and its arguments, while a ``tf.function`` is traced.  Comes out: its
results, grouped.  Tower 0 runs in the calling thread, and at its sync points the function given to
``merge_call`` runs at once, with each tower's own tensors (:class:`replica.PerTowerTensors`).  When
all is traced, :mod:`replica` makes the towers' operations of it.

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
from towerstrategy.replicas import enclosed
from towerstrategy.sharding import contract, replica, step, traffic
from towerstrategy.sharding.builder import Builder
from towerstrategy.sharding.replica import NeedsOwnTrace
from towerstrategy.variables import alone, tower_local


def call(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any,
         shares: shares_lib.Shares) -> Any:
    """Calls ``fn`` on every tower, see :func:`calls.call_each`; :class:`NeedsOwnTrace` if it can't.
    """
    made: list[tuple[Any, Any]] = []

    def run() -> Any:
        return _Once(strategy, shares, made).run(fn, args, kwargs)

    try:
        with step.no_garbage():
            # In a function of its own for a gradient tape around the call; and, where it crosses
            # machines, as in a loop TensorFlow numbers that in another order inside of a function.
            if _tf.may_be_recorded() or strategy.extended.workers is not None:
                return enclosed.run(run)
            return run()
    except NeedsOwnTrace:
        _initialize(made)
        raise


class _Once(contexts.Call):
    """One call of the replica function: tower 0 is traced, all towers do it."""

    def __init__(self, strategy: tf.distribute.Strategy, shares: shares_lib.Shares,
                 made: list[tuple[Any, Any]]) -> None:
        super().__init__(strategy)
        self._shares, self._made = shares, made
        self._opened = False
        self._warning: Warning | None = None  # that the user has made an error
        self.contract = contract.Contract()
        self._count = len(strategy.extended.worker_devices)
        self._error_note = strategy.extended.placement.note(0, shares.in_words(0))

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        found: list[Any] = []
        name = getattr(fn, "__name__", "replica")
        _tf.trace(lambda: found.append(self._traced(fn, args, kwargs)), [], name)
        result, = found
        return self._by_all(result, name)

    def _traced(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What ``fn`` returns on tower 0; all of it is in the graph of the moment."""
        self._graph: Any = tf.compat.v1.get_default_graph()
        self._own = replica.PerTowerTensors(self._graph, self._count, self._shares.filled
                                            if self._shares.may_be_empty else ())
        context = contexts.TowerContext(self._strategy, 0, self._shares, self)
        first = self._strategy.extended.first_replica
        with _tf.variables_of_caller(), _tf.operation_seeds_of_caller(), context, \
                tf.device(None), _tf.graph_seeded(_tf.graph_seed(), first), \
                _tf.variable_creator_scope(self._note_variable):
            args, kwargs = tf.nest.map_structure(self._enter, (args, kwargs))
            self._own.end_stretch()
            try:
                result = fn(*args, **kwargs)
            except NeedsOwnTrace:
                raise
            except Exception as error:
                if self._warning:  # AutoGraph has made another error of it
                    raise self._warning from error
                if self._opened:  # it may be why; where it is not, the towers' own traces fail, too
                    raise NeedsOwnTrace("it fails where the number of rows, which differs between "
                                        f"the towers, is open: {error}") from error
                _tf.add_note(error, self._error_note, traced=True)
                raise
            self._end_stretch()
        return result

    def _by_all(self, result: Any, name: str) -> Any:
        """Has all towers do what is traced, and groups what they return in place of ``result``."""
        own = self._own
        _check_plain(result)
        self._graph.outputs = [leaf for leaf in results.tensors_in(result)
                               if leaf.graph is self._graph]
        graph = tf.compat.v1.get_default_graph()
        _tf.hand_on_functions(self._graph, graph)
        layout = own.layout(self.contract, traffic.of_strategy(self._strategy, None))
        towers = step.towers_of(self._strategy, Builder(graph), lambda _: None)
        partition = replica.ReplicaPartition(towers, own)
        values = partition.run(layout, own.inputs(towers))
        keys, outputs = [], []
        for leaf, value in zip(self._graph.outputs, values):
            for tower in range(self._count if own.differs(leaf) else 1):
                keys.append((id(leaf), tower))
                outputs.append((value.part(tower), leaf))
        given, done = step.finished(self._strategy, towers, outputs, partition.effects, name)
        found = dict(zip(keys, given))

        def of(tower: int, leaf: Any) -> Any:
            if isinstance(leaf, tf.Operation):
                return tf.group(*done)
            return found.get((id(leaf), tower), found.get((id(leaf), 0), leaf))

        return _tf.regroup(
            tuple(results.map_tensors(functools.partial(of, tower), result)
                  for tower in range(self._count)),
            functools.partial(results.TowerResults, shares=self._shares))

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call`` of tower 0: the others get there at once."""
        if tf.executing_eagerly():
            raise NeedsOwnTrace("it syncs with the other towers in tf.init_scope")
        controls = _tf.control_dependencies_of(self._graph)
        self._end_stretch()
        with self._merging(controls):
            args, kwargs = _tf.regroup(self._of_each(args)), _tf.regroup(self._of_each(kwargs))
            own_note = self._error_note
            self._error_note = self._strategy.extended.placement.merge_note
            result = merge_fn(self._strategy, *args, **kwargs)
            self._error_note = own_note
        with _tf.not_recorded():
            answer = tf.nest.map_structure(self._enter, result)
        self._own.end_sync()
        return answer

    def _of_each(self, value: Any) -> tuple[Any, ...]:
        """What each tower has in place of any value of tower 0's, at a sync point."""
        _check_plain(value)

        def of(tower: int, leaf: Any) -> Any:
            return self._own.of_tower(leaf, tower) if tf.is_symbolic_tensor(leaf) else leaf

        return tuple(results.map_tensors(functools.partial(of, tower), value)
                     for tower in range(self._count))

    @contextlib.contextmanager
    def _merging(self, controls: Sequence[Any] = ()) -> Iterator[None]:
        """Within, what is made is done once."""
        with _tf.not_recorded(), _tf.cross_replica_context(self._strategy), \
                tf.control_dependencies(None), tf.control_dependencies(controls), \
                tf.name_scope(""), tf.device(None):
            yield

    def _end_stretch(self) -> None:
        """Looks at what tower 0 has done; merges what towers have written alone in it."""
        stretch, variables = self._own.stretch(), self._strategy.extended.variables()
        for handle in self._own.enter_handles([variable for variable in variables if isinstance(
                variable, tower_local.TowerLocalVariable)]):
            self.contract.put(handle, contract.UNKNOWN)  # what a tower keeps there is its own
        self.contract.look_at(stretch)
        written = alone.divert(self._graph, stretch, variables)
        self._own.end_stretch()
        if written:
            handles = {id(handle) for _, handle in written.values()}
            with self._merging([operation for operation in stretch if any(
                    id(tensor) in handles for tensor in operation.inputs)]):
                alone.merge_written(self._shares, [
                    {key: (variable, self._own.of_tower(handle, tower))
                     for key, (variable, handle) in written.items()}
                    for tower in range(self._count)])
            self._own.end_sync()

    def own(self, tower: int, name: str, values: Sequence[Any]) -> Any:
        """Tower 0's of one value a tower, also where a branch or a loop is being traced."""
        del tower
        first = self._stand_for(list(values))
        if tf.is_symbolic_tensor(first):
            self.contract.put(first, contract.KNOWN.get(name, contract.UNKNOWN))
        return first

    def total(self, value: Any, device: str) -> tf.Tensor | None:
        inside = tf.is_symbolic_tensor(value) and isinstance(value, tf.Tensor) \
            and not tf.executing_eagerly()
        return self._own.total(value, device) if inside and self._own.differs(value) else None

    def ask(self) -> None:
        raise NeedsOwnTrace("it looks at its replica id as a Python number")

    def check_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        evenly = self._shares.are_equal or not self._shares.are_known
        for gradient, variable in zip(gradients, variables):
            problem = self.contract.problem(gradient, self.asked, evenly)
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
                f"{variable.name!r} comes out otherwise than on one device. Decorate the step with "
                "strategy.function in place of tf.function and strategy.run, and it means what it "
                "means on one device; or scale a mean over the tower's rows by "
                "strategy.scale_loss, or gather rows by towerstrategy.whole_batch.")
        except Warning as error:
            self._warning = error
            raise

    def _note_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = next_creator(**kwargs)
        self._made.append((variable, kwargs["initial_value"]))
        return variable

    def _enter(self, leaf: Any) -> Any:
        """What stands on tower 0 for its part of a per-replica value."""
        if not isinstance(leaf, tf.distribute.DistributedValues) or _tf.is_variable(leaf):
            return leaf
        first = leaf.values[0]
        if all(part is first for part in leaf.values):
            return first
        structure = self._structure(leaf.values)
        parts = [tf.nest.flatten(part, expand_composites=True) for part in leaf.values]
        has_rows = isinstance(leaf, sub_batches.SubBatches) and isinstance(first, tf.Tensor)
        own = [self._stand_for(list(components), has_rows) for components in zip(*parts)]
        state = contract.ROWS if has_rows else contract.SAME if isinstance(
            leaf, _tf.Mirrored) else contract.UNKNOWN
        for component in own:
            if tf.is_symbolic_tensor(component):
                self.contract.put(component, state)
        return tf.nest.pack_sequence_as(structure, own, expand_composites=True)

    def _structure(self, parts: Sequence[Any]) -> Any:
        """What the towers' values look like, as tower 0's trace serves all."""
        try:
            specs = [tf.type_spec_from_value(part) for part in parts]
        except (TypeError, AttributeError):  # the second of tf.IndexedSlices that hold lists
            raise NeedsOwnTrace("a value that differs between the towers is no tensor: "
                                f"{parts[0]!r}") from None
        if all(spec == specs[0] for spec in specs):
            return parts[0]
        self._opened = True
        opened = [sub_batches.with_any_rows(spec) for spec in specs]
        if any(spec != opened[0] for spec in opened):
            raise NeedsOwnTrace(f"a value's static shape differs between the towers: {specs}")
        return opened[0]

    def _stand_for(self, values: list[Any], has_rows: bool = False) -> Any:
        """A tensor of tower 0's own that is ``values[r]`` on tower r.

        Rows are traced with an open number, by which the contract tells what counts them.
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
        return self._own.enter(values, shape)


# What has attributes, and no tensors in them that differ between towers.
_PLAIN = (tf.Tensor, tf.Operation, _tf.CompositeTensor, tf.Variable, _tf.DistributedVariable,
          tf.DType, tf.TensorShape, tf.TypeSpec, enum.Enum, type)


def _check_plain(value: Any) -> None:
    """Raises where tensors may be in attributes, or in the closure, of something in a nest."""
    for leaf in tf.nest.flatten(value):
        variable = isinstance(getattr(leaf, "handle", None), tf.Tensor)  # Keras 3's own, too
        if _tf.is_unread_variable(leaf) or (
                hasattr(leaf, "__dict__") and not variable and not isinstance(leaf, _PLAIN)):
            raise NeedsOwnTrace(f"it hands on a {type(leaf).__name__}, in which tensors cannot "
                                "be looked up")


def _initialize(made: list[tuple[Any, Any]]) -> None:
    """Initializes variables whose initial values were lost with the graph they were made in."""
    with tf.init_scope():
        for variable, initial_value in made:
            # Of several machines, not all need to come here: none can ask another for its value.
            initial_value = getattr(variable, "chiefs_initial_value", initial_value)
            value = initial_value() if callable(initial_value) else initial_value
            for part in getattr(variable, "_values", (variable,)):
                _tf.ResourceVariable.assign(part, tf.cast(value, part.dtype))
