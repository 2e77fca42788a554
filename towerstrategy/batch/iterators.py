"""Iterators over datasets of sub-batches; ``tf.data`` iterators, so they can be checkpointed.

Goes in: the iterator that ``tf.data`` makes.  Comes out: a :class:`TowerIterator`, which stops
Python's own loops where they see no end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import sub_batches
from towerstrategy.batch.rows import Nest

_ENDLESS = ("Python's enumerate, zip and comprehensions do not see where a distributed dataset "
            "ends while a function is traced. Write a plain `for batch in dataset:` loop, which "
            "autograph converts, and count in it.")
# Nobody unrolls so many steps into one graph on purpose.
_MOST_STEPS_IN_GRAPH = 1000


class _Counting(threading.local):
    follow: Callable[[tf.data.Dataset], tuple[tf.data.Dataset, Any]] | None = None


counting = _Counting()


def count_rows(follow: Callable[[tf.data.Dataset], tuple[tf.data.Dataset, Any]] | None) -> None:
    """From now on this thread's new iterators over a :class:`TowerDataset` are counted.

    ``follow`` turns a dataset into one that counts, and its count, which becomes the iterator's
    ``row_count``; None ends it.
    """
    counting.follow = follow


def followed(dataset: tf.data.Dataset, rows_of: Callable[..., tf.Tensor],
             follow: Callable[..., Any]) -> tuple[tf.data.Dataset, Any]:
    """``dataset``, whose elements are tuples, as ``follow`` counts them, and its count.

    ``rows_of`` takes what is in such a tuple, and gives the rows of each tower, a vector.
    """

    def with_rows(*element: Any) -> Any:
        rows = rows_of(*element)
        return element, sub_batches.CountedSubBatches([rows], rows)

    counted, count = follow(_tf.map_in_place(dataset, with_rows))
    return _tf.map_in_place(counted, lambda element, _: element), count


class Steps:
    """What an iterator over a :class:`TowerDataset` does with each batch."""

    _open_rows = False
    _between: Callable[[], None] | None = None
    _steps_in_graph = 0

    def __next__(self) -> Nest:
        self._check_ends()
        if self._between is not None and tf.executing_eagerly():
            self._between()  # a loop of Python's ends a step here, and begins another
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Nest:
        """The next batch; ``tf.errors.OutOfRangeError`` at the end."""
        raise NotImplementedError

    def _opened(self, element: Nest) -> Nest:
        """``element`` as whoever iterates gets it."""
        return sub_batches.with_open_rows(element) if self._open_rows else element

    def _check_ends(self) -> None:
        """Python's own loops know no end while a function is traced; stop them with a reason."""
        if tf.executing_eagerly():
            return
        self._steps_in_graph += 1
        if self._steps_in_graph > _MOST_STEPS_IN_GRAPH:
            raise NotImplementedError(
                f"more than {_MOST_STEPS_IN_GRAPH} batches were taken from a distributed dataset "
                f"while one tf.function was traced. {_ENDLESS}")


# TensorFlow's comes first: an iterator that is there could not become one of this class else.
class TowerIterator(_tf.OwnedIterator, tf.distribute.DistributedIterator, Steps):
    """Iterates over a :class:`TowerDataset`; a ``tf.data`` iterator, so it can be checkpointed.

    Attributes:
      row_count: what counts the rows taken, see :func:`count_rows`; None where nothing does.
    """

    row_count: Any = None
    __next__ = Steps.__next__

    def get_next(self) -> Nest:
        return self._opened(_tf.OwnedIterator.get_next(self))


def enumerated(batches: Any, start: int = 0) -> Any:
    """``enumerate`` as autograph calls it, which in a function that is traced would know no end."""
    is_split = any(isinstance(spec, _tf.PerReplicaSpec)
                   for spec in tf.nest.flatten(batches.element_spec))
    if tf.executing_eagerly() or not is_split:
        return enumerate(batches, start)
    raise NotImplementedError(f"enumerate of {type(batches).__name__} in a tf.function. {_ENDLESS}")
