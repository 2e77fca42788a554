"""Hooks: what a table of them holds, and what puts them in place.

Goes in: a table, ``(owner, name) -> Hook``, one for each Keras.  Comes out: the same Keras, those
names wrapped while a strategy is at work.  A hook acts in towers and on models of a
``TowerStrategy`` and hands everybody else on to the original.

Scopes and runs put the hooks in place.  A model is used outside of them, too: the methods with
which its Keras begins before it enters the model's scope are put into the model itself, where they
put the hooks in place first.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from towerstrategy import _tensorflow as _tf


class Hook(NamedTuple):
    """What is called in the place of a name of Keras, that before its arguments, and why."""

    instead: Callable[..., Any]
    why: str
    # Whether it is put into a strategy's models, and Keras' own class left as it is.  The name is
    # to stand in that Keras' ``names.ENTRIES``, too.
    in_models: bool = False


_in_models: dict[tuple[Any, str], Hook] = {}


def install(table: Mapping[tuple[Any, str], Hook]) -> None:
    """Has every name of ``table`` wrapped, if it is not yet.

    Raises:
      AttributeError: a name is not there; none is wrapped then.
    """
    for owner, name in table:
        if name not in owner.__dict__:
            raise AttributeError(f"{_tf.owner_name(owner)}.{name}")
    for (owner, name), hook in table.items():
        if hook.in_models:
            _in_models[owner, name] = hook
        else:
            _tf.Place([owner], name, hook.why).wrap(hook.instead)


def enter_with(model: Any, methods: Iterable[str]) -> None:
    """Has the hooks in place during calls of these methods of ``model``, which is a strategy's."""
    for name in methods:
        vars(model).setdefault(name, types.MethodType(_entry(type(model), name), model))


@contextlib.contextmanager
def having(owner: Any, **attributes: Any) -> Iterator[None]:
    """Within, an object has these attributes of its own."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def _entry(kind: Any, name: str) -> Callable[..., Any]:
    hooked_by = [hook.instead for (owner, hooked), hook in _in_models.items()
                 if hooked == name and issubclass(kind, owner)]

    @_tf.with_short_tracebacks
    @functools.wraps(getattr(kind, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(type(self), name)
        for instead in hooked_by:
            method = functools.partial(instead, method)
        with _tf.at_work():
            return method(self, *args, **kwargs)

    return call
