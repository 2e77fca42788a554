"""Global batch -> sub-batches: how rows are dealt to the towers, in eager code and in pipelines.

Goes in: a batch (any nest of dense, ragged, sparse and string tensors or arrays) or a
``tf.data.Dataset`` of batches.  Comes out: the same nest with one :class:`SubBatches` a component,
or a :class:`TowerDataset` of such nests.  Rows are dealt in order and as evenly as they go: with N
rows and R towers the first ``N mod R`` towers get ``N // R + 1`` rows, the others ``N // R``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf

# The name scope of the operations that split, in input pipelines.
SCOPE = "tower_split"

# How many elements lie ready behind the split.
READY = 2

# Nobody unrolls so many steps into one graph on purpose.
_MOST_STEPS_IN_GRAPH = 1000

_SAME_ROWS = "the components of a batch must have the same number of rows, but"
_LIST_HINT = " (A list or tuple is a nest of components: make an array of a list of rows.)"

Nest = Any
Rows = Any  # an int, or a scalar int64 tensor


class SubBatchesSpec(_tf.PerReplicaSpec):
    """The type spec of :class:`SubBatches`."""

    value_type = property(lambda _: SubBatches)
    _hash: int | None = None

    def __hash__(self) -> int:
        # Each call of a tf.function hashes its arguments' specs some times over.
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    __eq__ = _tf.PerReplicaSpec.__eq__

    def _from_components(self, components: Sequence[Any]) -> SubBatches:
        return SubBatches(components)


class SubBatches(_tf.PerReplica):
    """One component of a batch, dealt to the towers: ``values[r]`` holds the rows of tower r.

    It is the ``PerReplica`` that ``tf.distribute`` uses, with one thing more to it: whoever gets it
    knows that the first dimension counts rows, so that each tower's share of the batch is known.
    """

    @property
    def _type_spec(self) -> SubBatchesSpec:
        return SubBatchesSpec(*(tf.type_spec_from_value(value) for value in self._values))


class StandInSpec(SubBatchesSpec):
    """The type spec of :class:`StandInSubBatches`: one spec a tower, then the row counts'."""

    value_type = property(lambda _: StandInSubBatches)

    def _to_components(self, value: StandInSubBatches) -> tuple[Any, ...]:
        return (*super()._to_components(value), value.rows)

    def _from_components(self, components: Sequence[Any]) -> StandInSubBatches:
        return StandInSubBatches(components[:-1], components[-1])


class StandInSubBatches(SubBatches):
    """Sub-batches in which a tower without rows gets a copy of a row that belongs to another.

    Kernels are not reliable on empty tensors (oneDNN's convolutions fail on them), so Keras' steps
    never see one.  ``rows``, an int64 vector, holds the true row counts (with several machines,
    those of all their towers); whatever a tower with a count of 0 computes from its stand-in is
    left out where the towers meet.
    """

    def __init__(self, values: Sequence[Any], rows: tf.Tensor) -> None:
        super().__init__(values)
        self.rows = rows

    @property
    def _type_spec(self) -> StandInSpec:
        return StandInSpec(*(tf.type_spec_from_value(value) for value in self._values),
                           tf.TensorSpec(self.rows.shape, tf.int64))


def deal(rows: Rows, towers: int) -> tuple[list[Rows], list[Rows]]:
    """Where each tower's rows start and how many they are.

    Args:
      rows: rows of the batch, an int or a scalar integer tensor.
      towers: how many towers, at least 1.

    Returns:
      ``(starts, sizes)``, ``towers`` items each, ints or scalar tensors as ``rows`` is.

    >>> deal(10, 4)
    ([0, 3, 6, 8], [3, 3, 2, 2])
    >>> deal(2, 4)
    ([0, 1, 2, 2], [1, 1, 0, 0])
    """
    base, extra = rows // towers, rows % towers
    if isinstance(rows, int):
        starts = [tower * base + min(tower, extra) for tower in range(towers)]
        return starts, [base + int(tower < extra) for tower in range(towers)]
    numbers = tf.range(towers, dtype=rows.dtype)  # one operation for all: each batch pays for them
    starts = numbers * base + tf.minimum(numbers, extra)
    sizes = base + tf.cast(numbers < extra, rows.dtype)
    return tf.unstack(starts), tf.unstack(sizes)


