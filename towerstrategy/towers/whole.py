"""The rows of all towers: handed to each, or to a function that is computed once for all.

Goes in: a tower's rows.  Comes out: those of all towers, in order (:func:`rows_of_all`), or what a
function makes of them on the merge device (:func:`computed_once`); both differentiable, with the
gradient of its own rows for each tower.  A tower without rows adds none, whatever it works on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import merging
from towerstrategy.towers import contexts


def rows_of_all(tower: contexts.TowerContext, value: Any) -> Any:
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
    made = [component.made([tower.mark_whole(next(flat)) for _ in component.tensors])
            for component in components]
    return tf.nest.pack_sequence_as(value, made)


def own_rows_of(tower: contexts.TowerContext, compute: Callable[[Any], Any], value: Any) -> Any:
    """This tower's rows of what ``compute`` makes of the rows of all towers.

    Each tower computes all of it, and all draw the numbers that one device does.

    Args:
      tower: where this runs.
      compute: takes a nest as ``value``, returns one of tensors that have all rows, too.
      value: a nest of this tower's rows.
    """
    alone = tower.count == 1 and tower.shares.workers is None  # a tower of stages
    rows = value if alone else rows_of_all(tower, value)
    with tower.drawing_alike():
        made = compute(rows)
    if alone:
        return made
    first = tower.first_row

    def own(leaf: tf.Tensor) -> tf.Tensor:
        part = leaf[first:first + tower.rows]
        part.set_shape(tf.TensorShape([tower.given_rows]).concatenate(leaf.shape[1:]))
        if not _tf.is_eager(part):
            tower.parts |= {id(part)}
        return part

    return tf.nest.map_structure(own, made)


def computed_once(tower: contexts.TowerContext, compute: Callable[..., Any], args: Any) -> Any:
    """What ``compute`` returns for the rows of all towers: one tensor.

    Args:
      tower: where this runs.
      compute: takes ``args``; called once, on the merge device, outside of towers.
      args: a nest; tensors in it are gathered, scalars and everything else are tower 0's.

    Returns:
      A scalar as it is, the same on all towers, whose gradients are summed over the towers (so a
      tower has to count it by its share); of anything else this tower's rows.
    """
    components = [_Component(leaf) for leaf in tf.nest.flatten(args)]
    sources = [tensor for component in components for tensor in component.tensors]
    once = _Once(tower, compute, args, components)
    result, variables = tower.meet(once.forward, *sources)
    floats = [source for source in sources if source.dtype.is_floating]

    @tf.custom_gradient
    def linked(result: tf.Tensor, *sources: tf.Tensor) -> Any:
        del sources  # the gradient goes to them

        def gradient(upstream: tf.Tensor) -> Any:
            return None, *tower.meet(once.backward, upstream)

        return tf.identity(result), gradient

    return linked(result, *floats, *(variable.value() for variable in variables))


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

    def __init__(self, tower: contexts.TowerContext) -> None:
        self._tower = tower
        self._parts: list[list[tf.Tensor]] = []
        self._kept: list[list[Any]] = []
        self._starts: list[Any] = []

    def together(self, given: Sequence[Any]) -> list[tf.Tensor]:
        """The rows of all towers of each of ``given``, values that the towers have brought."""
        self._parts = [contexts.all_values(value, self._tower.count) for value in given]
        self._kept = [[self._rows(part, number) for number, part in enumerate(parts)]
                      for parts in self._parts]
        here = [self._joined(parts, kept) for parts, kept in zip(self._parts, self._kept)]
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
        for part, kept in zip(self._parts[place], self._kept[place]):
            rows = value[start:start + kept]
            missing = _size(part) - kept
            if not isinstance(missing, int) or missing:  # a stand-in's
                rows = tf.pad(rows, [[0, missing]] + [[0, 0]] * (value.shape.rank - 1))
            rows.set_shape(part.shape[:1].concatenate(value.shape[1:]))
            made.append(rows)
            start += kept
        return made

    def _joined(self, parts: Sequence[tf.Tensor], kept: Sequence[Any]) -> tf.Tensor:
        return tf.concat([part if isinstance(rows, int) and part.shape[0] == rows
                          else part[:rows] for part, rows in zip(parts, kept)], 0)

    def _rows(self, part: tf.Tensor, number: int) -> Any:
        """The rows of ``part`` that count: an int where known, else an int32 scalar."""
        shares = self._tower.shares
        if not shares.stand_ins:
            return _size(part)
        filled = shares.filled(number)
        if isinstance(filled, bool):
            return _size(part) if filled else 0
        return tf.where(filled, _size(part), 0)


class _Once:
    """A function of the rows of all towers, and its gradient, each computed where they meet."""

    def __init__(self, tower: contexts.TowerContext, compute: Callable[..., Any], args: Any,
                 components: Sequence[_Component]) -> None:
        self._tower, self._compute, self._args = tower, compute, args
        self._components = components
        self._rows = _Rows(tower)
        self._inputs: list[tf.Tensor] = []
        self._variables: list[Any] = []
        self._tape: Any = None
        self._result: Any = None
        self._with_rows: list[int] = []

    def forward(self, _: Any, *given: Any) -> Any:
        """The result, or each tower's rows of it, and the variables that were read."""
        flat = [contexts.all_values(value, self._tower.count)[0] for value in given]
        self._with_rows = [place for place, value in enumerate(flat) if value.shape.rank != 0]
        gathered = self._rows.together([given[place] for place in self._with_rows])
        for place, rows in zip(self._with_rows, gathered):
            flat[place] = rows
        self._inputs = [tf.identity(value) for value in flat]
        with _tf.VariableWatcher() as watcher, tf.GradientTape(persistent=True) as self._tape:
            if tf.executing_eagerly():
                self._tape.watch([value for value in self._inputs if value.dtype.is_floating])
            inputs = iter(self._inputs)
            made = [component.made([next(inputs) for _ in component.tensors])
                    for component in self._components]
            self._result = tf.convert_to_tensor(
                self._compute(*tf.nest.pack_sequence_as(self._args, made)))
        self._variables = list(watcher.watched_variables())
        if self._result.shape.rank == 0:
            return self._result, self._variables
        if not self._with_rows:
            raise ValueError("a function over the whole batch got no tensor with rows.")
        return self._rows.apart({0: self._result})[0], self._variables

    def backward(self, _: Any, upstream: Any) -> Any:
        """The gradient for each floating point input, then for each variable, a part a tower."""
        if self._result.shape.rank == 0:
            asked, = _sums(self._tower, [upstream])
        else:
            asked, = _Rows(self._tower).together([upstream])
        sources = [value for value in self._inputs if value.dtype.is_floating]
        found = self._gradients([*sources, *self._variables], asked)
        made, rows = [], iter(range(len(self._inputs)))
        for value, gradient in zip([*sources, *self._variables], found):
            place = next((place for place in rows if self._inputs[place] is value), None)
            if place in self._with_rows:
                number = self._with_rows.index(place)
                made += self._rows.apart({number: gradient})
            else:
                made.append(_each([gradient * tf.cast(self._tower.shares.of(number), gradient.dtype)
                                   for number in range(self._tower.count)]))
        return made

    def _gradients(self, sources: Sequence[Any], asked: tf.Tensor) -> list[tf.Tensor]:
        if tf.executing_eagerly():
            found = self._tape.gradient(self._result, sources, [asked])
        else:
            found = tf.gradients(self._result, [getattr(source, "handle", source)
                                                for source in sources], [asked],
                                 # A layer may read the variables, too, on the way to the inputs.
                                 stop_gradients=self._inputs)
        return [tf.zeros(source.shape if _tf.is_variable(source) else tf.shape(source),
                         source.dtype) if gradient is None else tf.convert_to_tensor(gradient)
                for source, gradient in zip(sources, found)]


def _sums(tower: contexts.TowerContext, values: Sequence[Any]) -> list[tf.Tensor]:
    """The sum over all towers with rows of each of the values that they have brought."""
    here = [merging.total([merging.without_empty(part, number, tower.shares)
                           for number, part in enumerate(contexts.all_values(value, tower.count))])
            for value in values]
    return here if tower.shares.workers is None else tower.shares.workers.sum(here)


def _each(values: Sequence[Any]) -> Any:
    """One value a tower, as the towers' meeting hands them out."""
    return values[0] if len(values) == 1 else _tf.PerReplica(tuple(values))


def _size(part: tf.Tensor) -> Any:
    return tf.shape(part)[0] if part.shape[0] is None else part.shape[0]
