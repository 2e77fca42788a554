"""TowerWarning, the class of all warnings, and :func:`warn`.

Goes in: a message.  Comes out: a warning that points to the line of the user's code that called the
package.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

_LIBRARIES = frozenset({"towerstrategy", "tensorflow", "keras", "tf_keras", "contextlib",
                        "functools", "threading"})


class TowerWarning(UserWarning):
    """The category of a TowerStrategy's warnings.

    In a function given to ``strategy.run``, it warns of gradients whose sum over the towers is not
    one device's gradient; it points to the user's line and names the operation.  To raise an error:

    >>> import warnings
    >>> warnings.simplefilter("error", TowerWarning)
    """


def warn(message: str) -> None:
    """Warns with ``message``; the warning points to the innermost line outside of libraries."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
            frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES
            or "autograph_generated" in frame.f_code.co_filename):  # a folder's or a file's name
        frame = frame.f_back
    warnings.warn_explicit(message, TowerWarning, frame.f_code.co_filename, frame.f_lineno)