# Rows of a batch -> where this machine's towers' rows start, how many they are, and the rows to
# put down with them.
Dealing = Callable[[Rows], tuple[list[Rows], list[Rows], Sequence[Rows]]]


def split_batch(batch: Nest, towers: int, stand_ins: bool = False,
                dealing: Dealing | None = None) -> Nest:
    """Deals the rows of ``batch`` to the towers.

    Args:
      batch: a nest whose leaves are tensors or arrays with one row an example in the first
        dimension, of any dtype: dense, ``tf.RaggedTensor``, ``tf.SparseTensor``, strings.  ``None``
        leaves stay ``None``.
      towers: how many sub-batches.
      stand_ins: whether a tower without rows gets a stand-in, see :class:`StandInSubBatches`.
      dealing: how rows are dealt where some go to other machines; None where all stay here.

    Returns:
      The same nest with a :class:`SubBatches` for each leaf; with one tower the batch itself, its
      leaves as tensors.

    Raises:
      ValueError: a leaf without rows (a scalar), or leaves whose row counts differ; where they are
        only known while the pipeline runs, ``tf.errors.InvalidArgumentError`` says the same.
    """
    paths, leaves = _named_leaves(batch)
    tensors = [_as_batch(path, leaf) for path, leaf in zip(paths, leaves)]
    counted = [(path, tensor) for path, tensor in zip(paths, tensors) if has_rows(tensor)]
    if not counted:
        if any(leaf is not None for leaf in leaves):
            return batch
        raise ValueError("batch has no component with rows to split: got "
                         f"{tf.nest.map_structure(type, batch)!r}.")
    rows = _rows_of_all(counted)
    if towers == 1 and dealing is None:
        return tf.nest.pack_sequence_as(batch, tensors)
    starts, sizes, told = (*deal(rows, towers), None) if dealing is None else dealing(rows)
    pack: Callable[[list[Any]], SubBatches] = SubBatches
    absent = stand_ins and not all(isinstance(size, int) and size > 0 for size in sizes)
    if absent or told is not None:
        counts = tf.cast(tf.stack(sizes if told is None else told), tf.int64)
        if absent:
            starts, sizes = _with_stand_ins(rows, starts, sizes)
        pack = functools.partial(StandInSubBatches, rows=counts)
    dealt = [pack([rows_between(tensor, start, size) for start, size in zip(starts, sizes)])
             if has_rows(tensor) else tensor for tensor in tensors]
    return tf.nest.pack_sequence_as(batch, dealt)


def as_batch(grouped: Nest) -> Nest:
    """Per-replica values, as sub-batches where their first dimensions differ between the towers.

    These are rows then, unless components contradict each other.
    """
    lengths = {}
    for leaf in tf.nest.flatten(grouped):
        if isinstance(leaf, _tf.PerReplica):
            shapes = [tf.TensorShape(getattr(part, "shape", ())) for part in leaf.values]
            rows = tuple(shape[0] if shape.rank else None for shape in shapes)
            if None not in rows and len(set(rows)) > 1:
                lengths[id(leaf)] = rows
    if len(set(lengths.values())) != 1:
        return grouped
    return tf.nest.map_structure(
        lambda leaf: SubBatches([part if has_rows(part) else tf.convert_to_tensor(part)
                                 for part in leaf.values]) if id(leaf) in lengths else leaf,
        grouped)


