"""What a strategy's workers iterate over: all get to the end at the same step.

Goes in: this worker's part of each global batch (:mod:`shards`).  Comes out: the same with the row
counts of the towers of all machines in each element.  One small all-reduce an element sums them and
how many workers have data: one whose data has ended goes on with elements without rows until all
have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import (
    datasets as datasets_lib,
    iterators,
    layouts,
    prefetching,
    rows as rows_lib,
    sub_batches,
)
from towerstrategy.batch.rows import Nest
from towerstrategy.machines import collectives


class WorkersIteratorSpec(tf.data.IteratorSpec):
    """The type spec of :class:`WorkersIterator`.

    Args:
      flat: the specs of what the pipeline gives: ``(there, rows, leaves)``.
      packed: the nest of specs of an element as the pipeline's end knew it.
      number: of the :class:`collectives.Machines`.
    """

    __slots__ = ["_packed", "_number"]
    value_type = property(lambda _: WorkersIterator)

    def __init__(self, flat: Any, packed: Nest, number: int) -> None:
        super().__init__(flat)
        self._packed, self._number = packed, number

    def _serialize(self) -> tuple[Any, ...]:
        return self._element_spec, self._packed, self._number

    def _from_components(self, components: Any) -> WorkersIterator:
        return _become(super()._from_components(components), WorkersIterator, self._packed,
                       collectives.numbered(self._number))


def _agreeing(base: Any) -> Any:
    """A subclass of ``base``: with two bases no iterator that is there could become one of it."""

    class Agreeing(base):
        """What iterators over a :class:`WorkersDataset` do: all workers get to the end at once.

        Those of a kind have ``_taken``, what this worker's pipeline has next, ``(there, rows,
        leaves)``, and ``_flat_spec``, the specs of these.
        """

        _packed: Nest
        _workers: collectives.Machines

        def _batch(self) -> Nest:
            there, rows, leaves = self._agreed()
            if tf.executing_eagerly():
                if not bool(there):
                    _raise_ended()
            else:
                # An iterator without elements raises the error that says that data has ended.
                ended = tf.cond(there, lambda: tf.constant(0, tf.int64), _raise_ended)
                with tf.control_dependencies([ended]):
                    leaves = self._copied(leaves)
            return self._element(leaves, rows)

        def get_next_as_optional(self) -> tf.experimental.Optional:
            there, rows, leaves = self._agreed()
            return AgreedOptional(self.element_spec, there, self._element(leaves, rows))

        @property
        def element_spec(self) -> Nest:
            return _packed_spec(self._packed, self._flat_spec, self._workers)

        def _agreed(self) -> tuple[tf.Tensor, tf.Tensor, Any]:
            """Whether any worker has an element; the rows of all towers; this one's values."""
            with tf.device("CPU:0"):
                there, rows, leaves = self._taken()
                return (*self._summed(there, rows), leaves)

        def _summed(self, there: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            """Whether any worker has an element, and the rows of all towers."""
            workers = self._workers
            with tf.device("CPU:0"):
                here = tf.cast(there, tf.int64)
                before, after = workers.first, workers.replicas - workers.first - workers.towers
                both = workers.sum_one(tf.concat([here[tf.newaxis], tf.pad(here * rows,
                                                                           [[before, after]])], 0))
                both.set_shape([1 + workers.replicas])
                batched = any(isinstance(spec, sub_batches.SubBatchesSpec)
                              for spec in tf.nest.flatten(self._packed))
                return both[0] >= (1 if batched else workers.count), both[1:]

        def _element(self, leaves: Sequence[Any], rows: tf.Tensor) -> Nest:
            return _pack(self._packed, leaves, self._workers.towers,
                         lambda values: sub_batches.CountedSubBatches(values, rows), _tf.PerReplica)

        def _copied(self, leaves: Any) -> Any:
            return tf.nest.map_structure(tf.identity, leaves, expand_composites=True)

    return Agreeing


class WorkersIterator(_agreeing(iterators.TowerIterator)):  # type: ignore[misc]
    """Iterates over a :class:`WorkersDataset`, whose elements are on the host."""

    _flat_spec = property(lambda self: self._element_spec)

    def _taken(self) -> Any:
        return _tf.OwnedIterator.get_next(self)

    @property
    def _type_spec(self) -> WorkersIteratorSpec:
        return WorkersIteratorSpec(self._element_spec, self._packed, self._workers.number)


class PrefetchedWorkersSpec(prefetching.PrefetchedSpec):
    """The type spec of :class:`PrefetchedWorkersIterator`."""

    value_type = property(lambda _: PrefetchedWorkersIterator)

    def __init__(self, spec: Nest, owners: tuple[int, ...], streams: Any, once: bool, packed: Nest,
                 number: int) -> None:
        super().__init__(spec, owners, streams, once)
        self._packed, self._number = packed, number

    def _serialize(self) -> tuple[Any, ...]:
        return (*super()._serialize(), self._packed, self._number)

    def _from_components(self, components: Sequence[Any]) -> PrefetchedWorkersIterator:
        return _become(super()._from_components(components), PrefetchedWorkersIterator,
                       self._packed, collectives.numbered(self._number))


class PrefetchedWorkersIterator(
        _agreeing(prefetching.PrefetchedIterator)):  # type: ignore[misc]
    """The same with each tower's part on its device already."""

    _flat_spec = property(lambda self: self._layout.spec)

    def _taken(self) -> Any:
        return self._layout.element(self._parts())

    def get_next_as_optional(self) -> tf.experimental.Optional:
        if not self._once:
            return super().get_next_as_optional()
        there, *held = self._from_first(self._host_agreed, lambda agreed: agreed[0])
        return AgreedOptional(self.element_spec, there, tuple(held), self)

    def _host_agreed(self) -> tuple[tf.Tensor, tf.Tensor, Any]:
        """What the host's stream has next, as :meth:`_agreed` gives it."""
        host, _ = self._streams._device_iterators[0].get_next()
        there, rows, *_ = host
        return (*self._summed(there, rows), host)

    def whole(self, rows: tf.Tensor, host: Any) -> Nest:
        """The element of which an optional of :meth:`read_once` has held the host's part."""
        _, _, leaves = self._layout.element([(host, ()), *self.others(host)])
        return self._element(leaves, rows)

    def _copied(self, leaves: Any) -> Any:
        _, _, spec = self._layout.spec
        return layouts.Layout(spec, self._layout.owners[2:]).copied(
            leaves, self._streams._devices)

    @property
    def _type_spec(self) -> PrefetchedWorkersSpec:
        return PrefetchedWorkersSpec(self._layout.spec, self._layout.owners,
                                     self._streams._type_spec, self._once, self._packed,
                                     self._workers.number)


class AgreedOptionalSpec(tf.TypeSpec):
    """The type spec of :class:`AgreedOptional`."""

    __slots__ = ["_spec", "_held", "_later"]
    value_type = property(lambda _: AgreedOptional)
    _component_specs = property(lambda self: (tf.TensorSpec([], tf.bool), self._held))

    def __init__(self, spec: Nest, held: Nest, later: int) -> None:
        self._spec, self._held, self._later = spec, held, later

    def _serialize(self) -> tuple[Any, ...]:
        return self._spec, self._held, self._later

    def _to_components(self, value: AgreedOptional) -> tuple[Any, ...]:
        return value._there, value._held

    def _from_components(self, components: Any) -> AgreedOptional:
        there, held = components
        return AgreedOptional(self._spec, there, held, prefetching.numbered(self._later))


class AgreedOptional(tf.experimental.Optional):
    """An element that counts or not; where it does not, it is one without rows.

    Args:
      spec: the element's.
      there: whether it counts, a bool.
      held: its parts where they were prefetched to, or the rows of all towers and the host's part.
      later: the iterator whose other streams are read when the value is, which is once then.
    """

    def __init__(self, spec: Nest, there: tf.Tensor, held: Nest, later: Any = None) -> None:
        self._spec, self._there, self._held, self._later = spec, there, held, later

    element_spec = property(lambda self: self._spec)

    def has_value(self, name: str | None = None) -> tf.Tensor:
        return tf.identity(self._there, name)

    def get_value(self, name: str | None = None) -> Nest:
        del name
        tf.debugging.Assert(self._there, ["the optional has no value: all data has ended"])
        return self._held if self._later is None else self._later.whole(*self._held)

    @property
    def _type_spec(self) -> AgreedOptionalSpec:
        held = self._spec if self._later is None else tf.nest.map_structure(
            tf.type_spec_from_value, self._held)
        return AgreedOptionalSpec(self._spec, held, prefetching.number_of(self._later))


def _become(iterator: Any, kind: Any, packed: Nest, workers: collectives.Machines) -> Any:
    """``iterator``, from now on of that ``kind``."""
    iterator.__class__ = kind
    iterator._packed, iterator._workers = packed, workers
    return iterator


def _raise_ended() -> tf.Tensor:
    """Raises ``tf.errors.OutOfRangeError``, in eager code or when the graph runs."""
    return iter(tf.data.Dataset.range(0)).get_next()


def _pack(packed: Nest, leaves: Sequence[Any], towers: int, batched: Callable[[list[Any]], Any],
          plain: Callable[[list[Any]], Any]) -> Nest:
    """``leaves`` in the structure of ``packed``, the towers' values of a component together."""
    left = list(leaves)

    def of(spec: tf.TypeSpec) -> Any:
        if rows_lib.is_absent(spec):
            return None
        if not isinstance(spec, _tf.PerReplicaSpec):
            return left.pop(0)
        values = [left.pop(0) for _ in range(towers)]
        return (batched if isinstance(spec, sub_batches.SubBatchesSpec) else plain)(values)

    return tf.nest.map_structure(of, packed)


def _packed_spec(packed: Nest, flat: Any, workers: collectives.Machines) -> Nest:
    """The spec of an element with the row counts of all machines."""
    counts = tf.TensorSpec([workers.replicas], tf.int64)
    return _pack(packed, flat[2], workers.towers,
                 lambda specs: sub_batches.CountedSpec(*specs, counts),
                 lambda specs: _tf.PerReplicaSpec(*specs))


class WorkersDataset(datasets_lib.TowerDataset):
    """What a strategy's workers iterate over: this worker's part of each global batch.

    Args:
      dataset: elements hold :class:`sub_batches.CountedSubBatches` with this worker's row counts,
        or ``PerReplica`` values where elements are no batches.
      workers: their collectives.
      ready: how many elements the pipeline holds ready.
      length: its ``cardinality``; unknown where workers may have others.
      mapped: see :class:`datasets.TowerDataset`.
    """

    def __init__(self, dataset: tf.data.Dataset, workers: collectives.Machines, ready: int,
                 length: Any, mapped: Callable[[Any], WorkersDataset]) -> None:
        self._spec, self._workers, self._length = dataset.element_spec, workers, length
        super().__init__(self._endless(dataset).prefetch(ready), mapped)

    @property
    def element_spec(self) -> Nest:
        return _packed_spec(self._spec, self.dataset.element_spec, self._workers)

    cardinality = property(lambda self: self._length)

    def __len__(self) -> int:
        if int(self._length) < 0:
            raise TypeError("the dataset's length is infinite or not known.")
        return int(self._length)

    def __iter__(self) -> Any:
        if self._watcher is not None and tf.executing_eagerly():
            self._watcher.agree()
        return super().__iter__()

    def _layout(self, spec: Nest) -> layouts.Layout:
        owners = [layouts.HOST, layouts.HOST]
        for leaf in tf.nest.flatten(self._spec):
            owners += layouts.owners_of(leaf, self._workers.towers, counts=False)
        return layouts.Layout(spec, owners)

    def _rows_of(self, element: Nest) -> Any:
        _, rows, _ = element
        return rows

    def _followed(self, dataset: tf.data.Dataset, follow: Any) -> tuple[tf.data.Dataset, Any]:
        return iterators.followed(dataset, lambda _, rows, __: rows, follow)

    def _iterator(self, follow: Any) -> WorkersIterator | PrefetchedWorkersIterator:
        iterator = super()._iterator(follow)
        if isinstance(iterator, prefetching.PrefetchedIterator):
            return _become(iterator, PrefetchedWorkersIterator, self._spec, self._workers)
        return _become(iterator, WorkersIterator, self._spec, self._workers)

    def _endless(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Elements ``(there, rows, values)``; after the data, without end, such with no rows."""
        towers = self._workers.towers

        def flat(element: Nest) -> tuple[Any, ...]:
            rows = tf.zeros([towers], tf.int64)
            values: list[Any] = []
            for leaf in tf.nest.flatten(element):
                if leaf is None:
                    continue
                if isinstance(leaf, sub_batches.CountedSubBatches):
                    rows = leaf.rows
                values += leaf.values if isinstance(leaf, _tf.PerReplica) else [leaf]
            return True, rows, tuple(values)

        missing = []
        for spec in tf.nest.flatten(self._spec):
            if rows_lib.is_absent(spec):
                continue
            several = isinstance(spec, _tf.PerReplicaSpec)
            specs = spec._component_specs[:towers] if several else [spec]
            missing += [rows_lib.no_rows(value) for value in specs]
        nothing = tf.data.Dataset.from_tensors(
            (False, tf.zeros([towers], tf.int64), tuple(missing))).repeat()
        return dataset.map(datasets_lib.on_elements(self._spec, flat)).concatenate(nothing)
