"""What a replica function makes of its gradients, made of the merged ones.

Goes in: tensors that a tower has computed from its gradients (clipped ones, a running sum, a step
of a rule of its own), in the graph that is being traced.  Comes out: which gradients have to be
merged, and, from the merged ones, what one device would have computed.

A function of the towers' gradients is in general not merged by merging its values: the norm of a
sum is not the sum of norms.  So the operations between the gradients and the tensor are done again,
once, behind the merge.  What else goes into them has to be the same on all towers: constants,
weights.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.losses import provenance
from towerstrategy.merge import linear
from towerstrategy.merge.shares import Value


class Gradient(NamedTuple):
    """A gradient that a tower has computed.

    Attributes:
      value: a tensor or ``tf.IndexedSlices``.
      home: the device of the variable that it belongs to.
      kind: what the differentiated loss was: a part of the batch's, or a mean; None where that is
        not known.
    """

    value: Value
    home: str
    kind: provenance.Kind | None


# What a nested function has taken it gives at each call, in whichever trace: by the names of the
# gradients their homes and kinds.
_TAKEN: weakref.WeakKeyDictionary[tf.Graph, dict[str, tuple[str, provenance.Kind]]] = (
    weakref.WeakKeyDictionary())
# The same of the values of slices.
_SLICES: weakref.WeakKeyDictionary[tf.Graph, dict[str, tuple[str, provenance.Kind]]] = (
    weakref.WeakKeyDictionary())


class Noted:
    """The gradients of one tower, and what has been made of them."""

    def __init__(self) -> None:
        self._gradients: dict[int, Gradient] = {}
        self._behind: dict[int, _Behind] = {}
        self._looked_at: dict[int, int] = {}
        self.is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nobody is to remember what tapes give."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def add(self, gradient: Gradient) -> None:
        """Remembers a gradient that a tape has given."""
        graph = _graph_of(gradient.value)
        if graph is not None:
            behind = self._behind.setdefault(id(graph), _Behind(graph))
            behind.gradients.update(part.name for part in _parts(gradient.value))
            if gradient.kind and isinstance(gradient.value, tf.IndexedSlices):
                _SLICES.setdefault(graph, {})[gradient.value.values.name] = (
                    gradient.home, gradient.kind)
            elif gradient.kind:
                _TAKEN.setdefault(graph, {})[gradient.value.name] = gradient.home, gradient.kind
        self._gradients[id(gradient.value)] = gradient

    def add_of_calls(self, graph: tf.Graph | None) -> list[tf.Tensor]:
        """Remembers the gradients that nested functions have returned in ``graph``.

        Returns:
          What these have made of gradients and is no multiple of them, since this was last asked.
        """
        others: list[tf.Tensor] = []
        if graph is None or not (_TAKEN or _SLICES):
            return others
        begin = self._looked_at.get(id(graph), 0)
        for place, operation in enumerate(graph.get_operations()[begin:], begin):
            if operation.type in provenance.CALLS:
                others += self._add_of_call(graph, place, operation)
            elif operation.type in provenance.LOOPS:
                self._add_of_loop(graph, place, operation)
        self._looked_at[id(graph)] = _tf.operation_count(graph)
        return others

    def _add_of_call(self, graph: tf.Graph, place: int,
                     call: tf.Operation) -> Iterator[tf.Tensor]:
        inner = _tf.graph_of_call(call)
        taken = {} if inner is None else _TAKEN.get(inner, {})
        if inner is None or not taken:
            return
        known = {name: kind for name, (_, kind) in taken.items()}
        for value, returned in zip(call.outputs, inner.outputs):
            kinds = _kinds_behind(inner, returned, known)
            if kinds in linear.ALONE:
                self._behind.setdefault(id(graph), _Behind(graph)).look_from(place)
                home, _ = next(iter(taken.values()))
                self.add(Gradient(value, home, next(iter(kinds))))
            elif kinds is not None and value.dtype.is_floating:
                yield value

    def _add_of_loop(self, graph: tf.Graph, place: int, loop: tf.Operation) -> None:
        """Remembers sums of gradients that a loop has added up from 0, turn by turn."""
        inner = _tf.graph_of_call(loop, loop.get_attr("body").name)
        taken = {} if inner is None else {**_TAKEN.get(inner, {}), **_densified(inner)}
        if inner is None or not taken:
            return
        known = {name: kind for name, (_, kind) in taken.items()}
        homes = [home for home, _ in taken.values()]
        for value, begun, carried, returned in zip(loop.outputs, loop.inputs, inner.inputs,
                                                   inner.outputs):
            if not value.dtype.is_floating or not _is_zero(begun):
                continue
            turn = _kinds_behind(inner, returned, known)
            for kind in turn or ():
                # What was added up before is a gradient as much as what this turn adds.
                both = _kinds_behind(inner, returned, {**known, carried.name: kind})
                if both in linear.ALONE and kind in both:
                    self._behind.setdefault(id(graph), _Behind(graph)).look_from(place)
                    self.add(Gradient(value, homes[0], kind))

    def holds(self, value: Any) -> bool:
        """Whether a tape has given ``value`` as it is."""
        held = self._gradients.get(id(value))
        return held is not None and held.value is value

    def kind_of(self, value: Any) -> provenance.Kind | None:
        """The kind of a gradient that a tape has given as it is, where that is known."""
        return self._gradients[id(value)].kind if self.holds(value) else None

    def has_eager_parts(self) -> bool:
        """Whether a tape has given, in eager code, a gradient of a part of the batch's loss."""
        return any(gradient.kind is provenance.Kind.PART and _graph_of(gradient.value) is None
                   for gradient in self._gradients.values())

    def remade(self, values: Sequence[Any], graph: tf.Graph | None,
               known: bool = False) -> Remade | None:
        """What of ``values`` can be made of merged gradients; None where nothing can, or need be.

        Args:
          values: tensors, ``tf.IndexedSlices`` or None, of one tower.
          graph: the graph that the tower is traced in.
          known: whether the kinds of the gradients have to be known.
        """
        gradients = [gradient for gradient in self._gradients.values()
                     if _graph_of(gradient.value) is graph and (gradient.kind or not known)]
        if graph is None or not gradients:
            return None
        found = Remade(gradients, self._behind[id(graph)].operations())
        for index, value in enumerate(values):
            if _graph_of(value) is graph:
                found.take(index, value)
        return found if found.places else None

    def kinds(self, value: tf.Tensor, graph: tf.Graph | None,
              is_same: Callable[[tf.Tensor], bool]) -> provenance.Kinds | None:
        """The kinds of the gradients of which ``value`` is a sum of multiples, terms apart.

        Args:
          value: a traced tensor.
          graph: the graph that the tower is traced in.
          is_same: whether a tensor is the same on all towers.

        Returns:
          None where no gradient whose kind is known is behind it; with ``MIXED`` among them where
          it is another function of gradients, with ``OTHER`` where it has other terms.
        """
        if graph is None or value.graph is not graph or id(graph) not in self._behind:
            return None
        known = {part.name: gradient.kind for gradient in self._gradients.values()
                 if gradient.kind and _graph_of(gradient.value) is graph
                 for part in _parts(gradient.value)}
        return linear.kinds(value, known, self._behind[id(graph)].operations(), is_same)


