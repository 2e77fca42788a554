"""A function of TensorFlow or Keras -> what is called in its place, while a strategy is at work.

Goes in: where functions stand, and what is called instead.  Comes out: that in their places
from the first entry (a scope, a ``run``, a call of a model) to the last exit, in whichever threads
these are; before and after that the originals.
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
    """A function of modules or classes, ``owners``, and what it does that towers cannot do with."""

    owners: Sequence[Any]
    name: str
    why: str
    _original: Any = None
    _hooked: Any = None

    def wrap(self, instead: Callable[..., Any]) -> None:
        """Has ``instead`` called in its place whenever a strategy is at work, once.

        ``instead`` takes the function, then its arguments.
        """
        key = self.owners[0], self.name
        with _lock:
            if key not in _wrapped:
                _wrapped[key], self._instead = self, instead
                if _entered:
                    self.put()

    def put(self) -> None:
        original = getattr(self.owners[0], self.name)
        if hasattr(original, MARK):  # somebody has wrapped what is ours, and it is there still
            return
        if original is not self._original:
            self._original, self._hooked = original, self._made_of(original)
        for owner in self.owners:
            setattr(owner, self.name, self._hooked)

    def _made_of(self, original: Callable[..., Any]) -> Any:
        instead = self._instead

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return instead(original, *args, **kwargs)

        if self.name in ("__init__", "call") and not hasattr(original, "__wrapped__"):
            # To know its arguments Keras asks inspect in a way that does not look at what is
            # wrapped.  Nothing else may have it: Keras hands it on with a method's own attributes.
            vars(hooked)["__signature__"] = inspect.signature(original)
        setattr(hooked, MARK, original)
        return hooked


_lock = threading.RLock()
_wrapped: dict[tuple[Any, str], Place] = {}
_entered = 0


def enter_work() -> None:
    """Puts all that is to be replaced in its place, until :func:`leave_work` is called as often."""
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
        for its in () if _entered else _wrapped.values():
            for owner in its.owners:
                if getattr(owner, its.name, None) is its._hooked:
                    setattr(owner, its.name, its._original)


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    enter_work()
    try:
        yield
    finally:
        leave_work()


def owner_name(owner: Any) -> str:
    """The name of a module or class, its module's before it."""
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
