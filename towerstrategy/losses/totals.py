"""A number of a tower's rows, made again of the sums and means over the rows of all towers.

Goes in: a number that is a function of sums and means over a tower's rows, such as the root of a
mean or a ratio of sums, in the graph that is being traced.  Comes out: the same function of the
whole batch's sums and means, which is what one device computes, the same on every tower.  What the
towers ask for as its gradient is added up, so each counts it by its share.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import by_row, provenance
from towerstrategy.merge import merging, remade
from towerstrategy.towers import contexts

# A number is a few operations behind its sums.
_MOST = 400


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
    found = _Search(tower, walk, given)
    if not found.goes_through(number):
        return None
    leaves = [_part(tower, value, kind) for value, kind in found.leaves.values()]
    names = [*found.leaves, *found.same]

    @tf.custom_gradient
    def linked(*sources: tf.Tensor) -> Any:
        totals = tower.all_reduce(_tf.ReduceOp.SUM, list(sources[:len(leaves)]))
        given = dict(zip(names, [*totals, *sources[len(leaves):]]))
        made = remade.made_again(found.needed, given)
        result = (made[number.op.name].outputs[number.value_index] if made
                  else tf.identity(given[number.name]))

        def gradient(upstream: tf.Tensor) -> Any:
            wanted = [tf.zeros_like(source) if each is None else each for each, source in zip(
                tf.gradients(result, list(given.values()), [upstream]), sources)]
            asked = tower.all_reduce(_tf.ReduceOp.SUM, wanted[:len(leaves)])
            return [*asked, *wanted[len(leaves):]]

        return result, gradient

    return linked(*leaves, *found.same.values())


def _part(tower: contexts.TowerContext, value: tf.Tensor, kind: provenance.Kind) -> tf.Tensor:
    """What a tower adds to the total: without rows nothing, and no gradient for it either."""
    if kind is provenance.Kind.MEAN:
        value = value * tf.cast(tower.share, value.dtype)
        # Of a stand-in it is 0 as it is; of no rows it is no number.
        return value if tower.shares.stand_ins or not tower.may_be_empty else merging.kept(
            tower.filled, value)
    return merging.kept(tower.filled, value) if tower.stand_ins else value


class _Search:
    """What a number is made of, down to sums and means over the tower's rows.

    Attributes:
      leaves: these, by their names.
      needed: the operations between them and the number.
      same: floats that go into these, the same on all towers, by their names.
    """

    def __init__(self, tower: contexts.TowerContext, walk: provenance.Walk,
                 given: by_row.Given | None) -> None:
        self._tower, self._walk, self._given = tower, walk, given
        self.leaves: dict[str, tuple[tf.Tensor, provenance.Kind]] = {}
        self.needed: dict[str, remade.Made] = {}
        self.same: dict[str, tf.Tensor] = {}

    def goes_through(self, number: tf.Tensor) -> bool:
        """Whether nothing of a tower's but sums and means is behind ``number``."""
        waiting = [number]
        while waiting:
            tensor = waiting.pop()
            if tensor.name in self.leaves or tensor.op.name in self.needed:
                continue
            if self._is_same(tensor):
                if tensor.dtype.is_floating and tensor.op.type != "Const":
                    self.same[tensor.name] = tensor
                continue
            kind = self._kind(tensor)
            if kind is not None:
                self.leaves[tensor.name] = tensor, kind
                continue
            operation = tensor.op
            if (not operation.inputs or operation.op_def.is_stateful or len(self.needed) > _MOST
                    or self._given is not None and tensor in self._given):
                return False
            self.needed[operation.name] = remade.Made(operation, tuple(operation.inputs))
            waiting.extend(operation.inputs)
        return bool(self.leaves)

    def _is_same(self, tensor: tf.Tensor) -> bool:
        """Whether all towers have the same."""
        # What has a gradient of its own, as an all-reduce has, comes out beside what went in.
        while tensor.op.type == "IdentityN":
            tensor = tensor.op.inputs[tensor.value_index]
        return (self._tower.is_agreed(tensor) or self._walk.is_steady(tensor)
                or self._walk.growth(tensor) == 0)

    def _kind(self, tensor: tf.Tensor) -> provenance.Kind | None:
        if self._tower.is_scaled(tensor):
            return provenance.Kind.PART
        if self._tower.is_mean(tensor):
            return provenance.Kind.MEAN
        if tensor.dtype.is_floating and self._walk.growth(tensor) == 1:
            return provenance.Kind.PART
        if tensor.op.type not in provenance.REDUCED or not tensor.dtype.is_floating:
            return None
        rows, axes = tensor.op.inputs
        if not rows.shape.rank or not self._walk.takes_rows(rows, axes, tensor):
            return None
        if self._given is not None and not by_row.is_by_row(self._walk, rows, self._given):
            return None
        return provenance.Kind.PART if tensor.op.type == "Sum" else provenance.Kind.MEAN
