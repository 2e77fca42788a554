"""A function of TensorFlow -> what is called in its place.

Goes in: where the function stands, and what makes another one of it.  Comes out: that one there,
once however often it is asked for, with the original at hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "_towerstrategy_original"


def wrap(owners: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts what ``make`` makes of the function ``name`` in its place.

    Args:
      owners: a module or class that has it, or all of those that have the same one.
      name: its name there.
      make: takes the function and returns what is called instead.
    """
    places = owners if isinstance(owners, tuple) else (owners,)
    original = getattr(places[0], name)
    if hasattr(original, MARK):
        return
    wrapped: Any = functools.wraps(original)(make(original))
    setattr(wrapped, MARK, original)
    for place in places:
        setattr(place, name, wrapped)
