"""A wrapper of a callback, for the list of callbacks of a training.

Goes in: a callback of either Keras.  Comes out: an object that hands every call on to it, and of
which a subclass says what else is done around a call.  Outside of its calls the callback is as it
was, whether or not a training fails.
"""

from __future__ import annotations

import contextlib
from typing import Any


class Held:
    """Wraps ``callback``, whose class it says it has."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._callback)

    def _around(self) -> contextlib.AbstractContextManager[None]:
        """Entered for each call."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._callback, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._around():
                return found(*args, **kwargs)

        return call


def is_held(callback: Any) -> bool:
    """Whether ``callback`` is a wrapper of one."""
    return issubclass(type(callback), Held)