def row_counts(batches: SubBatches) -> list[Rows]:
    """The true number of rows of each tower: ints where known, else int64 scalars."""
    if not isinstance(batches, StandInSubBatches):
        return [rows_in(part) for part in batches.values]
    if tf.executing_eagerly():
        return batches.rows.numpy().tolist()
    return tf.unstack(batches.rows)


def rows_in(component: Any) -> Rows:
    """The rows of a dense, ragged or sparse component: an int where known, else an int64 scalar."""
    static = known_rows(component)
    if static is not None:
        return static
    if isinstance(component, tf.SparseTensor):
        return component.dense_shape[0]
    if isinstance(component, tf.RaggedTensor):
        return component.nrows(out_type=tf.int64)
    return tf.shape(component, out_type=tf.int64)[0]


def known_rows(component: Any) -> int | None:
    """The rows of a dense, ragged or sparse component where they are known while tracing."""
    return component.shape[0] if component.shape.rank else None


def split_dataset(dataset: tf.data.Dataset, towers: int, stand_ins: bool = False,
                  ready: int = READY) -> TowerDataset:
    """A dataset of global batches, split in the input pipeline.

    Args:
      dataset: elements are batches, see :func:`split_batch`.
      towers: how many sub-batches each element becomes.
      stand_ins: see :func:`split_batch`.
      ready: how many split elements the pipeline holds ready.

    Raises:
      TypeError: ``dataset`` is no ``tf.data.Dataset``.
      ValueError: its elements are not batched.
    """
    check_batched(dataset)
    again = functools.partial(split_dataset, dataset, towers, True, ready)
    if towers > 1:
        split = on_elements(dataset.element_spec, _in_scope(
            lambda element: split_batch(element, towers, stand_ins)))
        dataset = dataset.map(split).prefetch(ready)
    return TowerDataset(dataset, again)


def group_dataset(dataset: tf.data.Dataset, towers: int, stand_ins: bool = False,
                  ready: int = READY) -> TowerDataset:
    """A dataset of per-tower batches: R elements in a row make one step, one a tower.

    An incomplete last group gives its missing towers batches with no rows.  Where a component is a
    scalar, so that elements are single values and not batches, such a group is left out, as
    ``MirroredStrategy`` leaves it out.

    Args:
      dataset: elements are the batches of one tower.
      towers: how many elements make a step.
      stand_ins: see :func:`split_batch`.
      ready: how many grouped elements the pipeline holds ready.

    Raises:
      TypeError: ``dataset`` is no ``tf.data.Dataset``.
    """
    _check_made(dataset)
    if towers == 1:
        return TowerDataset(dataset)
    spec = dataset.element_spec
    batched = _is_batched(spec)
    # window() makes a dataset of each leaf; only a flat tuple does it give back plainly.
    flat = dataset.map(on_elements(spec, lambda element: tuple(tf.nest.flatten(element))))
    windows = flat.window(towers, drop_remainder=not batched)

    def group(*leaves: tf.data.Dataset) -> Nest:
        window = tf.data.Dataset.zip(leaves)
        first = window.take(1).get_single_element()
        missing = first if stand_ins else tuple(map(rows_of_zeros, tf.nest.flatten(spec)))
        padded = window if not batched else window.concatenate(
            tf.data.Dataset.from_tensors(missing).repeat(towers))
        parts = [tf.nest.pack_sequence_as(spec, padded.skip(tower).take(1).get_single_element())
                 for tower in range(towers)]
        pack: Callable[[tuple[Any, ...]], Any] = SubBatches if batched else _tf.PerReplica
        if stand_ins and batched:
            there = tf.range(towers, dtype=tf.int64) < window.reduce(
                tf.constant(0, tf.int64), lambda count, *_: count + 1)
            rows = [tf.cast(rows_in(tf.nest.flatten(part)[0]), tf.int64) for part in parts]
            counts = tf.where(there, tf.stack(rows), tf.zeros([towers], tf.int64))
            pack = functools.partial(StandInSubBatches, rows=counts)
        return tf.nest.map_structure(lambda *values: pack(values), *parts)

    return TowerDataset(windows.map(_in_scope(group)).prefetch(ready),
                        functools.partial(group_dataset, dataset, towers, True, ready))


