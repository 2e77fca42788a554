"""Results of ``strategy.run``, which keep the shares of their batch.

Goes in: each tower's result, and the shares of the batch.  Comes out: :class:`TowerResults`, and
the shares of another call that gets results as arguments.  A result whose first dimension is the
tower's rows (an augmented batch) is a batch again; scalars, and vectors of another length, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib
from towerstrategy.merge import shares as shares_lib


class ResultsSpec(_tf.PerReplicaSpec):
    """The type spec of results that may be a batch: one spec per tower, then the row counts'.

    Other results, and results of towers with equal rows, have a plain ``PerReplicaSpec``.
    """

    value_type = property(lambda _: TowerResults)

    def _to_components(self, value: TowerResults) -> tuple[Any, ...]:
        return (*super()._to_components(value), value.counts)

    def _from_components(self, components: Sequence[Any]) -> TowerResults:
        return TowerResults(components[:-1], counts=components[-1])


class TowerResults(_tf.PerReplica):
    """The towers' results, with the shares of their batch.

    Instead of ``shares``, ``counts`` may have the row counts of all towers, an int64 vector.
    """

    def __init__(self, values: Any, shares: shares_lib.Shares | None = None,
                 counts: Any = None) -> None:
        super().__init__(values)
        self._shares, self._counts = shares, counts

    def shares(self, workers: Any) -> shares_lib.Shares:
        """The batch's shares."""
        # Made from counts at each call, because their tensors belong to the current graph.
        return self._shares or shares_lib.Shares.of_counts(self._counts, workers)

    @property
    def counts(self) -> tf.Tensor:
        """The row counts of all towers, an int64 vector."""
        # The given tensor itself, if any: TensorFlow checks whether arguments were changed.
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


def map_tensors(fn: Callable[[Any], Any], nest: Any) -> Any:
    """Applies ``fn`` to all tensors and operations, also in composite and distributed values."""
    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, (tf.Tensor, tf.Operation)):
            return fn(leaf)
        if isinstance(leaf, (_tf.PerReplica, _tf.Mirrored)) and not _tf.is_variable(leaf):
            values = [map_tensors(fn, part) for part in leaf.values]
            return TowerResults(values, leaf._shares, leaf._counts) \
                if isinstance(leaf, TowerResults) else type(leaf)(values)
        if isinstance(leaf, _tf.CompositeTensor) and not _tf.is_variable(leaf):
            return tf.nest.map_structure(fn, leaf, expand_composites=True)
        return leaf

    return tf.nest.map_structure(mapped, nest)


def with_refused_gradients(nest: Any, error: Exception, sources: Sequence[tf.Tensor] = ()) -> Any:
    """``nest``, whose floats have gradients that raise ``error``, also those for ``sources``.

    They would be None, or wrong, where a tape outside did not record what made the tensors.
    """

    @tf.custom_gradient
    def refusing(value: tf.Tensor, *sources: tf.Tensor) -> Any:
        del sources

        def refuse(*_: tf.Tensor) -> Any:
            raise error

        return tf.identity(value), refuse

    def mapped(leaf: Any) -> Any:
        floats = isinstance(leaf, tf.Tensor) and (leaf.dtype.is_floating or leaf.dtype.is_complex)
        return refusing(leaf, *sources) if floats else leaf

    return map_tensors(mapped, nest)


def tensors_in(nest: Any) -> list[tf.Tensor]:
    """The symbolic tensors in ``nest``, each once; see :func:`map_tensors`."""
    tensors: dict[int, tf.Tensor] = {}

    def collect(leaf: Any) -> Any:
        if tf.is_symbolic_tensor(leaf):
            tensors[id(leaf)] = leaf
        return leaf

    map_tensors(collect, nest)
    return list(tensors.values())


def shares_of(arguments: Sequence[Any],
              workers: Any) -> shares_lib.Shares | None:
    """The shares of the first of ``arguments`` that is both a result and a batch; None without one.

    If this is only known while the function runs, and none is a batch, towers have equal shares.
    """
    possible: list[tuple[tf.Tensor, shares_lib.Shares]] = []
    known: shares_lib.Shares | None = None
    for argument in arguments:
        if not isinstance(argument, TowerResults) or known is not None:
            continue
        shares = argument.shares(workers)
        are_rows = shares.counted and _are_rows(argument.values, shares)
        if are_rows is None:
            possible.append((_match(argument.values, shares), shares))
        elif are_rows:
            known = shares
    if not possible:
        return known
    counts = tf.ones([possible[0][1].number], tf.int64) if known is None else known.counts()
    for match, shares in reversed(possible):
        counts = tf.where(match, shares.counts(), counts)
    return shares_lib.Shares.of_counts(counts, workers)


def _are_rows(values: Sequence[Any], shares: shares_lib.Shares) -> bool | None:
    """Whether the first dimensions are the towers' rows; None if unknown while tracing."""
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
    """The first dimension of ``value``, an int64 scalar; -1 if ``value`` is a scalar."""
    if value.shape.rank is not None:
        return tf.cast(rows_lib.rows_in(value), tf.int64)
    return tf.concat([tf.shape(value, out_type=tf.int64), [-1]], 0)[0]
