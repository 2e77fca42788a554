"""What holds for a while in one thread: how many replicas there are said to be, XLA.

Goes in: values for the length of a ``with`` block.  Comes out: the same, for whoever asks within.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from towerstrategy.towers import steps


class Modes(threading.local):
    """What holds for a while, in one thread."""

    counted_as: Any = None
    one_copy_of_means = False
    in_order = False
    compiles = False
    keras_step = False
    steps: steps.StepsContext | None = None

    @contextlib.contextmanager
    def within(self, **modes: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in modes}
        vars(self).update(modes)
        try:
            yield
        finally:
            vars(self).update(before)
