"""What a report must not do to a training: print TensorFlow's lines into it, or end it.

Goes in: what a report does.  Comes out: the same without the profiler's log lines, with a warning
in place of an error, and without TensorFlow's writes to memory that it has freed.
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

_PROFILER_SAYS = re.compile(
    rb"^(?:I\d{4} |\d{4}-\d\d-\d\d \S+: I )[^\]]*"
    rb"\b(?:profiler_session|save_profile|cupti_\w+)\.cc:\d+\] ")

# glibc's malloc.h: the option by which mallopt has freed bytes overwritten.
_M_PERTURB = -6


@contextlib.contextmanager
def freed_overwritten() -> Iterator[None]:
    """Has what is freed within overwritten, where the C library is glibc.

    As it stops, TensorFlow's profiler looks at notes that it has freed (``HandleCrossThreadEvents``
    in ``tsl/profiler/backends/cpu/traceme_recorder.cc``, up to TensorFlow 2.21), and writes to
    those in which it finds the number of something that began in another thread, as collective
    operations do: of four workers one was killed (SIGSEGV) in most trainings.  In overwritten notes
    it finds no number.
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
    """Keeps the profiler's informational lines off the process' standard error.

    TensorFlow's C++ code writes them to the file descriptor, at a level that cannot be changed
    after the import.  Other threads' lines meanwhile come a moment later.
    """
    try:
        kept = os.dup(2)
    except OSError:  # a process without a standard error
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            for line in caught:
                if not _PROFILER_SAYS.match(line):
                    os.write(2, line)


@contextlib.contextmanager
def harmless(what: str, otherwise: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turns an error into a warning that says ``what`` could not be done; then ``otherwise``."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"TowerReport could not {what}, and the training goes on without it: "
                      f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
        otherwise()
