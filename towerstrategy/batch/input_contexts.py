"""What a dataset function gets: its place among the pipelines, and its towers' part of a batch.

Goes in: the numbers of ``tf.distribute.InputContext``, and every tower's share.  Comes out: that
context, which knows them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy.batch import rows as rows_lib


class TowerInputContext(tf.distribute.InputContext):
    """The ``tf.distribute.InputContext`` of a ``TowerStrategy``.

    Args:
      pipelines: how many input pipelines there are, on all machines.
      pipeline: this one's number.
      towers: the numbers of the towers that it feeds, among those of all machines.
      replicas: how many towers there are, on all machines.
      units: the shares of all of them, see :func:`rows.units_of`.

    Attributes:
      shares: of each tower that this pipeline feeds, its part of a global batch; with two towers,
        a pipeline each and ``shares=[3, 1]``, ``(0.75,)`` and ``(0.25,)``.
    """

    def __init__(self, pipelines: int, pipeline: int, towers: range, replicas: int,
                 units: rows_lib.Units) -> None:
        super().__init__(pipelines, pipeline, replicas)
        self._towers, self._units = towers, units
        units = units or (1,) * replicas
        self.shares = tuple(units[tower] / sum(units) for tower in towers)

    def rows_of(self, global_batch_size: int) -> list[int]:
        """The rows of each tower that this pipeline feeds, of a batch of ``global_batch_size``."""
        sizes = rows_lib.split_rows(global_batch_size, self.num_replicas_in_sync, self._units)[1]
        return [sizes[tower] for tower in self._towers]

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of this pipeline's tower; of its towers, where they get as many."""
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


def contexts(towers: int, workers: Any, per_replica: bool, replicas: int,
             units: rows_lib.Units) -> list[TowerInputContext]:
    """A context for each of this machine's pipelines: one, or with ``per_replica`` one a tower.

    ``towers`` are this machine's, ``replicas`` and ``units`` those of all, see
    :class:`TowerInputContext`.
    """
    first = 0 if workers is None else workers.first
    if per_replica:
        return [TowerInputContext(replicas, tower, range(tower, tower + 1), replicas, units)
                for tower in range(first, first + towers)]
    pipelines, pipeline = (1, 0) if workers is None else (workers.count, workers.index)
    return [TowerInputContext(pipelines, pipeline, range(first, first + towers), replicas, units)]
