"""Writes to the one copy from where the towers cannot sync: branches, loops and nested functions.

Goes in: what one tower has run, or traced, since its last sync point.  Comes out: the variables
that it has written, each with this tower's value; and, at the next sync point, one value for all.

Each tower writes to a temporary copy of its own, which starts with the variable's value and is what
the tower reads until the next sync point, so that no tower sees what another has written.  In a
graph the copy is an anonymous variable, put in the variable's place into the operations that are
there (:func:`divert`); eager towers take turns with the variable itself (:class:`Turns`).

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

# Nested functions and branches never get here: there the variable's own methods raise.
_RAW = ("variable {!r} has aggregation=SUM and is written in a tower by the operation {} ({}), "
        "past the variable's own methods, so that it is not known what is to be summed. Write "
        "v.assign, v.assign_add, v.scatter_add and the like.")

# id of a variable -> the variable, and a tower's value of it, or the handle of a temporary copy
Written = dict[int, tuple[Any, Any]]


def divert(graph: tf.Graph, operations: Sequence[tf.Operation], owned: Iterable[Any]) -> Written:
    """Gives a tower's operations temporary copies for what they write where towers cannot sync.

    ``operations`` are those of one tower in ``graph`` since its last sync point, ``owned`` the
    variables of the strategy.  Returned are the handles of the copies.
    """
    called = {operation for operation in operations
              if operation.op_def.is_stateful and not _initializes(operation)
              and any(tensor.dtype == tf.resource for tensor in operation.inputs)
              and _tf.has_effect(operation)}
    if not called:
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
            if id(variable) not in written and operation in called \
                    and _tf.writers_of(graph, operation.node_def, index) - _REPLACING:
                if variable.aggregation is tf.VariableAggregation.SUM:
                    raise RuntimeError(_RAW.format(variable.name, operation.type, operation.name))
                written[id(variable)] = variable, _temporary(graph, variable, tensor)
            if id(variable) in written:
                _tf.set_input(operation, index, written[id(variable)][1])
    return written


def merge_written(shares: shares_lib.Shares, towers: Sequence[Written]) -> None:
    """Writes one value to each variable that a tower has written, by the variable's rule."""
    every = {key: variable for written in towers for key, (variable, _) in written.items()}
    for key, variable in every.items():
        with tf.device(homes_lib.home_of(variable)):
            # Not read_value, which would tell TensorFlow that a tower's code uses the variable.
            before = _read(variable, variable.handle)
            values = [_read(variable, written[key][1]) if key in written else before
                      for written in towers]
            value = written_lib.value_alone(variable, values, shares, before)
            _tf.ResourceVariable.assign(variable, value, read_value=False)


def _read(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """``value``, or what is behind it where it is a handle."""
    return value if value.dtype != tf.resource else tf.raw_ops.ReadVariableOp(
        resource=value, dtype=variable.dtype)


class Turns:
    """Eager towers that run in turn, each from the values that the variables had before."""

    def __init__(self, owned: Callable[[], Iterable[Any]]) -> None:
        self._owned = owned
        self._before: Written = {}

    def begin(self) -> None:
        """The towers have met."""
        self._before = {}
        for variable in self._owned():
            if isinstance(variable, one_copy.TowerVariable) and variable._written_alone:
                self.note(variable)

    def note(self, variable: Any) -> None:
        """``variable`` is about to be written in this turn, if it has not been already."""
        if id(variable) not in self._before:
            with tf.init_scope():
                self._before[id(variable)] = variable, variable.read_value()

    def end_turn(self) -> Written:
        """A tower has come to a sync point: what it has written."""
        written = {key: (variable, variable.read_value())
                   for key, (variable, _) in self._before.items()}
        for variable, value in self._before.values():
            _tf.ResourceVariable.assign(variable, value, read_value=False)
        return written


def _initializes(operation: tf.Operation) -> bool:
    """Whether this is TensorFlow's initialization of a variable that a function makes."""
    # The question whether that is needed counts as a write for TensorFlow.
    asks = "VarIsInitializedOp"
    return operation.type == asks or (
        bool(operation.inputs) and operation.inputs[0].op.type == asks)


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
