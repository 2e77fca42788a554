"""Notes on errors, through autograph's own; tracebacks without our frames."""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

# Those whose only argument is their message.
_PLAIN_ERRORS = (ArithmeticError, AssertionError, AttributeError, IndexError, NotImplementedError,
                 RuntimeError, TypeError, ValueError, ZeroDivisionError)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_Called = TypeVar("_Called", bound=Callable[..., Any])


def with_short_tracebacks(function: _Called) -> _Called:
    """``function``, with one frame of this package in the tracebacks of errors in users' code.

    All stay where TensorFlow keeps its own (``tf.debugging.disable_traceback_filtering``).
    """
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not tf.debugging.is_traceback_filtering_enabled():
                raise
            raise error.with_traceback(_without_ours(error.__traceback__))  # noqa: B904

    return call  # type: ignore[return-value]


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    ours = [entry.tb_frame.f_code.co_filename.startswith(_PACKAGE) for entry in entries]
    if ours[-1]:  # our own complaint
        return entries[0]
    kept = None
    for entry, is_ours in zip(reversed(entries), reversed(ours)):
        if not is_ours:
            kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def add_note(error: Any, note: str, traced: bool) -> None:
    """Adds ``note`` to ``error``, and to the error that autograph will raise in its place.

    Where the function was ``traced``, that is another error with the first one's message, but
    without its notes.
    """
    metadata = getattr(error, "ag_error_metadata", None)
    has_notes = hasattr(error, "add_note")  # not in Python 3.10
    if metadata is not None:
        metadata.cause_message += f"\n{note}"
    elif (traced or not has_notes) and type(error) in _PLAIN_ERRORS and len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{note}",)
        return
    if has_notes:
        error.add_note(note)
    elif isinstance(error, tf.errors.OpError):
        error._message = f"{error.message}\n{note}"  # what its property ``message`` reads


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    """Within, an error gets ``note``."""
    try:
        yield
    except Exception as error:
        add_note(error, note, not tf.executing_eagerly())
        raise
