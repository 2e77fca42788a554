"""Hooks: replacements of functions and methods of Keras.

Goes in: a table ``(owner, name) -> Hook`` for each Keras.  Comes out: the same Keras, in which
these names are wrapped while a strategy is at work.  A hook acts in towers and on models of a
``TowerStrategy``; for all others it calls the original.

Scopes and runs put the hooks in place.  A user also calls a model's methods outside of them.  Some
of these methods run code before Keras enters the model's scope; they are wrapped on the model
itself, and the wrapper puts the hooks in place first.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from towerstrategy import _tensorflow as _tf


class Hook(NamedTuple):
    """A replacement for a function or method of Keras."""

    replacement: Callable[..., Any]  # takes the original, then its arguments
    reason: str  # what the original does wrong on towers


def install(table: Mapping[tuple[Any, str], Hook]) -> None:
    """Installs all hooks of ``table``, each once.

    Raises:
      AttributeError: a name is missing; then no hook is installed.
    """
    for owner, name in table:
        if name not in owner.__dict__:
            raise AttributeError(f"{_tf.owner_name(owner)}.{name}")
    for (owner, name), hook in table.items():
        _tf.Place([owner], name, hook.reason).wrap(hook.replacement)


def wrap_methods(model: Any, methods: Iterable[str]) -> None:
    """Wraps methods of a strategy's model, so that the hooks are in place during their calls."""
    for name in methods:
        vars(model).setdefault(name, types.MethodType(_wrapper(type(model), name), model))


def _wrapper(model_class: Any, name: str) -> Callable[..., Any]:
    """A method that puts the hooks in place, then calls the class's method."""

    @_tf.with_short_tracebacks
    @functools.wraps(getattr(model_class, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _tf.at_work():
            return getattr(type(self), name)(self, *args, **kwargs)

    return call
