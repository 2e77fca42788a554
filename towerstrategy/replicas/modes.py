"""What holds for a while in one thread: a step of Keras, a model that predicts or is compiled.

Goes in: values for the length of a ``with`` block.  Comes out: the same, for whoever asks within.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class Modes(threading.local):
    """What holds for a while, in one thread."""

    in_order = False  # whether rows are to come in the dataset's order: a model predicts
    one_replica = False  # whether a step with all rows runs, in whatever context
    keras_step = False  # whether a step of Keras is being traced
    compiles = False  # whether XLA compiles what the towers do
    adopts = False  # whether variables that are not the strategy's yet are to be adopted

    @contextlib.contextmanager
    def within(self, **modes: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in modes}
        vars(self).update(modes)
        try:
            yield
        finally:
            vars(self).update(before)
