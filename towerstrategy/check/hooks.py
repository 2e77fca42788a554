"""The functions of TensorFlow and Keras that the package replaces.

Goes in: what is installed.  Comes out: a table of them, with why, and how many there are.
"""

from __future__ import annotations

import collections

from towerstrategy import _keras, _tensorflow as _tf
from towerstrategy.report import description


def table() -> str:
    """Where, owner, name and why; below, how many there are of each kind."""
    rows = [(f"tensorflow{place.only_for and f', for {place.only_for}'}",
             _tf.owner_name(place.owners[0]), place.name, place.why) for place in _tf.PLACES]
    rows += _keras.replaced()
    counts = collections.Counter(where for where, *_ in rows)
    totals = "; ".join(f"{where}: {count}" for where, count in counts.items())
    return f"{description.table(('of', 'owner', 'name', 'why'), rows)}\n\n{totals}"