def zip_datasets(datasets: Sequence[tf.data.Dataset], ready: int = READY) -> TowerDataset:
    """One dataset of per-tower batches a tower, put side by side.

    A tower whose dataset has ended gets batches with no rows until all have ended; with elements
    that are single values and not batches, the shortest ends all.

    Args:
      datasets: one a tower, all with the same element spec.
      ready: how many elements the pipeline holds ready.

    Raises:
      TypeError: one of them is no ``tf.data.Dataset``, or has elements of another kind.
    """
    for dataset in datasets:
        _check_made(dataset)
    if len(datasets) == 1:
        return TowerDataset(datasets[0])
    spec = datasets[0].element_spec
    for tower, dataset in enumerate(datasets):
        _check_like_first(tower, dataset.element_spec, spec)
    batched = _is_batched(spec)
    pack = SubBatches if batched else _tf.PerReplica

    def group(*elements: Nest) -> Nest:
        parts = [tf.nest.pack_sequence_as(spec, element) for element in elements]
        return tf.nest.map_structure(lambda *leaves: pack(leaves), *parts)

    flat = [dataset.map(on_elements(spec, lambda element: tuple(tf.nest.flatten(element))))
            for dataset in datasets]
    if not batched:
        return TowerDataset(tf.data.Dataset.zip(tuple(flat)).map(group).prefetch(ready))
    nothing = tf.data.Dataset.from_tensors(
        (False, tuple(rows_of_zeros(leaf) for leaf in tf.nest.flatten(spec)))).repeat()
    flagged = [dataset.map(lambda *leaves: (True, leaves)).concatenate(nothing) for dataset in flat]
    zipped = tf.data.Dataset.zip(tuple(flagged)).take_while(
        lambda *pairs: tf.reduce_any([there for there, _ in pairs]))
    grouped = zipped.map(lambda *pairs: group(*(leaves for _, leaves in pairs)))
    return TowerDataset(grouped.prefetch(ready))


class _Counting(threading.local):
    follow: Callable[[tf.data.Dataset], tuple[tf.data.Dataset, Any]] | None = None


_counting = _Counting()


def count_rows(follow: Callable[[tf.data.Dataset], tuple[tf.data.Dataset, Any]] | None) -> None:
    """From now on this thread's new iterators over a :class:`TowerDataset` are counted.

    Args:
      follow: makes of a dataset one that counts, and its count, which becomes the iterator's
        ``row_count``; None ends it.
    """
    _counting.follow = follow


class TowerIterator(_tf.OwnedIterator, tf.distribute.DistributedIterator):
    """Iterates over a :class:`TowerDataset`; a ``tf.data`` iterator, so it can be checkpointed.

    Attributes:
      row_count: what counts the rows taken, see :func:`count_rows`; None where nothing does.
    """

    row_count: Any = None
    _devices: Sequence[str] = ()
    _steps_in_graph = 0

    def get_next(self) -> Nest:
        return onto_devices(super().get_next(), self._devices)

    def __next__(self) -> Nest:
        self._check_ends()
        return onto_devices(super().__next__(), self._devices)

    def _check_ends(self) -> None:
        """Python's own loops know no end while a function is traced; stop them with a reason."""
        if tf.executing_eagerly():
            return
        self._steps_in_graph += 1
        if self._steps_in_graph > _MOST_STEPS_IN_GRAPH:
            raise RuntimeError(
                f"more than {_MOST_STEPS_IN_GRAPH} batches were taken from a distributed dataset "
                "while one tf.function was traced. Python's enumerate, zip and comprehensions do "
                "not see where a dataset ends there. Write a plain `for batch in dataset:` loop, "
                "which autograph converts, and count in it.")


