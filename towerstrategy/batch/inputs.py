"""What feeds the towers of one strategy: its batches and datasets, split by the towers' shares.

Goes in: where a strategy runs, the other machines, and what measures the towers.  Comes out:
:class:`Inputs`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy.batch import (
    datasets as datasets_lib,
    input_contexts,
    input_options,
    prefetching,
    rows as rows_lib,
    splitting,
)
from towerstrategy.placement import devices as devices_lib
from towerstrategy.placement.workers import Workers


class Inputs:
    """Splits the batches and datasets of one strategy, by the shares of its towers.

    Args:
      placement: where it runs.
      workers: their collectives; None with a single machine.
      measuring: what measures the towers, and has the shares that it finds, see
        :class:`measured.measuring.Measuring`; None where nothing is measured.
    """

    def __init__(self, placement: devices_lib.Placement, workers: Workers | None = None,
                 measuring: Any = None) -> None:
        self._towers, self._workers, self.measuring = len(placement.towers), workers, measuring
        self._asked = placement.shares and placement.shares[::placement.micro_batches]
        self._measured = measuring and measuring.shares
        self._units = (rows_lib.units_of(placement.shares or (1.,)) if workers is None
                       else workers.units)

    @property
    def units(self) -> rows_lib.Units:
        """The shares of all machines' towers, see :func:`rows.units_of`; None: all are equal."""
        return self._units if self._measured is None else self._measured.units

    @property
    def shares(self) -> list[float] | None:
        """The shares of this machine's towers, as they can be asked for; None where none were."""
        if self._measured is None:
            return None if self._asked is None else list(self._asked)
        first = 0 if self._workers is None else self._workers.first
        return [float(unit) for unit in self._measured.units[first:first + self._towers]]

    def split(self, batch: Any) -> Any:
        """A global batch, the same on every machine -> the sub-batches of this machine's towers."""
        return splitting.split_batch(batch, self._towers, self._cuts())

    def distribute(self, dataset: tf.data.Dataset, in_order: bool, ready: int,
                   fetch: prefetching.Fetch) -> datasets_lib.TowerDataset:
        """A dataset of global batches, split; see :func:`datasets.split_dataset`."""
        if self._measured is not None:
            dataset = self._measured.left_out_of_checkpoints(dataset)
        if self._workers is not None:
            made = self._workers.shard_dataset(dataset, ready, in_order, self._measured)
        else:
            made = datasets_lib.split_dataset(dataset, self._towers, ready, self._cuts())
        made.fetch, made.watcher = fetch, self.measuring
        return made

    def from_function(self, dataset_fn: Callable[..., Any], options: Any,
                      extended: Any) -> datasets_lib.TowerDataset:
        """What ``dataset_fn`` makes for each pipeline of this machine, as one dataset.

        Args:
          dataset_fn: called with a :class:`input_contexts.TowerInputContext`.
          options: a ``tf.distribute.InputOptions`` or None.
          extended: ``strategy.extended``.
        """
        per_replica, fetch, ready = input_options.read(options, extended)
        placed = options is not None and options.experimental_place_dataset_on_device
        datasets = []
        for pipeline, context in enumerate(input_contexts.contexts(
                self._towers, self._workers, per_replica, extended._num_replicas_in_sync,
                self.units)):
            device = extended.worker_devices[pipeline] if placed else None
            with contextlib.nullcontext() if device is None else tf.device(device):
                datasets.append(dataset_fn(context))
        made = (datasets_lib.zip_datasets(datasets, ready=ready) if per_replica
                else datasets_lib.group_dataset(datasets[0], self._towers, ready=ready))
        if self._workers is not None:
            made = self._workers.shard_grouped(made, ready)
        made.fetch = fetch
        return made

    def _cuts(self) -> rows_lib.CutRows | None:
        """None where all towers are here and get as many rows."""
        if self._workers is not None:
            return self._workers.cuts_of(self.units)
        if self._measured is not None:
            return self._measured.cut
        units = self._units
        return None if units is None else lambda rows: (
            *rows_lib.split_rows(rows, self._towers, units), None)
