"""Datasets of global batches -> datasets of sub-batches, split in the input pipeline.

Goes in: a ``tf.data.Dataset`` of batches, or one a tower.  Comes out: a :class:`TowerDataset`,
whose elements are nests of :class:`sub_batches.SubBatches`: what Keras and loops iterate over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import (
    iterators,
    layouts,
    prefetching,
    rows as rows_lib,
    splitting,
    sub_batches,
)
from towerstrategy.batch.rows import Nest

# The name scope of the operations that split, in input pipelines.
SCOPE = "tower_split"

# How many elements lie ready behind the split.
READY = 2


def split_dataset(dataset: tf.data.Dataset, towers: int, ready: int = READY,
                  dealing: rows_lib.Dealing | None = None) -> TowerDataset:
    """A dataset of global batches, split in the input pipeline.

    Args:
      dataset: elements are batches, see :func:`split_batch`.
      towers: how many sub-batches each element becomes.
      ready: how many split elements the pipeline holds ready.
      dealing: see :func:`split_batch`.

    Raises:
      TypeError: ``dataset`` is no ``tf.data.Dataset``.
      ValueError: its elements are not batched.
    """
    check_batched(dataset)
    source = Source([dataset], lambda sources: split_dataset(sources[0], towers, ready, dealing))
    if towers > 1:
        split = on_elements(dataset.element_spec, _in_scope(
            lambda element: splitting.split_batch(element, towers, dealing)))
        dataset = dataset.map(split).prefetch(ready)
    return TowerDataset(dataset, source, open_rows=dealing is not None)


def group_dataset(dataset: tf.data.Dataset, towers: int, ready: int = READY) -> TowerDataset:
    """A dataset of per-tower batches: R elements in a row make one step, one a tower.

    An incomplete last group gives its missing towers batches with no rows.  Where a component is a
    scalar, so that elements are single values and not batches, such a group is left out, as
    ``MirroredStrategy`` leaves it out.

    Args:
      dataset: elements are the batches of one tower.
      towers: how many elements make a step.
      ready: how many grouped elements the pipeline holds ready.

    Raises:
      TypeError: ``dataset`` is no ``tf.data.Dataset``.
    """
    _check_made(dataset)
    source = Source([dataset], lambda sources: group_dataset(sources[0], towers, ready))
    if towers == 1:
        return TowerDataset(dataset, source)
    spec = dataset.element_spec
    batched = _is_batched(spec)
    # window() makes a dataset of each leaf; only a flat tuple does it give back plainly.
    flat = dataset.map(on_elements(spec, _tensors))
    windows = flat.window(towers, drop_remainder=not batched)

    def group(*leaves: tf.data.Dataset) -> Nest:
        window = tf.data.Dataset.zip(leaves)
        padded = window if not batched else window.concatenate(tf.data.Dataset.from_tensors(
            _none_of(window.take(1).get_single_element())).repeat(towers))
        parts = [padded.skip(tower).take(1).get_single_element() for tower in range(towers)]
        pack: Callable[[tuple[Any, ...]], Any] = (sub_batches.SubBatches if batched
                                                  else _tf.PerReplica)
        return _side_by_side(spec, parts, pack)

    return TowerDataset(windows.map(_in_scope(group)).prefetch(ready), source)


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
    source = Source(datasets, lambda sources: zip_datasets(sources, ready))
    if len(datasets) == 1:
        return TowerDataset(datasets[0], source)
    spec = datasets[0].element_spec
    for tower, dataset in enumerate(datasets):
        _check_like_first(tower, dataset.element_spec, spec)
    batched = _is_batched(spec)
    flat = [dataset.map(on_elements(spec, _tensors)) for dataset in datasets]
    if not batched:
        return TowerDataset(tf.data.Dataset.zip(tuple(flat)).map(
            lambda *parts: _side_by_side(spec, parts, _tf.PerReplica)).prefetch(ready), source)
    nothing = tf.data.Dataset.from_tensors(
        (False, _no_rows(spec))).repeat()
    flagged = [dataset.map(lambda *leaves: (True, leaves)).concatenate(nothing) for dataset in flat]
    zipped = tf.data.Dataset.zip(tuple(flagged)).take_while(
        lambda *pairs: tf.reduce_any([there for there, _ in pairs]))

    def group(*pairs: Any) -> Nest:
        there, parts = zip(*pairs)
        return _side_by_side(spec, _as_long(there, parts), sub_batches.SubBatches)

    return TowerDataset(zipped.map(_in_scope(group)).prefetch(ready), source)


def _side_by_side(spec: Nest, parts: Sequence[Any], pack: Callable[[Any], Any]) -> Nest:
    """The towers' flat elements as one element with ``spec``'s structure, None where it has None.
    """
    together = zip(*parts)
    return tf.nest.map_structure(
        lambda leaf: None if rows_lib.is_absent(leaf) else pack(next(together)), spec)


def _tensors(element: Nest) -> tuple[Any, ...]:
    """The components that ``element`` has, flat."""
    return tuple(leaf for leaf in tf.nest.flatten(element) if leaf is not None)


def _no_rows(spec: Nest) -> tuple[Any, ...]:
    """The same of an element without rows."""
    return tuple(rows_lib.no_rows(leaf) for leaf in tf.nest.flatten(spec)
                 if not rows_lib.is_absent(leaf))


def _none_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """``leaves`` without their rows, which are as long as they were: some operations ask for that.
    """
    return tuple(rows_lib.rows_between(leaf, 0, 0) for leaf in leaves)


def _as_long(there: Sequence[tf.Tensor], parts: Sequence[Any]) -> list[Any]:
    """``parts``, where towers whose data has ended have another's without its rows."""
    found = parts[-1]
    for has, part in zip(there[-2::-1], parts[-2::-1]):
        found = _either(has, part, found)
    none = _none_of(found)
    return [_either(has, part, none) for has, part in zip(there, parts)]


