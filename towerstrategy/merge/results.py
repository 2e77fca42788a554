"""What the towers returned, which knows the rows that it was computed from.

Goes in: one value a tower, and the shares of the batch.  Comes out: :class:`TowerResults`, and the
shares of a call that is given some.  A result whose first dimension is the tower's rows (an
augmented batch) is a batch again; scalars, and vectors of another length, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib
from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement.workers import Workers


class ResultsSpec(_tf.PerReplicaSpec):
    """The type spec of results that may be rows: one spec a tower, then the row counts'.

    Other results have the plain ``PerReplicaSpec``, and so have those of equal rows.
    """

    value_type = property(lambda _: TowerResults)

    def _to_components(self, value: TowerResults) -> tuple[Any, ...]:
        return (*super()._to_components(value), value.counts)

    def _from_components(self, components: Sequence[Any]) -> TowerResults:
        return TowerResults(components[:-1], counts=components[-1])


class TowerResults(_tf.PerReplica):
    """What the towers returned, with the shares of the batch they returned it for.

    ``counts`` are, in place of ``shares``, the rows of all towers, an int64 vector.
    """

    def __init__(self, values: Any, shares: shares_lib.Shares | None = None,
                 counts: Any = None) -> None:
        super().__init__(values)
        self._shares, self._counts = shares, counts

    def with_values(self, values: Any) -> TowerResults:
        """Other values of the same batch."""
        return TowerResults(values, self._shares, self._counts)

    def shares(self, workers: Workers | None) -> shares_lib.Shares:
        """The batch's shares."""
        # Not kept: the tensors are of the graph in which they are asked for.
        return self._shares or shares_lib.Shares.of_counts(self._counts, workers)

    @property
    def counts(self) -> tf.Tensor:
        """The rows of all towers, an int64 vector."""
        # Where they came in as a tensor, that one: TensorFlow looks whether arguments have changed.
        return self._counts if self._shares is None else self._shares.counts()

    @property
    def _type_spec(self) -> tf.TypeSpec:
        specs = [tf.type_spec_from_value(value) for value in self._values]
        shares = self._shares
        if shares is not None and (not shares.counted or shares.are_equal
                                   or _are_rows(self._values, shares) is False):
            return _tf.PerReplicaSpec(*specs)
        count = self._counts.shape[0] if shares is None else shares.number
        return ResultsSpec(*specs, tf.TensorSpec([count], tf.int64))


def map_tensors(change: Callable[[Any], Any], nest: Any) -> Any:
    """``nest`` with what ``change`` makes of each tensor and operation, those in composite and
    distributed values among them."""
    def changed(leaf: Any) -> Any:
        if isinstance(leaf, (tf.Tensor, tf.Operation)):
            return change(leaf)
        if isinstance(leaf, (_tf.PerReplica, _tf.Mirrored)) and not _tf.is_variable(leaf):
            values = [map_tensors(change, part) for part in leaf.values]
            return leaf.with_values(values) if isinstance(leaf, TowerResults) \
                else type(leaf)(values)
        if isinstance(leaf, _tf.CompositeTensor) and not _tf.is_variable(leaf):
            return tf.nest.map_structure(change, leaf, expand_composites=True)
        return leaf

    return tf.nest.map_structure(changed, nest)


def tensors_in(nest: Any) -> list[tf.Tensor]:
    """The tensors of graphs among what :func:`map_tensors` changes in ``nest``, each once."""
    found: dict[int, tf.Tensor] = {}

    def note(leaf: Any) -> Any:
        if tf.is_symbolic_tensor(leaf):
            found[id(leaf)] = leaf
        return leaf

    map_tensors(note, nest)
    return list(found.values())


def shares_of(arguments: Sequence[Any],
              workers: Workers | None) -> shares_lib.Shares | None:
    """The shares of the rows among ``arguments`` that towers returned before; None without any.

    Where that is only known while the function runs, all towers have one row if there are none.
    """
    possible: list[tuple[tf.Tensor, shares_lib.Shares]] = []
    sure: shares_lib.Shares | None = None
    for argument in arguments:
        if not isinstance(argument, TowerResults) or sure is not None:
            continue
        shares = argument.shares(workers)
        are_rows = shares.counted and _are_rows(argument.values, shares)
        if are_rows is None:
            possible.append((_match(argument.values, shares), shares))
        elif are_rows:
            sure = shares
    if not possible:
        return sure
    counts = tf.ones([possible[0][1].number], tf.int64) if sure is None else sure.counts()
    for match, shares in reversed(possible):
        counts = tf.where(match, shares.counts(), counts)
    return shares_lib.Shares.of_counts(counts, workers)


def _are_rows(values: Sequence[Any], shares: shares_lib.Shares) -> bool | None:
    """Whether the first dimensions are the towers' rows; None where that is not known yet."""
    known: bool | None = True
    for tower, (value, rows) in enumerate(zip(values, shares.here)):
        if not rows_lib.has_rows(value) or value.shape.rank == 0:
            return False
        length, fed = rows_lib.known_rows(value), shares.fed and shares.fed[tower]
        if length is None or shares.fed is None and not isinstance(rows, int):
            known = None
        elif length not in (rows if isinstance(rows, int) else fed, fed):
            return False
    return known


def _match(values: Sequence[Any], shares: shares_lib.Shares) -> tf.Tensor:
    """Whether the first dimensions are the towers' rows, a scalar bool tensor."""
    return tf.reduce_all(tf.stack([_length(value) for value in values])
                         == rows_lib.vector(shares.here))


def _length(value: Any) -> tf.Tensor:
    """The first dimension, an int64 scalar; -1 of a scalar."""
    if value.shape.rank is not None:
        return tf.cast(rows_lib.rows_in(value), tf.int64)
    return tf.concat([tf.shape(value, out_type=tf.int64), [-1]], 0)[0]
