"""Ragged rows made dense in a tower: as wide as the longest row of the whole batch.

Goes in: a ragged tensor of a tower's rows, where ``to_tensor`` is called on it.  Comes out: the
rows, padded as one device pads them, so that a mean over all elements, or one row's, is of as many.
Where the towers cannot meet (inside nested functions, branches and loops) a tower's own longest row
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import merging
from towerstrategy.towers import contexts


def install() -> None:
    """Wraps ``tf.RaggedTensor.to_tensor``, once; outside of towers it stays what it is."""
    _tf.wrap(tf.RaggedTensor, "to_tensor", _in_towers)


def _in_towers(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_tensor(self: Any, default_value: Any = None, name: Any = None, shape: Any = None) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or not tower.can_merge:
            return original(self, default_value, name, shape)
        asked = _asked(self, shape)
        if asked is None or None not in asked[1:]:
            return original(self, default_value, name, shape)
        widest = _widest(tower, self.bounding_shape(out_type=tf.int64))
        sizes = [(-1 if size is None else size) if axis == 0 or size is not None else widest[axis]
                 for axis, size in enumerate(asked)]
        dense = original(self, default_value, name, tf.stack(
            [tf.cast(size, tf.int64) for size in sizes]))
        if not _tf.is_eager(dense):
            dense.set_shape(asked)
        return dense

    return to_tensor


def _asked(ragged: Any, shape: Any) -> list[int | None] | None:
    """The sizes that are given, or known of ``ragged``, one a dimension; None if they may be any.
    """
    if ragged.shape.rank is None or tf.is_tensor(shape):
        return None
    given = tf.TensorShape(shape)
    if given.rank is None:
        given = tf.TensorShape([None] * ragged.shape.rank)
    if given.rank != ragged.shape.rank:
        return None  # TensorFlow says what is wrong
    return [known if size is None else size for size, known in zip(given, ragged.shape)]


def _widest(tower: contexts.TowerContext, sizes: tf.Tensor) -> tf.Tensor:
    """The largest of all towers' ``sizes``, of those that have rows."""
    def merged(_: Any, values: Any) -> Any:
        return merging.extreme("max", contexts.all_values(values, tower.count), tower.shares)

    return tower.meet(merged, sizes)
