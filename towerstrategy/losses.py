"""Losses in functions given to ``strategy.run``: scaled by a tower's share, or over all rows.

Goes in: a loss that a tower computes from its rows.  Comes out: the tower's part of the global
batch's loss.  The towers' gradients are summed, so the parts must add up to one device's loss.

If one replica has all rows (a step of Keras, ``strategy.function``, no strategy), each of these
functions returns one device's value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts, refused
from towerstrategy.batch import rows as rows_lib
from towerstrategy.merge import merging

__all__ = ["WholeBatch", "whole_batch"]


def __dir__() -> list[str]:
    return __all__


def scaled(tower: contexts.TowerContext, mean: tf.Tensor) -> tf.Tensor:
    """A tower's part of the batch's mean, from its mean over its rows; 0 if it has no rows."""
    part = mean * tf.cast(tower.share, mean.dtype)
    if tower.may_be_empty:
        part = merging.kept(tower.filled, part)  # a mean over no rows is NaN
    part._is_part = True  # so that scale_loss does not scale it again
    return part


def unscaled(tower: contexts.TowerContext, part: tf.Tensor) -> tf.Tensor:
    """The inverse of :func:`scaled`; 0 if the tower has no rows."""
    return tf.math.divide_no_nan(part, tf.cast(tower.share, part.dtype))


def scale_loss(loss: Any) -> tf.Tensor:
    """See ``TowerStrategy.scale_loss``."""
    value, tower = tf.convert_to_tensor(loss), contexts.splitting_tower()
    if not value.dtype.is_floating:
        raise refused.wrong_type("loss", value, "a floating point tensor")
    return value if tower is None or hasattr(loss, "_is_part") else scaled(tower, value)


def install() -> None:
    """Wraps TensorFlow's loss helpers, once; outside of towers they work as before."""
    _tf.AVERAGE.wrap(_average)
    _tf.REGULARIZATION.wrap(_regularization)


def _average(original: Callable[..., Any], per_example_loss: Any, sample_weight: Any = None,
             global_batch_size: Any = None) -> Any:
    tower = contexts.splitting_tower()
    if tower is None or global_batch_size is not None:
        return original(per_example_loss, sample_weight, global_batch_size)
    per_example_loss = tf.convert_to_tensor(per_example_loss)
    rows = tf.shape(per_example_loss)[0]
    return scaled(tower, original(per_example_loss, sample_weight, rows))


def _regularization(original: Callable[..., Any], regularization_loss: Any) -> Any:
    tower = contexts.splitting_tower()
    if tower is None:
        return original(regularization_loss)
    return scaled(tower, tf.reduce_sum(regularization_loss))


def whole_batch(value: Any) -> Any:
    """Gathers the rows of ``value`` from all towers, in order, inside of a replica function.

    For losses over pairs of rows of a batch: in-batch negatives, contrastive losses, mined
    triplets.  The gradient is right if each tower computes the loss of all rows and scales it by
    ``strategy.scale_loss``.

    Args:
      value: a tensor, or a nest of tensors, whose first dimension is the examples, one row each;
        the towers may have different numbers of rows.  Put each view of the examples into a tensor
        of its own: each tensor is gathered on its own.

    Returns:
      The same nest with the rows of all towers, of all machines; ``value`` itself if one replica
      has all rows.

    Raises:
      RuntimeError: called in a branch, a loop or a ``tf.function`` that a tower calls, where towers
        cannot sync; or outside of towers, with per-replica values.

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
        return _rows_of_all(tower, value)
    if any(isinstance(leaf, tf.distribute.DistributedValues) for leaf in tf.nest.flatten(value)):
        raise RuntimeError("whole_batch belongs inside of the function given to strategy.run, "
                           "where a tower has its rows; outside, use strategy.gather(value, 0).")
    return value


def _has_rows(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor or array with a first dimension."""
    if isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return leaf.shape.rank != 0
    return hasattr(leaf, "__array__") and not _tf.is_variable(leaf) and getattr(leaf, "ndim", 0) > 0


