"""Which of a split element's tensors goes to which tower, and how it comes apart and together.

Goes in: the type spec of split elements.  Comes out: a :class:`Layout`.  TensorFlow's multi-device
iterator takes one dataset and hands its elements to the devices in turn.  So each becomes
R + 1: what stays on the host (row counts, strings, int32, ragged components), then each tower's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.batch import iterators, rows as rows_lib
from towerstrategy.batch.rows import Nest

# The owner of what belongs to no tower.
HOST = -1


class Layout:
    """Which of an element's tensors belongs to which tower, and which stays on the host.

    ``owners`` are, for each tensor of an element, the number of a tower or :data:`HOST`.
    """

    def __init__(self, spec: Nest, owners: Sequence[int]) -> None:
        self.spec, self.owners = spec, tuple(owners)
        self._tensors = tf.nest.flatten(spec, expand_composites=True)
        self._places = [[place for place, owner in enumerate(owners) if owner == number]
                        for number in range(HOST, max(owners, default=HOST) + 1)]

    @property
    def moves(self) -> bool:
        """Whether anything is to be fetched; what holds no plain tensors cannot be."""
        return len(self._places) > 1 and all(
            isinstance(spec, tf.TensorSpec) and spec.dtype not in (tf.variant, tf.resource)
            for spec in self._tensors)

    def apart(self, element: Nest, counts: tuple[Any, ...] = ()) -> list[tuple[Any, Any]]:
        """R + 1 elements of one kind for one: the host's, with ``counts``, then each tower's.

        Of each, what belongs to the others has no rows.
        """
        tensors = _tensors(element)
        own = [tuple(tensors[place] for place in places) for places in self._places]
        no_host, no_tower = (tuple(rows_lib.no_rows(self._tensors[place]) for place in places)
                             for places in self._places[:2])
        return [(own[0] + counts, no_tower), *((no_host + counts, part) for part in own[1:])]

    def in_parts(self, dataset: tf.data.Dataset,
                 rows_of: Callable[[Nest], Any] | None = None) -> tf.data.Dataset:
        """``dataset`` with each element taken apart, and with its ``rows_of``, if any.

        The parts have different numbers of rows, so they go through ``unbatch`` in optionals: a
        dataset of its own for each element, which ``flat_map`` takes, costs milliseconds.
        """
        kinds: list[Any] = []

        def wrapped(*element: Any) -> tf.Tensor:
            rows = None if rows_of is None else rows_of(element)
            parts = [tf.nest.flatten(part)
                     for part in self.apart(element, () if rows is None else (rows,))]
            kinds[:] = [tf.nest.map_structure(tf.type_spec_from_value, part) for part in parts]
            return tf.stack([tf.raw_ops.OptionalFromValue(components=part) for part in parts])

        def opened(part: tf.Tensor) -> Any:
            common = [first.most_specific_common_supertype(others)
                      for first, *others in zip(*kinds)]
            tensors = tf.raw_ops.OptionalGetValue(
                optional=part, output_types=[spec.dtype for spec in common],
                output_shapes=[spec.shape for spec in common])
            hosts = len(tensors) - len(self._places[1])
            return tuple(tensors[:hosts]), tuple(tensors[hosts:])

        wrapped_parts = _tf.map_in_place(dataset, wrapped).unbatch()
        return _tf.map_in_place(wrapped_parts, opened)

    def counted(self, dataset: tf.data.Dataset,
                follow: iterators.Follow) -> tuple[tf.data.Dataset, Any]:
        """The host's elements, followed by ``follow`` when they are taken; and its count."""
        own = len(self._places[0])
        if len(dataset.element_spec[0]) == own:
            return dataset, None
        return follow(dataset, lambda element: element[0][own])

    def element(self, parts: Sequence[tuple[Any, Any]]) -> Nest:
        """The element again, from what the host and each tower took."""
        host, _ = parts[0]
        tensors: list[Any] = [None] * len(self._tensors)
        for places, own in zip(self._places, [host, *(part for _, part in parts[1:])]):
            for place, tensor in zip(places, own):
                tensor.set_shape(self._tensors[place].shape)
                tensors[place] = tensor
        return tf.nest.pack_sequence_as(self.spec, tensors, expand_composites=True)


def _tensors(element: Nest) -> list[Any]:
    """All tensors of ``element``; components that are None have none."""
    return [leaf for leaf in tf.nest.flatten(element, expand_composites=True) if leaf is not None]


def owners_of(spec: Any, towers: int, counts: bool = True) -> list[int]:
    """Who has each tensor of a component, the towers' row counts left out where not ``counts``."""
    several = isinstance(spec, _tf.PerReplicaSpec)
    parts = spec._component_specs[:None if counts else towers] if several else [spec]
    owners = []
    for number, part in enumerate(parts):
        # Behind the towers' parts are row counts, which the host reads.
        moves = number < towers and (several or towers == 1) and _moves(part)
        tensors = tf.nest.flatten(part, expand_composites=True)
        owners += [number if moves else HOST] * len(tensors)
    return owners


def _moves(spec: Any) -> bool:
    """Whether a component goes to a tower's own memory: strings cannot, ragged operations have CPU
    kernels alone, and most GPU kernels take int32 from the host's memory, so that what was brought
    to a GPU goes down again.
    """
    return isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)) \
        and spec.dtype not in (tf.string, tf.int32)
