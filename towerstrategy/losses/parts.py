"""A tower's loss: a mean over its own rows, or its part of the whole batch's loss.

Goes in: a scalar of one tower.  Comes out: the same, as the other of the two.  The parts of all
towers add up to what one device computes: a part of a mean is the tower's mean times its share of
the rows.

A tower remembers which scalars are which (:class:`Marks`); what was made of them, and what nobody
has told, is read off the graph that is being traced (:mod:`provenance`).  In eager code there is no
graph: what was not marked counts as a mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import provenance
from towerstrategy.merge import merging
from towerstrategy.towers import contexts

# Terms of these kinds do not simply count by the tower's share.
_LOOKED_INTO = frozenset({provenance.Kind.PART, provenance.Kind.COUNTED})


def scaled(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    """A tower's mean -> its part of the whole batch's mean; the mean where means are wanted."""
    share = tower.share
    if tower.own_means:
        if tower.weight is not None:
            value = value * tf.cast(tf.math.divide_no_nan(
                tower.weight, tf.cast(share, tower.weight.dtype)), value.dtype)
        return tower.mark_mean(value)
    share = share if tower.weight is None else tower.weight
    return tower.mark_scaled(value * tf.cast(share, value.dtype))


def unscaled(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    """The inverse; 0 in a tower without rows."""
    if tower.own_means:
        return value
    return tower.mark_mean(tf.math.divide_no_nan(value, tf.cast(tower.share, value.dtype)))


def summed(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    """A sum over a tower's rows, which is a part as it is; the mean that has it for its part."""
    if not tower.own_means:
        return tower.mark_scaled(value)
    return tower.mark_mean(tf.math.divide_no_nan(value, tf.cast(tower.share, value.dtype)))


def part(tower: contexts.TowerContext, value: tf.Tensor,
         default: provenance.Kind | None = None) -> tf.Tensor:
    """The part that ``value`` is, or is the mean of; what is no scalar stays as it is.

    Args:
      tower: where this runs.
      value: a tensor.
      default: what terms of it are of which nobody has told; None to find it out.
    """
    if value.shape.rank != 0 or not value.dtype.is_floating or tower.is_scaled(value):
        return value
    if _tf.is_eager(value):
        stays = default is provenance.Kind.PART and not tower.is_mean(value)
        made = value if stays else value * tf.cast(tower.share, value.dtype)
    else:
        made = _walk(tower, default).scaled(value, tower.share)
    return tower.mark_scaled(made)


def added(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    """The part, or the mean where means are wanted, of a term that a layer adds to the loss.

    A sum over rows is a sum over those of all towers.  What it is shows in the graph; eager terms,
    and those of which that does not tell, count as means.
    """
    if value.shape.rank != 0 or not value.dtype.is_floating or _tf.is_eager(value):
        return scaled(tower, value)
    walk = _walk(tower)
    if walk.kinds(value).isdisjoint(_LOOKED_INTO):
        return scaled(tower, value)
    made = walk.scaled(value, tower.share)
    if tower.stand_ins:
        made = merging.kept(tower.filled, made)
    return summed(tower, made)


def logged(tower: contexts.TowerContext, value: Any) -> Any:
    """Of what a step returns as a log: what has one device's log for its mean by share of rows."""
    if not isinstance(value, tf.Tensor) or value.shape.rank != 0:
        return value
    if value.dtype.is_floating:
        return mean(tower, value)
    counts = value.dtype.is_integer and not _tf.is_eager(value) and tower.can_merge
    if counts and kinds(tower, value, None) == {provenance.Kind.PART}:
        return tower.all_reduce(_tf.ReduceOp.SUM, value)
    return value


def own_loss(tower: contexts.TowerContext, compute: Callable[[], Any]) -> Any:
    """The part of what ``compute`` returns, a loss in which others' means are not scaled yet.

    A function that asks for the number of replicas scales by it what it adds of its own.
    """
    with own_means(tower):
        loss = compute()
        if loss is None:
            return None
        return part(tower, loss, provenance.Kind.PART if tower.asked else None)


def scale_loss(strategy: tf.distribute.Strategy, loss: Any) -> tf.Tensor:
    """See ``TowerStrategy.scale_loss``."""
    tower = contexts.current_tower()
    if tower is None or tower.strategy is not strategy:
        raise RuntimeError(
            "strategy.scale_loss makes a tower's mean its part of the whole batch's, so it belongs "
            "inside of the function given to strategy.run, or a model's train_step or "
            "compute_loss, between the forward pass and tape.gradient. "
            + ("Here no tower of a strategy runs." if tower is None
               else f"Here a tower of another strategy runs: {tower.strategy!r}."))
    value = tf.convert_to_tensor(loss)
    if not value.dtype.is_floating:
        raise TypeError(f"loss must be a floating point tensor, but got {loss!r} of dtype "
                        f"{value.dtype.name}.")
    if not tower.several:
        return value
    if tower.own_means or value.shape.rank != 0:
        return scaled(tower, value)
    return part(tower, value, provenance.Kind.MEAN)


def mean(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    """The mean that has ``value`` for its part, where it is one; a mean stays as it is."""
    if value.shape.rank != 0 or not value.dtype.is_floating or tower.is_mean(value):
        return value
    if _tf.is_eager(value):
        is_part = tower.is_scaled(value)
    else:
        found = _walk(tower, None, _factor(tower)).kinds(value)
        is_part = not found.isdisjoint(_LOOKED_INTO)
    if not is_part:
        return value
    return tf.math.divide_no_nan(_part_alone(tower, value), tf.cast(tower.share, value.dtype))


def kinds(tower: contexts.TowerContext, value: tf.Tensor, factor: int | None) -> provenance.Kinds:
    """The kinds of the terms of a traced scalar; what was divided by ``factor`` is a part."""
    return _walk(tower, None, factor).kinds(value)


def _part_alone(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    if _tf.is_eager(value):
        return value
    return _walk(tower, None, _factor(tower)).scaled(value, tower.share)


def _factor(tower: contexts.TowerContext) -> int | None:
    """What a replica function that has asked for the number of replicas divides its means by."""
    return tower.strategy.num_replicas_in_sync if tower.asked else None


def _walk(tower: contexts.TowerContext, default: provenance.Kind | None = None,
          factor: int | None = None) -> provenance.Walk:
    def known(value: Any) -> provenance.Kind | None:
        if tower.is_scaled(value):
            return provenance.Kind.PART
        return provenance.Kind.MEAN if tower.is_mean(value) else None

    return provenance.Walk(known, tower.static_rows, default, factor, tower.is_whole)


@contextlib.contextmanager
def own_means(tower: contexts.TowerContext) -> Iterator[None]:
    """Within, losses are means over the tower's own rows, to be scaled once at the end."""
    before = tower.own_means, tower.asked
    tower.own_means, tower.asked = True, False
    try:
        yield
    finally:
        tower.own_means, tower.asked = before
