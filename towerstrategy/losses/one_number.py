"""Losses and metrics that are one number: what of the towers' numbers makes one device's.

Goes in: a number that a function has made of a tower's rows, while it is traced.  Comes out: the
number, where it is a sum, or a mean, to which each row adds by itself, so that the towers' add up
to one device's, or have it for their mean; or the whole batch's.  A root of a mean or a ratio of
sums is made again of the sums of all towers; a function that puts rows together in another way, as
a correlation does or the mean of the worst, is called again, with the rows of all towers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import by_row, parts, provenance, row_axes, totals
from towerstrategy.towers import contexts

# Operations with a state that may be done twice: they read, or complain.
_HARMLESS = frozenset({"ReadVariableOp", "VarHandleOp", "ResourceGather", "Assert"})
# In the names of what a gradient tape has made.
_OF_TAPES = "gradient_tape/"


class Trial:
    """A function's call in a tower, whose number is to be looked at.

    Args:
      given: what the function was given, a nest of tensors.

    Attributes:
      given: the tensors, by their ids.
      misfits: whether the towers' numbers do not, or may not, make up one device's.
      fails: whether they do not, and the function can be called again, with all rows.
    """

    def __init__(self, given: Any) -> None:
        self.misfits = self.fails = False
        self.given = {id(leaf): leaf for leaf in tf.nest.flatten(given)
                      if isinstance(leaf, tf.Tensor)}
        self._graph = tf.compat.v1.get_default_graph()
        self._first = _tf.operation_count(self._graph)

    @property
    def rows(self) -> by_row.Given:
        """The tensors behind which not to look."""
        made = {each.name for each in self._graph.get_operations()[self._first:]}
        return by_row.Given(self.given, self._graph, made)

    def can_be_repeated(self, walk: provenance.Walk, number: tf.Tensor) -> bool:
        """Whether the function writes, draws and differentiates nothing, and has but rows given."""
        made = self._graph.get_operations()[self._first:]
        if any(walk.is_steady(each) for each in self.given.values()):
            return False  # such are the rows of all towers already
        if any(each.op_def.is_stateful and each.type not in _HARMLESS for each in made):
            return False
        if any(_OF_TAPES in each.name for each in made):
            return False  # where the towers meet no tape records
        names = {each.name for each in made}
        waiting, seen = [number], set(self.given)
        while waiting:
            tensor = waiting.pop()
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if tensor.op.name in names:
                waiting.extend(tensor.op.inputs)
            elif not walk.is_steady(tensor):
                return False
        return True


@contextlib.contextmanager
def trial(tower: contexts.TowerContext, given: Any) -> Iterator[Trial]:
    """Within, :func:`whole` looks at losses that are one number, and tells the trial."""
    before, tower.trial = tower.trial, Trial(given)
    try:
        yield tower.trial
    finally:
        tower.trial = before


def can_try(tower: contexts.TowerContext) -> bool:
    """Whether what a function returns can be looked at, and the towers can meet."""
    return not tf.executing_eagerly() and tower.can_merge


def whole(tower: contexts.TowerContext, number: tf.Tensor, is_sum: bool,
          weighted: bool) -> tf.Tensor:
    """``number``, or what has to count in its place.

    Args:
      tower: where it was made.
      number: what a loss function has returned; values, one a row, stay as they are.
      is_sum: whether the towers' numbers are added up, and do not count as means.
      weighted: whether it is going to be multiplied by weights of the rows.
    """
    if tower.trial is None or _tf.is_eager(number):
        return number
    walk = parts.walk(tower)
    given = tower.trial.rows
    if number.shape.rank != 0:
        tower.trial.fails |= _fail(tower, walk, number, tower.trial)
        return number
    if walk.is_steady(number):  # of the rows of all towers already, see parts.summed_values
        return number
    if not weighted and _Number(tower, walk, given, is_sum).fits(number):
        return number
    made = totals.of_all(tower, walk, number, given)
    if made is None:
        tower.trial.misfits = True
        tower.trial.fails = tower.trial.can_be_repeated(walk, number)
        return number
    if is_sum and not weighted:
        return tower.mark_scaled(made * tf.cast(tower.share, made.dtype))
    return tower.mark_mean(made)


def _fail(tower: contexts.TowerContext, walk: provenance.Walk, values: tf.Tensor,
          tried: Trial) -> bool:
    """Whether ``values``, one a row, are made of other rows, too, and can be made of all."""
    return (bool(values.shape.rank) and not tower.gathered
            and by_row.is_coupled(walk, values, tried.rows)
            and tried.can_be_repeated(walk, values))


def of_rows(function: Callable[..., Any], of_all: Callable[..., Any],
            weighted: bool = False) -> Callable[..., Any]:
    """A metric's ``function``, in whose place ``of_all`` is called where its number fails."""
    def value_of(*args: Any, **kwargs: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or not can_try(tower):
            return function(*args, **kwargs)
        with trial(tower, args) as tried:
            value = function(*args, **kwargs)
        if not isinstance(value, tf.Tensor) or _tf.is_eager(value):
            return value
        walk, given = parts.walk(tower), tried.rows
        if value.shape.rank != 0:
            return of_all(*args, **kwargs) if _fail(tower, walk, value, tried) else value
        if not weighted and any(_Number(tower, walk, given, is_sum).fits(value)
                                for is_sum in (False, True)):
            return value
        made = totals.of_all(tower, walk, value, given)
        if made is not None:
            return tower.mark_mean(made)
        return of_all(*args, **kwargs) if tried.can_be_repeated(walk, value) else value

    return value_of


class _Number:
    """A number that is looked at: is it a sum of sums, or of means, over the rows?"""

    def __init__(self, tower: contexts.TowerContext, walk: provenance.Walk,
                 given: by_row.Given, is_sum: bool) -> None:
        self._tower, self._walk, self._given, self._is_sum = tower, walk, given, is_sum

    def fits(self, value: tf.Tensor) -> bool:
        """Whether the towers' values add up to one device's, or have it for their mean."""
        value = self._walk.origin(value)
        if not value.dtype.is_floating:
            return False
        if self._tower.is_scaled(value):
            return self._is_sum
        if self._tower.is_mean(value):
            return not self._is_sum
        if _tf.is_eager(value):
            return not self._is_sum
        operation = value.op
        if operation.type in row_axes.SAME:
            return self.fits(operation.inputs[0])
        if operation.type in provenance.CALLS:
            inner = self._walk.inside(value)
            return inner is not None and self.fits(inner)
        if operation.type in provenance.ADDED:
            return all(self.fits(part) for part in operation.inputs)
        if self._walk.is_steady(value):
            return not self._is_sum and not self._walk.may_be_count(value)
        if operation.type == "Mul":
            one, other = operation.inputs
            return (self._is_factor(other) and self.fits(one)
                    or self._is_factor(one) and self.fits(other))
        if operation.type in provenance.DIVIDED:
            return self._quotient(operation)
        return operation.type in row_axes.REDUCED and self._reduction(operation)

    def _quotient(self, operation: tf.Operation) -> bool:
        one, divisor = operation.inputs
        if self._walk.divides_by_count(operation):
            return (not self._is_sum and self._walk.counts_rows(divisor)
                    and _Number(self._tower, self._walk, self._given, True).fits(one))
        return self._is_factor(divisor) and self.fits(one)

    def _is_factor(self, value: tf.Tensor) -> bool:
        """Whether ``value`` is the same on all towers, and would be for all rows."""
        return self._walk.is_steady(value) and not self._walk.may_be_count(value)

    def _reduction(self, operation: tf.Operation) -> bool:
        rows, axes = operation.inputs
        if rows.shape.rank == 0 or not self._walk.takes_rows(rows, axes, operation.outputs[0]):
            return self.fits(rows)
        return ((operation.type == "Sum") is self._is_sum
                and by_row.is_by_row(self._walk, rows, self._given))
