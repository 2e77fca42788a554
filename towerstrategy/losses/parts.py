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
from towerstrategy.losses import contractions, provenance, terms, totals
from towerstrategy.merge import merging
from towerstrategy.towers import contexts, one_replica
from towerstrategy.variables import by_gradients

_NO_SUMS = frozenset({provenance.Kind.MIXED, provenance.Kind.OTHER})
# What the mean of the towers' values does not make one device's.
OTHER_THAN_MEANS = provenance.OF_ROWS - provenance.MEANS
# Of numbers no sum.
_OF_SUMS = frozenset({"Exp", "Log", "Max", "Maximum", "Min", "Minimum", "Pow", "Prod", "Rsqrt",
                      "Sqrt"})


def scaled(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    """A tower's mean -> its part of the whole batch's mean; the mean where means are wanted."""
    share = tower.share
    if tower.own_means:
        if tower.weight is not None:
            value = value * tf.cast(tf.math.divide_no_nan(
                tower.weight, tf.cast(share, tower.weight.dtype)), value.dtype)
        return tower.mark_mean(value)
    share = share if tower.weight is None else tower.weight
    return tower.mark_scaled(_filled(tower, value * tf.cast(share, value.dtype)))


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


def summed_values(tower: contexts.TowerContext, values: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """As :func:`summed` for a loss object's ``total`` of ``values``, be they of the tower's rows.

    Of the rows of all towers (``whole_batch``) each tower has the same sum, and its share of it.

    Raises:
      RuntimeError: eagerly, one number, in a replica function that has gathered rows.
    """
    if not tower.gathered:
        return summed(tower, total)
    if not _tf.is_eager(values):
        return scaled(tower, total) if walk(tower).is_steady(values) else summed(tower, total)
    if not values.shape.rank:
        raise RuntimeError(
            'a loss object with reduction="sum" returned one number, after whole_batch: in eager '
            "code that does not tell whether it is a sum over this tower's rows or over those of "
            "all towers. Give the loss to towerstrategy.losses.WholeBatch, let it return a value a "
            "row, or put the step into a tf.function.")
    rows, whole = tower.given_rows, tower.shares.total
    of_all = isinstance(whole, int) and 0 < whole != rows and values.shape[0] % whole == 0
    return scaled(tower, total) if of_all else summed(tower, total)


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
        whole = None if default is provenance.Kind.PART else _whole(tower, value)
        if whole is None:
            made = terms.scaled(walk(tower, default), value, tower.share)
        else:
            made = whole * tf.cast(tower.share, value.dtype)
    return tower.mark_scaled(_filled(tower, made))


def _filled(tower: contexts.TowerContext, made: tf.Tensor) -> tf.Tensor:
    """A part; 0 in a tower without rows, of which a mean is no number."""
    may_be_none = tower.may_be_empty and not tower.shares.stand_ins
    return merging.kept(tower.filled, made) if may_be_none else made


def added(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    """The part, or the mean where means are wanted, of a term that a layer adds to the loss.

    A sum over rows is a sum over those of all towers.  What it is shows in the graph; eager terms,
    and those of which that does not tell, count as means.
    """
    if value.shape.rank != 0 or not value.dtype.is_floating or _tf.is_eager(value):
        return scaled(tower, value)
    whole = _whole(tower, value)
    if whole is not None:
        return scaled(tower, whole)
    found = walk(tower)
    if found.kinds(value).isdisjoint(terms.LOOKED_INTO):
        return scaled(tower, value)
    made = terms.scaled(found, value, tower.share)
    if tower.stand_ins:
        made = merging.kept(tower.filled, made)
    return summed(tower, made)


def logged(tower: contexts.TowerContext, value: Any) -> Any:
    """Of what a step returns as a log: what has one device's log for its mean by share of rows."""
    if not isinstance(value, tf.Tensor) or value.shape.rank != 0:
        if isinstance(value, tf.Tensor) and value.shape.rank is None:
            _check(tower, value)
        return value
    if value.dtype.is_floating:
        return mean(tower, value)
    if _tf.is_eager(value) or not tower.can_merge:
        return value
    if value.dtype.is_integer and kinds(tower, value, None) == {provenance.Kind.PART}:
        return tower.all_reduce(_tf.ReduceOp.SUM, value)
    whole = _whole(tower, value)
    return value if whole is None else whole


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
    if one_replica.has_all_rows() and one_replica.strategy_of_replica() is strategy:
        return _as_loss(loss)
    if tower is None or tower.strategy is not strategy:
        raise RuntimeError(
            "strategy.scale_loss makes a tower's mean its part of the whole batch's, so it belongs "
            "inside of the function given to strategy.run, or a model's train_step or "
            "compute_loss, between the forward pass and tape.gradient. "
            + ("Here no tower of a strategy runs." if tower is None
               else f"Here a tower of another strategy runs: {tower.strategy!r}."))
    value = _as_loss(loss)
    if not tower.several:
        return value
    if tower.own_means or value.shape.rank != 0:
        return scaled(tower, value)
    return part(tower, value, provenance.Kind.MEAN)


def _as_loss(loss: Any) -> tf.Tensor:
    try:
        value = tf.convert_to_tensor(loss)
    except (TypeError, ValueError) as error:
        raise TypeError(f"loss must be a floating point tensor, but got {loss!r} of type "
                        f"{type(loss).__name__}.") from error
    if not value.dtype.is_floating:
        raise TypeError(f"loss must be a floating point tensor, but got {loss!r} of dtype "
                        f"{value.dtype.name}.")
    return value


def mean(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    """The mean that has ``value`` for its part, where it is one; a mean stays as it is."""
    if value.shape.rank != 0 or not value.dtype.is_floating or tower.is_mean(value):
        return value
    if _tf.is_eager(value):
        is_part = tower.is_scaled(value)
    else:
        whole = by_gradients.of_merged(tower, value)
        if whole is None:
            whole = _whole(tower, value)
        if whole is not None:
            return tower.mark_mean(whole)
        found = walk(tower, None, _factor(tower)).kinds(value)
        is_part = not found.isdisjoint(terms.LOOKED_INTO)
    if not is_part:
        return value
    return tf.math.divide_no_nan(_part_alone(tower, value), tf.cast(tower.share, value.dtype))


def kinds(tower: contexts.TowerContext, value: tf.Tensor, factor: int | None) -> provenance.Kinds:
    """The kinds of the terms of a traced scalar; what was divided by ``factor`` is a part."""
    return walk(tower, None, factor).kinds(value)


def _part_alone(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor:
    if _tf.is_eager(value):
        return value
    return terms.scaled(walk(tower, None, _factor(tower)), value, tower.share)


def _factor(tower: contexts.TowerContext) -> int | None:
    """What a replica function that has asked for the number of replicas divides its means by."""
    return tower.strategy.num_replicas_in_sync if tower.asked else None


def _whole(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor | None:
    """What a function of sums and means over the tower's rows is for the whole batch.

    None for what is a sum of them, whose terms count each as what it is, and where nobody knows.
    """
    found = walk(tower, None, _factor(tower))
    if found.kinds(value).isdisjoint(_NO_SUMS):
        return None
    made = totals.of_all(tower, found, value)
    if made is None and (provenance.Kind.MIXED in found.kinds(value)
                         or totals.puts_together(tower, found, value)):
        _warn(tower, value)
    return made


def _has_batch(tower: contexts.TowerContext) -> bool:
    """Whether there are several towers, and rows of a batch that they have parts of."""
    return tower.several and (tower.is_nested or tower.static_rows is not None)


def _is_traced(tower: contexts.TowerContext, value: Any) -> bool:
    """Whether ``value`` is traced, in a tower that has rows."""
    return _has_batch(tower) and isinstance(value, tf.Tensor) and not _tf.is_eager(value)


def _can_be_of_all(tower: contexts.TowerContext, value: Any) -> bool:
    """The same, where the towers can meet."""
    return tower.can_merge and _is_traced(tower, value)


def of_all(tower: contexts.TowerContext, value: Any) -> tf.Tensor | None:
    """What one device has in the place of ``value``, a function of sums over a tower's rows.

    None where ``value`` is a mean over rows, comes of weights alone, or of something else.
    """
    if not _can_be_of_all(tower, value) or not (
            value.dtype.is_floating or value.dtype.is_integer):
        return None
    found = walk(tower)
    return None if found.kinds(value) <= provenance.MEANS else totals.of_all(tower, found, value)


def of_all_or_mean(tower: contexts.TowerContext, value: Any) -> tf.Tensor | None:
    """As :func:`of_all`; of what has a mean over rows for a term, too."""
    whole = of_all(tower, value)
    if whole is not None or not _can_be_of_all(tower, value) or not value.dtype.is_floating:
        return whole
    found = walk(tower).kinds(value)
    is_mean = found <= provenance.MEANS and provenance.Kind.MEAN in found
    return contexts.mean_of_towers(value) if is_mean else None


def of_terms(tower: contexts.TowerContext, value: tf.Tensor) -> tf.Tensor | None:
    """A tower's part of ``value``, each of whose terms counts as what it is.

    None where a term is no mean, no part, and not the same on all towers.
    """
    whole = of_all(tower, value)
    if whole is not None:
        return whole * tf.cast(tower.share, whole.dtype)
    found = walk(tower)
    if not found.kinds(value) <= provenance.MEANS | {provenance.Kind.PART}:
        return None
    return _filled(tower, terms.scaled(found, value, tower.share))


def is_steady(tower: contexts.TowerContext, value: Any) -> bool:
    """Whether ``value`` comes of weights and constants alone; eager values do not tell."""
    return not isinstance(value, tf.Tensor) or not _tf.is_eager(value) and (
        walk(tower).is_steady(value))


def kinds_alone(tower: contexts.TowerContext, value: Any) -> provenance.Kinds:
    """The kinds of the terms of what is traced where the towers cannot meet; none where not known.
    """
    if not _is_traced(tower, value):
        return frozenset()
    found = walk(tower)
    outside = found.origin(value)
    of_gradients = None if _tf.is_eager(outside) else tower.gradients.kinds(
        outside, tower.graph, tower.is_agreed)
    return found.kinds(value) | (of_gradients or frozenset())


def is_of_own_rows(tower: contexts.TowerContext, condition: Any) -> bool:
    """Whether a condition is made of sums or means over the tower's rows."""
    return (_is_traced(tower, condition)
            and not walk(tower).kinds(condition).isdisjoint(provenance.OF_ROWS))


def is_made_of(tower: contexts.TowerContext, value: Any, variable: Any) -> bool:
    """Whether ``value`` is traced, in a tower that has rows, and what ``variable`` holds is in it.
    """
    return (_can_be_of_all(tower, value) and value.dtype.is_floating
            and walk(tower).reads(value, variable.handle))


def is_of_rows(tower: contexts.TowerContext, value: Any) -> bool:
    """Whether ``value``, of which :func:`of_all` knows no way, is made of rows by no sum or mean.
    """
    if not _can_be_of_all(tower, value):
        return False
    found = walk(tower)
    kinds = found.kinds(value)
    return not kinds <= provenance.MEANS and (
        provenance.Kind.MIXED in kinds or totals.puts_together(tower, found, value))


def are_rows(tower: contexts.TowerContext, indices: Any, updates: Any) -> bool:
    """Whether there is one of ``indices`` a row, and ``updates`` are not divided by their number.
    """
    if not _is_traced(tower, indices) or not _is_traced(tower, updates):
        return False
    found = walk(tower)
    return contractions.axis_of(found, indices) == 0 and found.kinds(updates).isdisjoint(
        {provenance.Kind.COUNTED, provenance.Kind.MEAN})


def is_no_sum(tower: contexts.TowerContext, value: Any) -> bool:
    """Whether ``value`` is a root, an extreme or the like of a tower's sums, means or rows."""
    if (not _is_traced(tower, value) or not value.dtype.is_floating
            or tower.is_agreed(value)):
        return False
    added_up = value.op.inputs if value.op.type in provenance.ADDED else [value]
    return any(each.op.type in _OF_SUMS and provenance.Kind.MIXED in kinds(tower, each, None)
               for each in added_up)


def gradient(tower: contexts.TowerContext, value: Any) -> Any:
    """The tower's part of what an optimizer is given, where it is a function of sums over rows.

    So it is of a gradient of the batch's loss to which a multiple of the loss was added.
    """
    if not isinstance(value, tf.Tensor) or _tf.is_eager(value):
        return value
    found = kinds(tower, value, None)
    if found.isdisjoint(_NO_SUMS):
        is_mixed = {provenance.Kind.PART, provenance.Kind.MEAN} <= found
        return _filled(tower, terms.scaled(walk(tower), value, tower.share)) if is_mixed else value
    whole = of_all(tower, value)
    return value if whole is None else whole * tf.cast(tower.share, whole.dtype)


def _check(tower: contexts.TowerContext, value: tf.Tensor) -> None:
    """Warns of a value of no known rank that is made of rows by no sum or mean."""
    if tower.can_merge and totals.puts_together(tower, walk(tower), value):
        _warn(tower, value)


def _warn(tower: contexts.TowerContext, value: tf.Tensor) -> None:
    """Says, once for an operation, that a number will be another than on one device."""
    tower.warn_of(
        value,
        "towerstrategy: in a step of your own, {name} puts rows of the batch together in a way "
        "that is not made again of the rows of all towers: it is computed of each tower's rows, "
        "and counts as a mean, so that it comes out otherwise than on one device. Gather the rows "
        "first, with towerstrategy.whole_batch; make it of sums and means outside of nested "
        "tf.functions and branches; or give it to towerstrategy.losses.WholeBatch.")


def walk(tower: contexts.TowerContext, default: provenance.Kind | None = None,
         factor: int | None = None) -> provenance.Walk:
    def known(value: Any) -> provenance.Kind | None:
        if tower.is_scaled(value):
            return provenance.Kind.PART
        return provenance.Kind.MEAN if tower.is_mean(value) else tower.gradients.kind_of(value)

    others = () if tower.is_copied else [
        tower.shares.static_rows(number) or 0 for number in range(tower.count)]
    return provenance.Walk(known, tower.static_rows, default, factor, tower.is_whole,
                           tower.is_agreed, others,
                           tower.given.union(
                               id(part.handle) for values in
                               tower.strategy.extended.tower_local_parts(summed=True)
                               for part in values))


@contextlib.contextmanager
def own_means(tower: contexts.TowerContext) -> Iterator[None]:
    """Within, losses are means over the tower's own rows, to be scaled once at the end."""
    before = tower.own_means, tower.asked
    tower.own_means, tower.asked = True, False
    try:
        yield
    finally:
        tower.own_means, tower.asked = before