def _densified(graph: tf.Graph) -> dict[str, tuple[str, provenance.Kind]]:
    """What has been made of all slices of a gradient, dense; as in :data:`_TAKEN`."""
    slices = _SLICES.get(graph, {})
    return {operation.outputs[0].name: slices[operation.inputs[0].name]
            for operation in (graph.get_operations() if slices else ())
            if operation.type == "UnsortedSegmentSum" and operation.inputs[0].name in slices}


def _kinds_behind(graph: tf.Graph, value: tf.Tensor,
                  known: Mapping[str, provenance.Kind]) -> provenance.Kinds | None:
    """The kinds of ``known`` gradients of ``graph`` of which ``value`` is a sum of multiples."""
    behind = _Behind(graph, 0)
    behind.gradients.update(known)
    return linear.kinds(value, known, behind.operations(), lambda _: False)


def _is_zero(value: tf.Tensor) -> bool:
    if value.op.type == "Fill":
        value = value.op.inputs[1]
    static = tf.get_static_value(value)
    return value.op.type == "ZerosLike" or static is not None and not static.any()


class _Behind:
    """What gradients go into in one graph; each of its operations is looked at once."""

    def __init__(self, graph: tf.Graph, begin: int | None = None) -> None:
        self.gradients: set[str] = set()
        self._graph = graph
        self._seen = _tf.operation_count(graph) if begin is None else begin
        self._found: set[str] = set()

    def look_from(self, place: int) -> None:
        """Looks at operations again, as something before them turned out to be a gradient."""
        self._seen = min(self._seen, place)

    def operations(self) -> set[str]:
        """The names of the operations that something of the gradients goes into."""
        for operation in self._graph.get_operations()[self._seen:]:
            if any(tensor.name in self.gradients or tensor.op.name in self._found
                   for tensor in operation.inputs):
                self._found.add(operation.name)
        self._seen = _tf.operation_count(self._graph)
        return self._found


