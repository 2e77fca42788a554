"""Sub-batches: per-replica values whose first dimension counts rows.

Goes in: one component of a batch, a part a tower, and the row counts where other machines have rows
of it, too.  Comes out: :class:`SubBatches`, which know the rows of each tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib


def with_open_rows(element: Any) -> Any:
    """``element``, of which functions are traced for any number of rows."""
    # Where towers have unequal shares, one trace serves all of them then, whatever their shares.
    for leaf in tf.nest.flatten(element):
        if isinstance(leaf, SubBatches):
            leaf.open_rows = True
    return element


def with_any_rows(spec: tf.TypeSpec) -> tf.TypeSpec:
    """``spec`` with an open first dimension; as it is where it has none."""
    if not isinstance(spec, (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)) \
            or not spec.shape.rank:
        return spec
    shape = tf.TensorShape([None]).concatenate(spec.shape[1:])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype,
                                   spec.flat_values_spec)
    return type(spec)(shape, spec.dtype)


class SubBatchesSpec(_tf.PerReplicaSpec):
    """The type spec of :class:`SubBatches`: a spec a tower; then, if ``counted``, of row counts."""

    value_type = property(lambda _: SubBatches)

    def __init__(self, *specs: tf.TypeSpec, batch: int = 0, counted: bool = False) -> None:
        super().__init__(*specs)
        self.batch, self.counted = batch, counted

    def most_specific_common_supertype(self, others: Sequence[Any]) -> SubBatchesSpec | None:
        """Open for all towers where it is for one."""
        # A tower with as many rows of both batches by chance would have a function traced once more
        common = super().most_specific_common_supertype(others)
        if common is None:
            return None
        specs = common._component_specs
        towers = len(specs) - self.counted
        opened = [with_any_rows(spec) for spec in specs[:towers]]
        if set(opened).isdisjoint(specs):
            return common
        return type(self)(*opened, *specs[towers:], batch=self.batch, counted=self.counted)

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

    It is the ``PerReplica`` that ``tf.distribute`` uses, with one thing more to it: whoever gets it
    knows that the first dimension counts rows, so that each tower's share of the batch is known.

    Attributes:
      batch: of which of an element's batches, where these have different numbers of rows.
      rows: the row counts of the towers of all machines, an int64 vector (in a worker's own
        pipeline those of its own towers); None where all rows are here.
      open_rows: whether functions are traced for any number of rows.
    """

    open_rows = False

    def __init__(self, values: Sequence[Any], batch: int = 0, rows: Any = None) -> None:
        super().__init__(values)
        self.batch, self.rows = batch, rows

    @property
    def _type_spec(self) -> SubBatchesSpec:
        specs = [tf.type_spec_from_value(value) for value in self._values]
        if self.open_rows:
            specs = [with_any_rows(spec) for spec in specs]
        if self.rows is not None:
            specs.append(tf.TensorSpec(self.rows.shape, tf.int64))
        return SubBatchesSpec(*specs, batch=self.batch, counted=self.rows is not None)


def row_counts(batches: SubBatches) -> list[rows_lib.Rows]:
    """The number of rows of each tower: ints where known, else int64 scalars."""
    if batches.rows is None:
        return [rows_lib.rows_in(part) for part in batches.values]
    if tf.executing_eagerly():
        return batches.rows.numpy().tolist()
    return tf.unstack(batches.rows)


def rows_of(element: Any) -> Any:
    """The rows of each tower in an element, a vector; None where none are known."""
    leaves = tf.nest.flatten(element)
    for leaf in leaves:
        if isinstance(leaf, SubBatches):
            return leaf.rows if leaf.rows is not None else rows_lib.vector(row_counts(leaf))
    whole = [leaf for leaf in leaves if getattr(getattr(leaf, "shape", None), "rank", 0) != 0]
    return rows_lib.vector([rows_lib.rows_in(whole[0])]) if whole else None  # of the only tower
