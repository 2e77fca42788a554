"""Hooks: how a name of Keras is wrapped, once, and what a table of them holds.

Goes in: a table, ``(owner, name) -> Hook``, one for each Keras (``keras3/hooks.py``,
``tf_keras/hooks.py``).  Comes out: the same Keras, those names wrapped.  A hook acts in towers and
on models of a ``TowerStrategy`` and hands everybody else on to the original.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MARK = "_towerstrategy_original"


class Hook(NamedTuple):
    """What is put in the place of a name of Keras: made of the original, and why."""

    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str


class MovedError(Exception):
    """This Keras release does not have a name that we hook."""


def install(table: Mapping[tuple[Any, str], Hook]) -> None:
    """Wraps every name of ``table``, or none.

    Raises:
      MovedError: one of them is not there.
    """
    for owner, name in table:
        if name not in owner.__dict__:
            raise MovedError(f"{getattr(owner, '__name__', owner)}.{name}")
    for (owner, name), hook in table.items():
        wrap(owner, name, hook.make)


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces ``owner.name`` by ``make(owner.name)``, once."""
    original = owner.__dict__[name]
    if hasattr(original, MARK):
        return
    hooked: Any = functools.wraps(original)(make(original))
    if name == "__init__" and not hasattr(original, "__wrapped__"):
        # To remember arguments Keras asks inspect in a way that does not look at what is wrapped.
        # Nothing else may have it: Keras hands it on with a method's own attributes, self and all.
        hooked.__signature__ = inspect.signature(original)
    setattr(hooked, MARK, original)
    setattr(owner, name, hooked)
