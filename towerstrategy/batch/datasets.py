"""Datasets of global batches -> datasets of sub-batches, split in the input pipeline.

Goes in: a ``tf.data.Dataset`` of batches, or one for each tower.  Comes out: a
:class:`TowerDataset`, whose elements are nests of :class:`sub_batches.SubBatches`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, refused
from towerstrategy.batch import iterators, prefetching, rows as rows_lib, splitting, sub_batches
from towerstrategy.batch.rows import Nest

# The name scope of the splitting operations in input pipelines; profiles show it.
SCOPE = "tower_split"

# How many split elements are prefetched.
READY = 2


def split_dataset(dataset: tf.data.Dataset, towers: int, ready: int = READY,
                  cuts: rows_lib.CutRows | None = None) -> TowerDataset:
    """A dataset of global batches, each split by :func:`splitting.split_batch` in the pipeline."""
    batches = _batch_numbers(dataset)
    check_batched(dataset, batches)
    split = dataset
    if towers > 1:
        split = _tf.map_ahead(dataset, on_elements(dataset.element_spec, _in_scope(
            lambda element: splitting.split_batch(element, towers, cuts, batches))), ready)
    # Where shares do not change, each tower's rows are known if the batches' are.
    open_rows = cuts is not None and any(
        rows_lib.known_rows(part) is None for part in tf.nest.flatten(
            split.element_spec, expand_composites=True))
    return TowerDataset(split, lambda fn: split_dataset(dataset.map(fn), towers, ready, cuts),
                        open_rows=open_rows)


def batch_rows(dataset: tf.data.Dataset) -> int:
    """A dataset's batch size, from its last ``batch``; 0 if unknown, as in a ``tf.function``."""
    inputs = [dataset] if tf.executing_eagerly() else []
    while inputs:
        size = _tf.batch_size(inputs[0])
        if size is not None:
            return size
        inputs = _tf.inputs_of_dataset(inputs[0])
    return 0


def note_batch_rows(dataset: Any, adapter: Any) -> None:
    """Notes the batch size that one of Keras' data adapters was given, for arrays say."""
    if isinstance(dataset, TowerDataset):
        dataset.batch_rows = dataset.batch_rows or getattr(adapter, "_batch_size", None) or 0


def _batch_numbers(dataset: Any) -> list[int] | None:
    """For each component, the number of the batch that it belongs to; None if there is only one.

    An element has several batches if datasets with different batch sizes were zipped.  Of a dataset
    made in a ``tf.function``, that is not known before it runs.
    """
    if not isinstance(dataset, tf.data.Dataset) \
            or tf.is_symbolic_tensor(tf.data.experimental.to_variant(dataset)) \
            or not _zips_different_sizes(dataset, len(tf.nest.flatten(dataset.element_spec))):
        return None
    rows = _rows_of_first_element(dataset)
    sizes = [count for count in dict.fromkeys(rows) if count is not None]
    return [0 if count is None else sizes.index(count) for count in rows]


def _zips_different_sizes(dataset: tf.data.Dataset, most: int) -> bool:
    """Whether ``dataset``, or one of its inputs, zips datasets with different numbers of rows.

    A zip of more than ``most`` components does not count: Keras zips indices with arrays.
    """
    inputs = _tf.inputs_of_dataset(dataset)
    if len(inputs) == 1 and _adds_dimension(inputs[0].element_spec, dataset.element_spec):
        return False  # the dataset makes batches, so the zips before it are of single examples
    if len(inputs) > 1 and all(_is_batched(each.element_spec) for each in inputs):
        return len(tf.nest.flatten(dataset.element_spec)) <= most and len(
            {*_rows_of_first_element(dataset)} - {None}) > 1
    return any(_zips_different_sizes(each, most) for each in inputs)


def _adds_dimension(before: Any, after: Any) -> bool:
    """Whether each component has one dimension more in the spec ``after`` than in ``before``."""
    ranks = [[tf.TensorShape(getattr(leaf, "shape", None)).rank for leaf in tf.nest.flatten(spec)]
             for spec in (before, after)]
    return None not in ranks[0] and [rank + 1 for rank in ranks[0]] == ranks[1]


def _rows_of_first_element(dataset: tf.data.Dataset) -> list[int | None]:
    """The number of rows of each component of the first element; [] if there is no element."""
    # Reads no element if it can: a dataset that shuffles counts its readers.
    known = _known_rows(dataset)
    if known is not None:
        return known
    with tf.init_scope():
        return [int(rows_lib.rows_in(leaf)) if rows_lib.has_rows(leaf) and leaf.shape.rank else None
                for element in dataset.take(1) for leaf in tf.nest.flatten(element)]


