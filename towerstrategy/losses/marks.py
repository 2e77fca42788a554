"""What a tower remembers of losses and gradients, which tensors alone do not tell.

Goes in: tensors of a tower, by whoever knows what they are.  Comes out: the same answer for whoever
asks later: which scalars are parts of the batch's loss, which are means over the tower's rows,
which rows are those of all towers, and what tapes have given.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import remade

# What a nested function has scaled it scales at each call, in whichever trace: tensors' names.
_PARTS: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()
# So it is with what it was answered for in there: the names of what went into it.
_MADE_OF: weakref.WeakKeyDictionary[tf.Graph, dict[str, list[str]]] = weakref.WeakKeyDictionary()


class Marks:
    """The part of a tower's context that remembers.

    Attributes:
      weight: what losses are scaled by in place of the share of rows, or None.
      silenced: whether the gradients of a tower without rows are zero of themselves.
      own_means: whether losses are means over the tower's rows here, scaled by who asked for them.
      asked: whether the replica function has asked how many replicas there are.
      suspects: ids of the variables by which a loss that nothing has scaled was differentiated.
      gradients: what tapes have given for the weights.
      uniques: eager values of which each is there once.
      gathered: whether the replica function has asked for the rows of all towers.
      given: ids of the eager tensors that the towers were given parts of, where each is traced.
      parts: ids of traced tensors with this tower's rows, where the graph does not tell them.
      places: where rows are in tensors that were looked at, by their ids, see given_back.
      told_values: traced values of which a warning was due.
      trial: of the loss that is being called, see one_number; or None.
      predicates: by what it is decided whether what is being traced runs.
    """

    def __init__(self) -> None:
        self.weight: Any = None
        self.silenced = False
        self.own_means = False
        self.asked = False
        self.suspects: set[int] = set()
        self.gradients = remade.Noted()
        self.uniques: list[tf.Tensor] = []
        self.gathered = False
        self.given: frozenset[int] = frozenset()
        self.parts: frozenset[int] = frozenset()
        self.places: dict[int, Any] = {}
        self.told_values: list[tf.Tensor] = []
        self.trial: Any = None
        self.predicates: list[Any] = []
        self._scaled: dict[int, Any] = {}
        self._means: dict[int, Any] = {}
        self._whole: set[str] = set()
        self._losses: dict[int, tuple[Any, list[Any]]] = {}

    @contextlib.contextmanager
    def weighted(self, weight: Any) -> Iterator[None]:
        """Within, losses are scaled by ``weight`` (a scalar tensor), not by the share of rows."""
        before, self.weight = self.weight, weight
        try:
            yield
        finally:
            self.weight = before

    @contextlib.contextmanager
    def in_branch(self, predicate: Any) -> Iterator[None]:
        """Within, the branches of a condition are traced."""
        self.predicates.append(predicate)
        try:
            yield
        finally:
            self.predicates.pop()

    def mark_scaled(self, loss: Any) -> Any:
        """Remembers that ``loss`` is this tower's part of the whole batch's loss already."""
        self._scaled[id(loss)] = loss
        _note_in_graph(loss)
        return loss

    def is_scaled(self, loss: Any) -> bool:
        """Whether ``loss`` went through :meth:`mark_scaled`."""
        return self._scaled.get(id(loss)) is loss or _is_noted(loss)

    def mark_mean(self, loss: Any) -> Any:
        """Remembers that ``loss`` is a mean over this tower's rows."""
        self._means[id(loss)] = loss
        return loss

    def is_mean(self, loss: Any) -> bool:
        """Whether ``loss`` went through :meth:`mark_mean`."""
        return self._means.get(id(loss)) is loss

    def mark_whole(self, rows: tf.Tensor) -> tf.Tensor:
        """Remembers that ``rows`` are those of all towers, the same on each."""
        self.gathered = True
        if not _tf.is_eager(rows):
            self._whole.add(rows.name)
        return rows

    def is_whole(self, value: tf.Tensor) -> bool:
        """Whether a traced tensor went through :meth:`mark_whole`."""
        return bool(self._whole) and value.name in self._whole

    def losses_of(self, layer: Any) -> list[Any]:
        """The list of the losses that ``layer`` has added in this tower."""
        return self._losses.setdefault(id(layer), (layer, []))[1]


def mark_made_of(result: Any, given: Any) -> Any:
    """Remembers that somebody answers for how ``result`` was made of ``given``, two nests.

    Of what is traced, be it in a tower or not: a nested function may be called by one later.
    """
    sources = [each for each in tf.nest.flatten(given) if tf.is_symbolic_tensor(each)]
    for leaf in tf.nest.flatten(result):
        if tf.is_symbolic_tensor(leaf) and not any(leaf is source for source in sources):
            _MADE_OF.setdefault(leaf.graph, {})[leaf.name] = [
                source.name for source in sources if source.graph is leaf.graph]
    return result


def made_of(result: tf.Tensor) -> list[tf.Tensor] | None:
    """What ``result`` was made of, where it went through :func:`mark_made_of`; else None."""
    graph = result.graph
    names = _MADE_OF.get(graph, {}).get(result.name)
    return None if names is None else [graph.get_tensor_by_name(name) for name in names]


def _note_in_graph(loss: Any) -> None:
    if isinstance(loss, tf.Tensor) and not _tf.is_eager(loss):
        _PARTS.setdefault(loss.graph, set()).add(loss.name)


def _is_noted(loss: Any) -> bool:
    return (isinstance(loss, tf.Tensor) and not _tf.is_eager(loss)
            and loss.name in _PARTS.get(loss.graph, ()))
