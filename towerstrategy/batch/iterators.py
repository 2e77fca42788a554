"""Iterators over datasets of sub-batches; ``tf.data`` iterators, so they can be checkpointed.

Goes in: the iterator that ``tf.data`` makes.  Comes out: a :class:`TowerIterator`, which stops
Python's own loops where they see no end.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import sub_batches
from towerstrategy.batch.rows import Nest

_log = logging.getLogger("towerstrategy")
_ENDLESS = (
    "Python's enumerate, zip, map and comprehensions do not see where a distributed dataset ends "
    "while a function is traced. Write a plain `for batch in dataset:` loop, which autograph "
    "converts, and count in it; for a number of steps, `for _ in tf.range(steps):` with "
    "`next(iterator)` in it.")
# So many steps are seldom unrolled into one graph on purpose, and so many more never.
_MANY, _TOO_MANY = 100, 1000
_taken_in: weakref.WeakKeyDictionary[tf.Graph, int] = weakref.WeakKeyDictionary()


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

    def __next__(self) -> Nest:
        if self._between is not None and tf.executing_eagerly():
            self._between()  # a loop of Python's ends a step here, and begins another
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Nest:
        """The next batch; ``tf.errors.OutOfRangeError`` at the end."""
        if not tf.executing_eagerly():
            _check_ends()
        batch = self._batch()
        return sub_batches.with_open_rows(batch) if self._open_rows else batch

    def _batch(self) -> Nest:
        """The next batch as the pipeline gives it."""
        raise NotImplementedError


def _check_ends() -> None:
    """Python's own loops know no end while a function is traced; stop them with a reason."""
    graph = tf.compat.v1.get_default_graph()
    taken = _taken_in[graph] = _taken_in.get(graph, 0) + 1
    text = (f"{{}} {taken} batches were taken from distributed datasets while one tf.function was "
            f"traced. {_ENDLESS}")
    if taken == _MANY:
        _log.warning(text.format("So far"))
    if taken == _TOO_MANY:
        raise NotImplementedError(text.format("Already"))


class TowerIteratorSpec(sub_batches.HashedOnce, tf.data.IteratorSpec):
    """The type spec of :class:`TowerIterator`: as a function's argument it is one, too."""

    __slots__ = ["_open_rows"]
    value_type = property(lambda _: TowerIterator)

    def __init__(self, element_spec: Nest, open_rows: bool) -> None:
        super().__init__(element_spec)
        self._open_rows = open_rows

    def _serialize(self) -> tuple[Any, ...]:
        return self._element_spec, self._open_rows

    def _from_components(self, components: Any) -> TowerIterator:
        iterator = super()._from_components(components)
        iterator.__class__ = TowerIterator
        iterator._open_rows = self._open_rows
        return iterator


# TensorFlow's comes first: an iterator that is there could not become one of this class else.
class TowerIterator(_tf.OwnedIterator, tf.distribute.DistributedIterator, Steps):
    """Iterates over a :class:`TowerDataset`; a ``tf.data`` iterator, so it can be checkpointed.

    Attributes:
      row_count: what counts the rows taken, see :func:`count_rows`; None where nothing does.
    """

    row_count: Any = None
    __next__, get_next = Steps.__next__, Steps.get_next

    def _batch(self) -> Nest:
        return _tf.OwnedIterator.get_next(self)

    @property
    def _type_spec(self) -> TowerIteratorSpec:
        return TowerIteratorSpec(self.element_spec, self._open_rows)


def refuse_endless(builtin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``builtin`` as autograph calls it, which in a function that is traced would know no end."""
    if tf.executing_eagerly():
        return builtin(*args, **kwargs)
    raise NotImplementedError(
        f"{builtin.__name__} over a distributed dataset in a tf.function. {_ENDLESS}")