def _known_rows(dataset: tf.data.Dataset) -> list[int | None] | None:
    """As :func:`_rows_of_first_element`; None if the datasets themselves do not say it."""
    spec, inputs = dataset.element_spec, _tf.inputs_of_dataset(dataset)
    shapes = [tf.TensorShape(getattr(leaf, "shape", None)) for leaf in tf.nest.flatten(spec)]
    if all(shape.rank is not None and None not in shape[:1] for shape in shapes):
        return [shape[0] if shape.rank else None for shape in shapes]
    size = _tf.batch_size(dataset)
    if size is not None:
        return [size] * len(shapes)
    if _tf.has_functions(dataset) or sum(
            len(tf.nest.flatten(each.element_spec)) for each in inputs) != len(shapes) or (
            len(inputs) == 1 and inputs[0].element_spec != spec):
        return None
    rows = [_known_rows(each) for each in inputs]  # of one, such as a prefetch; of several, a zip
    return None if None in rows else [count for each in rows for count in each or ()]


def group_datasets(datasets: Sequence[tf.data.Dataset], towers: int,
                   ready: int = READY) -> TowerDataset:
    """Groups per-tower batches: of a dataset for each tower, or R consecutive ones of a single one.

    Towers without an element, because their dataset has ended or the last group is incomplete, get
    batches with no rows.  If components are scalars, elements are no batches; then the shortest
    dataset ends all, and an incomplete last group is dropped, as in ``MirroredStrategy``.
    """
    for dataset in datasets:
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError("dataset_fn must return a tf.data.Dataset, but got "
                            f"{refused.shown(dataset)} of type {type(dataset).__name__}.")
    steps, single = datasets[0], len(datasets) == 1
    if towers > 1:
        spec = _common_spec([dataset.element_spec for dataset in datasets])
        if single:
            steps = _optionals(datasets[0], towers - 1).batch(towers, drop_remainder=True)
        else:
            steps = tf.data.Dataset.zip(tuple(map(_optionals, datasets)))
            if _is_batched(spec):
                steps = steps.take_while(lambda *step: tf.reduce_any(_have_value(step)))
        steps = steps.map(_in_scope(lambda *step: _joined(
            step[0] if single else tf.stack(step), spec))).prefetch(ready)
    return TowerDataset(steps, lambda fn: group_datasets(
        [dataset.map(fn) for dataset in datasets], towers, ready))


def _optionals(dataset: tf.data.Dataset, padding: int | None = None) -> tf.data.Dataset:
    """The elements as optionals; after batches, ``padding`` ones without a value, or endlessly."""
    optionals = dataset.map(on_elements(dataset.element_spec, iterators.as_optional))
    return optionals if not _is_batched(dataset.element_spec) else optionals.concatenate(
        tf.data.Dataset.from_tensors(tf.raw_ops.OptionalNone()).repeat(padding))