class TowerDataset(tf.distribute.DistributedDataset):
    """A dataset whose elements are split for the towers: what Keras and loops iterate over.

    Attributes:
      element_spec: nest of type specs, a :class:`SubBatchesSpec` for each split component.
    """

    def __init__(self, dataset: tf.data.Dataset,
                 with_stand_ins: Callable[[], TowerDataset] | None = None) -> None:
        self._dataset = dataset
        self._with_stand_ins = with_stand_ins
        self._devices: Sequence[str] = ()

    def with_stand_ins(self) -> TowerDataset:
        """The same dataset with stand-ins for towers without rows."""
        if self._with_stand_ins is None:
            return self
        return self._with_stand_ins().fetched_to(self._devices)

    def fetched_to(self, devices: Sequence[str]) -> TowerDataset:
        """This dataset, each tower's part of an element put on its device when it is taken."""
        self._devices = devices
        return self

    @property
    def dataset(self) -> tf.data.Dataset:
        """What it iterates over."""
        return self._dataset

    @property
    def element_spec(self) -> Nest:
        return self._dataset.element_spec

    @property
    def cardinality(self) -> int:
        """Steps in one pass, as ``tf.data`` counts them."""
        return self._dataset.cardinality()

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> TowerIterator:
        dataset, row_count = self._dataset, None
        if _counting.follow is not None:
            dataset, row_count = _counting.follow(dataset)
        iterator = iter(dataset)
        iterator.__class__ = TowerIterator
        iterator._devices = self._devices
        iterator.row_count = row_count
        return iterator

    def reduce(self, initial_state: Nest, reduce_func: Callable[[Nest, Nest], Nest]) -> Nest:
        """Folds ``reduce_func(state, element)`` over the elements (autograph's ``for``).

        The body runs in the caller's graph, where towers have their devices, and not inside the
        input pipeline.
        """
        iterator = iter(self)

        def body(element: tf.experimental.Optional, state: Nest) -> tuple[Any, Nest]:
            state = reduce_func(state, element.get_value())
            return iterator.get_next_as_optional(), state

        _, state = tf.while_loop(lambda element, _: element.has_value(), body,
                                 (iterator.get_next_as_optional(), initial_state),
                                 parallel_iterations=1)
        return state


class RestartableIterator:
    """What tf.distribute's first API has: ``make_dataset_iterator``, ``make_input_fn_iterator``.

    It reads from the start again after :meth:`initialize`.
    """

    def __init__(self, dataset: TowerDataset) -> None:
        self._dataset = dataset
        self._iterator = iter(dataset)

    def initialize(self) -> list[tf.Operation]:
        """Starts again; there is no operation to run, as in all eager programs."""
        self._iterator = iter(self._dataset)
        return []

    @property
    def initializer(self) -> list[tf.Operation]:
        return self.initialize()

    @property
    def element_spec(self) -> Nest:
        return self._dataset.element_spec

    def get_next(self) -> Nest:
        """The next element; ``tf.errors.OutOfRangeError`` at the end."""
        return self._iterator.get_next()

    def get_next_as_optional(self) -> tf.experimental.Optional:
        return self._iterator.get_next_as_optional()


def onto_devices(element: Nest, devices: Sequence[str]) -> Nest:
    """``element`` with each tower's part on its device; as it is where no devices are given."""
    if not devices:
        return element

    def moved(part: Any, device: str) -> Any:
        with tf.device(device):
            return tf.nest.map_structure(tf.identity, part, expand_composites=True)

    def each(leaf: Any) -> Any:
        if not isinstance(leaf, _tf.PerReplica):
            return moved(leaf, devices[0]) if len(devices) == 1 and has_rows(leaf) else leaf
        parts = [moved(part, device) for part, device in zip(leaf.values, devices)]
        if isinstance(leaf, StandInSubBatches):
            return StandInSubBatches(parts, leaf.rows)
        return type(leaf)(parts)

    return tf.nest.map_structure(each, element)


