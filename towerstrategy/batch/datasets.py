"""Datasets of global batches -> datasets of sub-batches, split in the input pipeline.

Goes in: a ``tf.data.Dataset`` of batches, or one a tower.  Comes out: a :class:`TowerDataset`,
whose elements are nests of :class:`sub_batches.SubBatches`: what Keras and loops iterate over.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, refused
from towerstrategy.batch import iterators, prefetching, rows as rows_lib, splitting, sub_batches
from towerstrategy.batch.rows import Nest

# The name scope of the operations that split, in input pipelines.
SCOPE = "tower_split"

# How many split elements lie ready.
READY = 2


def split_dataset(dataset: tf.data.Dataset, towers: int, ready: int = READY,
                  cuts: rows_lib.CutRows | None = None) -> TowerDataset:
    """A dataset of global batches, each split by :func:`splitting.split_batch` in the pipeline."""
    batches = _batches_in(dataset)
    check_batched(dataset, batches)
    split = dataset
    if towers > 1:
        split = _tf.map_ahead(dataset, on_elements(dataset.element_spec, _in_scope(
            lambda element: splitting.split_batch(element, towers, cuts, batches))), ready)
    return TowerDataset(split, lambda fn: split_dataset(dataset.map(fn), towers, ready, cuts),
                        open_rows=cuts is not None)


def _batches_in(dataset: Any) -> list[int] | None:
    """For each component of an element the number of the batch it is of; None: all are of one."""
    # Datasets of batches of different sizes may have been zipped.  Only their elements tell.
    if not isinstance(dataset, tf.data.Dataset) or not _zips_different(
            dataset, len(tf.nest.flatten(dataset.element_spec))):
        return None
    rows = _rows_of_first(dataset)
    sizes = list(dict.fromkeys(count for count in rows if count is not None))
    return [0 if count is None else sizes.index(count) for count in rows] \
        if len(sizes) > 1 else None


def _zips_different(dataset: tf.data.Dataset, most: int) -> bool:
    """Whether it is made of datasets, side by side, of which components differ in length.

    ``most`` is how many components these may have: of more some are indices, as Keras zips them
    with arrays, and no batch.
    """
    inputs = _tf.inputs_of_dataset(dataset)
    if len(inputs) == 1 and _puts_in_batches(inputs[0].element_spec, dataset.element_spec):
        return False  # what is zipped before is an example's
    if len(inputs) > 1 and all(_is_batched(each.element_spec) for each in inputs):
        return len(tf.nest.flatten(dataset.element_spec)) <= most and len(
            {*_rows_of_first(dataset)} - {None}) > 1
    return any(_zips_different(each, most) for each in inputs)


def _puts_in_batches(before: Any, after: Any) -> bool:
    """Whether elements of a dataset have one dimension more than those that it is made of."""
    ranks = [[tf.TensorShape(getattr(leaf, "shape", None)).rank for leaf in tf.nest.flatten(spec)]
             for spec in (before, after)]
    return None not in ranks[0] and [rank + 1 for rank in ranks[0]] == ranks[1]


def _rows_of_first(dataset: tf.data.Dataset) -> list[int | None]:
    """How many rows each component of the first element has; nothing where there is none."""
    # It is read where that is not known without, as a dataset that shuffles counts its readers.
    shapes = [tf.TensorShape(getattr(leaf, "shape", None))
              for leaf in tf.nest.flatten(dataset.element_spec)]
    if all(shape.rank is not None and None not in shape[:1] for shape in shapes):
        return [shape[0] if shape.rank else None for shape in shapes]
    with tf.init_scope():
        return [int(rows_lib.rows_in(leaf)) if rows_lib.has_rows(leaf) and leaf.shape.rank else None
                for element in dataset.take(1) for leaf in tf.nest.flatten(element)]


def group_dataset(dataset: tf.data.Dataset, towers: int, ready: int = READY) -> TowerDataset:
    """A dataset of per-tower batches: R elements in a row make one step, one a tower.

    An incomplete last group gives its missing towers batches with no rows.  Where a component is a
    scalar, so that elements are single values and not batches, such a group is left out, as
    ``MirroredStrategy`` leaves it out.
    """
    _check_made(dataset)

    def mapped(fn: Callable[..., Nest]) -> TowerDataset:
        return group_dataset(dataset.map(fn), towers, ready)

    if towers == 1:
        return TowerDataset(dataset, mapped)
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

    return TowerDataset(windows.map(_in_scope(group)).prefetch(ready), mapped)


def zip_datasets(datasets: Sequence[tf.data.Dataset], ready: int = READY) -> TowerDataset:
    """A dataset of per-tower batches for each tower, put side by side.

    A tower whose dataset has ended gets batches with no rows until all have ended; with elements
    that are single values and not batches, the shortest ends all.
    """
    for dataset in datasets:
        _check_made(dataset)

    def mapped(fn: Callable[..., Nest]) -> TowerDataset:
        return zip_datasets([dataset.map(fn) for dataset in datasets], ready)

    if len(datasets) == 1:
        return TowerDataset(datasets[0], mapped)
    spec = datasets[0].element_spec
    for tower, dataset in enumerate(datasets):
        _check_like_first(tower, dataset.element_spec, spec)
    batched = _is_batched(spec)
    flat = [dataset.map(on_elements(spec, _tensors)) for dataset in datasets]
    if not batched:
        return TowerDataset(tf.data.Dataset.zip(tuple(flat)).map(
            lambda *parts: _side_by_side(spec, parts, _tf.PerReplica)).prefetch(ready), mapped)
    nothing = tf.data.Dataset.from_tensors((False, tuple(
        rows_lib.no_rows(leaf) for leaf in tf.nest.flatten(spec)
        if not rows_lib.is_absent(leaf)))).repeat()
    flagged = [dataset.map(lambda *leaves: (True, leaves)).concatenate(nothing) for dataset in flat]
    zipped = tf.data.Dataset.zip(tuple(flagged)).take_while(
        lambda *pairs: tf.reduce_any([there for there, _ in pairs]))

    def group(*pairs: Any) -> Nest:
        there, parts = zip(*pairs)
        return _side_by_side(spec, _as_long(there, parts), sub_batches.SubBatches)

    return TowerDataset(zipped.map(_in_scope(group)).prefetch(ready), mapped)


def _side_by_side(spec: Nest, parts: Sequence[Any], pack: Callable[[Any], Any]) -> Nest:
    """The towers' flat elements as one element with ``spec``'s structure."""
    together = zip(*parts)
    return tf.nest.map_structure(
        lambda leaf: None if rows_lib.is_absent(leaf) else pack(next(together)), spec)


def _tensors(element: Nest) -> tuple[Any, ...]:
    """The components that ``element`` has, flat."""
    return tuple(leaf for leaf in tf.nest.flatten(element) if leaf is not None)


def _none_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """``leaves`` without their rows, of the same inner lengths, which some operations ask for."""
    return tuple(rows_lib.rows_between(leaf, 0, 0) for leaf in leaves)


def _as_long(there: Sequence[tf.Tensor], parts: Sequence[Any]) -> list[Any]:
    """``parts``, where towers whose data has ended have another's without its rows."""
    def either(condition: tf.Tensor, yes: Any, no: Any) -> Any:
        return tf.cond(condition, lambda: yes, lambda: no)

    found = parts[-1]
    for has, part in zip(there[-2::-1], parts[-2::-1]):
        found = either(has, part, found)
    none = _none_of(found)
    return [either(has, part, none) for has, part in zip(there, parts)]


