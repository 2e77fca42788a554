"""Notes on errors, also on the errors that autograph makes; tracebacks without our frames."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.util import traceback_utils

# Errors whose only argument is their message.
_PLAIN_ERRORS = (ArithmeticError, AssertionError, AttributeError, IndexError, NotImplementedError,
                 RuntimeError, TypeError, ValueError, ZeroDivisionError)
# TensorFlow's filter of tracebacks drops our frames, too.
traceback_utils._EXCLUDED_PATHS += (os.path.dirname(os.path.dirname(__file__)) + os.sep,)
_Called = TypeVar("_Called", bound=Callable[..., Any])


def with_short_tracebacks(function: _Called) -> _Called:
    """``function``, with one frame of this package in the tracebacks of its errors.

    ``tf.debugging.disable_traceback_filtering`` keeps all frames.
    """
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not tf.debugging.is_traceback_filtering_enabled():
                raise
            short = traceback_utils._process_traceback_frames(error.__traceback__)
            raise error.with_traceback(short)  # noqa: B904

    return call  # type: ignore[return-value]


def add_note(error: Any, note: str, traced: bool) -> None:
    """Adds ``note`` to ``error``, and to the error that autograph will raise in its place.

    If the function was ``traced``, the new error has the message of ``error`` but not its notes.
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
        error._message = f"{error.message}\n{note}"  # the property ``message`` reads it
