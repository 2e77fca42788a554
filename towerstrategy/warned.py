"""TowerWarning, and how it is given.

Goes in: a sentence.  Comes out: a warning that points to the line of the user's code from which the
package was called.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

_LIBRARIES = frozenset({"towerstrategy", "tensorflow", "keras", "tf_keras", "contextlib",
                        "functools", "threading"})


class TowerWarning(UserWarning):
    """What a TowerStrategy warns of.

    In a function given to ``strategy.run``: gradients whose sum over the towers is not one
    device's.  It points to the user's line and names the operation.  To have it as an error:

    >>> import warnings
    >>> warnings.simplefilter("error", TowerWarning)
    """


def warn(message: str) -> None:
    """Warns, pointing to the innermost line that is none of a library's."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
            frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
            or "/autograph_generated" in frame.f_code.co_filename
            or "__autograph_generated_file" in frame.f_code.co_filename):
        frame = frame.f_back
    warnings.warn_explicit(message, TowerWarning, frame.f_code.co_filename, frame.f_lineno)
