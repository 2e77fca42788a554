"""Replaces functions of TensorFlow and Keras while a strategy is at work.

Goes in: the functions' owners and names, and replacements.  Comes out: the replacements are in
place from the first entry (a scope, a ``run``, a call of a model), in any thread, to the last exit;
before and afterwards, the originals are.  :func:`patched` sets attributes for a while.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MARK = "_towerstrategy_original"


@dataclasses.dataclass
class Place:
    """A function that can be replaced."""

    owners: Sequence[Any]  # modules or classes
    name: str
    why: str  # what the original does that does not work with towers
    _original: Any = None
    _hooked: Any = None

    def wrap(self, instead: Callable[..., Any]) -> None:
        """Replaces the function, once, by ``instead(original, *args)`` while a strategy works."""
        key = self.owners[0], self.name
        with _lock:
            if key not in _wrapped:
                _wrapped[key], self._instead = self, instead
                if _entered:
                    self.put()

    def put(self) -> None:
        original = getattr(self.owners[0], self.name)
        if hasattr(original, MARK):  # another library has wrapped our replacement
            return
        if original is not self._original:
            self._original, self._hooked = original, self._replacement(original)
        for owner in self.owners:
            setattr(owner, self.name, self._hooked)

    def _replacement(self, original: Callable[..., Any]) -> Any:
        """A function with the name of ``original`` that calls ``instead``."""
        instead = self._instead

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        if self.name in ("__init__", "call") and not hasattr(original, "__wrapped__"):
            # Keras reads the arguments of these by inspect, without following ``__wrapped__``.  For
            # others, Keras would copy the signature with a method's attributes.
            vars(hooked)["__signature__"] = inspect.signature(original)
        setattr(hooked, MARK, original)
        return hooked


_lock = threading.RLock()
_wrapped: dict[tuple[Any, str], Place] = {}
_entered = 0


def enter_work() -> None:
    """Puts all replacements in place, until :func:`leave_work` has been called equally often."""
    global _entered
    with _lock:
        if not _entered:
            for wrapped in _wrapped.values():
                wrapped.put()
        _entered += 1


def leave_work() -> None:
    global _entered
    with _lock:
        _entered -= 1
        for place in () if _entered else _wrapped.values():
            for owner in place.owners:
                if getattr(owner, place.name, None) is place._hooked:
                    setattr(owner, place.name, place._original)


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """A context in which the replacements are in place."""
    enter_work()
    try:
        yield
    finally:
        leave_work()


@contextlib.contextmanager
def patched(instance: Any, **attributes: Any) -> Iterator[None]:
    """Sets instance attributes; at the end it restores those that were there and deletes others."""
    values = vars(instance)
    before = {name: values[name] for name in attributes if name in values}
    values.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del values[name]
        values.update(before)


def owner_name(owner: Any) -> str:
    """The full name of a module or class."""
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
