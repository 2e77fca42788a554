"""Notes on errors, through autograph's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

__all__ = ("add_note", "noting")
PRIVATE_NAMES = {
    "python.autograph.pyct.error_utils:ErrorMetadataBase":
        "an error's ag_error_metadata, from which autograph makes the error that users see",
}
# Those whose only argument is their message.
_PLAIN_ERRORS = (ArithmeticError, AssertionError, AttributeError, IndexError, NotImplementedError,
                 RuntimeError, TypeError, ValueError, ZeroDivisionError)


def add_note(error: Any, note: str, traced: bool) -> None:
    """Adds ``note`` to ``error``, and to the error that autograph will raise in its place.

    Where the function was ``traced``, that is another error with the first one's message, but
    without its notes.
    """
    metadata = getattr(error, "ag_error_metadata", None)
    if metadata is not None:
        metadata.cause_message += f"\n{note}"
    elif traced and type(error) in _PLAIN_ERRORS and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{note}",)
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        _tell(error, note)


def _tell(error: Any, note: str) -> None:
    """``add_note`` for Python 3.10, which shows no notes: where it can be, in the message."""
    if isinstance(error, tf.errors.OpError):
        error._message = f"{error.message}\n{note}"  # what its property ``message`` reads
    elif error.__class__.__str__ is Exception.__str__ and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{note}",)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    """Within, an error gets ``note``."""
    try:
        yield
    except Exception as error:
        add_note(error, note, not tf.executing_eagerly())
        raise
