"""Sub-batches: per-replica values whose first dimension counts rows.

Goes in: each tower's part of a component of a batch, and the row counts of the towers of all
machines, if there are several.  Comes out: :class:`SubBatches`, which know each tower's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib


def with_open_rows(element: Any, are_open: bool = True) -> Any:
    """Marks ``element`` so that functions are traced for any row counts: once for all shares."""
    for leaf in tf.nest.flatten(element):
        if isinstance(leaf, SubBatches):
            leaf.open_rows = are_open
    return element


def with_any_rows(spec: tf.TypeSpec) -> tf.TypeSpec:
    """``spec`` with an unknown first dimension; ``spec`` itself if it has no first dimension."""
    if not isinstance(spec, rows_lib.SPECS) or not spec.shape.rank:
        return spec
    shape = tf.TensorShape([None]).concatenate(spec.shape[1:])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype,
                                   spec.flat_values_spec)
    return type(spec)(shape, spec.dtype)


class SubBatchesSpec(_tf.PerReplicaSpec):
    """The type spec of :class:`SubBatches`: one spec per tower; if ``counted``, the row counts'."""

    value_type = property(lambda _: SubBatches)

    def __init__(self, *specs: tf.TypeSpec, batch: int = 0, counted: bool = False) -> None:
        super().__init__(*specs)
        self.batch, self.counted = batch, counted

    def most_specific_common_supertype(self, others: Sequence[Any]) -> SubBatchesSpec | None:
        """The common supertype; if a tower's first dimension is unknown in it, all towers' are."""
        # Otherwise a tower with equal rows in two batches, by chance, would cause another trace.
        common = super().most_specific_common_supertype(others)
        if common is None:
            return None
        specs = common._component_specs
        towers = len(specs) - self.counted
        with_open = [with_any_rows(spec) for spec in specs[:towers]]
        if set(with_open).isdisjoint(specs):
            return common
        return type(self)(*with_open, *specs[towers:], batch=self.batch, counted=self.counted)

    def _serialize(self) -> tuple[Any, ...]:
        return (*super()._serialize(), self.batch, self.counted)

    @classmethod
    def _deserialize(cls, serialized: tuple[Any, ...]) -> SubBatchesSpec:
        *specs, batch, counted = serialized
        return cls(*specs, batch=batch, counted=counted)

    def _to_components(self, value: SubBatches) -> tuple[Any, ...]:
        return (*super()._to_components(value), *([value.rows] if self.counted else []))

    def _from_components(self, components: Sequence[Any]) -> SubBatches:
        *values, rows = components if self.counted else (*components, None)
        return SubBatches(values, self.batch, rows)


class SubBatches(_tf.PerReplica):
    """One component of a batch, split over the towers: ``values[r]`` holds the rows of tower r.

    It is the ``PerReplica`` of ``tf.distribute``, of which the first dimension is known to be rows.
    So each tower's share of the batch is known.

    Attributes:
      batch: the number of its batch, if an element has several batches with different row counts.
      rows: the row counts of the towers of all machines, an int64 vector; None if its parts tell
        them: this machine has all rows, or it is in a worker's own pipeline.
      open_rows: whether functions are traced for any number of rows.
    """

    open_rows = False

    def __init__(self, values: Sequence[Any], batch: int = 0, rows: Any = None) -> None:
        super().__init__(values)
        self.batch, self.rows = batch, rows

    @property
    def _type_spec(self) -> SubBatchesSpec:
        specs = [tf.type_spec_from_value(value) for value in self._values]
        return self.spec_of([with_any_rows(spec) for spec in specs] if self.open_rows else specs)

    def spec_of(self, specs: Sequence[tf.TypeSpec]) -> SubBatchesSpec:
        """The type spec of sub-batches like these, with these specs of the towers' parts."""
        counts = [] if self.rows is None else [tf.TensorSpec(self.rows.shape, tf.int64)]
        return SubBatchesSpec(*specs, *counts, batch=self.batch, counted=self.rows is not None)


def row_counts(batches: SubBatches) -> list[rows_lib.Rows]:
    """Each tower's number of rows: an int if it is known while tracing, else an int64 scalar."""
    if batches.rows is None:
        return [rows_lib.rows_in(part) for part in batches.values]
    if tf.executing_eagerly():
        return batches.rows.numpy().tolist()
    return tf.unstack(batches.rows)


def rows_of(element: Any) -> Any:
    """Each tower's number of rows in an element, a vector; None if the element has no rows."""
    leaves = tf.nest.flatten(element)
    for leaf in leaves:
        if isinstance(leaf, SubBatches):
            return leaf.rows if leaf.rows is not None else rows_lib.vector(row_counts(leaf))
    whole = [leaf for leaf in leaves if getattr(getattr(leaf, "shape", None), "rank", 0) != 0]
    return rows_lib.vector([rows_lib.rows_in(whole[0])]) if whole else None  # of a single tower
