"""What a scalar of a tower is made of: means of the tower's rows, or parts of the batch's loss.

Goes in: a scalar of the graph that is being traced, and what is known of tensors behind it.  Comes
out: the :class:`Kind` of its terms, and the scalar with those terms scaled that need it.

A sum over a tower's rows, divided by a constant or not, adds up over the towers to what one device
computes: it is a part of the whole batch's loss as it is.  A mean over a tower's rows is not, nor
is a term that comes of the weights alone: each counts by the tower's share.  Which of them a scalar
is shows in its graph: sums, differences and multiples are looked through, down to the operation
that reduced the rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import contractions, row_axes


class Kind(enum.Enum):
    """What a term of a scalar is."""

    PART = "a part of the whole batch's"
    MEAN = "a mean over the tower's rows"
    COUNTED = "no part, divided by the number of the tower's rows"
    CONSTANT = "of constants alone"
    WEIGHTS = "of weights and constants alone"
    MIXED = "a function of sums or means over the tower's rows, but no sum of them"
    OTHER = "not known"


Kinds = frozenset[Kind]
Known = Callable[[tf.Tensor], Kind | None]
_PART, _MEAN, _COUNTED, _CONSTANT, _WEIGHTS, _MIXED, _OTHER = map(frozenset, zip(Kind))
# Of what is a sum of such the towers' mean by share of rows is one device's.
MEANS = frozenset({Kind.MEAN, Kind.CONSTANT, Kind.WEIGHTS})
OF_ROWS = frozenset({Kind.PART, Kind.MEAN, Kind.COUNTED, Kind.MIXED})

ADDED = frozenset({"AddV2", "Add", "Sub", "AddN", "Pack"})
DIVIDED = frozenset({"RealDiv", "Div", "DivNoNan"})
# What all-reduces end in, and what state, such as a metric's count, begins with.
_SHARED = frozenset({"StopGradient", "ReadVariableOp"})
CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
BRANCHES = frozenset({"If", "StatelessIf"})
LOOPS = frozenset({"StatelessWhile", "While"})

# What makes of a number of rows a multiple of it.
_MULTIPLES = frozenset({"Cast", "Identity", "Mul", "Maximum"})

# Operations that are looked at to find out whether something comes of weights and constants alone.
_LARGEST_SEARCH = 2000


class Walk:
    """Looks at scalars of one graph.

    Args:
      known: the kind of a tensor that is known already, else None.
      rows: the tower's rows where they are known while tracing; 0 where they are not known then,
        None where there is no batch.
      default: the kind of what is neither known nor a sum of other terms; None to find it out.
      factor: a number: what was divided by it counts as a part.
      is_whole: whether a tensor has the rows of all towers, the same on each, as weights are.
      is_agreed: whether a tensor, in which an all-reduce may end, is one's.
      others: the other towers' rows, where these look for themselves and have to find the same.
      state: the ids of what is eager, and each tower's own: parts of a batch, and the handles of
        its parts of variables.
    """

    def __init__(self, known: Known = lambda _: None, rows: int | None = None,
                 default: Kind | None = None,
                 factor: int | None = None,
                 is_whole: Callable[[tf.Tensor], bool] = lambda _: False,
                 is_agreed: Callable[[tf.Tensor], bool] = lambda _: True,
                 others: Collection[int] = (), state: Collection[int] = ()) -> None:
        self._known = known
        self._is_agreed = is_agreed
        self._is_whole = is_whole
        self._rows = rows
        self._every = {each for each in (rows, *others) if each}
        # A small batch of eager code is a constant in a trace of a tower's own.
        self._captured = {"Placeholder", *(["Const"] if others else [])}
        self._state = state
        self._default = default
        self._factor = factor
        self._found: dict[int, tuple[tf.Tensor, Kinds]] = {}
        self._outer: dict[int, Any] = {}
        self._graphs: dict[int, tf.Graph] = {}

    def kinds(self, value: tf.Tensor) -> Kinds:
        """The kinds of the terms of ``value``."""
        found = self._found.get(id(value))
        if found is None:
            found = self._found[id(value)] = (value, self._look(self.origin(value)))
        return found[1]

    def _look(self, value: Any) -> Kinds:
        known = self._known(value)
        if known is not None:
            return frozenset({known})
        if _tf.is_eager(value):
            return self._leaf(_OTHER if id(value) in self._state else _CONSTANT)
        operation = value.op
        if self._state and self._is_agreed(value):
            return self._behind_a_meeting().kinds(value)
        if self.is_state(value):
            return self._leaf(_MIXED)
        if operation.type in row_axes.SAME:
            return self.kinds(operation.inputs[0])
        if operation.type in ADDED:
            return self._together(operation.inputs)
        if self._default is None and self.length_along(value) == 0:
            return _PART
        if self._default is None and self.is_steady(value):
            return _CONSTANT if self._all_behind(value, _reads_nothing) else _WEIGHTS
        if operation.type == "Mul":
            return self._product(*operation.inputs)
        if operation.type in DIVIDED:
            return self._quotient(operation)
        if operation.type in row_axes.REDUCED:
            return self._reduction(operation)
        if rows := contractions.rows_of(self, operation):
            are_coupled = any(contractions.is_coupled(self, each) for each in rows)
            return self._leaf(_MIXED if are_coupled else _PART)
        if operation.type in CALLS:
            return self._call(value)
        if operation.type in BRANCHES:
            return self._leaf(self._branches(value))
        if operation.type in LOOPS:
            return self._leaf(self._loop(value))
        if operation.type in contractions.EXTREMES and value.dtype.is_floating and self.takes_rows(
                operation.inputs[0], operation.inputs[1], value):
            return self._leaf(_MIXED)
        return self._leaf(self._function(operation))

    def _leaf(self, kinds: Kinds) -> Kinds:
        return kinds if self._default is None else frozenset({self._default})

    def _together(self, values: Any) -> Kinds:
        return frozenset[Kind]().union(*(self.kinds(value) for value in values))

    def _product(self, one: tf.Tensor, other: tf.Tensor) -> Kinds:
        for term, factor in ((one, other), (other, one)):
            if self.is_factor(factor):
                inverse = None if self._factor is None else 1 / self._factor
                return _PART if self._is_number(factor, inverse) else self.kinds(term)
        return self._leaf(self._function(one.op, [one, other]))

    def _quotient(self, operation: tf.Operation) -> Kinds:
        one, divisor = operation.inputs
        kinds = self.kinds(one)
        if self.divides_by_count(operation):
            if not self.is_steady(divisor) and not self.counts_rows(divisor):
                return self._leaf(_MIXED)
            return self._leaf(_MEAN if kinds == _PART else _COUNTED | kinds & (_OTHER | _MIXED))
        if self.is_steady(divisor):
            if not self.is_factor(divisor):
                return _MIXED
            return _PART if self._is_number(divisor, self._factor) else kinds
        if self._known(one) is not None or self._default is not None or self._counts_here(divisor):
            return kinds
        if Kind.MIXED in kinds:
            return _MIXED
        # A number of all rows comes of an all-reduce, behind which nothing is known.
        return kinds if kinds == _PART else _OTHER

    def divides_by_count(self, operation: tf.Operation) -> bool:
        """Whether a quotient's divisor is the number of the tower's rows, written or asked for."""
        one, divisor = operation.inputs
        if not self._is_made_here(one):
            return False
        if self.is_steady(divisor):
            # As Keras divides what an activity regularizer returns, by how many rows so ever.
            return self._is_own_count(divisor, operation.type == "DivNoNan")
        # What outputs were summed to comes of weights, too.
        of_sums = contractions.is_coupled(self, divisor)
        shared = _SHARED - {"ReadVariableOp"} if of_sums else _SHARED
        return (self._default is None and self._known(one) is None
                and self._counts_here(divisor, without=shared)
                and self._lengths(divisor) != {False})

    def _is_made_here(self, value: tf.Tensor) -> bool:
        """Whether no term of ``value`` is a part because somebody has told."""
        value = self.origin(value)
        known = self._known(value)
        if known is not None or _tf.is_eager(value):
            return known is not Kind.PART
        if value.op.type in row_axes.SAME:
            return self._is_made_here(value.op.inputs[0])
        if value.op.type in (*ADDED, "Mul"):
            return all(self._is_made_here(part) for part in value.op.inputs)
        return True

    def _reduction(self, operation: tf.Operation) -> Kinds:
        value, axes = operation.inputs
        if value.shape.rank == 0 or not self.takes_rows(value, axes, operation.outputs[0]):
            chosen = self._default is None and value.op.type == "TopKV2"
            return _MIXED if chosen and contractions.is_coupled(self, value) else self.kinds(value)
        if self._default is not None:
            return frozenset({self._default})
        if contractions.is_coupled(self, value):
            return _MIXED
        if operation.type == "Sum":
            return _PART
        return _MIXED if row_axes.is_selected(value) else _MEAN

    def _branches(self, value: tf.Tensor) -> Kinds:
        """The kinds of what comes of a branch or another: a term counts as it would there."""
        kinds = self.kinds(value.op.inputs[0]) & _MIXED  # each tower takes a branch of its own
        for name in _tf.functions_of(value.op):
            graph = _tf.graph_of_call(value.op, name)
            ends_in = None if graph is None else graph.outputs[value.value_index]
            if ends_in is None or not self._is_number(ends_in, 0):  # which is anything
                kinds |= self._call(value, name)
        if kinds <= MEANS or kinds == _PART:
            return kinds
        return _OTHER if OF_ROWS.isdisjoint(kinds) else _MIXED

    def _loop(self, value: tf.Tensor) -> Kinds:
        """The kinds of what a loop adds up, turn by turn."""
        body = _tf.graph_of_call(value.op, value.op.get_attr("body").name)
        if body is None:
            return _OTHER
        self.enter(body.inputs, value.op.inputs)
        kinds = self.kinds(body.outputs[value.value_index])
        if Kind.PART not in kinds:
            return kinds
        begins_at_0 = self._is_number(value.op.inputs[value.value_index], 0)
        return _PART if begins_at_0 and kinds <= _PART | _CONSTANT else _MIXED

    def takes_rows(self, value: tf.Tensor, axes: tf.Tensor, reduced: tf.Tensor) -> bool:
        """Whether reducing ``value`` over ``axes`` reduces the batch's rows."""
        rank, known, own = value.shape.rank, tf.get_static_value(axes), row_axes.axis_in(value)
        if known is None or rank is None:
            taken = reduced.shape.rank == 0 or known is None or 0 in known
        else:
            taken = own in [axis % rank for axis in known.reshape([-1])]
        if not taken or not self.may_be_rows(value):
            return False
        while value.op.type in row_axes.SAME or (value.op.type == "Mul" and self.is_steady(
                value.op.inputs[1])):
            value = value.op.inputs[0]
        inner = value.op
        return inner.type not in row_axes.REDUCED or not self.takes_rows(
            inner.inputs[0], inner.inputs[1], value)

    def may_be_rows(self, value: tf.Tensor) -> bool:
        """Whether ``value`` may have the batch's rows."""
        axis = row_axes.axis_in(value)
        size = value.shape[axis] if value.shape.rank and axis is not None else None
        return axis is not None and (size is None or self.is_multiple_of_rows(size))

    def is_multiple_of_rows(self, size: int) -> bool:
        """Whether a dimension of ``size`` may be that of the batch's rows."""
        return self._rows is None or any(size % rows == 0 for rows in self._every)

    def is_row_count(self, size: int) -> bool:
        """Whether there may be as many rows."""
        return self._rows is None or size in self._every

    def _function(self, operation: tf.Operation, inputs: Any = None) -> Kinds:
        """The kind of a function of scalars that is no sum of them."""
        scalars = [value for value in (inputs or operation.inputs)
                   if value.shape.rank == 0 and value.dtype.is_floating]
        return _OTHER if OF_ROWS.isdisjoint(self._together(scalars)) else _MIXED

    def _call(self, value: tf.Tensor, function: str | None = None) -> Kinds:
        """Looks into a nested ``tf.function``, or the ``function`` that is a branch."""
        inner = self.inside(value, function)
        return self._leaf(_OTHER) if inner is None else self.kinds(inner)

    def inside(self, value: tf.Tensor, function: str | None = None) -> tf.Tensor | None:
        """What a nested function, or a branch, returns as ``value``; arguments lead out again.

        None where it is not known.
        """
        operation = value.op
        graph = _tf.graph_of_call(operation, function)
        if graph is None:
            return None
        given = operation.inputs[0 if function is None else 1:]
        self.enter(graph.inputs, given)
        returned: tf.Tensor = graph.outputs[value.value_index]
        return returned

    def enter(self, arguments: Sequence[tf.Tensor], given: Sequence[tf.Tensor]) -> None:
        """Lets the ``arguments`` of a function lead to what it is given."""
        self._outer.update((id(inner), outer) for inner, outer in zip(arguments, given))

    def is_outside(self, value: Any) -> bool:
        """Whether ``value`` is the same on all towers, and nothing is to be seen behind it."""
        return bool(_tf.is_eager(value) or self._is_whole(value))

    def origin(self, value: Any) -> Any:
        """What ``value`` stands for: a captured tensor, or the argument of a function's call."""
        while not _tf.is_eager(value) and value.op.type in self._captured:
            if id(value.graph) not in self._graphs:
                self._graphs[id(value.graph)] = value.graph
                self._outer.update((id(inner), outer)
                                   for outer, inner in _tf.captures_of(value.graph))
            outer = self._outer.get(id(value))
            if outer is None or value.op.type == "Const" and id(outer) not in self._state:
                break
            value = outer
        return value

    def _is_own_count(self, divisor: tf.Tensor, of_any_size: bool) -> bool:
        """Whether a constant is the number of the tower's rows.

        A number of 1 or 2 that is written there, and not taken from a shape, is something else,
        unless ``of_any_size``.
        """
        lengths = self._lengths(divisor, _MULTIPLES)
        if lengths:
            return bool(self._rows) and True in lengths
        least = 1 if of_any_size else 3
        return (self._rows or 0) >= least and self._is_number(divisor, self._rows)

    def _is_number(self, value: tf.Tensor, number: float | None) -> bool:
        static = tf.get_static_value(self.origin(value))
        return (number is not None and static is not None and np.size(static) == 1
                and abs(float(np.ravel(static)[0]) - number) < 1e-6)

    def is_steady(self, value: Any) -> bool:
        """Whether ``value`` comes of weights and constants alone."""
        return self._all_behind(value, is_steady_source)

    def is_state(self, value: tf.Tensor) -> bool:
        """Whether ``value`` is what has been read of a tower's part of a variable."""
        return (bool(self._state) and value.op.type == "ReadVariableOp"
                and id(self.origin(value.op.inputs[0])) in self._state)

    def _behind_a_meeting(self) -> Walk:
        """Looks at what all towers have been given: of all parts of a variable, not of one's."""
        return Walk(self._known, self._rows, self._default, self._factor, self._is_whole,
                    self._is_agreed, self._every)

    def is_of_weights(self, value: tf.Tensor) -> bool:
        """Whether ``value`` comes of weights, with constants or without, and of nothing else."""
        return self.is_steady(value) and not self._all_behind(value, _reads_nothing)

    def is_factor(self, value: tf.Tensor) -> bool:
        """Whether ``value`` is the same on all towers, and is no number of a tower's rows."""
        return self.is_steady(value) and not (
            self._rows and self._default is None and True in (self._lengths(value) or ()))

    def counts_rows(self, value: tf.Tensor) -> bool:
        """Whether ``value`` is a multiple of how many rows the tower has, as the step has it."""
        return True in (self._lengths(value, _MULTIPLES) or ())

    def may_be_count(self, value: tf.Tensor) -> bool:
        """Whether a number may be one of the tower's rows, which are known while tracing."""
        if not self._rows:
            return False
        static = tf.get_static_value(self.origin(value))
        return static is None or not np.all(static % self._rows)

    def length_along(self, tensor: tf.Tensor) -> int | None:
        """The dimension whose length, of something with rows, a traced tensor is, 0 for its size.

        None for anything else.  What is known while tracing is a constant, by its name.
        """
        operation = tensor.op
        is_size = row_axes.is_named(operation, "Size")
        if not is_size and (operation.type != "StridedSlice" or not row_axes.is_named(
                operation.inputs[0].op, "Shape") or operation.get_attr("shrink_axis_mask") != 1):
            return None
        lengths = tensor if is_size else operation.inputs[0]
        begin = [0] if is_size else tf.get_static_value(operation.inputs[1])
        if begin is None or not is_size and not lengths.shape[0]:
            return None
        axis = 0 if is_size else int(begin[0]) % lengths.shape[0]
        if lengths.op.type == "Const":
            length = np.reshape(tf.get_static_value(lengths), [-1])[axis]
            return axis if self._rows and (axis or length % self._rows == 0) else None
        counted = lengths.op.inputs[0]
        if self.is_steady(counted) or row_axes.is_deduplicated(counted):
            return None
        return 0 if is_size or axis == row_axes.axis_in(counted) else axis or 1

    def _lengths(self, value: tf.Tensor, through: Collection[str] | None = None
                 ) -> set[bool] | None:
        """For each length that ``value`` is made of whether it is of rows; None of anything else.

        Args:
          value: a number.
          through: the types of operations that may be between; None for all.
        """
        found: set[bool] = set()
        waiting = [value]
        while waiting:
            tensor = self.origin(waiting.pop())
            axis = None if _tf.is_eager(tensor) else self.length_along(tensor)
            if axis is not None:
                counted = tensor.op.inputs[0] if tensor.op.inputs else tensor
                if axis == 0 and row_axes.is_selected(counted):
                    return None
                found.add(axis == 0)
            elif _tf.is_eager(tensor) or tensor.op.type == "Const":
                continue
            elif not tensor.op.inputs or tensor.op.op_def.is_stateful or (
                    through is not None and tensor.op.type not in through):
                return None
            else:
                waiting.extend(tensor.op.inputs)
        return found

    def _counts_here(self, value: Any, without: Collection[str] = ("StopGradient",)) -> bool:
        """Whether ``value`` comes of the tower's rows, and of nothing that the towers share."""
        def is_own(source: tf.Operation) -> bool:
            is_users = source.type == "StopGradient" and not self._is_agreed(source.outputs[0])
            return is_users or source.type not in without

        return self._all_behind(value, is_own, row_axes.SIZES)

    def reads(self, value: tf.Tensor, handle: Any) -> bool:
        """Whether what a variable holds, that ``handle`` stands for, goes into ``value``."""
        return not self._all_behind(value, lambda operation: operation.type != "ReadVariableOp"
                                    or self.origin(operation.inputs[0]) is not self.origin(handle))

    def behind(self, value: tf.Tensor) -> set[int] | None:
        """The ids of what steady ``value`` comes of outside of all graphs; None if not steady."""
        found: set[int] = set()
        return found if self._all_behind(value, is_steady_source, outside=found) else None

    def _all_behind(self, value: Any, allowed: Callable[[tf.Operation], bool],
                    enough: Sequence[str] = (), outside: set[int] | None = None) -> bool:
        """Whether all operations behind ``value``, up to types that are ``enough``, are allowed."""
        waiting, seen = [value], set[int]()
        while waiting:
            tensor = self.origin(waiting.pop())
            if _tf.is_eager(tensor):
                if id(tensor) in self._state and not enough:
                    return False
                if outside is not None:
                    outside.add(id(tensor))
                continue
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if self._state and self._is_agreed(tensor):
                if not self._behind_a_meeting()._all_behind(tensor, allowed, enough, outside):
                    return False
                continue
            if self._is_whole(tensor) and not enough:
                continue
            if not allowed(tensor.op) or len(seen) > _LARGEST_SEARCH:
                return False
            if tensor.op.type == "IdentityN":  # what a gradient of its own is given through
                waiting.append(tensor.op.inputs[tensor.value_index])
            elif tensor.op.type not in enough:
                waiting.extend(tensor.op.inputs)
        return True


def is_steady_source(operation: tf.Operation) -> bool:
    """Whether an operation may be behind what comes of weights and constants alone."""
    if operation.type.startswith(("Placeholder", "Iterator", "Optional")):  # a batch's
        return False
    return bool(operation.inputs) or operation.type in ("Const", "VarHandleOp")


def _reads_nothing(operation: tf.Operation) -> bool:
    return all(value.dtype != tf.resource for value in operation.inputs)