def _rows_of_all(tower: contexts.TowerContext, value: Any) -> Any:
    """The nest ``value`` of this tower's rows, gathered from all towers, on each tower."""
    # The gradient of a tower's rows is the sum of all towers' gradients for these rows.
    def gathered(leaf: Any) -> Any:
        if isinstance(leaf, tf.SparseTensor):
            raise TypeError(f"a SparseTensor has no rows to gather: {leaf!r}. Make it dense first.")
        if not _has_rows(leaf):
            raise ValueError("whole_batch takes tensors with a row an example in the first "
                             f"dimension, but got {leaf!r}.")
        if isinstance(leaf, tf.RaggedTensor):
            flat, *lengths = (tower.all_gather(part, 0)
                              for part in (leaf.flat_values, *leaf.nested_row_lengths()))
            return tf.RaggedTensor.from_nested_row_lengths(flat, lengths, validate=False)
        return tower.all_gather(tf.convert_to_tensor(leaf), 0)

    return tf.nest.map_structure(gathered, value)


class WholeBatch:
    """A loss over the rows of all towers, for replica functions.

    In a function given to ``strategy.run``, it takes the arguments of the inner loss.  Tensors with
    rows are gathered (:func:`whole_batch`); other arguments are passed on.  If the inner loss
    returns a scalar, the result is the tower's part of it and needs no ``scale_loss``; if it
    returns one value per row, the result has the tower's rows:

    >>> strategy = TowerStrategy(split_cpu(4)[:2])
    >>> pairs = WholeBatch(
    ...     lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_b=True)))
    >>> step = tf.function(lambda x: pairs(x))
    >>> parts = strategy.run(step, (strategy.split(np.ones([3, 1])),))
    >>> float(strategy.reduce("SUM", parts, axis=None))
    9.0

    In a step of Keras and in ``strategy.function`` every loss sees all rows; there, as without a
    strategy, it calls the inner loss.  ``compile`` accepts it as a loss or as a metric's function.

    Args:
      loss: a loss object of Keras 3 or tf_keras, a function, or the name of one.

    Attributes:
      inner: the inner loss: the ``loss`` given.
    """

    def __init__(self, loss: Any) -> None:
        if not callable(loss) and not isinstance(loss, str):
            raise refused.wrong_type("loss", loss, "a loss object, a function or the name of one")
        self.inner: Any = loss.inner if isinstance(loss, WholeBatch) else loss
        # Keras names a metric by it.
        self.__name__ = loss if isinstance(loss, str) else (  # a loss object's name may be None
            getattr(loss, "name", None) or getattr(loss, "__name__", "whole_batch"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The tower's part of the loss of all rows; outside of towers, the inner loss."""
        inner = tf.keras.losses.get(self.inner) if isinstance(self.inner, str) else self.inner
        tower = contexts.splitting_tower()
        if tower is None:
            return inner(*args, **kwargs)
        flat = tf.nest.flatten((args, kwargs))
        args, kwargs = tf.nest.pack_sequence_as((args, kwargs), [
            _rows_of_all(tower, leaf) if _has_rows(leaf) else leaf for leaf in flat])
        with contexts.OneReplicaContext(tower.strategy):
            result = inner(*args, **kwargs)
        if result.shape.rank == 0:
            return scaled(tower, result)
        rows = next(rows_lib.rows_in(leaf) for leaf in flat if _has_rows(leaf))
        counts = tower.all_gather(tf.stack([rows]), 0)
        first = tf.reduce_sum(counts[:tower.replica_id_in_sync_group])
        return result[first:first + rows]

    def __repr__(self) -> str:
        return f"WholeBatch({self.inner!r})"


def inner_losses(losses: Any) -> Any:
    """The nest ``losses`` with each :class:`WholeBatch` replaced by its inner loss."""
    return tf.nest.map_structure(
        lambda leaf: leaf.inner if isinstance(leaf, WholeBatch) else leaf, losses)
