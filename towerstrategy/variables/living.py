"""Variables remembered without being kept alive.

Goes in: variables.  Comes out: those that are still there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any


def keep(references: dict[int, weakref.ref[Any]], variable: Any) -> None:
    key = id(variable)
    references[key] = weakref.ref(variable, lambda _: references.pop(key, None))


def living(references: dict[int, weakref.ref[Any]]) -> Iterator[Any]:
    for reference in list(references.values()):
        variable = reference()
        if variable is not None:
            yield variable