def _either(condition: tf.Tensor, yes: Any, no: Any) -> Any:
    return tf.cond(condition, lambda: yes, lambda: no)


class Source(NamedTuple):
    """What a :class:`TowerDataset` was made of, so that it can be made otherwise.

    Attributes:
      datasets: of batches as the user gave them.
      make: makes the like of such datasets.
    """

    datasets: Sequence[Any]
    make: Callable[[Sequence[Any]], TowerDataset]


class TowerDataset(tf.distribute.DistributedDataset):
    """A dataset whose elements are split for the towers: what Keras and loops iterate over.

    Attributes:
      element_spec: nest of type specs, a :class:`SubBatchesSpec` for each split component.
    """

    def __init__(self, dataset: tf.data.Dataset, source: Source, open_rows: bool = False) -> None:
        self._dataset = dataset
        self._source = source
        self._open_rows = open_rows
        self._watcher: Any = None
        self._fetch = prefetching.Fetch()

    def __repr__(self) -> str:  # which Keras 3 shows, where it does not know what this is
        return ("<a TowerStrategy's dataset, for a model that is on its towers: compiled inside of "
                "the scope (with strategy.scope():), or handed to strategy.adopt(model)>")

    def map(self, map_func: Callable[..., Nest]) -> TowerDataset:
        """The same dataset of batches that ``map_func`` has changed before they were dealt.

        Keras turns class weights into sample weights by it.
        """
        mapped = [dataset.map(map_func) for dataset in self._source.datasets]
        return self._source.make(mapped).fetched_to(self._fetch).watched_by(self._watcher)

    def prefetch(self, buffer_size: Any) -> TowerDataset:
        """This dataset: its pipeline holds elements ready as it is, see ``tf.distribute``."""
        del buffer_size
        return self

    def fetched_to(self, fetch: prefetching.Fetch) -> TowerDataset:
        """This dataset, each tower's part of an element put on its device ahead of the step."""
        self._fetch = fetch
        return self

    def watched_by(self, watcher: Any) -> TowerDataset:
        """This dataset, of whose steps in Python's own loops ``watcher``, if any, is told.

        Args:
          watcher: its ``between`` is called where a step ends and another begins, ``end_of_loop``
            when an iterator is no more; or None.
        """
        self._watcher = watcher
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

    def __bool__(self) -> bool:
        # As tf.data's: an endless dataset has no length to ask for.
        return True

    def __iter__(self) -> iterators.TowerIterator | prefetching.PrefetchedIterator:
        iterator = self._iterator(iterators.counting.follow)
        iterator._open_rows = self._open_rows
        if self._watcher is not None:
            iterator._between = self._watcher.between
            weakref.finalize(iterator, self._watcher.end_of_loop)
        return iterator

    def _iterator(self, follow: Any) -> Any:
        dataset, row_count = self._dataset, None
        if self._fetch.devices and self._fetch.is_safe:
            layout = self._layout(dataset.element_spec)
            if layout.moves:
                return prefetching.iterate(dataset, layout, self._fetch, follow, self._rows_of)
        if follow is not None:
            dataset, row_count = self._followed(dataset, follow)
        iterator = iter(dataset)
        iterator.__class__ = iterators.TowerIterator
        iterator.row_count = row_count
        return iterator

    def _layout(self, spec: Nest) -> layouts.Layout:
        """Where an element's tensors are to be fetched to."""
        return layouts.Layout.of(spec, len(self._fetch.devices))

    def _rows_of(self, element: Nest) -> Any:
        """The rows of each tower in an element, a vector; None where none are known."""
        return sub_batches.rows_of(element, len(self._fetch.devices))

    def _followed(self, dataset: tf.data.Dataset, follow: Any) -> tuple[tf.data.Dataset, Any]:
        """``dataset``, of which ``follow`` counts the rows, and the count."""
        counted: tuple[tf.data.Dataset, Any] = follow(dataset)
        return counted

    def reduce(self, initial_state: Nest, reduce_func: Callable[[Nest, Nest], Nest]) -> Nest:
        """Folds ``reduce_func(state, element)`` over the elements (autograph's ``for``).

        The body runs in the caller's graph, where towers have their devices, and not inside the
        input pipeline.
        """
        iterator = iter(self)
        if isinstance(iterator, prefetching.PrefetchedIterator):
            iterator.read_once()

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


