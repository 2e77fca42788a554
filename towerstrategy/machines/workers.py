"""The workers of one strategy, as the core knows them.

Goes in: this process' place in its cluster.  Comes out: a :class:`placement.workers.Workers`: where
the workers merge (:mod:`meeting`), and how their datasets are dealt (:mod:`shards`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy.batch import datasets, rows as rows_lib
from towerstrategy.machines import meeting, shards, workers_data


class DealingMachines(meeting.Machines):
    """Machines that meet, and that deal their datasets among them."""

    def cuts_of(self, units: rows_lib.Units) -> rows_lib.CutRows:
        """Deals a batch that every worker has, by ``units``: each takes its own towers' rows."""
        return shards.cuts_of(self, units)

    def shard_dataset(self, dataset: tf.data.Dataset, ready: int, in_order: bool,
                      measured: Any = None) -> workers_data.WorkersDataset:
        """See :func:`shards.shard_dataset`."""
        return shards.shard_dataset(dataset, self, ready, in_order, measured)

    def shard_grouped(self, grouped: datasets.TowerDataset,
                      ready: int) -> workers_data.WorkersDataset:
        """See :func:`shards.shard_grouped`."""
        return shards.shard_grouped(grouped, self, ready)
