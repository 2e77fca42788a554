"""Global batch -> sub-batches.

Goes in: a batch, any nest of dense, ragged, sparse and string tensors or arrays.  Comes out: the
same nest with one :class:`sub_batches.SubBatches` per component; or an error that names the
component without rows, or the components whose numbers of rows differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import rows as rows_lib, sub_batches
from towerstrategy.batch.rows import Nest

_SAME_ROWS = "the components of a batch must have the same number of rows, but"
_LIST_HINT = " (A list or tuple is a nest of components: make an array of a list of rows.)"


def split_batch(batch: Nest, towers: int, cuts: rows_lib.CutRows | None = None,
                batches: Sequence[int] | None = None, here: slice | None = None) -> Nest:
    """The nest ``batch`` with a :class:`SubBatches` for each leaf; None stays None.

    With one tower, it is the batch itself, with tensors as its leaves.  Different numbers of rows
    raise ``ValueError`` or, if they are only known while the pipeline runs,
    ``tf.errors.InvalidArgumentError``.

    Args:
      batch: dense, ragged or sparse tensors or arrays of any dtype, one row per example.
      towers: the number of sub-batches.
      cuts: computes each tower's rows, if other machines have towers or shares are unequal.
      batches: for each leaf, the number of the batch that it belongs to; None if there is only one.
      here: with several machines, this one's towers among those whose rows ``cuts`` computes.
    """
    named = _tf.flatten_with_paths(batch)
    tensors = [_as_component(path, leaf) for path, leaf in named]
    if not any(map(rows_lib.has_rows, tensors)):
        if any(leaf is not None for leaf in tensors):
            return batch
        raise ValueError("batch has no component with rows to split: got "
                         f"{tf.nest.map_structure(type, batch)!r}.")
    numbers = batches or [0] * len(named)
    sizes = {}  # the towers' rows of each batch
    for number in dict.fromkeys(numbers):
        rows = _common_rows([(path, tensor) for (path, _), tensor, other in zip(
            named, tensors, numbers) if other == number and rows_lib.has_rows(tensor)])
        sizes[number] = rows_lib.split_rows(rows, towers) if cuts is None else cuts(rows)
    if towers == 1 and cuts is None:
        return tf.nest.pack_sequence_as(batch, tensors)
    counts = {number: None if here is None else tf.convert_to_tensor(each, tf.int64)
              for number, each in sizes.items()}
    packed = tf.nest.pack_sequence_as(batch, [
        sub_batches.SubBatches(rows_lib.cut(tensor, sizes[number], here or slice(None)), number,
                               counts[number]) if rows_lib.has_rows(tensor) else tensor
        for tensor, number in zip(tensors, numbers)])
    fixed = not tf.executing_eagerly() and here is None and all(
        isinstance(each, list) for each in sizes.values())  # the same for all batches of a dataset
    return packed if cuts is None or fixed else sub_batches.with_open_rows(packed)


def as_sub_batches(grouped: Nest) -> Nest:
    """Per-replica values; as sub-batches if their first dimensions differ between the towers."""
    # Different first dimensions are numbers of rows, unless components contradict each other.
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


def component_name(path: str) -> str:
    """The name, in errors, of the component at ``path`` of a nest."""
    return f"component {path}" if path else "the batch"


def _as_component(path: str, leaf: Any) -> Any:
    """``leaf`` as a tensor with rows; None and optionals (absent components) as they are."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return leaf
    if isinstance(leaf, tf.distribute.DistributedValues):
        raise ValueError(f"{component_name(path)} is split already: got {type(leaf).__name__}.")
    if not rows_lib.has_rows(leaf):
        leaf = _as_tensor(path, leaf)
    if leaf.shape.rank == 0:
        raise ValueError(f"{component_name(path)} is a scalar of dtype {leaf.dtype.name}, but it "
                         "needs rows in a first (batch) dimension to be split over the towers."
                         + _LIST_HINT * bool(path))
    if leaf.shape.rank is None:
        message = f"{component_name(path)} has no first (batch) dimension to split over the towers."
        with tf.control_dependencies([tf.debugging.assert_rank_at_least(leaf, 1, message=message)]):
            leaf = tf.identity(leaf)
    return leaf


def _as_tensor(path: str, leaf: Any) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        hint = " Distribute it with strategy.experimental_distribute_dataset." if isinstance(
            leaf, tf.data.Dataset) else (
            " Let the batch have its tensors, and make it of them in the model; or give each tower "
            "batches of its own, by strategy.distribute_datasets_from_function, and call "
            "strategy.run." if isinstance(leaf, _tf.CompositeTensor) else "")
        raise TypeError(f"{component_name(path)} must be a tensor or array with rows, but got "
                        f"{type(leaf).__name__}: {error}{hint}") from error
    if not isinstance(tensor, tf.Tensor):
        raise TypeError(f"{component_name(path)} must be a tensor or array with rows, but got "
                        f"{leaf!r} of type {type(leaf).__name__}.")
    return tensor


def _common_rows(components: Sequence[tuple[str, Any]]) -> rows_lib.Rows:
    """The number of rows of all components; raises, now or when it runs, if they differ."""
    rows = [rows_lib.rows_in(tensor) for _, tensor in components]
    check_same_rows({path: count for (path, _), count in zip(components, rows)
                     if isinstance(count, int)})
    if len(rows) == 1 or all(isinstance(count, int) for count in rows):
        return rows[0]
    counts = rows_lib.vector(rows)
    same = tf.reduce_all(tf.equal(counts, rows[0]))
    message = [f"{_SAME_ROWS} {', '.join(path for path, _ in components)} have", counts]
    # Not tf.debugging.Assert, which makes a tf.cond, whose branch is traced for each batch.
    check = tf.raw_ops.Assert(condition=same, data=[*map(tf.convert_to_tensor, message)],
                              summarize=len(rows))
    if isinstance(rows[0], int):
        return rows[0]
    with tf.control_dependencies([check]):
        return tf.identity(rows[0])


def check_same_rows(rows: dict[str, int], hint: str = "") -> None:
    """Raises if components, by path, have different numbers of rows; ``hint``: a likely cause."""
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"{path} has {count}" for path, count in rows.items())
        raise ValueError(f"{_SAME_ROWS} {sizes}.{hint}")