def on_elements(spec: Nest, fn: Callable[[Nest], Nest]) -> Callable[..., Nest]:
    """``fn`` as ``Dataset.map`` calls it: tf.data opens plain tuples up, and those alone."""
    if type(spec) is tuple:
        return lambda *element: fn(element)
    return fn


def _in_scope(fn: Callable[..., Nest]) -> Callable[..., Nest]:
    """``fn`` with its operations in the scope by which a profile knows them."""

    def scoped(*element: Any) -> Nest:
        with tf.name_scope(SCOPE):
            return fn(*element)

    return scoped


def _named_leaves(batch: Nest) -> tuple[list[str], list[Any]]:
    pairs = _tf.flatten_with_paths(batch, expand_composites=False)
    return [path for path, _ in pairs], [leaf for _, leaf in pairs]


def _called(path: str) -> str:
    """What errors call the component at ``path`` of a nest."""
    return f"component {path}" if path else "the batch"


def has_rows(leaf: Any) -> bool:
    """Whether ``leaf`` is a tensor of a kind that can have rows."""
    return isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor))


def _as_batch(path: str, leaf: Any) -> Any:
    """``leaf`` as a tensor with rows; None and optionals (absent components) as they are."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return leaf
    if isinstance(leaf, tf.distribute.DistributedValues):
        raise ValueError(f"{_called(path)} is split already: got {type(leaf).__name__}.")
    if not has_rows(leaf):
        leaf = _as_tensor(path, leaf)
    if leaf.shape.rank == 0:
        raise ValueError(f"{_called(path)} is a scalar of dtype {leaf.dtype.name}, but it needs "
                         "rows in a first (batch) dimension to be split over the towers."
                         + _LIST_HINT * bool(path))
    if leaf.shape.rank is None:
        message = f"{_called(path)} has no first (batch) dimension to be split over the towers."
        with tf.control_dependencies([tf.debugging.assert_rank_at_least(leaf, 1, message=message)]):
            leaf = tf.identity(leaf)
    return leaf


def _as_tensor(path: str, leaf: Any) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        hint = (" Distribute it with strategy.experimental_distribute_dataset."
                if isinstance(leaf, tf.data.Dataset) else "")
        raise TypeError(f"{_called(path)} must be a tensor or array with rows, but got "
                        f"{type(leaf).__name__}: {error}{hint}") from error
    if not isinstance(tensor, tf.Tensor):
        raise TypeError(f"{_called(path)} must be a tensor or array with rows, but got {leaf!r} of "
                        f"type {type(leaf).__name__}.")
    return tensor


def _rows_of_all(counted: Sequence[tuple[str, Any]]) -> Rows:
    """The row count that all components share."""
    rows = [rows_in(tensor) for _, tensor in counted]
    _check_known({path: count for (path, _), count in zip(counted, rows)
                  if isinstance(count, int)})
    if len(rows) == 1 or all(isinstance(count, int) for count in rows):
        return rows[0]
    counts = [tf.cast(count, tf.int64) for count in rows]
    told = [part for (path, _), count in zip(counted, counts) for part in (f"{path} has", count)]
    check = tf.debugging.Assert(
        tf.reduce_all([tf.equal(count, counts[0]) for count in counts[1:]]), [_SAME_ROWS, *told])
    if isinstance(rows[0], int) or check is None:  # eager code has checked already
        return rows[0]
    with tf.control_dependencies([check]):
        return tf.identity(rows[0])


def _check_known(rows: dict[str, int]) -> None:
    """Raises where the row counts that are known differ."""
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"{path} has {count}" for path, count in rows.items())
        raise ValueError(f"{_SAME_ROWS} {sizes}.")


def _with_stand_ins(rows: Rows, starts: list[Rows],
                    sizes: list[Rows]) -> tuple[list[Rows], list[Rows]]:
    """Starts and sizes that give a tower without rows the batch's last row (if there is any)."""
    if isinstance(rows, int):
        return [min(start, max(rows - 1, 0)) for start in starts], [max(size, 1) for size in sizes]
    one = tf.constant(1, rows.dtype)
    last = tf.maximum(rows - one, 0)
    return (tf.unstack(tf.minimum(tf.stack(starts), last)),
            tf.unstack(tf.maximum(tf.stack(sizes), one)))


