"""Iterators over datasets of sub-batches; ``tf.data`` iterators, so they can be checkpointed.

Goes in: an iterator of ``tf.data``.  Comes out: a :class:`TowerIterator`, which raises in Python
loops that would never end while tracing; optionals, which are elements that may be absent.
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
# Batches taken in one trace: from the first number on, warn; at the second, raise.
_MANY, _TOO_MANY = 100, 1000
_taken_in: weakref.WeakKeyDictionary[tf.Graph, int] = weakref.WeakKeyDictionary()

# Takes a dataset, and a function from an element to its row counts (a vector or None).  Returns the
# dataset that counts the rows of the elements taken from it, and a function that returns the counts
Follow = Callable[[tf.data.Dataset, Callable[[tuple[Any, ...]], Any]], tuple[tf.data.Dataset, Any]]


class _Counting(threading.local):
    follow: Follow | None = None


# If ``follow`` is set, it counts the rows of this thread's new iterators over a
# :class:`TowerDataset`; their ``row_count`` returns the counts.
counting = _Counting()


class Steps:
    """The methods that iterators over a :class:`TowerDataset` share."""

    agreement: Any = None  # with several machines, the shards.Agreement about each element
    _open_rows = False
    _between: Callable[[], None] | None = None

    def __next__(self) -> Nest:
        if self._between is not None and tf.executing_eagerly():
            self._between()  # a Python loop ends a step here and begins the next one
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Nest:
        """The next batch; raises ``tf.errors.OutOfRangeError`` at the end."""
        if not tf.executing_eagerly():
            _check_ends()
        batch = self.take() if self.agreement is None else self.agreement.batch(self)
        return sub_batches.with_open_rows(batch) if self._open_rows else batch

    def get_next_as_optional(self) -> tf.experimental.Optional:
        return self._optional() if self.agreement is None else self.agreement.optional(self)

    def read_once(self) -> Any:
        """An iterator over the same data, for loops that read each optional's value just once."""
        return self

    @property
    def element_spec(self) -> Nest:
        return self.spec if self.agreement is None else self.agreement.element_spec

    # The pipeline's elements, before the agreement of several machines: their spec, the method that
    # takes the next one, and the method that takes it as an optional.
    spec: Nest
    take: Callable[..., Nest]
    _optional: Callable[..., tf.experimental.Optional]


def as_optional(element: Nest) -> tf.Tensor:
    """An element as a ``tf.data`` optional: a variant, of one shape whatever the element's is."""
    return tf.raw_ops.OptionalFromValue(components=tensors_of(element))


def value_of(optional: tf.Tensor, spec: Nest) -> Nest:
    """The element, of ``spec``, that :func:`as_optional` has made an optional of."""
    specs = tf.nest.flatten(spec, expand_composites=True)
    tensors = tf.raw_ops.OptionalGetValue(
        optional=optional, output_types=[each.dtype for each in specs],
        output_shapes=[each.shape for each in specs])
    return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)


def tensors_of(element: Nest) -> list[Any]:
    """All tensors of ``element``, flat; nothing for components that are None."""
    return [leaf for leaf in tf.nest.flatten(element, expand_composites=True) if leaf is not None]


def copied(element: Nest) -> Nest:
    """A copy of an element, each tensor on its device."""
    def copy(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tensor.device):
            return tf.identity(tensor)

    return tf.nest.map_structure(copy, element, expand_composites=True)


def _check_ends() -> None:
    """Counts the batches taken in this trace; warns, then raises, if a Python loop never ends."""
    graph = tf.compat.v1.get_default_graph()
    taken = _taken_in[graph] = _taken_in.get(graph, 0) + 1
    text = (f"{{}} {taken} batches were taken from distributed datasets while one tf.function was "
            f"traced. {_ENDLESS}")
    if taken == _MANY:
        _log.warning(text.format("So far"))
    if taken == _TOO_MANY:
        raise NotImplementedError(text.format("Already"))


