"""TODO
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

_MARK = "_towerstrategy_original"


class MovedError(Exception):
    """This Keras release does not have a name that we hook."""


def require(hooks: Iterable[tuple[Any, str]]) -> None:
    """Raises :class:`MovedError` unless each ``owner.name`` is there, before any is replaced."""
    for owner, name in hooks:
        if name not in owner.__dict__:
            raise MovedError(f"{getattr(owner, '__name__', owner)}.{name}")


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces ``owner.name`` by ``make(owner.name)``, once."""
    original = owner.__dict__[name]
    if hasattr(original, _MARK):
        return
    hooked = functools.wraps(original)(make(original))
    setattr(hooked, _MARK, original)
    setattr(owner, name, hooked)
