"""The core's interface to several machines, which ``extras/machines/`` implements.

Goes in: this machine's values, or a dataset.  Comes out: values merged over all machines, or this
machine's part of the dataset.  With a single machine, there is None in place of :class:`Workers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf


class Workers(Protocol):
    """The workers of one strategy; all of them must call its methods in the same order."""

    count: int  # how many workers there are
    index: int  # this worker's number
    towers: int  # how many towers this worker has
    first: int  # the number of this worker's first tower among the towers of all workers
    replicas: int  # how many towers all workers have
    units: tuple[int, ...] | None  # the shares of all towers; None if all are equal

    @property
    def is_chief(self) -> bool:
        """Whether this is worker 0, which gives the initial values and writes files."""
        return self.index == 0

    @property
    def here(self) -> slice:
        """The positions of this worker's towers among those of all workers."""
        return slice(self.first, self.first + self.towers)

    def sum(self, values: Sequence[Any]) -> list[Any]:
        """The sums over the workers of their ``values``, tensors or slices; None stays None."""

    def chiefs(self, values: Sequence[Any]) -> list[Any]:
        """Worker 0's ``values``."""

    def gather(self, value: Any, axis: int = 0) -> Any:
        """The workers' values concatenated along ``axis``, in the workers' order."""

    def gather_rows(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Each of ``values`` gathered along its first dimension; their row counts may differ."""

    def shard_dataset(self, dataset: tf.data.Dataset, ready: int, measured: Any = None) -> Any:
        """This worker's part of a dataset of global batches."""

    def shard_grouped(self, grouped: Any, ready: int) -> Any:
        """A dataset of this worker's own per-tower batches."""
