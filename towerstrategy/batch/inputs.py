"""The input of one strategy: its batches and datasets, split by the towers' shares.

Goes in: a strategy's placement, the workers of other machines, and what measures the towers.  Comes
out: :class:`Inputs`; :func:`read`, which interprets ``tf.distribute.InputOptions``; and
:class:`TowerInputContext`, the argument of a dataset function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import refused
from towerstrategy.batch import datasets as datasets_lib, prefetching, rows as rows_lib, splitting
from towerstrategy.placement import devices as devices_lib

_PER_REPLICA = tf.distribute.InputReplicationMode.PER_REPLICA


class TowerInputContext(tf.distribute.InputContext):
    """The ``tf.distribute.InputContext`` of an input pipeline for ``towers``.

    Attributes:
      shares: the share of the global batch of each of this pipeline's towers: ``(0.75,)`` and
        ``(0.25,)`` for two towers with one pipeline each and ``shares=[3, 1]``.
    """

    def __init__(self, pipelines: int, pipeline: int, towers: range, replicas: int,
                 units: rows_lib.Units) -> None:
        super().__init__(pipelines, pipeline, replicas)
        self._towers, self._units = towers, units
        units = units or (1,) * replicas
        self.shares = tuple(units[tower] / sum(units) for tower in towers)

    def rows_of(self, global_batch_size: int) -> list[int]:
        """The row counts of this pipeline's towers for a batch of ``global_batch_size`` rows."""
        sizes = rows_lib.split_rows(global_batch_size, self.num_replicas_in_sync, self._units)
        return [sizes[tower] for tower in self._towers]

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The number of rows of each of this pipeline's towers; raises if their shares differ."""
        if self._units is None:
            return super().get_per_replica_batch_size(global_batch_size)
        rows = self.rows_of(global_batch_size)
        if len(set(rows)) > 1:
            raise ValueError(
                f"the towers that this pipeline feeds get {rows} rows of a batch of "
                f"{global_batch_size}, by their shares: context.rows_of({global_batch_size}) says "
                "so. Give each tower a pipeline, with InputReplicationMode.PER_REPLICA, or make "
                "batches of these sizes in turn.")
        return rows[0]


def read(options: Any, extended: Any) -> tuple[bool, prefetching.Fetch, int]:
    """From ``InputOptions``: whether each tower has a pipeline, the fetch, elements to prefetch."""
    towers = extended.worker_devices
    on_host = extended.placement.towers_on_host
    fetch = prefetching.Fetch(() if on_host else towers, extended.host_device)
    if options is None:
        return False, fetch, datasets_lib.READY
    refused.check_type("options", options, tf.distribute.InputOptions,
                       "None or a tf.distribute.InputOptions")
    mode, fetches = options.experimental_replication_mode, options.experimental_fetch_to_device
    refused.check_type(
        "InputOptions: experimental_replication_mode", mode, tf.distribute.InputReplicationMode,
        "a tf.distribute.InputReplicationMode (PER_WORKER or PER_REPLICA)")
    if options.experimental_place_dataset_on_device and (mode != _PER_REPLICA or fetches):
        raise ValueError(
            "InputOptions: experimental_place_dataset_on_device=True needs "
            "experimental_replication_mode=PER_REPLICA, a dataset for each tower, and "
            "experimental_fetch_to_device=False, as the batches are on the device already, but "
            f"got {mode} and {fetches}.")
    ready = options.experimental_per_replica_buffer_size
    return (mode == _PER_REPLICA, fetch._replace(devices=towers if fetches else (), ready=ready),
            max(datasets_lib.READY, ready))


class Inputs:
    """Splits the batches and datasets of one strategy, by the shares of its towers.

    ``measuring`` measures the towers and computes their shares; None unless ``shares="measured"``.
    """

    def __init__(self, placement: devices_lib.Placement, workers: Any,
                 measuring: Any) -> None:
        self._towers, self._workers, self.measuring = len(placement.towers), workers, measuring
        self._here = None if workers is None else workers.here
        self._shares = placement.shares and placement.shares[::placement.micro_batches]
        self._measured = measuring and measuring.shares
        self._units = (rows_lib.units_of(placement.shares or (1.,)) if workers is None
                       else workers.units)

    @property
    def units(self) -> rows_lib.Units:
        """The shares of all machines' towers as whole numbers; None if all are equal."""
        return self._units if self._measured is None else self._measured.units

    @property
    def shares(self) -> list[float] | None:
        """The shares of this machine's towers, in the form of the argument ``shares``."""
        if self._measured is None:
            return None if self._shares is None else list(self._shares)
        return [float(unit) for unit in self._measured.units[self._here or slice(None)]]

    def split(self, batch: Any) -> Any:
        """The sub-batches of this machine's towers; every machine has the same global batch."""
        return splitting.split_batch(batch, self._towers, self._cuts(), here=self._here)

    def distribute(self, dataset: tf.data.Dataset, ready: int,
                   fetch: prefetching.Fetch) -> datasets_lib.TowerDataset:
        """Splits a dataset of global batches; see :func:`datasets.split_dataset`."""
        if self._measured is not None:
            dataset = self._measured.left_out_of_checkpoints(dataset)
        if self._workers is not None:
            split = self._workers.shard_dataset(dataset, ready, self._measured)
        else:
            split = datasets_lib.split_dataset(dataset, self._towers, ready, self._cuts())
        split.fetch, split.watcher = fetch, self.measuring
        split.batch_rows = datasets_lib.batch_rows(dataset)
        return split

    def from_function(self, dataset_fn: Callable[..., Any], options: Any,
                      extended: Any) -> datasets_lib.TowerDataset:
        """One dataset of the datasets that ``dataset_fn`` makes for this machine's pipelines."""
        per_replica, fetch, ready = read(options, extended)
        placed = options is not None and options.experimental_place_dataset_on_device
        datasets = []
        for pipeline, context in enumerate(self._contexts(
                per_replica, extended._num_replicas_in_sync)):
            device = extended.worker_devices[pipeline] if placed else None
            with contextlib.nullcontext() if device is None else tf.device(device):
                datasets.append(dataset_fn(context))
        grouped = datasets_lib.group_datasets(datasets, self._towers, ready)
        if self._workers is not None:
            grouped = self._workers.shard_grouped(grouped, ready)
        grouped.fetch = fetch
        return grouped

    def _contexts(self, per_replica: bool, replicas: int) -> list[TowerInputContext]:
        """The contexts of this machine's pipelines: one, or one per tower."""
        workers, here = self._workers, range(replicas)[self._here or slice(None)]
        if per_replica:
            return [TowerInputContext(replicas, tower, range(tower, tower + 1), replicas,
                                      self.units) for tower in here]
        pipelines, pipeline = (1, 0) if workers is None else (workers.count, workers.index)
        return [TowerInputContext(pipelines, pipeline, here, replicas, self.units)]

    def _cuts(self) -> rows_lib.CutRows | None:
        """Computes all towers' rows; None if this machine has all towers, with equal shares."""
        if self._workers is None and self._measured is not None:
            return self._measured.cut
        units, workers = self.units, self._workers
        towers = self._towers if workers is None else workers.replicas
        return None if units is None and workers is None else (
            lambda rows: rows_lib.split_rows(rows, towers, units))
