"""Who gets which rows: what one strategy deals to its towers, and how.

Goes in: where a strategy runs, and the other machines.  Comes out: a :class:`Dealer`, which splits
its batches and datasets.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy.batch import (
    datasets as datasets_lib,
    measured as measured_lib,
    prefetching,
    rows as rows_lib,
    splitting,
)
from towerstrategy.machines import meeting, shards
from towerstrategy.placement import asked_shares, devices as devices_lib
from towerstrategy.report import measuring as measuring_lib


class Dealer:
    """Deals batches to the towers of one strategy, by their shares.

    Args:
      placement: where it runs.
      workers: their collectives; None with a single machine.

    Attributes:
      measuring: what measures the towers; None where nothing is measured.
    """

    def __init__(self, placement: devices_lib.Placement, workers: meeting.Machines | None) -> None:
        self._towers, self._workers = len(placement.towers), workers
        self._asked = placement.shares and placement.shares[::placement.micro_batches]
        self._measured: measured_lib.MeasuredShares | None = None
        self.measuring: measuring_lib.Measuring | None = None
        number = self._towers if workers is None else workers.replicas
        if placement.shares_from == asked_shares.MEASURED and number > 1:
            self._measured = measured_lib.MeasuredShares(number, self._towers)
            self.measuring = measuring_lib.Measuring(self._measured, placement, workers)
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
        """A dataset of global batches, dealt; see :func:`datasets.split_dataset`."""
        if self._measured is not None:
            dataset = measured_lib.saved_without(dataset)
        if self._workers is not None:
            made: datasets_lib.TowerDataset = shards.shard_dataset(
                dataset, self._workers, ready, in_order, self._measured)
        else:
            made = datasets_lib.split_dataset(dataset, self._towers, ready, self._cuts())
        return made.fetched_to(fetch).watched_by(self.measuring)

    def _cuts(self) -> rows_lib.CutRows | None:
        """None where all towers are here and get as many rows."""
        if self._workers is not None:
            return shards.cuts_of(self._workers, self.units)
        if self._measured is not None:
            return self._measured.cut
        units = self._units
        return None if units is None else lambda rows: (
            *rows_lib.split_rows(rows, self._towers, units), None)
