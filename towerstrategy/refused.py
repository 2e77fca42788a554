"""Errors about wrong arguments: they have the argument's name, the type expected, the value given.

Goes in: an argument.  Comes out: nothing, or an error.
"""

from __future__ import annotations

import os
import pathlib
import reprlib
from typing import Any


class _Shown(reprlib.Repr):
    """Shows only dtypes and shapes of arrays and tensors, also in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 16
        self.maxstring = self.maxother = self.maxlong = 300

    def repr1(self, x: Any, level: int) -> str:
        if not isinstance(x, type) and hasattr(x, "dtype") and hasattr(x, "shape"):
            return f"<{type(x).__name__} of {getattr(x.dtype, 'name', x.dtype)}, shape {x.shape}>"
        return super().repr1(x, level)


shown = _Shown().repr


def wrong_type(argument: str, value: Any, expected: str, hint: str = "") -> TypeError:
    """The error for an argument of a wrong type; ``hint``: a sentence to add."""
    return TypeError(f"{argument} must be {expected}, but got {shown(value)} of type "
                     f"{type(value).__name__}.{hint and f' {hint}'}")


def check_type(argument: str, value: Any, types: Any, expected: str) -> None:
    """Raises ``TypeError`` unless ``value`` is of one of ``types``; ``expected``: them in words."""
    if not isinstance(value, types):
        raise wrong_type(argument, value, expected)


def check_file(argument: str, path: str | os.PathLike[str], what: str = "a file") -> None:
    """Raises ``ValueError`` if ``what`` cannot be written to ``path``, before it is computed."""
    file = pathlib.Path(path)
    if file.is_dir():
        raise ValueError(f"{argument} must be the path of {what}, but {str(path)!r} is a folder.")
    if not file.parent.is_dir():
        raise ValueError(f"{argument} is to be written to {str(path)!r}, but there is no folder "
                         f"{str(file.parent)!r} (here is {str(pathlib.Path.cwd())!r}).")
