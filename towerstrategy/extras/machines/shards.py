"""A dataset -> this machine's part of each global batch.

Goes in: the dataset that every worker of a cluster has made, and its auto-shard policy.  Comes out:
a :class:`workers_data.WorkersDataset`.  With it, the collectives (:mod:`collectives`) are what the
core asks of several machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import datasets as datasets_lib, rows as rows_lib, splitting, sub_batches
from towerstrategy.batch.rows import Nest
from towerstrategy.extras.machines import collectives, workers_data

Policy: TypeAlias = tf.data.experimental.AutoShardPolicy


class ShardingMachines(collectives.Machines):
    """The workers of one strategy, as the core knows them: a :class:`placement.workers.Workers`."""

    @property
    def _here(self) -> slice:
        """This worker's towers among those of all."""
        return slice(self.first, self.first + self.towers)

    def cuts_of(self, units: rows_lib.Units, counted: slice = slice(None),
                note: Callable[[Any, Any], None] | None = None) -> rows_lib.CutRows:
        """Cuts a batch that every worker has, by ``units``: each takes its own towers' rows."""
        def cut(rows: rows_lib.Rows) -> tuple[rows_lib.Sizes, slice, rows_lib.Sizes]:
            sizes = rows_lib.split_rows(rows, self.replicas, units)
            if note is not None:
                note(rows, sizes[self._here])
            return sizes, self._here, sizes[counted]

        return cut

    def shard_dataset(self, dataset: tf.data.Dataset, ready: int = datasets_lib.READY,
                      in_order: bool = False, measured: Any = None) -> workers_data.WorkersDataset:
        """This worker's part of a dataset of global batches, by its auto-shard policy.

        Either every worker reads all batches and takes its towers' rows of each, or it reads files
        of its own, or all, and takes one of as many parts as there are workers of each batch that
        it reads: docs/several_machines.md says which policy does what.

        Args:
          in_order: whether ``AUTO`` is to keep the rows' order, which ``DATA`` does.
          measured: the shares, where they change (see :mod:`extras.measured`); the workers' else.
        """
        datasets_lib.check_batched(dataset)
        own = _own_batches(dataset, self, in_order)
        if own is None:
            note = None if measured is None else measured.note
            made = _map_by_units(
                dataset, self, measured, lambda element, units: splitting.split_batch(
                    element, self.towers, self.cuts_of(units, self._here, note)))
            length = dataset.cardinality()
        else:
            made = _in_steps(own, self, measured, self._here)
            length = _length_for_all(own)
        return workers_data.WorkersDataset(
            made, self, ready, length,
            lambda fn: self.shard_dataset(dataset.map(fn), ready, in_order, measured))

    def shard_grouped(self, grouped: datasets_lib.TowerDataset,
                      ready: int) -> workers_data.WorkersDataset:
        """A dataset of this worker's own per-tower batches, as :mod:`datasets` groups them."""
        dataset = grouped.dataset
        made = dataset.map(datasets_lib.on_elements(dataset.element_spec, _counted))
        return workers_data.WorkersDataset(
            made, self, ready, _length_for_all(dataset),
            lambda fn: self.shard_grouped(grouped.map(fn), ready))


def _map_by_units(dataset: tf.data.Dataset, workers: collectives.Machines, measured: Any,
                  fn: Callable[[Nest, rows_lib.Units], Nest]) -> tf.data.Dataset:
    """``fn`` of each element of ``dataset`` and the shares of all towers."""
    # All elements of an iterator are split by the same ones: workers are not at the same element.
    if measured is None:
        return dataset.map(datasets_lib.on_elements(
            dataset.element_spec, lambda element: fn(element, workers.units)))
    return tf.data.Dataset.zip((dataset, measured.of_iterator())).map(fn)


def _length_for_all(own: tf.data.Dataset) -> Any:
    """The length of this worker's ``own`` dataset where it is all workers'."""
    # Others may have more or fewer batches, and Keras ends an epoch after as many as it is given.
    length = own.cardinality()
    return tf.constant(tf.data.UNKNOWN_CARDINALITY, tf.int64) if length >= 0 else length


def _own_batches(dataset: tf.data.Dataset, workers: collectives.Machines,
                 in_order: bool) -> tf.data.Dataset | None:
    """The batches of which this worker has all rows; None where it shares them with all others."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == Policy.OFF:
        return dataset
    if policy == Policy.DATA or (policy == Policy.AUTO and in_order):
        return None
    try:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            Policy.FILE if policy == Policy.AUTO else policy)
        return _tf.AutoShardDataset(dataset.with_options(options), workers.count, workers.index)
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError):
        if policy != Policy.AUTO:
            raise
        return None


def _in_steps(own: tf.data.Dataset, workers: collectives.Machines, measured: Any,
              here: slice) -> tf.data.Dataset:
    """Each of this worker's batches as several steps, so that all workers' make one batch."""
    spec = own.element_spec

    def parts(element: Nest) -> tf.data.Dataset:
        leaves = tf.nest.flatten(element)
        rows = tf.cast(rows_lib.rows_in(next(filter(rows_lib.has_rows, leaves))), tf.int64)
        # As many for each: what a worker has to do is what is in its files.
        # Workers begin at different parts, so that each step has a part of every size.
        sizes = tf.roll(rows_lib.split_rows(rows, workers.count), -workers.index, 0)
        starts = tf.cumsum(sizes, exclusive=True)

        def part(number: tf.Tensor) -> tuple[tf.Tensor, Nest]:
            start, size = starts[number], sizes[number]
            cut = [None if leaf is None else rows_lib.rows_between(leaf, start, size)
                   for leaf in leaves]
            return size, tf.nest.pack_sequence_as(spec, cut)

        return tf.data.Dataset.range(workers.count).map(part)

    def split_part(sized: tuple[tf.Tensor, Nest], units: rows_lib.Units) -> Nest:
        size, element = sized
        sizes = rows_lib.split_rows(
            size, workers.towers, None if units is None else units[here])
        if measured is not None:
            measured.note(size, sizes)
        return splitting.split_batch(
            element, workers.towers, lambda _: (sizes, slice(None), sizes))

    sized = own.flat_map(datasets_lib.on_elements(spec, parts))
    return _map_by_units(sized, workers, measured, split_part)


def _counted(element: Nest) -> Nest:
    """An element of grouped batches with the row counts of this worker's towers."""

    def counted(leaf: Any) -> Any:
        if leaf is None:
            return leaf
        parts = leaf.values if isinstance(leaf, _tf.PerReplica) else [leaf]
        if not isinstance(leaf, sub_batches.SubBatches) and not (
                rows_lib.has_rows(parts[0]) and parts[0].shape.rank != 0):
            return _tf.PerReplica(parts)
        rows = tf.stack([tf.cast(rows_lib.rows_in(part), tf.int64) for part in parts])
        return sub_batches.SubBatches(parts, rows=rows)

    return tf.nest.map_structure(counted, element)
