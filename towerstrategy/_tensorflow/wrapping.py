"""A function of TensorFlow -> what is called in its place.

Goes in: where the function stands, and what makes another one of it.  Comes out: that one there,
once however often it is asked for, with the original at hand; and a list of all such places.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MARK = "_towerstrategy_original"


class Place(NamedTuple):
    """A function that is replaced, and why.

    Attributes:
      owners: the modules or classes that have it.
      name: its name there.
      why: what it does that towers cannot do with.
      only_for: what a strategy has for which alone it is replaced; empty: always.
    """

    owners: Sequence[Any]
    name: str
    why: str
    only_for: str = ""

    def wrap(self, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Puts what ``make`` makes of the function in its place."""
        original = getattr(self.owners[0], self.name)
        if hasattr(original, MARK):
            return
        wrapped: Any = functools.wraps(original)(make(original))
        setattr(wrapped, MARK, original)
        for owner in self.owners:
            setattr(owner, self.name, wrapped)


def owner_name(owner: Any) -> str:
    """The name of a module or class, its module's before it."""
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
