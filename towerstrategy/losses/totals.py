"""A number of a tower's rows, made again of the sums and means over the rows of all towers.

Goes in: a number that is a function of sums and means over a tower's rows, such as the root of a
mean or a ratio of sums, in the graph that is being traced.  Comes out: the same function of the
whole batch's sums and means, which is what one device computes, the same on every tower.  What the
towers ask for as its gradient is added up, so each counts it by its share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import by_row, contractions, provenance, row_axes
from towerstrategy.merge import merging, remade
from towerstrategy.towers import contexts

# A number is a few operations behind its sums.
_MOST = 400

# What may hold sums and means over rows that are not seen from outside.
_FLAGS = frozenset({"All", "Any"})
_PYTHON = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
_TOLD_ELSEWHERE = provenance.CALLS | provenance.BRANCHES


def of_all(tower: contexts.TowerContext, walk: provenance.Walk, number: tf.Tensor,
           given: by_row.Given | None = None) -> tf.Tensor | None:
    """``number`` of the rows of all towers; None where it is not made of sums and means alone.

    Args:
      tower: where it was made.
      walk: looks at the graph.
      number: a traced tensor.
      given: the tensors of which each row is known to be one of the batch; None where sums are
        taken for sums over rows without looking what is behind them.
    """
    if not tower.can_merge or tf.executing_eagerly() or _tf.is_eager(number):
        return None
    if given is not None and tower.static_rows:
        return None  # any constant may be made of the number of this tower's rows
    found = _Search(tower, walk, given)
    if not found.goes_through(number):
        return None
    counted = _counts(tower, found)
    leaves = [_part(tower, leaf, counted) for leaf in found.leaves.values()]
    names = [*found.leaves, *found.same]

    def made_of(given: dict[str, tf.Tensor]) -> tf.Tensor:
        given = {**given, **counted}
        made = remade.made_again(found.needed, given)
        return (made[number.op.name].outputs[number.value_index] if made
                else tf.identity(given[number.name]))

    if not names:
        return made_of({})

    @tf.custom_gradient
    def linked(*sources: tf.Tensor) -> Any:
        totals = tower.all_reduce(_tf.ReduceOp.SUM, list(sources[:len(leaves)])) if leaves else []
        given = dict(zip(names, [*totals, *sources[len(leaves):]]))
        result = made_of(given)

        def gradient(upstream: tf.Tensor) -> Any:
            with tower.gradients.paused():
                found = tf.gradients(result, list(given.values()), [upstream])
            wanted = [tf.zeros_like(source) if each is None else each
                      for each, source in zip(found, sources)]
            asked = (tower.all_reduce(_tf.ReduceOp.SUM, wanted[:len(leaves)]) if leaves else [])
            return [*asked, *wanted[len(leaves):]]

        return result, gradient

    return linked(*leaves, *found.same.values())


def puts_together(tower: contexts.TowerContext, walk: provenance.Walk, number: tf.Tensor) -> bool:
    """Whether rows go into ``number``, of which :func:`of_all` knows no way, but by no sum or mean.
    """
    if tf.executing_eagerly() or _tf.is_eager(number) or number.graph is not tower.graph:
        return False
    found = _Search(tower, walk, None)
    return not found.goes_through(number) and found.is_together


class _Leaf(NamedTuple):
    """A sum or mean over a tower's rows.

    Attributes:
      value: the float that it is.
      kind: what it is.
      rows: of a mean over some of the rows how many these are.
    """

    value: tf.Tensor
    kind: provenance.Kind
    rows: tf.Tensor | None = None


def _counts(tower: contexts.TowerContext, found: _Search) -> dict[str, tf.Tensor]:
    """Of all towers, by their names, the numbers of rows, other sums of integers, flags and state.
    """
    flags = {name: tf.cast(flag if flag.op.type == "Any" else tf.logical_not(flag), tf.int32)
             for name, flag in found.flags.items()}
    here = {name: merging.kept(tower.filled, count) if tower.stand_ins else count
            for name, count in {**found.counts, **flags}.items()}
    totals = dict(zip(found.state, tower.sum_parts(list(found.state.values()))))
    if here:
        totals.update(zip(here, tower.all_reduce(_tf.ReduceOp.SUM, list(here.values()))))
    for name, flag in found.flags.items():
        totals[name] = totals[name] > 0 if flag.op.type == "Any" else tf.equal(totals[name], 0)
    return totals


def _part(tower: contexts.TowerContext, leaf: _Leaf, counted: dict[str, tf.Tensor]) -> tf.Tensor:
    """What a tower adds to the total: without rows nothing, and no gradient for it either."""
    value = leaf.value
    if leaf.rows is not None:
        share = tf.math.divide_no_nan(tf.cast(leaf.rows, value.dtype),
                                      tf.cast(counted[leaf.rows.name], value.dtype))
        part = merging.kept(leaf.rows > 0, value) * share  # of no rows there is no mean
    elif leaf.kind is provenance.Kind.MEAN:
        part = value * tf.cast(tower.share, value.dtype)
        # Of a stand-in it is 0 as it is; of no rows it is no number.
        return part if tower.shares.stand_ins or not tower.may_be_empty else merging.kept(
            tower.filled, part)
    else:
        part = value
    return merging.kept(tower.filled, part) if tower.stand_ins else part


class _Search:
    """What a number is made of, down to sums and means over the tower's rows.

    Attributes:
      leaves: these, by their names.
      needed: the operations between them and the number.
      same: floats that go into these, the same on all towers, by their names.
      counts: numbers of rows, and sums of integers, by their names.
      flags: whether any, or all, of the rows are something, by their names.
      state: what is kept in variables of which each tower has a part, by their names.
      is_together: whether the search has come to the batch: rows are put together in another way.
    """

    def __init__(self, tower: contexts.TowerContext, walk: provenance.Walk,
                 given: by_row.Given | None) -> None:
        self._tower, self._walk, self._given = tower, walk, given
        self.leaves: dict[str, _Leaf] = {}
        self.counts: dict[str, tf.Tensor] = {}
        self.flags: dict[str, tf.Tensor] = {}
        self.needed: dict[str, remade.Made] = {}
        self.same: dict[str, tf.Tensor] = {}
        self.state: dict[str, tf.Tensor] = {}
        self.is_together = False

    def goes_through(self, number: tf.Tensor) -> bool:
        """Whether nothing of a tower's but sums and means is behind ``number``."""
        waiting = [number]
        while waiting:
            tensor = waiting.pop()
            if (tensor.name in {*self.leaves, *self.counts, *self.flags, *self.state}
                    or tensor.op.name in self.needed):
                continue
            if tensor.op.type in _FLAGS and self._reduces_rows(tensor):
                self.flags[tensor.name] = tensor
                continue
            if self._walk.is_state(tensor):
                self.state[tensor.name] = tensor
                continue
            if self._is_count(tensor):
                self.counts[tensor.name] = tensor
                continue
            if self._is_same(tensor):
                if tensor.dtype.is_floating and tensor.op.type != "Const":
                    self.same[tensor.name] = tensor
                continue
            leaf = self._leaf(tensor)
            if leaf is not None:
                self.leaves[tensor.name] = leaf
                continue
            if self._given is None and self._walk.length_along(tensor):
                continue
            operation = tensor.op
            self.is_together = self._is_batch(tensor) and _TOLD_ELSEWHERE.isdisjoint(
                each.operation.type for each in self.needed.values())
            if (not operation.inputs or operation.op_def.is_stateful or len(self.needed) > _MOST
                    or self._tower.is_told(tensor)
                    or self._given is not None and tensor in self._given):
                return False
            self.needed[operation.name] = remade.Made(operation, tuple(operation.inputs))
            waiting.extend(operation.inputs)
        return bool(self.leaves or self.counts or self.flags or self.state)

    def _is_batch(self, tensor: tf.Tensor) -> bool:
        """Whether this has the rows that the tower was given, or nobody knows what."""
        if tensor.op.type in _PYTHON or provenance.is_steady_source(tensor.op):
            return tensor.op.type in _PYTHON
        # A stand-in shows its single row, where the number of rows is not known.
        return bool(self._tower.static_rows) or not tensor.shape.rank or tensor.shape[0] is None

    def _is_same(self, tensor: tf.Tensor) -> bool:
        """Whether all towers have the same."""
        # What has a gradient of its own, as an all-reduce has, comes out beside what went in.
        while tensor.op.type == "IdentityN":
            tensor = tensor.op.inputs[tensor.value_index]
        return self._tower.is_agreed(tensor) or self._walk.is_factor(tensor)

    def _leaf(self, tensor: tf.Tensor) -> _Leaf | None:
        if self._tower.is_scaled(tensor):
            return _Leaf(tensor, provenance.Kind.PART)
        if self._tower.is_mean(tensor):
            return _Leaf(tensor, provenance.Kind.MEAN)
        kind = self._tower.gradients.kind_of(tensor)
        if kind is not None:
            return _Leaf(tensor, kind)
        if not tensor.dtype.is_floating or not self._reduces_rows(tensor):
            return None
        if tensor.op.type != "Mean":
            return _Leaf(tensor, provenance.Kind.PART)
        count = None
        if self._given is None and row_axes.is_selected(tensor.op.inputs[0]):
            count = tf.shape(tensor.op.inputs[0])[0]
            self.counts[count.name] = count
        return _Leaf(tensor, provenance.Kind.MEAN, count)

    def _is_count(self, tensor: tf.Tensor) -> bool:
        """Whether this is a number to which each row adds."""
        if not tensor.dtype.is_integer:
            return False
        if self._given is None and self._walk.length_along(tensor) == 0:
            return True
        return tensor.op.type != "Mean" and self._reduces_rows(tensor)

    def _reduces_rows(self, tensor: tf.Tensor) -> bool:
        """Whether this is a sum or a mean over rows of each of which it has to do with no other."""
        added = contractions.rows_of(self._walk, tensor.op)
        if not added and tensor.op.type in (*row_axes.REDUCED, *_FLAGS):
            rows, axes = tensor.op.inputs
            takes = rows.shape.rank and self._walk.takes_rows(rows, axes, tensor)
            added = (rows,) if takes else ()
        return bool(added) and all(map(self._is_alone, added))

    def _is_alone(self, rows: tf.Tensor) -> bool:
        """Whether each of ``rows`` has to do with no other."""
        if self._given is None:
            return not contractions.is_coupled(self._walk, rows)
        return by_row.is_by_row(self._walk, rows, self._given)
