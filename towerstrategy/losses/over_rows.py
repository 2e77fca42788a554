"""Functions of all rows of a batch: which they are, and what a tower has of them.

Goes in: a loss, or a metric's function, that puts rows together, and a tower's rows.  Comes out:
the tower's part of what it makes of all towers' rows; elsewhere what it makes of what it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy.losses import parts
from towerstrategy.towers import contexts, whole


class OverRows:
    """A loss, or a metric's function, that is to see all rows of a batch.

    Attributes:
      inner: what it is: a loss object, a function, or the name of one.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        """The inner one's."""
        if isinstance(self.inner, str):
            return self.inner
        return str(getattr(self.inner, "name", None) or getattr(self.inner, "__name__", None)
                   or type(self.inner).__name__)

    @property
    def reduction(self) -> Any:
        """How the inner one's values are put together, where it says."""
        return getattr(self.inner, "reduction", "sum_over_batch_size")


def part_of(function: Callable[..., Any], *args: Any) -> Any:
    """The tower's part of ``function`` of all rows, be it a loss: the parts add up to it."""
    tower = contexts.splitting_tower()
    if tower is None:
        return function(*args)
    result = whole.computed_once(tower, function, args)
    return parts.scaled(tower, result) if result.shape.rank == 0 else result


def mean_of(function: Callable[..., Any], *args: Any) -> Any:
    """The same for a metric: a number is the batch's on every tower."""
    tower = contexts.splitting_tower()
    if tower is None:
        return function(*args)
    result = whole.computed_once(tower, function, args)
    return tower.mark_mean(result) if result.shape.rank == 0 else result


def whole_batch(value: Any) -> Any:
    """All towers' rows of ``value``, in order, inside of a replica function.

    For losses that put the rows of a batch together: in-batch negatives, contrastive losses, mined
    triplets.  The gradient is right for a loss that each tower computes of all rows and
    ``strategy.scale_loss`` makes its part of the batch's: what the towers ask for is added up, and
    each gets that of its own rows.  Where a loss is a sum and not a mean, or runs eagerly, give
    ``towerstrategy.losses.WholeBatch`` the function; it computes it once for all.

    Args:
      value: a tensor, or a nest of tensors, each with a row an example in the first dimension; the
        towers may have different numbers of rows.  Views of one example belong into tensors of
        their own: rows are put together tensor by tensor.

    Returns:
      The same nest with the rows of all towers, of all machines; outside of towers, and with a
      single one, ``value``.

    Raises:
      ValueError: a component without rows.
      TypeError: a ``tf.SparseTensor``.
      RuntimeError: called in a branch, a loop or a ``tf.function`` that a tower calls, where the
        towers cannot meet.

    >>> strategy = TowerStrategy(split_cpu(4)[:2])
    >>> @tf.function
    ... def loss_of(x):
    ...   rows = whole_batch(x)
    ...   products = tf.matmul(rows, rows, transpose_b=True)
    ...   return strategy.scale_loss(tf.reduce_mean(products))
    >>> losses = strategy.run(loss_of, (strategy.split(np.eye(3)),))
    >>> round(float(strategy.reduce("SUM", losses, axis=None)), 3)
    0.333
    """
    tower = contexts.splitting_tower()
    if tower is not None:
        return whole.rows_of_all(tower, value)
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(value)):
        raise RuntimeError("whole_batch belongs inside of the function given to strategy.run, "
                           "where a tower has its rows; outside, use strategy.gather(value, 0).")
    return value