def _have_value(optionals: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.stack([tf.raw_ops.OptionalHasValue(optional=each) for each in optionals])


def _joined(optionals: tf.Tensor, spec: Nest) -> Nest:
    """One element from the towers' optionals; batches without a value get no rows."""
    each, pack = tf.unstack(optionals), _tf.PerReplica
    if _is_batched(spec):
        pack, spec = sub_batches.SubBatches, tf.nest.map_structure(sub_batches.with_any_rows, spec)
        have_value = _have_value(each)
        # Some operations need the inner dimensions, so these are of a batch with a value.
        some = iterators.value_of(optionals[tf.argmax(tf.cast(have_value, tf.int32))], spec)
        no_rows = iterators.as_optional(tf.nest.map_structure(
            lambda leaf: leaf if leaf is None else rows_lib.rows_between(leaf, 0, 0), some))
        each = tf.unstack(tf.where(have_value, optionals, no_rows))
    return tf.nest.map_structure(
        lambda *parts: None if parts[0] is None else pack(parts),
        *(iterators.value_of(optional, spec) for optional in each))


class TowerDataset(tf.distribute.DistributedDataset):
    """A dataset whose elements are split for the towers; Keras and loops iterate over it.

    ``mapped``, called with a function, makes the dataset whose batches the function changes before
    they are split.  With ``open_rows``, functions are traced for any number of rows.
    """

    batch_rows = 0  # the rows of most batches, if they are known
    fetch = prefetching.Fetch()  # where to prefetch the towers' parts of elements
    # Measures the steps of Python loops: ``between`` is called where a step ends and the next one
    # begins, ``end_of_loop`` when an iterator is deleted.
    watcher: Any = None
    _agreement: Any = None  # see :class:`iterators.Steps`
    _rows_of = staticmethod(sub_batches.rows_of)

    def __init__(self, dataset: tf.data.Dataset, mapped: Callable[[Any], TowerDataset],
                 open_rows: bool = False) -> None:
        self.dataset, self._mapped, self._open_rows = dataset, mapped, open_rows

    def __repr__(self) -> str:  # Keras 3's error for data of an unknown type shows it
        return ("<a TowerStrategy's dataset, for a model that is on its towers: compiled inside of "
                "the scope (with strategy.scope():), or handed to strategy.adopt(model)>")

    def map(self, map_func: Callable[..., Nest]) -> TowerDataset:
        """The dataset of batches that ``map_func`` has changed; Keras applies class weights so."""
        mapped = self._mapped(map_func)
        mapped.fetch, mapped.watcher, mapped.batch_rows = (
            self.fetch, self.watcher, self.batch_rows)
        return mapped

    def prefetch(self, buffer_size: Any) -> TowerDataset:
        """This dataset itself: its pipeline prefetches already."""
        del buffer_size
        return self

    @property
    def element_spec(self) -> Nest:
        return (self._agreement or self.dataset).element_spec

    @property
    def cardinality(self) -> int:
        """The number of steps in one pass, or a constant of ``tf.data``: infinite, unknown."""
        return self.dataset.cardinality()

    def __len__(self) -> int:
        return len(self.dataset)

    def __bool__(self) -> bool:
        # As in tf.data: len() of an infinite dataset would raise.
        return True

    def __iter__(self) -> iterators.TowerIterator | prefetching.PrefetchedIterator:
        dataset, follow = self.dataset, iterators.counting.follow
        layout = self._layout(dataset.element_spec)
        iterator: Any
        if layout.fetches and self.fetch.is_safe:
            iterator = prefetching.iterate(dataset, layout, self.fetch, follow, self._rows_of)
        else:
            row_count = None
            if follow is not None:
                dataset, row_count = follow(dataset, self._rows_of)
            iterator = iter(dataset)
            iterator.__class__ = iterators.TowerIterator
            iterator.row_count = row_count
        iterator._open_rows, iterator.agreement = self._open_rows, self._agreement
        iterator.batch_rows = self.batch_rows
        if self.watcher is not None:
            iterator._between = self.watcher.between
            weakref.finalize(iterator, self.watcher.end_of_loop)
        return iterator

    def _layout(self, spec: Nest) -> prefetching.Layout:
        """Which tower's device each tensor of an element is fetched to."""
        return prefetching.Layout(spec, prefetching.owners_of(spec, len(self.fetch.devices)))

    def reduce(self, initial_state: Nest, reduce_func: Callable[[Nest, Nest], Nest]) -> Nest:
        """Folds ``reduce_func(state, element)`` over the elements; autograph's ``for`` calls it."""
        return _tf.fold(iter(self).read_once(), initial_state, reduce_func)


class RestartableIterator:
    """The iterator of tf.distribute's V1 API: :meth:`initialize` makes it start again."""

    def __init__(self, dataset: TowerDataset) -> None:
        self._dataset = dataset
        self.initialize()

    def initialize(self) -> list[tf.Operation]:
        """Starts again; returns no operation, as there is none to run in eager code."""
        self._iterator = iter(self._dataset)
        return []

    initializer = property(initialize)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def on_elements(spec: Nest, fn: Callable[[Nest], Nest]) -> Callable[..., Nest]:
    """``fn``, of one element, as ``Dataset.map`` calls it: with a tuple's items as arguments."""
    if type(spec) is tuple:
        return lambda *element: fn(element)
    return fn


def _in_scope(fn: Callable[..., Nest]) -> Callable[..., Nest]:
    """``fn`` with its operations in the name scope :data:`SCOPE`."""

    def scoped(*element: Any) -> Nest:
        with tf.name_scope(SCOPE):
            return fn(*element)

    return scoped


def _is_batched(spec: Nest) -> bool:
    """Whether each component has rows; of a user's own type (``ExtensionType``) none is known."""
    return all(leaf.shape.rank != 0 if isinstance(leaf, rows_lib.SPECS)
               else rows_lib.is_absent(leaf) for leaf in tf.nest.flatten(spec))


def check_batched(dataset: Any, batches: Sequence[int] | None = None) -> None:
    """Raises unless ``dataset`` is a dataset of batches; ``batches``: as in ``split_batch``."""
    refused.check_type("dataset", dataset, tf.data.Dataset, "a tf.data.Dataset")
    named = [(path, leaf) for path, leaf in _tf.flatten_with_paths(dataset.element_spec)
             if hasattr(leaf, "shape")]
    for path, leaf in named:
        if leaf.shape.rank == 0:
            what = f"{splitting.component_name(path)} of its elements is a scalar" if path else (
                "its elements are scalars")
            raise ValueError(
                f"the dataset is not batched: {what} ({leaf!r}), so there are no rows to split "
                "over the towers. Call dataset.batch(global_batch_size) first. If the dataset is "
                "batched, give this component a value for each row: a number for the whole batch, "
                "such as that of dataset.enumerate(), has no rows.")
    if batches is None:
        splitting.check_same_rows(
            {path: leaf.shape[0] for path, leaf in named
             if leaf.shape and leaf.shape[0] is not None},
            " If these are single examples, the dataset is not batched: call "
            "dataset.batch(global_batch_size) first.")


def _common_spec(specs: Sequence[Nest]) -> Nest:
    """The towers' element specs as one, since one iterator has them all; raises if they differ."""
    common = specs[0]
    for tower, spec in enumerate(specs):
        try:
            common = tf.nest.map_structure(
                lambda one, other: one.most_specific_common_supertype([other]), common, spec)
        except (TypeError, ValueError):
            common = None
        if None in tf.nest.flatten(common):
            raise TypeError("dataset_fn must return datasets with elements of one structure and "
                            f"dtype, but for tower {tower} they are {spec}, and for tower 0 "
                            f"{specs[0]}.")
    return common


_tf.python_loops_with((TowerDataset, iterators.Steps), iterators.refuse_endless)
