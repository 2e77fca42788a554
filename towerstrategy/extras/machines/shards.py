"""Shards a dataset over the workers; all workers reach its end together.

Goes in: the dataset that every worker of a cluster has made, and its auto-shard policy.  Comes out:
a :class:`WorkersDataset`: this worker's part of each global batch, with the row counts of the
towers of all machines.  A small all-reduce per element sums these counts, and the number of workers
that have data.  A worker whose data has ended gets elements without rows until all have ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import (
    datasets as datasets_lib,
    iterators,
    prefetching,
    rows as rows_lib,
    splitting,
    sub_batches,
)
from towerstrategy.batch.rows import Nest
from towerstrategy.extras.machines import collectives

Policy: TypeAlias = tf.data.experimental.AutoShardPolicy


class ShardingMachines(collectives.Machines):
    """The workers of one strategy: their collectives, and the rows that each reads."""

    def shard_dataset(self, dataset: tf.data.Dataset, ready: int = datasets_lib.READY,
                      measured: Any = None) -> WorkersDataset:
        """This worker's part of a dataset of global batches, by its auto-shard policy.

        By ``AUTO`` and ``DATA``, every worker reads all batches and takes its towers' rows of each.
        By the others, a worker reads its own files, or all of them, and uses each batch for as many
        steps as there are workers, a part of it in each.  See docs/several_machines.md.

        Args:
          measured: the shares if they change (see :mod:`extras.measured`), else None.
        """
        datasets_lib.check_batched(dataset)
        batches = _batches_of_worker(dataset, self)
        if batches is None:
            same_on_all = tf.data.Options()
            same_on_all.deterministic = True
            dataset = dataset.with_options(same_on_all)
            elements = _map_by_units(
                dataset, self, measured, lambda element, units: splitting.split_batch(
                    element, self.towers, here=self.here,
                    cuts=lambda rows: rows_lib.split_rows(rows, self.replicas, units)))
            length = dataset.cardinality()
        else:
            elements = _in_steps(batches, self, measured)
            length = _length_for_all(batches)
        return WorkersDataset(
            elements, self, ready, length,
            lambda fn: self.shard_dataset(dataset.map(fn), ready, measured), measured)

    def shard_grouped(self, grouped: datasets_lib.TowerDataset,
                      ready: int) -> WorkersDataset:
        """A dataset of this worker's own per-tower batches, as :mod:`datasets` groups them."""
        return WorkersDataset(grouped.dataset, self, ready, _length_for_all(grouped.dataset),
                              lambda fn: self.shard_grouped(grouped.map(fn), ready))


def _map_by_units(dataset: tf.data.Dataset, workers: collectives.Machines, measured: Any,
                  fn: Callable[[Nest, rows_lib.Units], Nest]) -> tf.data.Dataset:
    """Maps ``fn``, which takes an element and the shares of all towers, over a dataset."""
    # An iterator keeps its first shares: at a change, workers may be at different elements.
    if measured is None:
        return dataset.map(datasets_lib.on_elements(
            dataset.element_spec, lambda element: fn(element, workers.units)))
    return tf.data.Dataset.zip((dataset, measured.of_iterator())).map(fn)


def _length_for_all(batches: tf.data.Dataset) -> Any:
    """The length of this worker's ``batches`` if it is infinite or unknown, else unknown."""
    # Others may have more or fewer batches, and Keras would end an epoch after this many.
    length = batches.cardinality()
    return tf.constant(tf.data.UNKNOWN_CARDINALITY, tf.int64) if length >= 0 else length


