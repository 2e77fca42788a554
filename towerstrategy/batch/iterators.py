"""Iterators over datasets of sub-batches; ``tf.data`` iterators, so they can be checkpointed.

Goes in: the iterator that ``tf.data`` makes.  Comes out: a :class:`TowerIterator`, which stops
Python's own loops where they see no end; :class:`HeldOptional`, an element that may not be there.
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

# A dataset, and what gives the rows of each tower in an element, a vector, or None -> the dataset,
# counted as elements are taken, and the count.
Follow = Callable[[tf.data.Dataset, Callable[[tuple[Any, ...]], Any]], tuple[tf.data.Dataset, Any]]


class _Counting(threading.local):
    follow: Follow | None = None


# By its ``follow`` this thread's new iterators over a :class:`TowerDataset` are counted; what that
# counts with becomes their ``row_count``.
counting = _Counting()


class Steps:
    """What an iterator over a :class:`TowerDataset` does with each batch."""

    agreement: Any = None  # of several machines, at each element: a shards.Agreement
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
        batch = self.take() if self.agreement is None else self.agreement.batch(self)
        return sub_batches.with_open_rows(batch) if self._open_rows else batch

    def get_next_as_optional(self) -> tf.experimental.Optional:
        return self._optional() if self.agreement is None else self.agreement.optional(self)

    def read_once(self) -> Any:
        """This iterator, for a loop that reads each optional's value once if it has one."""
        return self

    @property
    def element_spec(self) -> Nest:
        return self.spec if self.agreement is None else self.agreement.element_spec(self.spec)

    # The pipeline's own elements, which several machines have not agreed on yet: their spec, what
    # takes the next one, and what takes it as an optional.
    spec: Nest
    take: Callable[..., Nest]
    _optional: Callable[..., tf.experimental.Optional]


def copied(element: Nest) -> Nest:
    """A copy of an element, each tensor where it is."""
    def copy(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tensor.device):
            return tf.identity(tensor)

    return tf.nest.map_structure(copy, element, expand_composites=True)


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


class TowerIteratorSpec(tf.data.IteratorSpec):
    """The type spec of :class:`TowerIterator`: as a function's argument it is one, too."""

    __slots__ = ["_open_rows", "_agreement"]
    value_type = property(lambda _: TowerIterator)

    def __init__(self, element_spec: Nest, open_rows: bool, agreement: Any) -> None:
        super().__init__(element_spec)
        self._open_rows, self._agreement = open_rows, agreement

    def _serialize(self) -> tuple[Any, ...]:
        return self._element_spec, self._open_rows, self._agreement

    def _from_components(self, components: Any) -> TowerIterator:
        iterator = super()._from_components(components)
        iterator.__class__ = TowerIterator
        iterator._open_rows, iterator.agreement = self._open_rows, self._agreement
        return iterator


# TensorFlow's comes first: an iterator that is there could not become one of this class else.
class TowerIterator(_tf.OwnedIterator, tf.distribute.DistributedIterator, Steps):
    """Iterates over a :class:`TowerDataset`; a ``tf.data`` iterator, so it can be checkpointed."""

    row_count: Any = None  # what counts the rows taken, see :data:`counting`
    __next__, get_next = Steps.__next__, Steps.get_next
    get_next_as_optional = Steps.get_next_as_optional
    element_spec = Steps.element_spec
    spec = property(lambda self: self._element_spec)
    take, _optional = _tf.OwnedIterator.get_next, _tf.OwnedIterator.get_next_as_optional

    @property
    def _type_spec(self) -> TowerIteratorSpec:
        return TowerIteratorSpec(self._element_spec, self._open_rows, self.agreement)


# Iterators that are to open what an optional holds, by id: a spec holds plain values alone.
_later: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class HeldOptionalSpec(tf.TypeSpec):
    __slots__ = ["_spec", "_held", "_number"]
    value_type = property(lambda _: HeldOptional)
    _component_specs = property(lambda self: (tf.TensorSpec([], tf.bool), self._held))

    def __init__(self, spec: Nest, held: Nest, number: int) -> None:
        self._spec, self._held, self._number = spec, held, number

    def _serialize(self) -> tuple[Any, ...]:
        return self._spec, self._held, self._number

    def _to_components(self, value: HeldOptional) -> tuple[Any, ...]:
        return value._there, value._held

    def _from_components(self, components: Any) -> HeldOptional:
        there, held = components
        return HeldOptional(self._spec, there, held, _later.get(self._number))


class HeldOptional(tf.experimental.Optional):
    """An element that is there or not, its parts where they are, on several devices.

    TensorFlow's optionals hold all tensors of a value on one device.  ``held`` is the element,
    without rows where it is not there; or what the iterator ``later`` makes one of, once.
    """

    def __init__(self, spec: Nest, there: tf.Tensor, held: Nest, later: Any = None) -> None:
        self._spec, self._there, self._held, self._later = spec, there, held, later
        if later is not None:
            _later[id(later)] = later

    element_spec = property(lambda self: self._spec)

    def has_value(self, name: str | None = None) -> tf.Tensor:
        return tf.identity(self._there, name)

    def get_value(self, name: str | None = None) -> Nest:
        del name
        if self._later is not None:
            return self._later.opened(self._held)
        tf.debugging.Assert(self._there, ["the optional has no value: all data has ended"])
        return self._held

    @property
    def _type_spec(self) -> HeldOptionalSpec:
        held = self._spec if self._later is None else tf.nest.map_structure(
            tf.type_spec_from_value, self._held)
        return HeldOptionalSpec(self._spec, held, 0 if self._later is None else id(self._later))


def refuse_endless(builtin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``builtin`` as autograph calls it, which in a function that is traced would know no end."""
    if tf.executing_eagerly():
        return builtin(*args, **kwargs)
    raise NotImplementedError(
        f"{builtin.__name__} over a distributed dataset in a tf.function. {_ENDLESS}")