class Made(NamedTuple):
    """An operation and its inputs, which may be others once the towers are copied."""

    operation: tf.Operation
    inputs: tuple[tf.Tensor, ...]


class Remade:
    """Values that can be made again, once the gradients behind them have been merged.

    Attributes:
      places: the numbers of the values.
      gradients: the gradients to be merged.
    """

    def __init__(self, gradients: Sequence[Gradient], made_of: Collection[str]) -> None:
        self._gradient_of = {part.name: (number, index) for number, gradient in enumerate(gradients)
                             for index, part in enumerate(_parts(gradient.value))}
        self._every = gradients
        self._made_of = made_of
        self._needed: dict[str, Made] = {}
        self._used: dict[int, int] = {}
        self._values: dict[int, Value] = {}
        self._walk = provenance.Walk()

    @property
    def places(self) -> Collection[int]:
        return self._values.keys()

    @property
    def gradients(self) -> list[Gradient]:
        return [self._every[number] for number in self._used]

    def take(self, place: int, value: Value) -> None:
        """Takes ``value`` in if it is, or is made of, gradients, and of nothing else of a tower's.
        """
        needed: dict[str, Made] = {}
        used: set[int] = set()
        waiting = _parts(value)
        while waiting:
            tensor = waiting.pop()
            if tensor.name in self._gradient_of:
                used.add(self._gradient_of[tensor.name][0])
            elif tensor.op.name in self._made_of:
                if tensor.op.name not in needed:
                    needed[tensor.op.name] = made = Made(tensor.op, tuple(tensor.op.inputs))
                    waiting.extend(made.inputs)
            elif not self._walk.is_steady(tensor):
                return
        if not used or any(made.operation.op_def.is_stateful for made in needed.values()):
            return
        self._needed.update(needed)
        for number in used:
            self._used.setdefault(number, len(self._used))
        self._values[place] = value

    def again(self, merged: Sequence[Value]) -> dict[int, Value]:
        """The values by their place, of ``merged`` in place of :attr:`gradients`."""
        made = self._made_again([_parts(value) for value in merged])

        def instead(tensor: tf.Tensor) -> tf.Tensor:
            if tensor.name in self._gradient_of:
                number, index = self._gradient_of[tensor.name]
                return _parts(merged[self._used[number]])[index]
            if tensor.op.name in self._needed:
                return made[tensor.op.name].outputs[tensor.value_index]
            return tensor

        return {place: _map_parts(instead, value) for place, value in self._values.items()}

    def _made_again(self, merged: Sequence[Sequence[tf.Tensor]]) -> dict[str, tf.Operation]:
        return made_again(self._needed, {
            name: merged[self._used[number]][index]
            for name, (number, index) in self._gradient_of.items() if number in self._used})


def made_again(needed: Mapping[str, Made], merged: Mapping[str, tf.Tensor]
               ) -> dict[str, tf.Operation]:
    """Operations, by their names, once more.

    Args:
      needed: the operations by name, with all between them.
      merged: by its name, what stands in the place of a tensor that goes into them.
    """
    if not needed:
        return {}
    graph_def = tf.compat.v1.GraphDef()
    graph = next(iter(needed.values())).operation.graph
    graph_def.versions.producer = graph.graph_def_versions.producer
    inputs: dict[str, tf.Tensor] = {}
    for operation, given in needed.values():
        node = graph_def.node.add()
        node.CopyFrom(operation.node_def)
        node.device = ""
        node.attr.pop("_class", None)
        del node.input[:]
        for tensor in given:
            if tensor.name not in merged and tensor.op.name in needed:
                node.input.append(tensor.name)
                continue
            place = "merged" if tensor.name in merged else "same"
            key = f"{place}/{tensor.op.name}_{tensor.value_index}:0"
            inputs[key] = merged.get(tensor.name, tensor)
            node.input.append(key)
    names = list(needed)
    return dict(zip(names, tf.graph_util.import_graph_def(
        graph_def, input_map=inputs, return_elements=names, name="remade")))


def _graph_of(value: Any) -> tf.Graph | None:
    first = value.values if isinstance(value, tf.IndexedSlices) else value
    return first.graph if isinstance(first, tf.Tensor) and not _tf.is_eager(first) else None


def _parts(value: Value) -> list[tf.Tensor]:
    return [value.values, value.indices] if isinstance(value, tf.IndexedSlices) else [value]


def _map_parts(function: Callable[[tf.Tensor], tf.Tensor], value: Value) -> Value:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(function(value.values), function(value.indices), value.dense_shape)
    return function(value)