def _batches_of_worker(dataset: tf.data.Dataset,
                       workers: collectives.Machines) -> tf.data.Dataset | None:
    """The batches of which this worker uses all rows; None if it uses a part of every batch."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy in (Policy.AUTO, Policy.DATA):  # so a step has one device's rows, unless asked for
        return None
    if policy == Policy.OFF:
        return dataset
    return _tf.AutoShardDataset(dataset, workers.count, workers.index)


def _in_steps(batches: tf.data.Dataset, workers: collectives.Machines,
              measured: Any) -> tf.data.Dataset:
    """Splits each of this worker's batches over steps; all workers' parts make a global batch."""
    spec = tf.nest.map_structure(sub_batches.with_any_rows, batches.element_spec)

    def parts(element: Nest) -> tf.Tensor:
        # Parts of equal sizes, since a worker has to do what is in its files.  Workers start at
        # different parts, so that each step has a part of every size.
        split = splitting.split_batch(element, workers.count, lambda rows: tf.roll(
            rows_lib.split_rows(rows, workers.count), -workers.index, 0))
        leaves = [leaf.values for leaf in tf.nest.flatten(split) if leaf is not None]
        return tf.stack(list(map(iterators.as_optional, zip(*leaves))))

    def split_part(part: tf.Tensor, units: rows_lib.Units) -> Nest:
        local_units = None if units is None else units[workers.here]
        return splitting.split_batch(
            iterators.value_of(part, spec), workers.towers,
            lambda rows: rows_lib.split_rows(rows, workers.towers, local_units))

    steps = batches.map(datasets_lib.on_elements(batches.element_spec, parts)).unbatch()
    return _map_by_units(steps, workers, measured, split_part)


class Agreement(NamedTuple):
    """Agrees with the other workers on each element's rows and on the end of the data.

    It is part of iterators' type specs, so it holds plain values.  A pipeline's elements are
    ``(exists, rows, tensors)``, see :class:`WorkersDataset`.
    """

    packed: Nest  # the spec of an element that this worker's pipeline has split, without row counts
    number: int  # the index of the workers in :data:`collectives.MADE`

    @property
    def _workers(self) -> collectives.Machines:
        return collectives.MADE[self.number]

    def same_on_all(self, number: int) -> int:
        """Worker 0's number; 0 in a graph, as this is decided before anything runs."""
        return int(self._workers.chiefs([number])[0]) if tf.executing_eagerly() else 0

    def batch(self, iterator: Any) -> Nest:
        """The next element; raises at the end of the data of all workers."""
        exists, rows, local = self._take(iterator)
        # An empty iterator raises the error about the end of the data, before a loop's next key is
        # taken: else some workers would have taken more keys than others.
        ended = tf.cond(exists, self._workers.next_key_in_loops,
                        lambda: iter(tf.data.Dataset.range(0, output_type=tf.int32)).get_next())
        with tf.control_dependencies([ended]):
            local = local if tf.executing_eagerly() else iterators.copied(local)
        return self.element(local, rows)

    def optional(self, iterator: Any) -> tf.experimental.Optional:
        """The next element as an optional, which has no value after the end of the data."""
        exists, rows, local = self._take(iterator)
        return iterators.HeldOptional(iterator.element_spec, exists, self.element(local, rows))

    def _take(self, iterator: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
        with tf.device("CPU:0"):
            return self.of_host(iterator.take())

    def of_host(self, local: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
        """Whether there is an element, the rows of all towers, and the pipeline's own (``local``).

        It needs only the host's part of ``local``; the other parts may be taken later.
        """
        workers, (exists, rows, *_) = self._workers, local
        with tf.device("CPU:0"):
            one = tf.cast(exists, tf.int64)
            before, after = workers.first, workers.replicas - workers.first - workers.towers
            sums = workers.sum([tf.concat(
                [one[tf.newaxis], tf.pad(one * rows, [[before, after]])], 0)])[0]
            sums.set_shape([1 + workers.replicas])
            batched = any(isinstance(spec, sub_batches.SubBatchesSpec)
                          for spec in tf.nest.flatten(self.packed))
            return sums[0] >= (1 if batched else workers.count), sums[1:], local

    def element(self, local: Any, rows: tf.Tensor) -> Nest:
        """An element with the values of the pipeline's element ``local`` and all towers' rows."""
        packed = tf.nest.pack_sequence_as(self.packed, local[2], expand_composites=True)
        return tf.nest.map_structure(
            lambda leaf: sub_batches.SubBatches(leaf.values, rows=rows)
            if isinstance(leaf, sub_batches.SubBatches) else leaf, packed)

    @property
    def element_spec(self) -> Nest:
        """The spec of an element with the row counts of all machines."""
        counts = tf.TensorSpec([self._workers.replicas], tf.int64)
        return tf.nest.map_structure(
            lambda spec: sub_batches.SubBatchesSpec(*spec._component_specs, counts, counted=True)
            if isinstance(spec, sub_batches.SubBatchesSpec) else spec, self.packed)


class WorkersDataset(datasets_lib.TowerDataset):
    """A worker's part of a distributed dataset: its towers' rows of each global batch.

    ``split`` has this worker's elements; ``length`` is the ``cardinality`` for all workers.
    Elements of ``dataset`` are ``(exists, rows, tensors)``: whether it is an element, its rows on
    this worker's towers, and its tensors.  After the data, endlessly, there are none without rows.
    """

    def __init__(self, split: tf.data.Dataset, workers: collectives.Machines, ready: int,
                 length: Any, mapped: Callable[[Any], WorkersDataset],
                 measured: Any = None) -> None:
        self._towers, self._length, self._measured = workers.towers, length, measured
        self._agreement = Agreement(
            tf.nest.map_structure(self._without_counts, split.element_spec), workers.number)
        super().__init__(self._endless(split).prefetch(ready), mapped)

    cardinality = property(lambda self: self._length)

    def __len__(self) -> int:
        if int(self._length) < 0:
            raise TypeError("the dataset's length is infinite or not known.")
        return int(self._length)

    def __iter__(self) -> Any:
        if self.watcher is not None and tf.executing_eagerly():
            self.watcher.agree()
        iterator = super().__iter__()
        iterator.batch_rows = self._agreement.same_on_all(self.batch_rows)
        return iterator

    def _layout(self, spec: Nest) -> prefetching.Layout:
        return prefetching.Layout(spec, [prefetching.HOST, prefetching.HOST, *prefetching.owners_of(
            self._agreement.packed, len(self.fetch.devices))])

    def _rows_of(self, element: Nest) -> Any:
        _, rows, _ = element
        return rows

    def _without_counts(self, spec: Any) -> Any:
        """The spec of the towers' parts of a component, which have any rows, and no row counts."""
        if rows_lib.is_absent(spec):
            return spec
        parts = (spec._component_specs[:self._towers] if isinstance(spec, _tf.PerReplicaSpec)
                 else [spec])
        batched = isinstance(spec, sub_batches.SubBatchesSpec) or tf.TensorShape(
            getattr(parts[0], "shape", ())).rank != 0
        return (sub_batches.SubBatchesSpec if batched else _tf.PerReplicaSpec)(
            *map(sub_batches.with_any_rows, parts))

    def _endless(self, split: tf.data.Dataset) -> tf.data.Dataset:
        """Elements as tuples: whether there is one, its towers' row counts, its tensors.

        After the last one come tuples without rows, forever: the other machines may have more.
        """
        spec = self._agreement.packed
        no_rows = tf.zeros([self._towers], tf.int64)

        def flat(element: Nest) -> tuple[Any, ...]:
            tensors = iterators.tensors_of([
                leaf.values if isinstance(leaf, _tf.PerReplica) else leaf
                for leaf in tf.nest.flatten(element)])
            rows = sub_batches.rows_of(
                tf.nest.pack_sequence_as(spec, tensors, expand_composites=True))
            if self._measured is not None:
                self._measured.note(rows)
            return True, no_rows if rows is None else rows, tuple(tensors)

        empty = iterators.tensors_of([
            rows_lib.no_rows(part) for leaf in tf.nest.flatten(spec)
            if isinstance(leaf, _tf.PerReplicaSpec) for part in leaf._component_specs])
        after_end = tf.data.Dataset.from_tensors((False, no_rows, tuple(empty))).repeat()
        return split.map(datasets_lib.on_elements(split.element_spec, flat)).concatenate(after_end)
