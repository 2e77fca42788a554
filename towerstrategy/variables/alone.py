"""Writes to the one copy from where the towers cannot sync: branches, loops and nested functions.

Goes in: what one tower has run, or traced, since it last met the others.  Comes out: the variables
that it has written there, each with the value that this tower has made of it; and, where the towers
sync next, one value for all.

Each tower writes to a temporary copy of its own, which starts with the variable's value.  What the
tower does from there on until the next sync point reads and writes that copy, so that no tower sees
what another has written, in whatever order they run.  In a graph the copy is an anonymous variable,
put in the variable's place into the operations that are there (:func:`divert`); eager towers take
turns with the variable itself (:class:`Turns`).

``scatter_update``, ``_min`` and ``_max`` write the rows of all towers, so they go to the variable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement import homes as homes_lib
from towerstrategy.variables import one_copy, written as written_lib

# What writes the rows of all towers, one after another.
_REPLACING = frozenset({"ResourceScatterUpdate", "ResourceScatterMin", "ResourceScatterMax"})

# id of a variable -> the variable, and what stands for it
Written = dict[int, tuple[Any, Any]]


def divert(graph: tf.Graph, operations: Sequence[tf.Operation], owned: Iterable[Any]) -> Written:
    """Gives a tower's operations temporary copies for what they write where towers cannot sync.

    Args:
      graph: the graph that is being traced.
      operations: of one tower, since it last met the others.
      owned: the variables of the strategy.

    Returns:
      The variables that are written, and the handles of their temporary copies.
    """
    called = {operation for operation in operations if _writes_somewhere(operation)}
    if not called:
        return {}
    variables = by_handle(graph, owned)
    written: Written = {}
    for operation in operations:
        for index, tensor in enumerate(operation.inputs):
            variable = variables.get(tensor.name) if tensor.dtype == tf.resource else None
            if variable is None:
                continue
            if id(variable) not in written and operation in called \
                    and _tf.writers_of(graph, operation, index) - _REPLACING:
                _check_raw(variable, operation)
                written[id(variable)] = variable, _temporary(graph, variable, tensor)
            if id(variable) in written:
                _tf.set_input(operation, index, written[id(variable)][1])
    return written


def merge_written(shares: shares_lib.Shares, towers: Sequence[Written],
                  read: Callable[[Any, Any], tf.Tensor]) -> None:
    """Writes one value to each variable that a tower has written, by the variable's rule.

    Args:
      shares: those of the towers' batch.
      towers: what each tower has written.
      read: gives a tower's value of a variable, from what stands for it.
    """
    every = {key: variable for written in towers for key, (variable, _) in written.items()}
    for key, variable in every.items():
        with tf.device(homes_lib.home_of(variable)):
            # Not read_value, which would tell TensorFlow that a tower's code uses the variable.
            before = read_temporary(variable, variable.handle)
            values = [read(variable, written[key][1]) if key in written else before
                      for written in towers]
            value = written_lib.value_alone(variable, values, shares, before)
            _tf.ResourceVariable.assign(variable, value, read_value=False)


def read_temporary(variable: Any, handle: tf.Tensor) -> tf.Tensor:
    """The value behind the handle of a temporary copy for ``variable``."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype)


class Turns:
    """Eager towers that run in turn, each from the values that the variables had before.

    Args:
      owned: gives the variables of the strategy.
    """

    def __init__(self, owned: Callable[[], Iterable[Any]]) -> None:
        self._owned = owned
        self._before: Written = {}
        self._towers: list[Written] = []

    def begin(self) -> None:
        """The towers have met."""
        self._before, self._towers = {}, []
        for variable in self._owned():
            if isinstance(variable, one_copy.TowerVariable) and variable._written_alone:
                self.note(variable)

    def note(self, variable: Any) -> None:
        """``variable`` is about to be written in this turn, if it has not been already."""
        if id(variable) not in self._before:
            with tf.init_scope():
                self._before[id(variable)] = variable, variable.read_value()

    def end_turn(self) -> None:
        """A tower has come to a sync point."""
        self._towers.append({key: (variable, variable.read_value())
                             for key, (variable, _) in self._before.items()})
        for variable, value in self._before.values():
            _tf.ResourceVariable.assign(variable, value, read_value=False)

    def merge(self, shares: shares_lib.Shares) -> None:
        """Writes what the towers' turns have come to."""
        merge_written(shares, self._towers, lambda _, value: value)


def _writes_somewhere(operation: tf.Operation) -> bool:
    """Whether ``operation`` writes a resource, past the variable's methods, or calls what does."""
    return operation.op_def.is_stateful and not _initializes(operation) \
        and any(tensor.dtype == tf.resource for tensor in operation.inputs) \
        and bool(_tf.written_resources(operation))


def _check_raw(variable: Any, operation: tf.Operation) -> None:
    """Raises where an operation past the variable's methods cannot be merged.

    Nested functions and branches never get here: there the variable's own methods raise.
    """
    if variable.aggregation is tf.VariableAggregation.SUM:
        raise RuntimeError(
            f"variable {variable.name!r} has aggregation=SUM and is written in a tower by the "
            f"operation {operation.type} ({operation.name}), past the variable's own methods, so "
            "that it is not known what is to be summed. Write v.assign, v.assign_add, "
            "v.scatter_add and the like.")


def _initializes(operation: tf.Operation) -> bool:
    """Whether this is TensorFlow's initialization of a variable that a function makes.

    The question whether that is needed counts as a write for TensorFlow.
    """
    asks = "VarIsInitializedOp"
    return operation.type == asks or (
        bool(operation.inputs) and operation.inputs[0].op.type == asks)


def by_handle(graph: tf.Graph, owned: Iterable[Any]) -> dict[str, Any]:
    """The variables by the name that their handle has in ``graph``."""
    by_id = {id(variable._handle): variable for variable in owned
             if isinstance(variable, one_copy.TowerVariable)}
    return {inner.name: by_id[id(outer)] for outer, inner in graph.captures
            if id(outer) in by_id}


def _temporary(graph: tf.Graph, variable: Any, handle: tf.Tensor) -> tf.Tensor:
    """The handle of a new variable with the value that ``handle`` has."""
    with graph.as_default(), tf.control_dependencies(None), _tf.not_recorded(), \
            tf.device(None), tf.device(homes_lib.home_of(variable)):
        made = _started(variable.dtype, variable.shape)(handle)
    _tf.copy_handle_data(handle, made)
    return made


@functools.cache
def _started(dtype: tf.DType, shape: tf.TensorShape) -> Callable[[tf.Tensor], tf.Tensor]:
    """Makes the temporary copy of a variable, given its handle.

    A function, because TensorFlow orders what uses a variable by when the operations were made, and
    those that use the temporary copy are there before it.
    """

    @tf.function(autograph=False)
    def temporary(handle: tf.Tensor) -> tf.Tensor:
        made = _tf.anonymous_variable(dtype, shape)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        start = tf.raw_ops.AssignVariableOp(resource=made, value=value)
        with tf.control_dependencies([start]):
            return tf.identity(made)

    return temporary
