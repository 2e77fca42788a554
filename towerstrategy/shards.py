"""A dataset -> this machine's part of each global batch.

Goes in: the dataset that every worker of a cluster has made, and its auto-shard policy.  Comes out:
a :class:`WorkersDataset`: what :mod:`split` makes of a dataset on one machine, with the row counts
of the towers of all machines in each element.

Those are told in one small all-reduce an element, which also tells who still has data: a worker
whose data has ended goes on with elements without rows until all have ended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy import machines, split

Policy: TypeAlias = tf.data.experimental.AutoShardPolicy
Nest = Any


def dealing(workers: machines.Machines, told: slice = slice(None)) -> split.Dealing:
    """Deals a batch that every worker has: each takes its own towers' rows."""
    here = slice(workers.first, workers.first + workers.towers)

    def deal(rows: split.Rows) -> tuple[list[Any], list[Any], list[Any]]:
        starts, sizes = split.deal(rows, workers.replicas)
        return starts[here], sizes[here], sizes[told]

    return deal


def shard_dataset(dataset: tf.data.Dataset, workers: machines.Machines, stand_ins: bool = False,
                  ready: int = split.READY, in_order: bool = False) -> WorkersDataset:
    """This worker's part of a dataset of global batches.

    The policy is the dataset's ``options().experimental_distribute.auto_shard_policy``:

    * ``DATA``: every worker reads all batches and takes its towers' rows of each.
    * ``FILE``, ``HINT``: every worker reads files of its own (TensorFlow's sharding), and takes of
      each batch that it reads as many rows as its towers' share of a global batch is.
    * ``OFF``: the same from all files: every worker reads everything.
    * ``AUTO``: ``FILE`` where TensorFlow can shard the dataset's files, else ``DATA``.

    Args:
      dataset: elements are batches, see :func:`split.split_batch`.
      workers: where the workers meet.
      stand_ins: see :func:`split.split_batch`.
      ready: how many elements the pipeline holds ready.
      in_order: whether ``AUTO`` is to keep the rows' order, which ``DATA`` does.

    Raises:
      TypeError: ``dataset`` is no ``tf.data.Dataset``.
      ValueError: its elements are not batched.
    """
    split.check_batched(dataset)
    own = _own_batches(dataset, workers, in_order)
    if own is None:
        here = slice(workers.first, workers.first + workers.towers)
        made = dataset.map(split.on_elements(dataset.element_spec, lambda element:
                           split.split_batch(element, workers.towers, stand_ins,
                                             dealing(workers, here))))
        length = dataset.cardinality()
    else:
        made = _dealt(own, workers, stand_ins)
        length = own.cardinality() * workers.count if own.cardinality() > 0 else own.cardinality()
    again = functools.partial(shard_dataset, dataset, workers, True, ready, in_order)
    return WorkersDataset(made, workers, stand_ins, ready, length, again)


def shard_grouped(grouped: split.TowerDataset, workers: machines.Machines, stand_ins: bool,
                  ready: int) -> WorkersDataset:
    """A dataset of this worker's own per-tower batches, as :mod:`split` groups them."""
    dataset = grouped.dataset
    made = dataset.map(split.on_elements(dataset.element_spec, _counted))
    again = functools.partial(shard_grouped, grouped.with_stand_ins(), workers, True, ready)
    return WorkersDataset(made, workers, stand_ins, ready, dataset.cardinality(), again)


def _own_batches(dataset: tf.data.Dataset, workers: machines.Machines,
                 in_order: bool) -> tf.data.Dataset | None:
    """The batches of which this worker has all rows; None where it shares them with all others."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == Policy.OFF:
        return dataset
    if policy == Policy.DATA or (policy == Policy.AUTO and in_order):
        return None
    try:
        return _by_file(dataset, workers, Policy.FILE if policy == Policy.AUTO else policy)
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError):
        if policy != Policy.AUTO:
            raise
        return None


def _by_file(dataset: tf.data.Dataset, workers: machines.Machines,
             policy: Policy) -> tf.data.Dataset:
    """``dataset`` from this worker's files alone, as TensorFlow shards it."""
    spec = dataset.element_spec
    sharded = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(dataset), num_workers=workers.count,
        index=workers.index, auto_shard_policy=policy.value, num_replicas=workers.replicas,
        output_types=[tf.variant if isinstance(leaf, tf.SparseTensorSpec) else leaf.dtype
                      for leaf in tf.nest.flatten(spec)],
        output_shapes=[leaf.shape for leaf in tf.nest.flatten(spec)])
    return tf.data.experimental.from_variant(sharded, spec)


def _dealt(own: tf.data.Dataset, workers: machines.Machines, stand_ins: bool) -> tf.data.Dataset:
    """Each of this worker's batches as several steps, so that all workers' make one batch."""
    spec = own.element_spec
    # Workers begin at different parts, so that each step has a part of every size.
    turn = np.roll(np.arange(workers.count), -workers.index)
    until = np.cumsum([0, *workers.towers_of])

    def parts(element: Nest) -> tf.data.Dataset:
        leaves = tf.nest.flatten(element)
        rows = tf.cast(split.rows_in(leaves[0]), tf.int64)
        _, each = split.deal(rows, workers.replicas)
        sizes = tf.stack([tf.add_n(each[until[worker]:until[worker + 1]]) for worker in turn])
        starts = tf.cumsum(sizes, exclusive=True)

        def part(number: tf.Tensor) -> tuple[tf.Tensor, Nest]:
            start, size = starts[number], sizes[number]
            if stand_ins:
                start = tf.minimum(start, tf.maximum(rows - 1, 0))
            taken = tf.maximum(size, 1) if stand_ins else size
            cut = [split.rows_between(leaf, start, taken) for leaf in leaves]
            return size, tf.nest.pack_sequence_as(spec, cut)

        return tf.data.Dataset.range(workers.count).map(part)

    def deal_part(size: tf.Tensor, element: Nest) -> Nest:
        starts, sizes = split.deal(size, workers.towers)
        return split.split_batch(element, workers.towers, stand_ins,
                                 lambda _: (starts, sizes, sizes))

    return own.flat_map(split.on_elements(spec, parts)).map(deal_part)