class TowerDataset(tf.distribute.DistributedDataset):
    """A dataset whose elements are split for the towers: what Keras and loops iterate over.

    ``mapped`` makes the like of it, of batches that a function has changed before they were split.
    With ``open_rows`` functions are traced for any number of rows.
    """

    fetch = prefetching.Fetch()  # where each tower's part of an element is put ahead of the step
    # Is notified of steps in Python's own loops: by ``between`` where a step ends and another
    # begins, by ``end_of_loop`` when an iterator is no more.
    watcher: Any = None
    _agreement: Any = None  # see :class:`iterators.Steps`
    _rows_of = staticmethod(sub_batches.rows_of)

    def __init__(self, dataset: tf.data.Dataset, mapped: Callable[[Any], TowerDataset],
                 open_rows: bool = False) -> None:
        self.dataset, self._mapped, self._open_rows = dataset, mapped, open_rows

    def __repr__(self) -> str:  # which Keras 3 shows, where it does not know what this is
        return ("<a TowerStrategy's dataset, for a model that is on its towers: compiled inside of "
                "the scope (with strategy.scope():), or handed to strategy.adopt(model)>")

    def map(self, map_func: Callable[..., Nest]) -> TowerDataset:
        """The same of batches that ``map_func`` has changed, as Keras does for class weights."""
        mapped = self._mapped(map_func)
        mapped.fetch, mapped.watcher = self.fetch, self.watcher
        return mapped

    def prefetch(self, buffer_size: Any) -> TowerDataset:
        """This dataset: its pipeline holds elements ready as it is, see ``tf.distribute``."""
        del buffer_size
        return self

    @property
    def element_spec(self) -> Nest:
        spec = self.dataset.element_spec
        return spec if self._agreement is None else self._agreement.element_spec(spec)

    @property
    def cardinality(self) -> int:
        """Steps in one pass, as ``tf.data`` counts them."""
        return self.dataset.cardinality()

    def __len__(self) -> int:
        return len(self.dataset)

    def __bool__(self) -> bool:
        # As tf.data's: an endless dataset has no length to ask for.
        return True

    def __iter__(self) -> iterators.TowerIterator | prefetching.PrefetchedIterator:
        dataset, follow, layout = self.dataset, iterators.counting.follow, None
        if self.fetch.devices and self.fetch.is_safe:
            layout = self._layout(dataset.element_spec)
        iterator: Any
        if layout is not None and layout.moves:
            iterator = prefetching.iterate(dataset, layout, self.fetch, follow, self._rows_of)
        else:
            row_count = None
            if follow is not None:
                dataset, row_count = follow(dataset, self._rows_of)
            iterator = iter(dataset)
            iterator.__class__ = iterators.TowerIterator
            iterator.row_count = row_count
        iterator._open_rows, iterator.agreement = self._open_rows, self._agreement
        if self.watcher is not None:
            iterator._between = self.watcher.between
            weakref.finalize(iterator, self.watcher.end_of_loop)
        return iterator

    def _layout(self, spec: Nest) -> prefetching.Layout:
        """Where an element's tensors are to be fetched to."""
        count = len(self.fetch.devices)
        return prefetching.Layout(spec, [owner for leaf in tf.nest.flatten(spec)
                                         for owner in prefetching.owners_of(leaf, count)])

    def reduce(self, initial_state: Nest, reduce_func: Callable[[Nest, Nest], Nest]) -> Nest:
        """Folds ``reduce_func(state, element)`` over the elements (autograph's ``for``)."""
        # The body runs in the caller's graph, where towers have their devices, and not inside the
        # input pipeline.
        iterator = iter(self).read_once()

        def body(element: tf.experimental.Optional, state: Nest) -> tuple[Any, Nest]:
            state = reduce_func(state, element.get_value())
            return iterator.get_next_as_optional(), state

        _, state = tf.while_loop(lambda element, _: element.has_value(), body,
                                 (iterator.get_next_as_optional(), initial_state),
                                 parallel_iterations=1)
        return state


