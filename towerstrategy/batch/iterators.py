"""Iterators over datasets of sub-batches; ``tf.data`` iterators, so they can be checkpointed.

Goes in: the iterator that ``tf.data`` makes.  Comes out: a :class:`TowerIterator`, which tells when
Python's own loops know no end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib, sub_batches
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

    Args:
      follow: makes of a dataset one that counts, and its count, which becomes the iterator's
        ``row_count``; None ends it.
    """
    counting.follow = follow


def followed(dataset: tf.data.Dataset, rows_of: Callable[..., tf.Tensor],
             follow: Callable[..., Any]) -> tuple[tf.data.Dataset, Any]:
    """``dataset``, whose elements are no split batches, as ``follow`` counts them, and its count.

    Args:
      dataset: elements are tuples.
      rows_of: takes what is in such a tuple, and gives the rows of each tower, a vector.
      follow: see :func:`count_rows`.
    """

    def told(*element: Any) -> Any:
        rows = rows_of(*element)
        return element, sub_batches.CountedSubBatches([rows], rows)

    counted, count = follow(_tf.map_in_place(dataset, told))
    return _tf.map_in_place(counted, lambda element, _: element), count


class TowerIterator(_tf.OwnedIterator, tf.distribute.DistributedIterator):
    """Iterates over a :class:`TowerDataset`; a ``tf.data`` iterator, so it can be checkpointed.

    Attributes:
      row_count: what counts the rows taken, see :func:`count_rows`; None where nothing does.
    """

    row_count: Any = None
    _open_rows = False
    _between: Callable[[], None] | None = None
    _steps_in_graph = 0

    def get_next(self) -> Nest:
        return handed(self, super().get_next())

    def __next__(self) -> Nest:
        begin_step(self)
        return handed(self, super().__next__())


def handed(iterator: Any, element: Nest) -> Nest:
    """``element`` as whoever iterates gets it."""
    return sub_batches.with_open_rows(element) if iterator._open_rows else element


def begin_step(iterator: Any) -> None:
    """A loop of Python's asks for its next batch: tells who watches, and stops endless tracing."""
    check_ends(iterator)
    if iterator._between is not None and tf.executing_eagerly():
        iterator._between()


def next_in_python(iterator: Any) -> Nest:
    """The next batch for a loop of Python's, which a StopIteration ends."""
    begin_step(iterator)
    try:
        return iterator.get_next()
    except tf.errors.OutOfRangeError:
        raise StopIteration from None


def check_ends(iterator: Any) -> None:
    """Python's own loops know no end while a function is traced; stop them with a reason."""
    if tf.executing_eagerly():
        return
    iterator._steps_in_graph += 1
    if iterator._steps_in_graph > _MOST_STEPS_IN_GRAPH:
        raise NotImplementedError(
            f"more than {_MOST_STEPS_IN_GRAPH} batches were taken from a distributed dataset "
            f"while one tf.function was traced. {_ENDLESS}")


def enumerated(batches: Any, start: int = 0) -> Any:
    """``enumerate`` as autograph calls it, which in a function that is traced would know no end."""
    is_dealt = any(isinstance(spec, _tf.PerReplicaSpec)
                   for spec in tf.nest.flatten(batches.element_spec))
    if tf.executing_eagerly() or not is_dealt:
        return enumerate(batches, start)
    raise NotImplementedError(f"enumerate of {type(batches).__name__} in a tf.function. {_ENDLESS}")


def onto_devices(element: Nest, devices: Sequence[str]) -> Nest:
    """``element`` with each tower's part on its device; as it is where no devices are given."""
    if not devices:
        return element

    def moved(part: Any, device: str) -> Any:
        with tf.device(device):
            return tf.nest.map_structure(tf.identity, part, expand_composites=True)

    def each(leaf: Any) -> Any:
        if not isinstance(leaf, _tf.PerReplica):
            alone = len(devices) == 1 and rows_lib.has_rows(leaf)
            return moved(leaf, devices[0]) if alone else leaf
        parts = [moved(part, device) for part, device in zip(leaf.values, devices)]
        if isinstance(leaf, sub_batches.CountedSubBatches):
            return sub_batches.CountedSubBatches(parts, leaf.rows)
        return type(leaf)(parts)

    return tf.nest.map_structure(each, element)
