"""What a strategy's workers iterate over: all get to the end at the same step.

Goes in: this worker's part of each global batch (:mod:`shards`).  Comes out: the same with the row
counts of the towers of all machines in each element.  Those are told in one small all-reduce an
element, which also tells who still has data: a worker whose data has ended goes on with elements
without rows until all have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import datasets as datasets_lib
from towerstrategy.batch import iterators, sub_batches
from towerstrategy.batch import rows as rows_lib
from towerstrategy.batch.rows import Nest
from towerstrategy.machines import meeting


class WorkersIteratorSpec(tf.data.IteratorSpec):
    """The type spec of :class:`WorkersIterator`.

    Args:
      flat: the specs of what the pipeline gives: ``(there, rows, leaves)``.
      packed: the nest of specs of an element as the pipeline's end knew it.
      number: of the :class:`machines.Machines`.
      devices: where the towers' parts are put.
    """

    __slots__ = ["_packed", "_number", "_devices"]

    def __init__(self, flat: Any, packed: Nest, number: int, devices: tuple[str, ...]) -> None:
        super().__init__(flat)
        self._packed, self._number, self._devices = packed, number, devices

    value_type = property(lambda _: WorkersIterator)

    def _serialize(self) -> tuple[Any, ...]:
        return self._element_spec, self._packed, self._number, self._devices

    def _from_components(self, components: Any) -> WorkersIterator:
        return _agreeing(super()._from_components(components), self._packed,
                         meeting.numbered(self._number), self._devices)


class WorkersIterator(iterators.TowerIterator):
    """Iterates over a :class:`WorkersDataset`: all workers get to the end at the same step."""

    _packed: Nest
    _workers: meeting.Machines

    def get_next(self) -> Nest:
        there, element = self._agreed()
        if tf.executing_eagerly():
            if not bool(there):
                _raise_ended()
            return iterators.handed(self, iterators.onto_devices(element, self._devices))
        # An iterator without elements raises the error that says that data has ended.
        ended = tf.cond(there, lambda: tf.constant(0, tf.int64), _raise_ended)
        with tf.control_dependencies([ended]):
            element = tf.nest.map_structure(tf.identity, element, expand_composites=True)
        return iterators.handed(self, iterators.onto_devices(element, self._devices))

    def __next__(self) -> Nest:
        return iterators.next_in_python(self)

    def get_next_as_optional(self) -> tf.experimental.Optional:
        there, element = self._agreed()
        spec = self.element_spec

        def empty() -> tf.experimental.Optional:
            return tf.experimental.Optional.empty(spec)

        def full() -> tf.experimental.Optional:
            return tf.experimental.Optional.from_value(element)

        if tf.executing_eagerly():
            return full() if bool(there) else empty()
        return tf.cond(there, full, empty)

    @property
    def element_spec(self) -> Nest:
        return _packed_spec(self._packed, self._element_spec, self._workers)

    @property
    def _type_spec(self) -> WorkersIteratorSpec:
        return WorkersIteratorSpec(self._element_spec, self._packed, self._workers.number,
                                   tuple(self._devices))

    def _agreed(self) -> tuple[tf.Tensor, Nest]:
        """Whether there is an element, on any worker; and this worker's, with all row counts."""
        workers = self._workers
        with tf.device("CPU:0"):
            there, rows, leaves = _tf.OwnedIterator.get_next(self)
            here = tf.cast(there, tf.int64)
            before, after = workers.first, workers.replicas - workers.first - workers.towers
            told = workers.sum_one(tf.concat([here[tf.newaxis], tf.pad(here * rows,
                                                                       [[before, after]])], 0))
            told.set_shape([1 + workers.replicas])
            batched = any(isinstance(spec, sub_batches.SubBatchesSpec)
                          for spec in tf.nest.flatten(self._packed))
            element = _pack(self._packed, leaves, workers.towers,
                            lambda values: sub_batches.StandInSubBatches(values, told[1:]),
                            _tf.PerReplica)
            return told[0] >= (1 if batched else workers.count), element


def _agreeing(iterator: Any, packed: Nest, workers: meeting.Machines,
              devices: Sequence[str]) -> WorkersIterator:
    iterator.__class__ = WorkersIterator
    iterator._packed, iterator._workers, iterator._devices = packed, workers, devices
    return iterator


