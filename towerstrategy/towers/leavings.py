"""Tensors that a replica function leaves behind in a list, a dictionary or an attribute.

Goes in: the function, its arguments, and the graph that tower 0 was traced in.  Comes out: where it
has left tensors of that graph, other than in its result.  There they are tower 0's alone and, after
the trace, of no use; so the function is traced for each tower, where the caller is.

Towers that take turns would each find there, behind a meeting, what the last one has put there, so
each is given its own again (:class:`Turns`).

What is looked at is what the function reaches by its arguments, its closure, its object and the
globals that it names.  TensorFlow's own objects (modules, layers, models) are left out: layers keep
tensors that nobody takes from there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

# Functions that the function calls, and objects in its objects.
_DEPTH = 3
# Parts of a container; what holds more is data.
_MOST = 1000


class Before:
    """What the containers that a function reaches hold before it is traced.

    Args:
      fn: the replica function.
      arguments: what it is called with, a nest.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Any) -> None:
        self._held = {place: (name, filled, filled.copy())
                      for place, (name, filled) in _containers(fn, arguments).items()}

    def take_back(self, graph: tf.Graph) -> list[str]:
        """Gives the containers that hold tensors of ``graph`` now what they held before.

        Returns:
          Their types, in words.
        """
        found: list[str] = []
        for name, filled, before in self._held.values():
            known = {id(part) for part in _parts(before)}
            if any(_holds(part, graph) for part in _parts(filled) if id(part) not in known):
                found.append(name)
                if isinstance(filled, list):
                    filled[:] = before
                else:
                    filled.clear()
                    filled.update(before)
        return found


class Turns:
    """What each of several towers that take turns has put into attributes and dictionaries.

    Sums and lists that one tower after another adds to stay everyone's.

    Args:
      fn: the replica function.
      arguments: what it is called with, a nest.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Any) -> None:
        self._held: dict[int, dict[Any, Any]] = {
            place: filled for place, (_, filled) in _containers(fn, arguments).items()
            if isinstance(filled, dict)}
        self._own: dict[tuple[int, int], dict[Any, Any]] = {}
        self._seen: dict[int, dict[Any, Any]] = {}

    def begin(self, tower: int) -> None:
        """Gives ``tower`` what it has put there in the turns before."""
        for place, held in self._held.items():
            held.update({
                key: value for key, value in self._own.get((tower, place), {}).items()
                if key in held and held[key] is not value and not _goes_on(held[key], value)})
            self._seen[place] = dict(held)

    def end(self, tower: int) -> None:
        """Remembers what ``tower`` has put there in this turn."""
        for place, held in self._held.items():
            seen = self._seen[place]
            put = {key: value for key, value in held.items()
                   if (key not in seen or seen[key] is not value) and _may_hold(value)}
            self._own.setdefault((tower, place), {}).update(put)


def _goes_on(later: Any, value: Any) -> bool:
    """Whether a tower has made ``later`` by adding to ``value``, another's.

    In eager code it does not show what a tensor was made of; numbers are taken for sums there.
    """
    if not isinstance(value, tf.Tensor) or not isinstance(later, tf.Tensor):
        ids = {id(each) for each in _tensors(value)}
        return any(id(each) in ids for each in _tensors(later))
    if _tf.is_eager(value) or _tf.is_eager(later):
        return bool(value.shape.rank == 0)
    waiting, seen = [later], set[str]()
    while waiting and len(seen) < _MOST:
        tensor = waiting.pop(0)
        if tensor.name == value.name:
            return True
        if tensor.name not in seen:
            seen.add(tensor.name)
            waiting += tensor.op.inputs
    return False


def _may_hold(value: Any) -> bool:
    """Whether there are tensors in what has been put somewhere, or may be, later."""
    return not isinstance(value, _LEFT_OUT) and _filled(value) is not None or bool(_tensors(value))


def _tensors(value: Any, depth: int = 0) -> list[tf.Tensor]:
    """The tensors in what has been put somewhere."""
    if isinstance(value, tf.Tensor):
        return [value]
    if depth > _DEPTH or isinstance(value, _LEFT_OUT):
        return []
    return [each for part in _inside(value, _filled(value)) for each in _tensors(part, depth + 1)]


def _containers(fn: Callable[..., Any], arguments: Any) -> dict[int, tuple[str, Any]]:
    """By their ids the lists and dictionaries that a function reaches, and whose they are."""
    found: dict[int, tuple[str, Any]] = {}
    waiting = [(holder, 0) for holder in [*_reached(fn), arguments]]
    while waiting:
        holder, depth = waiting.pop()
        if depth > _DEPTH or isinstance(holder, _LEFT_OUT):
            continue
        filled = _filled(holder)
        if filled is not None:
            if id(filled) in found or len(filled) > _MOST:
                continue
            found[id(filled)] = type(holder).__name__, filled
        waiting += [(part, depth + 1) for part in _inside(holder, filled)]
    return found


def _reached(fn: Any) -> Iterator[Any]:
    """What a function holds and names."""
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    if hasattr(fn, "__self__"):
        yield fn.__self__
    if isinstance(fn, types.MethodType):
        fn = fn.__func__
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    if isinstance(fn, types.FunctionType):
        yield from (fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__)


def _filled(holder: Any) -> list[Any] | dict[Any, Any] | None:
    """The list or dictionary that is filled where something is put into ``holder``."""
    if isinstance(holder, (list, dict)):
        return holder
    if isinstance(holder, _FUNCTIONS) or not hasattr(holder, "__dict__"):
        return None
    return vars(holder)


def _inside(holder: Any, filled: list[Any] | dict[Any, Any] | None) -> list[Any]:
    if filled is not None:
        return _parts(filled)
    if isinstance(holder, _FUNCTIONS):
        return list(_reached(holder))
    return list(holder) if isinstance(holder, tuple) else []


def _parts(filled: list[Any] | dict[Any, Any]) -> list[Any]:
    return list(filled.values() if isinstance(filled, dict) else filled)


def _holds(value: Any, graph: tf.Graph, depth: int = 0) -> bool:
    """Whether something new is, or has in it, a tensor of ``graph``."""
    if isinstance(value, tf.Tensor):
        return not _tf.is_eager(value) and value.graph is graph
    if isinstance(value, _tf.CompositeTensor) and not isinstance(value, tf.Variable):
        return any(_holds(part, graph) for part in tf.nest.flatten(value, expand_composites=True))
    if depth > _DEPTH or isinstance(value, _LEFT_OUT):
        return False
    return any(_holds(part, graph, depth + 1) for part in _inside(value, _filled(value)))


_FUNCTIONS = (types.FunctionType, types.MethodType)
_LEFT_OUT = (tf.Tensor, tf.Variable, tf.Module, tf.Graph, tf.TypeSpec, tf.distribute.Strategy,
             tf.distribute.DistributedValues, types.ModuleType, type, str, bytes, int, float,
             _tf.Trackable, _tf.CompositeTensor, _tf.Function)
