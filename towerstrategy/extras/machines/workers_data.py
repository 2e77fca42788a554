"""What a strategy's workers iterate over: all get to the end at the same step.

Goes in: this worker's part of each global batch (:mod:`shards`).  Comes out: the same with the row
counts of the towers of all machines in each element.  One small all-reduce an element sums them and
how many workers have data: one whose data has ended goes on with elements without rows until all
have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import (
    datasets as datasets_lib,
    iterators,
    prefetching,
    rows as rows_lib,
    sub_batches,
)
from towerstrategy.batch.rows import Nest
from towerstrategy.extras.machines import collectives


class Agreement(NamedTuple):
    """What the workers agree on at each element: its rows on all towers, and the end of the data.

    It is part of iterators' type specs, so it holds plain values.  The pipelines' own elements are
    ``(there, rows, values)``, see :class:`WorkersDataset`.
    """

    packed: Nest  # the specs of an element as this worker's pipeline has split it
    number: int  # of the :class:`collectives.Machines`

    @property
    def _workers(self) -> collectives.Machines:
        return collectives.MADE[self.number]

    def batch(self, iterator: Any) -> Nest:
        """The next element that any worker has."""
        there, rows, own = self._taken_from(iterator)
        # An iterator without elements raises the error that says that data has ended.
        ended = tf.cond(there, lambda: tf.constant(0, tf.int64),
                        lambda: iter(tf.data.Dataset.range(0)).get_next())
        with tf.control_dependencies([ended]):
            own = own if tf.executing_eagerly() else iterators.copied(own)
        return self.element(own, rows)

    def optional(self, iterator: Any) -> tf.experimental.Optional:
        """The next element, whether or not any worker has it."""
        there, rows, own = self._taken_from(iterator)
        return iterators.HeldOptional(iterator.element_spec, there, self.element(own, rows))

    def _taken_from(self, iterator: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
        with tf.device("CPU:0"):
            return self.of_host(iterator.take())

    def of_host(self, own: Any) -> tuple[tf.Tensor, tf.Tensor, Any]:
        """Whether any worker has an element, the rows of all towers, and the pipeline's ``own``.

        Of ``own`` it needs the host's part alone; other parts may be taken later.
        """
        workers, (there, rows, *_) = self._workers, own
        with tf.device("CPU:0"):
            here = tf.cast(there, tf.int64)
            before, after = workers.first, workers.replicas - workers.first - workers.towers
            both = workers.sum([tf.concat(
                [here[tf.newaxis], tf.pad(here * rows, [[before, after]])], 0)])[0]
            both.set_shape([1 + workers.replicas])
            batched = any(isinstance(spec, sub_batches.SubBatchesSpec)
                          for spec in tf.nest.flatten(self.packed))
            return both[0] >= (1 if batched else workers.count), both[1:], own

    def element(self, own: Any, rows: tf.Tensor) -> Nest:
        """The element of a pipeline's ``own`` and the rows of all towers."""
        return self._pack(own[2], lambda parts: sub_batches.SubBatches(parts, rows=rows),
                          _tf.PerReplica)

    def element_spec(self, own: Any) -> Nest:
        """The spec of an element with the row counts of all machines, given the pipeline's own."""
        counts = tf.TensorSpec([self._workers.replicas], tf.int64)
        return self._pack(
            own[2], lambda specs: sub_batches.SubBatchesSpec(*specs, counts, counted=True),
            lambda specs: _tf.PerReplicaSpec(*specs))

    def _pack(self, values: Sequence[Any], batched: Callable[[list[Any]], Any],
              plain: Callable[[list[Any]], Any]) -> Nest:
        """``values`` in the structure of an element, the towers' of a component together."""
        left = iter(values)

        def of(spec: tf.TypeSpec) -> Any:
            if rows_lib.is_absent(spec):
                return None
            if not isinstance(spec, _tf.PerReplicaSpec):
                return next(left)
            parts = [next(left) for _ in range(self._workers.towers)]
            return (batched if isinstance(spec, sub_batches.SubBatchesSpec) else plain)(parts)

        return tf.nest.map_structure(of, self.packed)


class WorkersDataset(datasets_lib.TowerDataset):
    """What a strategy's workers iterate over: this worker's part of each global batch.

    Elements of ``dataset`` hold :class:`sub_batches.SubBatches` with this worker's row counts, or
    ``PerReplica`` values where they are no batches.  ``length`` is its ``cardinality``.
    """

    def __init__(self, dataset: tf.data.Dataset, workers: collectives.Machines, ready: int,
                 length: Any, mapped: Callable[[Any], WorkersDataset]) -> None:
        self._spec, self._workers, self._length = dataset.element_spec, workers, length
        self._agreement = Agreement(self._spec, workers.number)
        super().__init__(self._endless(dataset).prefetch(ready), mapped)

    cardinality = property(lambda self: self._length)

    def __len__(self) -> int:
        if int(self._length) < 0:
            raise TypeError("the dataset's length is infinite or not known.")
        return int(self._length)

    def __iter__(self) -> Any:
        if self.watcher is not None and tf.executing_eagerly():
            self.watcher.agree()
        return super().__iter__()

    def _layout(self, spec: Nest) -> prefetching.Layout:
        owners = [prefetching.HOST, prefetching.HOST]
        for leaf in tf.nest.flatten(self._spec):
            owners += prefetching.owners_of(leaf, self._workers.towers, counts=False)
        return prefetching.Layout(spec, owners)

    def _rows_of(self, element: Nest) -> Any:
        _, rows, _ = element
        return rows

    def _endless(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Elements ``(there, rows, values)``; after the data, without end, such with no rows."""
        towers = self._workers.towers

        def flat(element: Nest) -> tuple[Any, ...]:
            leaves = [leaf for leaf in tf.nest.flatten(element) if leaf is not None]
            counts = (leaf.rows for leaf in leaves if isinstance(leaf, sub_batches.SubBatches))
            return True, next(counts, tf.zeros([towers], tf.int64)), tuple(
                part for leaf in leaves
                for part in (leaf.values if isinstance(leaf, _tf.PerReplica) else [leaf]))

        missing = [rows_lib.no_rows(part)
                   for spec in tf.nest.flatten(self._spec) if not rows_lib.is_absent(spec)
                   for part in (spec._component_specs[:towers]
                                if isinstance(spec, _tf.PerReplicaSpec) else [spec])]
        nothing = tf.data.Dataset.from_tensors(
            (False, tf.zeros([towers], tf.int64), tuple(missing))).repeat()
        return dataset.map(datasets_lib.on_elements(self._spec, flat)).concatenate(nothing)