def _raise_ended() -> tf.Tensor:
    """Raises ``tf.errors.OutOfRangeError``, in eager code or when the graph runs."""
    return iter(tf.data.Dataset.range(0)).get_next()


def _pack(packed: Nest, leaves: Sequence[Any], towers: int, batched: Callable[[list[Any]], Any],
          plain: Callable[[list[Any]], Any]) -> Nest:
    """``leaves`` in the structure of ``packed``, the towers' values of a component together."""
    left = list(leaves)

    def of(spec: tf.TypeSpec) -> Any:
        if not isinstance(spec, _tf.PerReplicaSpec):
            return left.pop(0)
        values = [left.pop(0) for _ in range(towers)]
        return (batched if isinstance(spec, sub_batches.SubBatchesSpec) else plain)(values)

    return tf.nest.map_structure(of, packed)


def _packed_spec(packed: Nest, flat: Any, workers: meeting.Machines) -> Nest:
    """The spec of an element with the row counts of all machines."""
    counts = tf.TensorSpec([workers.replicas], tf.int64)
    return _pack(packed, flat[2], workers.towers,
                 lambda specs: sub_batches.StandInSpec(*specs, counts),
                 lambda specs: _tf.PerReplicaSpec(*specs))


class WorkersDataset(datasets_lib.TowerDataset):
    """What a strategy's workers iterate over: this worker's part of each global batch.

    Args:
      dataset: elements hold :class:`split.StandInSubBatches` with this worker's row counts, or
        ``PerReplica`` values where elements are no batches.
      workers: where the workers meet.
      stand_ins: whether towers without rows get stand-ins.
      ready: how many elements the pipeline holds ready.
      length: elements in one pass.
      source: what it was made of.
    """

    def __init__(self, dataset: tf.data.Dataset, workers: meeting.Machines, stand_ins: bool,
                 ready: int, length: Any, source: datasets_lib.Source) -> None:
        self._spec = dataset.element_spec
        self._workers = workers
        self._length = length
        super().__init__(self._endless(dataset, stand_ins).prefetch(ready), source)

    @property
    def element_spec(self) -> Nest:
        return _packed_spec(self._spec, self._dataset.element_spec, self._workers)

    @property
    def cardinality(self) -> Any:
        """Steps in one pass, as ``tf.data`` counts them; unknown where workers may have others."""
        return self._length

    def __len__(self) -> int:
        if int(self._length) < 0:
            raise TypeError("the dataset's length is infinite or not known.")
        return int(self._length)

    def __iter__(self) -> Any:
        if self._watcher is not None and tf.executing_eagerly():
            self._watcher.agree()
        return super().__iter__()

    def _layout(self, spec: Nest) -> None:
        del spec
        # The step puts parts on the devices: TensorFlow's multi-device iterator, made in a function
        # of one of several workers, was seen to hang.
        return None

    def _iterator(self, follow: Any) -> WorkersIterator:
        return _agreeing(super()._iterator(follow), self._spec, self._workers,
                         self._fetch.devices)

    def _endless(self, dataset: tf.data.Dataset, stand_ins: bool) -> tf.data.Dataset:
        """Elements ``(there, rows, values)``, at the end of the data without end such with no rows.
        """
        towers = self._workers.towers

        def flat(element: Nest) -> tuple[Any, ...]:
            rows = tf.zeros([towers], tf.int64)
            values: list[Any] = []
            for leaf in tf.nest.flatten(element):
                if isinstance(leaf, sub_batches.StandInSubBatches):
                    rows = leaf.rows
                values += leaf.values if isinstance(leaf, _tf.PerReplica) else [leaf]
            return True, rows, tuple(values)

        missing = []
        for spec in tf.nest.flatten(self._spec):
            several = isinstance(spec, _tf.PerReplicaSpec)
            specs = spec._component_specs[:towers] if several else [spec]
            missing += [rows_lib.rows_of_zeros(value, 1 if stand_ins else 0) for value in specs]
        nothing = tf.data.Dataset.from_tensors(
            (False, tf.zeros([towers], tf.int64), tuple(missing))).repeat()
        return dataset.map(datasets_lib.on_elements(self._spec, flat)).concatenate(nothing)
