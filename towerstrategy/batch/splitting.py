"""Global batch -> sub-batches.

Goes in: a batch, any nest of dense, ragged, sparse and string tensors or arrays.  Comes out: the
same nest with one :class:`sub_batches.SubBatches` a component, or an error that names the component
which has no rows, or others than the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib, sub_batches
from towerstrategy.batch.rows import Nest

_SAME_ROWS = "the components of a batch must have the same number of rows, but"
_LIST_HINT = " (A list or tuple is a nest of components: make an array of a list of rows.)"


def split_batch(batch: Nest, towers: int, cuts: rows_lib.CutRows | None = None,
                batches: Sequence[int] | None = None) -> Nest:
    """The nest ``batch`` with a :class:`SubBatches` for each leaf, by rows; None stays None.

    With one tower it is the batch itself, its leaves as tensors.  Row counts that differ raise
    ``ValueError``; where they are only known while the pipeline runs,
    ``tf.errors.InvalidArgumentError`` says the same.

    Args:
      batch: dense, ragged or sparse tensors or arrays of any dtype, a row an example.
      towers: how many sub-batches.
      cuts: where rows are cut if towers are elsewhere, too, or have unequal shares.
      batches: for each leaf the number of the batch it is of; None where all are of one.
    """
    named = _tf.flatten_with_paths(batch)
    tensors = [_as_batch(path, leaf) for path, leaf in named]
    if not any(map(rows_lib.has_rows, tensors)):
        if any(leaf is not None for leaf in tensors):
            return batch
        raise ValueError("batch has no component with rows to split: got "
                         f"{tf.nest.map_structure(type, batch)!r}.")
    numbers = batches or [0] * len(named)
    split = {each: _splitter([
        (path, tensor) for (path, _), tensor, number in zip(named, tensors, numbers)
        if number == each and rows_lib.has_rows(tensor)], towers, cuts, each)
        for each in dict.fromkeys(numbers)}
    if towers == 1 and cuts is None:
        return tf.nest.pack_sequence_as(batch, tensors)
    packed = tf.nest.pack_sequence_as(batch, [
        split[number](tensor) if rows_lib.has_rows(tensor) else tensor
        for tensor, number in zip(tensors, numbers)])
    return packed if cuts is None else sub_batches.with_open_rows(packed)


def _splitter(counted: Sequence[tuple[str, Any]], towers: int, cuts: rows_lib.CutRows | None,
              batch: int) -> Callable[[Any], sub_batches.SubBatches]:
    """What splits the components of one batch, pairs of a path and a tensor."""
    rows = _rows_of_all(counted)
    sizes, here, counts = (
        (rows_lib.split_rows(rows, towers), slice(None), None) if cuts is None else cuts(rows))
    vector = None if counts is None else tf.convert_to_tensor(counts, tf.int64)
    return lambda tensor: sub_batches.SubBatches(rows_lib.cut(tensor, sizes, here), batch, vector)


def as_batch(grouped: Nest) -> Nest:
    """Per-replica values, as sub-batches where their first dimensions differ between the towers."""
    # These are rows then, unless components contradict each other.
    lengths = {}
    for leaf in tf.nest.flatten(grouped):
        if isinstance(leaf, _tf.PerReplica):
            shapes = [tf.TensorShape(getattr(part, "shape", ())) for part in leaf.values]
            rows = tuple(shape[0] if shape.rank else None for shape in shapes)
            if None not in rows and len(set(rows)) > 1:
                lengths[id(leaf)] = rows
    if len(set(lengths.values())) != 1:
        return grouped
    return tf.nest.map_structure(lambda leaf: leaf if id(leaf) not in lengths else (
        sub_batches.SubBatches([part if rows_lib.has_rows(part) else tf.convert_to_tensor(part)
                                for part in leaf.values])), grouped)


def called(path: str) -> str:
    """What errors call the component at ``path`` of a nest."""
    return f"component {path}" if path else "the batch"


def _as_batch(path: str, leaf: Any) -> Any:
    """``leaf`` as a tensor with rows; None and optionals (absent components) as they are."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return leaf
    if isinstance(leaf, tf.distribute.DistributedValues):
        raise ValueError(f"{called(path)} is split already: got {type(leaf).__name__}.")
    if not rows_lib.has_rows(leaf):
        leaf = _as_tensor(path, leaf)
    if leaf.shape.rank == 0:
        raise ValueError(f"{called(path)} is a scalar of dtype {leaf.dtype.name}, but it needs "
                         "rows in a first (batch) dimension to be split over the towers."
                         + _LIST_HINT * bool(path))
    if leaf.shape.rank is None:
        message = f"{called(path)} has no first (batch) dimension to be split over the towers."
        with tf.control_dependencies([tf.debugging.assert_rank_at_least(leaf, 1, message=message)]):
            leaf = tf.identity(leaf)
    return leaf


def _as_tensor(path: str, leaf: Any) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        hint = (" Distribute it with strategy.experimental_distribute_dataset."
                if isinstance(leaf, tf.data.Dataset) else "")
        raise TypeError(f"{called(path)} must be a tensor or array with rows, but got "
                        f"{type(leaf).__name__}: {error}{hint}") from error
    if not isinstance(tensor, tf.Tensor):
        raise TypeError(f"{called(path)} must be a tensor or array with rows, but got {leaf!r} of "
                        f"type {type(leaf).__name__}.")
    return tensor


def _rows_of_all(counted: Sequence[tuple[str, Any]]) -> rows_lib.Rows:
    """The row count that all components share."""
    rows = [rows_lib.rows_in(tensor) for _, tensor in counted]
    check_known({path: count for (path, _), count in zip(counted, rows)
                  if isinstance(count, int)})
    if len(rows) == 1 or all(isinstance(count, int) for count in rows):
        return rows[0]
    counts = rows_lib.vector(rows)
    alike = tf.reduce_all(tf.equal(counts, rows[0]))
    found = [f"{_SAME_ROWS} {', '.join(path for path, _ in counted)} have", counts]
    # The operation itself: tf.debugging's would put it into a branch, to be traced for each batch.
    check = tf.raw_ops.Assert(condition=alike, data=[*map(tf.convert_to_tensor, found)],
                              summarize=len(rows))
    if isinstance(rows[0], int):
        return rows[0]
    with tf.control_dependencies([check]):
        return tf.identity(rows[0])


def check_known(rows: dict[str, int], hint: str = "") -> None:
    """Raises where the row counts that are known differ; ``hint`` says what may have caused it."""
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"{path} has {count}" for path, count in rows.items())
        raise ValueError(f"{_SAME_ROWS} {sizes}.{hint}")