class TowerIteratorSpec(tf.data.IteratorSpec):
    """The type spec of :class:`TowerIterator`, so that a function gets one as its argument."""

    value_type = property(lambda _: TowerIterator)

    def __init__(self, element_spec: Nest, agreement: Any) -> None:
        super().__init__(element_spec)
        self._agreement = agreement

    def _serialize(self) -> tuple[Any, ...]:
        return self._element_spec, self._agreement

    def _from_components(self, components: Any) -> TowerIterator:
        iterator = super()._from_components(components)
        iterator.__class__ = TowerIterator
        iterator.agreement = self._agreement
        return iterator


# OwnedIterator comes first: otherwise ``iterator.__class__ = TowerIterator`` would fail.
class TowerIterator(_tf.OwnedIterator, tf.distribute.DistributedIterator, Steps):
    """Iterates over a :class:`TowerDataset`; a ``tf.data`` iterator, so it can be checkpointed."""

    row_count: Any = None  # returns the numbers of rows taken, see :data:`counting`
    __next__, get_next = Steps.__next__, Steps.get_next
    get_next_as_optional = Steps.get_next_as_optional
    element_spec = Steps.element_spec
    spec = property(lambda self: self._element_spec)
    take, _optional = _tf.OwnedIterator.get_next, _tf.OwnedIterator.get_next_as_optional

    @property
    def _type_spec(self) -> TowerIteratorSpec:
        return TowerIteratorSpec(self._element_spec, self.agreement)


# The iterators that make elements of optionals, by id: a type spec can only hold plain values.
_iterators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class HeldOptionalSpec(tf.TypeSpec):
    value_type = property(lambda _: HeldOptional)
    _component_specs = property(lambda self: (tf.TensorSpec([], tf.bool), self._held))

    def __init__(self, spec: Nest, held: Nest, number: int) -> None:
        self._spec, self._held, self._number = spec, held, number

    def _serialize(self) -> tuple[Any, ...]:
        return self._spec, self._held, self._number

    def _to_components(self, value: HeldOptional) -> tuple[Any, ...]:
        return value._has_value, value._held

    def _from_components(self, components: Any) -> HeldOptional:
        has_value, held = components
        return HeldOptional(self._spec, has_value, held, _iterators.get(self._number))


class HeldOptional(tf.experimental.Optional):
    """An optional element whose tensors are on several devices.

    TensorFlow's optionals hold all tensors of a value on one device.  ``held`` is the element,
    without rows if it is absent; or the parts from which ``iterator.element_of`` makes it.
    """

    def __init__(self, spec: Nest, has_value: tf.Tensor, held: Nest, iterator: Any = None) -> None:
        self._spec, self._has_value, self._held, self._iterator = spec, has_value, held, iterator
        if iterator is not None:
            _iterators[id(iterator)] = iterator

    element_spec = property(lambda self: self._spec)

    def has_value(self, name: str | None = None) -> tf.Tensor:
        return tf.identity(self._has_value, name)

    def get_value(self, name: str | None = None) -> Nest:
        del name
        if self._iterator is not None:
            return self._iterator.element_of(self._held)
        tf.debugging.Assert(self._has_value, ["the optional has no value: all data has ended"])
        return self._held

    @property
    def _type_spec(self) -> HeldOptionalSpec:
        if self._iterator is None:
            return HeldOptionalSpec(self._spec, self._spec, 0)
        held = tf.nest.map_structure(tf.type_spec_from_value, self._held)
        return HeldOptionalSpec(self._spec, held, id(self._iterator))


def refuse_endless(builtin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``builtin``, such as ``zip``, in autograph: raises while tracing, see _ENDLESS."""
    if tf.executing_eagerly():
        return builtin(*args, **kwargs)
    raise NotImplementedError(
        f"{builtin.__name__} over a distributed dataset in a tf.function. {_ENDLESS}")
