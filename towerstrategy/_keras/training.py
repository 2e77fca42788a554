"""Training steps, as both Kerases have them: data split, outputs put together.

Goes in: a step's data and what the towers returned.  Comes out: sub-batches; rows in the order of
the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import datasets as datasets_lib
from towerstrategy.batch import results
from towerstrategy.batch import rows as rows_lib
from towerstrategy.merge import merging
from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement import kind


def split_plain(strategy: tf.distribute.Strategy, data: Any) -> Any:
    """A step's data, split unless it is already."""
    leaves = tf.nest.flatten(data)
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in leaves):
        return data
    return strategy.extended.split(data, stand_ins=True)


def check_dataset(x: Any, strategy: tf.distribute.Strategy | None) -> None:
    """Raises ``ValueError`` where a model that is on no towers is given their dataset."""
    if isinstance(x, datasets_lib.TowerDataset) and not kind.is_tower_strategy(strategy):
        raise ValueError(
            "the dataset was made by experimental_distribute_dataset or "
            "distribute_datasets_from_function of a TowerStrategy, but the model is not on its "
            "towers. Compile the model inside of the scope (with strategy.scope():), or call "
            "strategy.adopt(model), or give the model a tf.data.Dataset.")


def rows_only(values: Any) -> list[Any]:
    """The towers' outputs without what came of stand-ins."""
    parts = list(values.values)
    shares = getattr(values, "shares", None)
    if shares is None or not shares.stand_ins:
        return parts
    return [_first_rows(part, shares.filled(number)) if part.shape.rank != 0 else part
            for number, part in enumerate(parts)]


def _as_tensors(value: Any) -> Any:
    """``value`` with tensors in place of what stands for one, as a distribution may."""
    if all(isinstance(part, (tf.Tensor, _tf.CompositeTensor)) for part in value.values):
        return value
    return results.TowerResults([tf.convert_to_tensor(part) for part in value.values],
                                value.shares)


def joined(value: Any, concat: Callable[[list[Any]], Any]) -> Any:
    """A model's output for the whole batch, from the towers' outputs ``value``.

    The rows of all towers and machines; an output that has no row for each of the batch's (a
    table, a mean over the batch) once: exactly what the towers agree on, else their mean by share.
    """
    parts, shares = list(value.values), value.shares
    rows = results.have_rows(parts, shares)
    if rows is True:
        return _joined_rows(value, concat)
    if rows is False:
        return _once(parts, shares)
    return tf.cond(rows, lambda: _joined_rows(value, concat), lambda: _once(parts, shares))


def _joined_rows(value: Any, concat: Callable[[list[Any]], Any]) -> Any:
    rows, workers = concat(rows_only(value)), value.shares.workers
    return rows if workers is None else workers.gather(rows)


def _once(parts: list[Any], shares: shares_lib.Shares) -> Any:
    if parts[0].dtype.is_floating:
        return merging.agreed(parts, shares)
    return shares.firsts(merging.first_of_filled(parts, shares))


def _first_rows(part: Any, filled: Any) -> Any:
    if isinstance(part, tf.SparseTensor):
        size = tf.where(filled, part.dense_shape, tf.zeros_like(part.dense_shape))
        return tf.sparse.slice(part, tf.zeros_like(size), size)
    return part[:tf.where(filled, tf.cast(rows_lib.rows_in(part), tf.int64), 0)]


def reducing(concat: Callable[[list[Any]], Any]
             ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The hook for a Keras' ``reduce_per_replica``, which puts the towers' outputs together.

    What is to be neither the first nor rows nor a sum is a mean, see ``parts.logged``.

    Args:
      concat: how this Keras puts rows behind one another.
    """

    def reduced(value: Any, reduction: str) -> Any:
        if not isinstance(value, _tf.PerReplica):
            return value
        value = _as_tensors(value)
        if reduction == "first":
            return value.shares.firsts(value.values[0])
        if reduction == "concat":
            return joined(value, concat)
        if reduction == "sum":
            return merging.total_of_filled(list(value.values), value.shares)
        parts, dtype = list(value.values), value.values[0].dtype
        if dtype.is_floating:
            return merging.weighted_mean(parts, value.shares)
        if dtype is tf.bool:
            return _once(parts, value.shares)
        return tf.cast(merging.mean_of_filled(parts, value.shares), dtype)

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
            if not kind.is_tower_strategy(strategy) or strategy.num_replicas_in_sync == 1:
                return original(values, strategy, reduction)
            with tf.device(strategy.extended.merge_device):
                return tf.nest.map_structure(lambda value: reduced(value, reduction), values)

        return reduce_per_replica

    return hook


def predict(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Model.predict`` with its rows in the dataset's order, whoever of the machines has them."""

    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kind.is_tower_strategy(self.distribute_strategy):
            return original(self, *args, **kwargs)
        with self.distribute_strategy.extended.predict():
            return original(self, *args, **kwargs)

    return predict
