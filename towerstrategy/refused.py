"""What an error says of a wrong argument: its name, what was expected, what was given.

Goes in: an argument.  Comes out: nothing, or an error.
"""

from __future__ import annotations

from typing import Any


def wrong_type(argument: str, given: Any, expected: str) -> TypeError:
    """The error for an argument of a wrong type."""
    return TypeError(
        f"{argument} must be {expected}, but got {given!r} of type {type(given).__name__}.")


def check_type(argument: str, given: Any, types: Any, expected: str) -> None:
    """Raises ``TypeError`` where ``given`` is of none of ``types``, ``expected`` in words."""
    if not isinstance(given, types):
        raise wrong_type(argument, given, expected)
