"""Writes to the one copy from where the towers cannot sync: branches, loops and nested functions.

Goes in: the operations that a tower has run, or traced, since its last sync point.  Comes out: the
variables that it has written, with the tower's values; at the next sync point, one value for each.

Each tower writes to a temporary copy of its own.  The copy starts with the variable's value, and
the tower reads it until the next sync point, so no tower sees another tower's writes.  In a graph,
the copy is an anonymous variable, which replaces the variable in the tower's existing operations
(:func:`divert`).  Eager towers take turns with the variable itself (:class:`Turns`).

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

# Op types that write the rows of all towers to the variable, one tower after another.
_REPLACING = frozenset({"ResourceScatterUpdate", "ResourceScatterMin", "ResourceScatterMax"})

# Nested functions and branches never get here: there the variable's own methods raise.
_RAW = ("variable {!r} has aggregation=SUM and is written in a tower by the operation {} ({}), not "
        "by the variable's own methods, so the value to sum is unknown. Use v.assign, "
        "v.assign_add, v.scatter_add or another method of the variable.")

# By a variable's id: the variable, and the tower's value or the handle of its temporary copy.
Written = dict[int, tuple[Any, Any]]


def divert(graph: tf.Graph, operations: Sequence[tf.Operation], owned: Iterable[Any]) -> Written:
    """Makes a tower's operations write to temporary copies; returns the handles of the copies.

    ``operations`` are the tower's operations in ``graph`` since its last sync point, ``owned`` the
    variables of the strategy.
    """
    writers = {operation for operation in operations
               if operation.op_def.is_stateful and not _initializes(operation)
               and any(tensor.dtype == tf.resource for tensor in operation.inputs)
               and _tf.has_effect(operation)}
    if not writers:
        return {}
    by_id = {id(variable._handle): variable for variable in owned
             if isinstance(variable, one_copy.TowerVariable)}
    variables = {inner.name: by_id[id(outer)] for outer, inner in graph.captures
                 if id(outer) in by_id}
    written: Written = {}
    for operation in operations:
        for index, tensor in enumerate(operation.inputs):
            variable = variables.get(tensor.name) if tensor.dtype == tf.resource else None
            if variable is None:
                continue
            if id(variable) not in written and operation in writers \
                    and _tf.writers_of(graph, operation.node_def, index) - _REPLACING:
                if variable.aggregation is tf.VariableAggregation.SUM:
                    raise RuntimeError(_RAW.format(variable.name, operation.type, operation.name))
                written[id(variable)] = variable, _temporary(graph, variable, tensor)
            if id(variable) in written:
                _tf.set_input(operation, index, written[id(variable)][1])
    return written


def merge_written(shares: shares_lib.Shares, towers: Sequence[Written]) -> None:
    """Merges the towers' values of each written variable by its rule, and writes the result."""
    every = {key: variable for written in towers for key, (variable, _) in written.items()}
    for key, variable in every.items():
        with tf.device(homes_lib.home_of(variable)):
            # Not read_value: tapes and functions would note that a tower's code read the variable.
            before = _read(variable, variable.handle)
            values = [_read(variable, written[key][1]) if key in written else before
                      for written in towers]
            value = written_lib.value_alone(variable, values, shares, before)
            _tf.ResourceVariable.assign(variable, value, read_value=False)


def _read(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """``value``; if it is the handle of a variable, the variable's value."""
    return value if value.dtype != tf.resource else tf.raw_ops.ReadVariableOp(
        resource=value, dtype=variable.dtype)


class Turns:
    """Eager towers' turns: each tower starts with the variables' values at the last sync point."""

    def __init__(self, owned: Callable[[], Iterable[Any]]) -> None:
        self._owned = owned
        self._before: Written = {}

    def begin(self) -> None:
        """Starts again after a sync point."""
        self._before = {}
        for variable in self._owned():
            if isinstance(variable, one_copy.TowerVariable) and variable._written_alone:
                self.note(variable)

    def note(self, variable: Any) -> None:
        """Saves the value of ``variable`` before its first write since the sync point."""
        if id(variable) not in self._before:
            with tf.init_scope():
                self._before[id(variable)] = variable, variable.read_value()

    def end_turn(self) -> Written:
        """Ends a tower's turn at a sync point: resets the variables, returns the tower's values."""
        written = {key: (variable, variable.read_value())
                   for key, (variable, _) in self._before.items()}
        for variable, value in self._before.values():
            _tf.ResourceVariable.assign(variable, value, read_value=False)
        return written


def _initializes(operation: tf.Operation) -> bool:
    """Whether ``operation`` is of the initialization of a variable that a function makes."""
    check = "VarIsInitializedOp"  # counts as a write for TensorFlow
    return operation.type == check or (
        bool(operation.inputs) and operation.inputs[0].op.type == check)


def _temporary(graph: tf.Graph, variable: Any, handle: tf.Tensor) -> tf.Tensor:
    """The handle of a new variable on the home of ``variable``, with the value of ``handle``."""
    with graph.as_default(), tf.control_dependencies(None), _tf.not_recorded(), \
            tf.device(None), tf.device(homes_lib.home_of(variable)):
        copied = _copying(variable.dtype, variable.shape)(handle)
    _tf.copy_handle_data(handle, copied)
    return copied


@functools.cache
def _copying(dtype: tf.DType, shape: tf.TensorShape) -> Callable[[tf.Tensor], tf.Tensor]:
    """A ``tf.function`` from a variable's handle to the handle of a temporary copy.

    It is a function because TensorFlow orders the operations on a variable by when they were made;
    the operations on the temporary copy were made before its initialization.
    """

    @tf.function(autograph=False)
    def temporary(handle: tf.Tensor) -> tf.Tensor:
        copied = _tf.anonymous_variable(dtype, shape)
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
        initialize = tf.raw_ops.AssignVariableOp(resource=copied, value=value)
        with tf.control_dependencies([initialize]):
            return tf.identity(copied)

    return temporary
