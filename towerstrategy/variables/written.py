"""Merges the values that the towers write to a variable.

Goes in: a variable with one copy, and each tower's value, or slices.  Comes out: the value, or
slices, to write, on the variable's home:

=====================  ===================================================================
aggregation            value written
=====================  ===================================================================
NONE, MEAN (floats)    the mean over the towers, each counted by its share of the batch
NONE (other dtypes)    the first tower's that has rows
SUM                    the sum over the towers that have rows
ONLY_FIRST_REPLICA     the first tower's that has rows
=====================  ===================================================================

With ``strategy.merge_rule``, it is the largest, or smallest, value.

Scatter writes follow the same rules, slice by slice: SUM writes the slices of all towers, in order,
as one device does; so does NONE for ``scatter_update``, ``_min`` and ``_max``, where writing twice
changes nothing; for ``scatter_mul`` and ``_div``, NONE writes tower 0's.  ``v[a:b].assign`` follows
the table element by element, over the towers with rows that wrote the element.  A per-replica value
written from outside the towers is merged as for NONE, unless ONLY_FIRST_REPLICA is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.merge import merging, results, shares as shares_lib
from towerstrategy.placement import homes as homes_lib

Aggregation = tf.VariableAggregation

REPLACING = ("scatter_update", "scatter_min", "scatter_max", "scatter_nd_update",
             "scatter_nd_min", "scatter_nd_max")
_STEPPING = ("scatter_add", "scatter_sub", "scatter_nd_add", "scatter_nd_sub")


def rule_of(variable: Any, outside: bool = False) -> str:
    """How values are merged: ``"sum"``, ``"mean"``, ``"first"``, ``"max"`` or ``"min"``.

    ``outside``: whether a per-replica value is written from outside of the towers.
    """
    if variable._extreme:
        return str(variable._extreme)
    if variable.aggregation is Aggregation.SUM and not outside:
        return "sum"
    floats = variable.dtype.is_floating or variable.dtype.is_complex
    return "mean" if floats and variable.aggregation is not Aggregation.ONLY_FIRST_REPLICA \
        else "first"


def value(variable: Any, values: Sequence[Any], shares: shares_lib.Shares,
          outside: bool = False) -> Any:
    """The value to write if each tower writes one of ``values``; ``outside``: see rule_of."""
    rule = rule_of(variable, outside)
    with tf.device(homes_lib.home_of(variable)):
        if rule == "sum":
            return shares.across(merging.total(merging.without_empty(values, shares)))
        if rule == "mean":
            return merging.mean(values, shares)
        if rule == "first":
            return values[0] if variable._alike_on_all else shares.firsts(
                merging.first_of_filled(values, shares))
        return merging.extreme(rule, values, shares)


def unless_empty(value: Any, shares: shares_lib.Shares, before: Any) -> Any:
    """``value``, or ``before`` if no tower has rows."""
    if not shares.may_be_empty or shares.workers is not None:
        return value
    return tf.where(tf.reduce_any(tf.stack(shares.filled), 0), value, before)


def total(variable: Any, tower: Any, value: Any) -> tf.Tensor | None:
    """The sum, or mean, of this machine's towers' values; ``value`` is the value of ``tower``."""
    rule = rule_of(variable)
    if rule not in ("sum", "mean"):
        return None  # these values need a sync point
    value = tf.convert_to_tensor(value, variable.dtype)
    part = value * tf.cast(tower.share, value.dtype) if rule == "mean" else value
    return tower.call.total(part, homes_lib.home_of(variable))


def slices(variable: Any, method_name: str, parts: Sequence[tf.IndexedSlices],
           shares: shares_lib.Shares, outside: bool = False) -> tf.IndexedSlices:
    """The slices that ``method_name`` writes if each tower writes one of ``parts``."""
    aggregation, replaces = variable.aggregation, method_name in REPLACING
    if outside and aggregation is not Aggregation.ONLY_FIRST_REPLICA:
        aggregation = Aggregation.NONE
    if replaces and aggregation in (Aggregation.SUM, Aggregation.MEAN):
        raise NotImplementedError(
            f"{method_name} is only supported for mirrored variable (variable created within "
            "certain `tf.distribute.Strategy` scope) with NONE or `ONLY_FIRST_REPLICA` "
            f"aggregation, got: {aggregation}.")
    with tf.device(homes_lib.home_of(variable)):
        filled = list(map(shares_lib.slices_if, shares.filled, parts))
        if aggregation is Aggregation.SUM or (
                replaces and aggregation is not Aggregation.ONLY_FIRST_REPLICA):
            return shares.across(merging.total(filled))
        steps = method_name in _STEPPING or aggregation is Aggregation.MEAN
        if steps and rule_of(variable, outside) == "mean":
            return merging.mean(filled, shares)
        return shares.firsts(filled[0])


def value_of_pieces(variable: Any, slices: Sequence[Any], values: Sequence[tf.Tensor],
                    shares: shares_lib.Shares) -> tf.Tensor:
    """The value to write if towers write ``values`` to different slices of ``variable``.

    ``slices`` has arguments of ``tf.strided_slice``.  Each element is merged over the towers that
    have rows and wrote it: for the others, a tower has no rows of it.
    """
    with tf.device(homes_lib.home_of(variable)):
        before = variable.value()
        whole = [_with_piece(before, *each) for each in zip(slices, values)]
        if variable.aggregation is Aggregation.ONLY_FIRST_REPLICA:
            return value(variable, whole, shares)
        none = tf.zeros_like(before, tf.int64)
        rows = [_with_piece(none, *each) for each in zip(slices, shares.here)]
        if shares.workers is not None:
            whole, rows = (tf.unstack(shares.workers.gather(tf.stack(towers)), shares.number)
                           for towers in (whole, rows))
        by_element = shares_lib.Shares(rows)
        return unless_empty(value(variable, whole, by_element), by_element, before)


def _with_piece(whole: tf.Tensor, piece: dict[str, Any], value: Any) -> tf.Tensor:
    """``whole`` with ``value`` in a slice (``tf.strided_slice``'s arguments)."""
    value = tf.broadcast_to(tf.cast(value, whole.dtype), tf.shape(tf.strided_slice(whole, **piece)))
    return tf.raw_ops.TensorStridedSliceUpdate(input=whole, value=value, **piece)


def value_alone(variable: Any, values: list[Any], shares: shares_lib.Shares,
                before: tf.Tensor) -> Any:
    """The value to write if each tower has its own copy's value in ``values``, see :mod:`alone`.

    ``before`` is the variable's value at the last sync point.
    """
    rule = rule_of(variable)
    if rule in merging.EXTREMES:
        return merging.EXTREMES[rule][0](merging.extreme(rule, values, shares), before)
    merge = merging.first_of_filled if rule == "first" else merging.mean
    return unless_empty(merge(values, shares), shares, before)


def sizes_of(variable: Any) -> tf.Tensor:
    """The shape of ``variable`` as an int64 vector."""
    if variable.shape.is_fully_defined():
        return tf.constant(variable.shape.as_list(), tf.int64)
    return tf.shape(variable.read_value(), out_type=tf.int64)


def shares_of(variable: Any, value: Any) -> shares_lib.Shares:
    """The shares of the ``strategy.run`` that returned a per-replica value; else equal shares."""
    extended = variable.distribute_strategy.extended
    if isinstance(value, results.TowerResults):
        return value.shares(extended.workers)
    return extended.equal_shares()


# Pieces of a variable: slices, and the elements of ``scatter_nd_*``.


def nd_slices(shape: tf.Tensor, indices: Any, updates: tf.Tensor) -> tf.IndexedSlices:
    """``scatter_nd`` indices and updates as slices: all dimensions but the last become one."""
    indices = tf.cast(indices, tf.int64)
    depth = tf.shape(indices)[-1]
    return tf.IndexedSlices(tf.reshape(updates, tf.concat([[-1], shape[depth:]], 0)),
                            tf.reshape(indices, [-1, depth]))


def batch_indices(indices: tf.Tensor) -> tf.Tensor:
    """Converts indices of ``batch_scatter_update`` to indices of ``scatter_nd_update``."""
    indices = tf.cast(indices, tf.int64)
    counts = [tf.range(tf.shape(indices, tf.int64)[axis]) for axis in range(indices.shape.rank)]
    return tf.stack([*tf.meshgrid(*counts, indexing="ij")[:-1], indices], -1)


def are_same(slices: Sequence[dict[str, Any]]) -> bool:
    """Whether the towers' slices (arguments of ``tf.strided_slice``) are known to be the same."""
    def known(part: Any) -> Any:
        value = part if isinstance(part, int) else tf.get_static_value(part)
        return id(part) if value is None else np.asarray(value).tolist()

    first, *others = ({name: known(part) for name, part in each.items()} for each in slices)
    return all(other == first for other in others)