def _is_batched(spec: Nest) -> bool:
    shapes = [leaf.shape for leaf in tf.nest.flatten(spec) if hasattr(leaf, "shape")]
    return all(shape.rank != 0 for shape in shapes)


def check_batched(dataset: Any) -> None:
    """Raises where ``dataset`` is no dataset of batches."""
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError("dataset must be a tf.data.Dataset, but got "
                        f"{dataset!r} of type {type(dataset).__name__}.")
    for path, leaf in zip(*splitting.named_leaves(dataset.element_spec)):
        shape = getattr(leaf, "shape", None)
        if shape is not None and shape.rank == 0:
            what = f"{splitting.called(path)} of its elements is a scalar" if path else (
                "its elements are scalars")
            raise ValueError(
                f"the dataset is not batched: {what} ({leaf!r}), so there are no rows to split "
                "over the towers. Call dataset.batch(global_batch_size) first.")
    named = splitting.named_leaves(dataset.element_spec)
    splitting.check_known(
        {path: leaf.shape[0] for path, leaf in zip(*named)
         if getattr(leaf, "shape", None) and leaf.shape[0] is not None},
        " If these are single examples, the dataset is not batched: call "
        "dataset.batch(global_batch_size) first.")


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


# An iterator that is an argument of a tf.function is one of tf.data's in it.
for _kind in (TowerDataset, _tf.OwnedIterator, prefetching.PrefetchedIterator):
    _tf.enumerate_with(_kind, iterators.enumerated)