def _counted(element: Nest) -> Nest:
    """An element of grouped batches with the row counts of this worker's towers."""

    def counted(leaf: Any) -> Any:
        if isinstance(leaf, split.StandInSubBatches):
            return leaf
        parts = leaf.values if isinstance(leaf, _tf.PerReplica) else [leaf]
        if not isinstance(leaf, split.SubBatches) and not _has_rows(parts[0]):
            return _tf.PerReplica(parts)
        rows = tf.stack([tf.cast(split.rows_in(part), tf.int64) for part in parts])
        return split.StandInSubBatches(parts, rows)

    return tf.nest.map_structure(counted, element)


def _has_rows(value: Any) -> bool:
    return (isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))
            and value.shape.rank != 0)


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
                         machines.numbered(self._number), self._devices)


class WorkersIterator(split.TowerIterator):
    """Iterates over a :class:`WorkersDataset`: all workers get to the end at the same step."""

    _packed: Nest
    _workers: machines.Machines

    def get_next(self) -> Nest:
        there, element = self._agreed()
        if tf.executing_eagerly():
            if not bool(there):
                _raise_ended()
            return split.onto_devices(element, self._devices)
        # An iterator without elements raises the error that says that data has ended.
        ended = tf.cond(there, lambda: tf.constant(0, tf.int64), _raise_ended)
        with tf.control_dependencies([ended]):
            element = tf.nest.map_structure(tf.identity, element, expand_composites=True)
        return split.onto_devices(element, self._devices)

    def __next__(self) -> Nest:
        self._check_ends()
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

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
            batched = any(isinstance(spec, split.SubBatchesSpec)
                          for spec in tf.nest.flatten(self._packed))
            element = _pack(self._packed, leaves, workers.towers,
                            lambda values: split.StandInSubBatches(values, told[1:]),
                            _tf.PerReplica)
            return told[0] >= (1 if batched else workers.count), element


def _agreeing(iterator: Any, packed: Nest, workers: machines.Machines,
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
        return (batched if isinstance(spec, split.SubBatchesSpec) else plain)(values)

    return tf.nest.map_structure(of, packed)


def _packed_spec(packed: Nest, flat: Any, workers: machines.Machines) -> Nest:
    """The spec of an element with the row counts of all machines."""
    counts = tf.TensorSpec([workers.replicas], tf.int64)
    return _pack(packed, flat[2], workers.towers,
                 lambda specs: split.StandInSpec(*specs, counts),
                 lambda specs: _tf.PerReplicaSpec(*specs))


class WorkersDataset(split.TowerDataset):
    """What a strategy's workers iterate over: this worker's part of each global batch.

    Args:
      dataset: elements hold :class:`split.StandInSubBatches` with this worker's row counts, or
        ``PerReplica`` values where elements are no batches.
      workers: where the workers meet.
      stand_ins: whether towers without rows get stand-ins.
      ready: how many elements the pipeline holds ready.
      length: elements in one pass.
      with_stand_ins: makes the same dataset with stand-ins.
    """

    def __init__(self, dataset: tf.data.Dataset, workers: machines.Machines, stand_ins: bool,
                 ready: int, length: Any, with_stand_ins: Callable[[], WorkersDataset]) -> None:
        self._spec = dataset.element_spec
        self._workers = workers
        self._length = length
        super().__init__(self._endless(dataset, stand_ins).prefetch(ready), with_stand_ins)

    @property
    def element_spec(self) -> Nest:
        return _packed_spec(self._spec, self._dataset.element_spec, self._workers)

    @property
    def cardinality(self) -> Any:
        """Steps that this worker's own data makes; other workers may have more."""
        return self._length

    def __len__(self) -> int:
        if int(self._length) < 0:
            raise TypeError("the dataset's length is infinite or not known.")
        return int(self._length)

    def __iter__(self) -> WorkersIterator:
        return _agreeing(super().__iter__(), self._spec, self._workers, self._devices)

    def _endless(self, dataset: tf.data.Dataset, stand_ins: bool) -> tf.data.Dataset:
        """Elements ``(there, rows, values)``, at the end of the data without end such with no rows.
        """
        towers = self._workers.towers

        def flat(element: Nest) -> tuple[Any, ...]:
            rows = tf.zeros([towers], tf.int64)
            values: list[Any] = []
            for leaf in tf.nest.flatten(element):
                if isinstance(leaf, split.StandInSubBatches):
                    rows = leaf.rows
                values += leaf.values if isinstance(leaf, _tf.PerReplica) else [leaf]
            return True, rows, tuple(values)

        missing = []
        for spec in tf.nest.flatten(self._spec):
            several = isinstance(spec, _tf.PerReplicaSpec)
            specs = spec._component_specs[:towers] if several else [spec]
            missing += [split.rows_of_zeros(value, 1 if stand_ins else 0) for value in specs]
        nothing = tf.data.Dataset.from_tensors(
            (False, tf.zeros([towers], tf.int64), tuple(missing))).repeat()
        return dataset.map(split.on_elements(self._spec, flat)).concatenate(nothing)
