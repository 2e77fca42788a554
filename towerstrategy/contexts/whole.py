"""The rows of all towers, handed to each.

Goes in: a tower's rows.  Comes out: those of all towers, in order; differentiable, with the
gradient of its own rows for each tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.contexts.call import all_values
from towerstrategy.contexts.tower import TowerContext
from towerstrategy.merge import merging


def rows_of_all(tower: TowerContext, value: Any) -> Any:
    """``value``, a nest of this tower's rows, with the rows of all towers, on every tower.

    The gradient for a tower's rows is the sum over the towers of what each asks for.
    """
    components = [_Component(leaf) for leaf in tf.nest.flatten(value)]
    for component in components:
        if not component.tensors or component.tensors[0].shape.rank == 0:
            raise ValueError("whole_batch takes tensors with a row an example in the first "
                             f"dimension, but got {component.leaf!r}.")

    @tf.custom_gradient
    def together(*tensors: tf.Tensor) -> Any:
        rows = _Rows(tower)
        floats = [place for place, tensor in enumerate(tensors) if tensor.dtype.is_floating]

        def gradient(*upstream: Any) -> Any:
            def apart(_: Any, *asked: Any) -> Any:
                summed = _sums(tower, asked)
                return rows.apart(dict(zip(floats, summed)))

            wanted = iter(tower.meet(apart, *(upstream[place] for place in floats)))
            return [next(wanted) if place in floats else None for place in range(len(tensors))]

        return tower.meet(lambda _, *given: rows.together(given), *tensors), gradient

    flat = iter(together(*(tensor for component in components for tensor in component.tensors)))
    made = [component.made([next(flat) for _ in component.tensors])
            for component in components]
    return tf.nest.pack_sequence_as(value, made)


class _Component:
    """A leaf of a nest, and the tensors that it is made of, all of which have rows or none."""

    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf
        if isinstance(leaf, tf.SparseTensor):
            raise TypeError(f"a SparseTensor has no rows to gather: {leaf!r}. Make it dense first.")
        if isinstance(leaf, tf.RaggedTensor):
            self.tensors = [leaf.flat_values, *leaf.nested_row_lengths()]
        elif isinstance(leaf, tf.Tensor) or (
                hasattr(leaf, "__array__") and not _tf.is_variable(leaf)):
            self.tensors = [tf.convert_to_tensor(leaf)]
        else:
            self.tensors = []

    def made(self, tensors: Sequence[tf.Tensor]) -> Any:
        """The same leaf of other rows."""
        if isinstance(self.leaf, tf.RaggedTensor):
            return tf.RaggedTensor.from_nested_row_lengths(tensors[0], tensors[1:], validate=False)
        return tensors[0] if tensors else self.leaf


class _Rows:
    """Where the towers' rows are among those of all: put together, and taken apart later."""

    def __init__(self, tower: TowerContext) -> None:
        self._tower = tower
        self._parts: list[list[tf.Tensor]] = []
        self._starts: list[Any] = []

    def together(self, given: Sequence[Any]) -> list[tf.Tensor]:
        """The rows of all towers of each of ``given``, values that the towers have brought."""
        self._parts = [all_values(value, self._tower.count) for value in given]
        here = [tf.concat(parts, 0) for parts in self._parts]
        workers = self._tower.shares.workers
        if workers is None:
            self._starts = [0] * len(here)
            return here
        counts = workers.stack(tf.stack([tf.shape(value)[0] for value in here]))
        self._starts = tf.unstack(tf.reduce_sum(counts[:workers.index], 0), len(here))
        return workers.gather_rows(here)

    def apart(self, values: dict[int, tf.Tensor]) -> list[Any]:
        """Of each of ``values``, by its place in :meth:`together`, every tower's rows."""
        return [_each(self._apart(place, value)) for place, value in values.items()]

    def _apart(self, place: int, value: tf.Tensor) -> list[tf.Tensor]:
        start, made = self._starts[place], []
        for part in self._parts[place]:
            size = _size(part)
            rows = value[start:start + size]
            rows.set_shape(part.shape[:1].concatenate(value.shape[1:]))
            made.append(rows)
            start += size
        return made


def _sums(tower: TowerContext, values: Sequence[Any]) -> list[tf.Tensor]:
    """The sum over all towers with rows of each of the values that they have brought."""
    here = [merging.filled_here(all_values(value, tower.count), tower.shares) for value in values]
    return here if tower.shares.workers is None else tower.shares.workers.sum(here)


def _each(values: Sequence[Any]) -> Any:
    """One value a tower, as the towers' meeting hands them out."""
    return values[0] if len(values) == 1 else _tf.PerReplica(tuple(values))


def _size(part: tf.Tensor) -> Any:
    return tf.shape(part)[0] if part.shape[0] is None else part.shape[0]
