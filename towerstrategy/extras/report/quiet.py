"""Contexts that keep a report from disturbing a training.

Goes in: code of a report.  Comes out: the same without the profiler's log lines, with warnings in
place of errors, and without the profiler's writes to freed memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator

_PROFILER_LINE = re.compile(
    rb"^(?:I\d{4} |\d{4}-\d\d-\d\d \S+: I )[^\]]*"
    rb"\b(?:profiler_session|save_profile|cupti_\w+)\.cc:\d+\] ")

# The option of mallopt (glibc's malloc.h) that lets free overwrite the bytes.
_M_PERTURB = -6


@contextlib.contextmanager
def overwriting_freed_memory() -> Iterator[None]:
    """A context in which freed memory is overwritten, if the C library is glibc.

    When it stops, TensorFlow's profiler reads freed records (``HandleCrossThreadEvents`` in
    ``tsl/profiler/backends/cpu/traceme_recorder.cc``, up to TensorFlow 2.21).  It writes to a
    record if it finds there the number of an event that began in another thread, as those of
    collective operations do: with four workers, one was killed (SIGSEGV) in most trainings.  In
    overwritten records it finds no number.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_M_PERTURB, 0xA5)
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    """A context that removes the profiler's informational lines from standard error.

    TensorFlow's C++ code writes them to the file descriptor, and its log level cannot be changed
    after the import.  Other threads' lines are printed at the end of the context.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # a process without a standard error
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            for line in caught:
                if not _PROFILER_LINE.match(line):
                    os.write(2, line)


@contextlib.contextmanager
def harmless(what: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turns an error into a warning that the report could not do ``what``; calls ``otherwise``."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"TowerReport could not {what}, and the training goes on without it: "
                      f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
        otherwise()
