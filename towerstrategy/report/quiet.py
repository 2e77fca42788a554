"""What a report must not do to a training: print TensorFlow's lines into it, or end it.

Goes in: what a report does.  Comes out: the same without the profiler's log lines, and with a
warning in place of an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterator

_PROFILER_SAYS = re.compile(
    rb"^(?:I\d{4} |\d{4}-\d\d-\d\d \S+: I )[^\]]*"
    rb"\b(?:profiler_session|save_profile|cupti_\w+)\.cc:\d+\] ")


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    """Keeps the profiler's informational lines off the process' standard error.

    TensorFlow's C++ code writes them to the file descriptor, and offers Python no level that can be
    changed after the import.  Other threads' lines meanwhile come a moment later.
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
def harmless(what: str) -> Iterator[None]:
    """Turns an error into a warning that says ``what`` could not be done."""
    try:
        yield
    except Exception as error:
        warn(what, error)


def warn(what: str, error: Exception) -> None:
    """Says that the report could not do ``what``."""
    warnings.warn(f"TowerReport could not {what}, and the training goes on without it: "
                  f"{type(error).__name__}: {error}", RuntimeWarning, stacklevel=3)