def rows_between(tensor: Any, start: Rows, size: Rows) -> Any:
    """``size`` rows of ``tensor`` from ``start``."""
    if isinstance(tensor, tf.SparseTensor):
        rest = tensor.dense_shape[1:]
        begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(rest)], 0)
        part = tf.sparse.slice(tensor, begin, tf.concat([[tf.cast(size, tf.int64)], rest], 0))
        shape = [size if isinstance(size, int) else None, *tensor.shape.as_list()[1:]]
        return tf.SparseTensor(part.indices, part.values,
                               tf.ensure_shape(part.dense_shape, [len(shape)]))
    return tensor[start:start + size]


def _is_batched(spec: Nest) -> bool:
    shapes = [leaf.shape for leaf in tf.nest.flatten(spec) if hasattr(leaf, "shape")]
    return all(shape.rank != 0 for shape in shapes)


def check_batched(dataset: Any) -> None:
    """Raises where ``dataset`` is no dataset of batches."""
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError("dataset must be a tf.data.Dataset, but got "
                        f"{dataset!r} of type {type(dataset).__name__}.")
    for path, leaf in zip(*_named_leaves(dataset.element_spec)):
        shape = getattr(leaf, "shape", None)
        if shape is not None and shape.rank == 0:
            what = f"{_called(path)} of its elements is a scalar" if path else (
                "its elements are scalars")
            raise ValueError(
                f"the dataset is not batched: {what} ({leaf!r}), so there are no rows to split "
                "over the towers. Call dataset.batch(global_batch_size) first.")
    _check_known({path: leaf.shape[0] for path, leaf in zip(*_named_leaves(dataset.element_spec))
                  if getattr(leaf, "shape", None) and leaf.shape[0] is not None})


def _check_made(dataset: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError("dataset_fn must return a tf.data.Dataset, but got "
                        f"{dataset!r} of type {type(dataset).__name__}.")


def _check_like_first(tower: int, spec: Nest, first: Nest) -> None:
    """One iterator goes over the towers' datasets, so their elements must be of one kind."""
    try:
        tf.nest.assert_same_structure(spec, first)
        alike = all(own.most_specific_common_supertype([other]) is not None
                    for own, other in zip(tf.nest.flatten(spec), tf.nest.flatten(first)))
    except (TypeError, ValueError):
        alike = False
    if not alike:
        raise TypeError("dataset_fn must return datasets with elements of one structure and dtype, "
                        f"but for tower {tower} they are {spec}, and for tower 0 {first}.")


def rows_of_zeros(spec: tf.TypeSpec, rows: int = 0) -> Any:
    """A value of ``spec`` with no rows, or with ``rows`` rows of zeros."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = [size or 0 for size in spec.shape.as_list()[1:]]
        flat = tf.zeros([0] + inner[spec.ragged_rank:], spec.dtype)
        rt: Any = flat
        for depth in reversed(range(spec.ragged_rank)):
            count = 1 if depth else rows + 1
            rt = tf.RaggedTensor.from_row_splits(rt, tf.zeros([count], spec.row_splits_dtype))
        return rt
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [rows] + [size or rows for size in spec.shape.as_list()[1:]]
        nowhere = np.zeros([0, len(shape)], np.int64)
        return tf.SparseTensor(nowhere, tf.zeros([0], spec.dtype), shape)
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        return tf.zeros([], getattr(spec, "dtype", tf.float32))
    shape = [rows] + [rows if size is None else size for size in spec.shape.as_list()[1:]]
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, spec.dtype)