class RestartableIterator:
    """What tf.distribute's first API has; it reads from the start after :meth:`initialize`."""

    def __init__(self, dataset: TowerDataset) -> None:
        self._dataset = dataset
        self.initialize()

    def initialize(self) -> list[tf.Operation]:
        """Starts again; there is no operation to run, as in all eager programs."""
        self._iterator = iter(self._dataset)
        return []

    initializer = property(initialize)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


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


def check_batched(dataset: Any, batches: Sequence[int] | None = None) -> None:
    """Raises where ``dataset`` is no dataset of batches, see :func:`splitting.split_batch`."""
    refused.check_type("dataset", dataset, tf.data.Dataset, "a tf.data.Dataset")
    named = [(path, leaf) for path, leaf in _tf.flatten_with_paths(dataset.element_spec)
             if hasattr(leaf, "shape")]
    for path, leaf in named:
        if leaf.shape.rank == 0:
            what = f"{splitting.called(path)} of its elements is a scalar" if path else (
                "its elements are scalars")
            raise ValueError(
                f"the dataset is not batched: {what} ({leaf!r}), so there are no rows to split "
                "over the towers. Call dataset.batch(global_batch_size) first.")
    if batches is None:
        splitting.check_known(
            {path: leaf.shape[0] for path, leaf in named
             if leaf.shape and leaf.shape[0] is not None},
            " If these are single examples, the dataset is not batched: call "
            "dataset.batch(global_batch_size) first.")


def _check_made(dataset: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError("dataset_fn must return a tf.data.Dataset, but got "
                        f"{refused.shown(dataset)} of type {type(dataset).__name__}.")


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


_tf.python_loops_with((TowerDataset, iterators.Steps), iterators.refuse_endless)
