"""Trace tower 0 once, and have the other towers copied.

Goes in: the replica function and its arguments, while a ``tf.function`` is traced.  Comes out: its
results, grouped.  Tower 0 runs in the calling thread; at its sync points, :mod:`copies`
makes their operations and the function given to ``merge_call`` runs at once.

All of it happens in a function of its own, so that nothing is left behind when the function turns
out to need a trace for each tower: :class:`NeedsOwnTrace` says why.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts, warned
from towerstrategy.batch import sub_batches
from towerstrategy.merge import results, shares as shares_lib
from towerstrategy.placement import scopes
from towerstrategy.replicas import copies, enclosed
from towerstrategy.replicas.copies import NeedsOwnTrace
from towerstrategy.sharding import contract, step
from towerstrategy.variables import alone


def call(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Any, kwargs: Any,
         shares: shares_lib.Shares, finish: enclosed.Finish | None = None) -> Any:
    """Calls ``fn`` on every tower, see :func:`calls.call_each`; :class:`NeedsOwnTrace` if it can't.

    ``finish`` is called with the graph of the towers' operations when all are made.
    """
    made: list[tuple[Any, Any]] = []
    try:
        with step.no_garbage():
            result, operation = enclosed.run(
                lambda: _Once(strategy, shares, made).run(fn, args, kwargs), finish)
    except NeedsOwnTrace:
        _initialize(made)
        raise
    # What a trace has made is initialized by what is in its graph.
    keeps = made or strategy.extended.keep_graphs or _tf.may_be_recorded()
    if operation is not None and not keeps:
        _tf.forget_trace(operation)
    return result


class _Once(contexts.Call):
    """One call of the replica function: tower 0 is traced, the others are copied."""

    def __init__(self, strategy: tf.distribute.Strategy, shares: shares_lib.Shares,
                 made: list[tuple[Any, Any]]) -> None:
        super().__init__(strategy)
        self._shares, self._made = shares, made
        self._opened = False
        self._warning: Warning | None = None  # that the user has made an error
        self.contract = contract.Contract()
        self._devices = strategy.extended.worker_devices
        self._graph = tf.compat.v1.get_default_graph()
        names = [scopes.of_tower(tower, device) for tower, device in enumerate(self._devices)]
        self._scope = f"{names[0]}/"
        self._error_note = strategy.extended.placement.note(0, shares.in_words(0))
        self._placer = strategy.extended.stages.placer(self._graph, 0)
        self._copier = copies.Copier(strategy, self._graph, names)

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        context = contexts.TowerContext(self._strategy, 0, self._shares, self)
        first = self._strategy.extended.first_replica
        with context, tf.device(self._devices[0]), tf.name_scope(self._scope), \
                _tf.graph_seeded(_tf.graph_seed(), first), \
                _tf.variable_creator_scope(self._note_variable):
            args, kwargs = tf.nest.map_structure(self._enter, (args, kwargs))
            self._copier.skip()
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
            self._copy(result)
        grouped = self._copier.values(result)
        self._strategy.extended.stages.put_in_order(
            self._graph, self._copier.operations(), grouped)
        return _tf.regroup(grouped, functools.partial(results.TowerResults, shares=self._shares))

    def sync(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """``merge_call`` of tower 0: the others get there at once."""
        if tf.executing_eagerly():
            raise NeedsOwnTrace("it syncs with the other towers in tf.init_scope")
        controls = _tf.control_dependencies_of(self._graph)
        self._copy((args, kwargs, controls))
        copier = self._copier
        args, kwargs = _tf.regroup(copier.values(args)), _tf.regroup(copier.values(kwargs))
        with self._merging([copier.operation(control, tower) for control in controls
                            for tower in range(len(self._devices))]), \
                tf.device(self._strategy.extended.merge_device):
            own_note = self._error_note
            self._error_note = self._strategy.extended.placement.merge_note
            result = merge_fn(self._strategy, *args, **kwargs)
            self._error_note = own_note
        with _tf.not_recorded():
            answer = tf.nest.map_structure(self._enter, result)
        self._copier.skip()
        return answer

    @contextlib.contextmanager
    def _merging(self, controls: Sequence[Any] = ()) -> Iterator[None]:
        """Within, what is made is done once."""
        with _tf.not_recorded(), _tf.cross_replica_context(self._strategy), \
                tf.control_dependencies(None), tf.control_dependencies(controls), \
                tf.name_scope("merge/"), tf.device(None):
            yield

    def _copy(self, handed: Any) -> None:
        """Copies the stretch that ends here; merges what towers have written alone in it."""
        stretch = self._copier.added()
        self._placer.place(stretch)
        for handle in self._copier.put_local_variables():
            self.contract.put(handle, contract.UNKNOWN)  # what a tower keeps there is its own
        self.contract.look_at(stretch)
        written = alone.divert(self._graph, stretch, self._strategy.extended.variables())
        self._copier.copy(handed)
        if written:
            towers = [{key: (variable, self._copier.tensor(handle, tower))
                       for key, (variable, handle) in written.items()}
                      for tower in range(len(self._devices))]
            with self._merging():
                alone.merge_written(self._shares, towers)
            self._copier.skip()

    def own(self, tower: int, name: str, values: Sequence[Any]) -> Any:
        """Tower 0's of one value a tower; the others' are put into the copies."""
        del tower
        before = len(self._graph.get_operations())
        with self._graph.as_default():  # also where a branch or a loop is being traced
            first = self._stand_for(list(map(tf.convert_to_tensor, values)))
        self._copier.keep(before)
        self.contract.put(first, contract.KNOWN.get(name, contract.UNKNOWN))
        return first

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
        """Tower 0's part of a per-replica value, the other parts put into the table."""
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
        """A tensor of tower 0's own that has ``values[r]`` in its place on tower r.

        Rows are traced with an open number, by which the contract tells what counts them.
        """
        if all(value is values[0] for value in values):
            return values[0]
        if not all(isinstance(value, tf.Tensor) for value in values):
            raise NeedsOwnTrace("a value that differs between the towers is no tensor: "
                                f"{values[0]!r}")
        # Not an identity: its value must not be known while tracing, as it is tower 0's alone.
        shape = values[0].shape
        if has_rows or any(value.shape != shape for value in values):
            self._opened = True
            shape = tf.TensorShape([None]).concatenate(shape[1:])
        hide = tf.compat.v1.placeholder_with_default
        if values[0].dtype == tf.int32 and shape.rank:  # which hide would have go by the host
            first = tf.transpose(values[0], hide(list(range(shape.rank)), [shape.rank]))
            first.set_shape(shape)
        else:
            first = hide(values[0], shape)
        _tf.copy_handle_data(values[0], first)
        self._copier.put(first, [self._graph.capture(value) for value in values[1:]])
        return first


def _initialize(made: list[tuple[Any, Any]]) -> None:
    """Initializes variables whose initial values were lost with the graph they were made in."""
    with tf.init_scope():
        for variable, initial_value in made:
            # Of several machines, not all need to come here: none can ask another for its value.
            initial_value = getattr(variable, "chiefs_initial_value", initial_value)
            value = initial_value() if callable(initial_value) else initial_value
            for part in getattr(variable, "_values", (variable,)):
                _tf.ResourceVariable.assign(part, tf.cast(value, part.dtype))
