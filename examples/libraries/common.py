"""What the examples of other libraries share: towers, and a look at what came out.

Goes in: how many towers, and what was found.  Comes out: a ``TowerStrategy`` on the GPUs, or on
logical CPU devices where there are fewer than two; lines of findings, each beside its bound.
"""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import towerstrategy

TOWERS = 3
BATCH = 8  # three towers get 3, 3 and 2 rows


def towers() -> towerstrategy.TowerStrategy:
    """All GPUs, or three towers on the CPU where there are fewer than two GPUs."""
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return towerstrategy.TowerStrategy()
    return towerstrategy.TowerStrategy(towerstrategy.split_cpu(TOWERS))


def difference(some: Sequence[Any], others: Sequence[Any]) -> float:
    """The largest difference between two lists of arrays, relative to an array's largest value.

    Arrays of values below 1e-3 count as if that were their largest: a bias before batch norm, whose
    gradient is zero in theory, holds rounding errors alone.
    """
    pairs = [(np.asarray(one, "float64"), np.asarray(other, "float64"))
             for one, other in zip(some, others, strict=True)]
    return max(float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-3))
               for one, other in pairs if one.size)


def twins(strategy: towerstrategy.TowerStrategy, make: Callable[[], Any]) -> tuple[Any, Any]:
    """The model that ``make`` builds on the towers, and on one device, with the same weights."""
    alone = make()
    with strategy.scope():
        together = make()
    together.set_weights(alone.get_weights())
    return together, alone


class Findings:
    """Prints what is found, and remembers whether all of it is as promised.

    From then on a TowerWarning is an error: the examples' losses are right.
    """

    def __init__(self, *packages: str) -> None:
        self.good = True
        warnings.simplefilter("error", towerstrategy.TowerWarning)
        print(", ".join(f"{package} {importlib.metadata.version(package)}"
                        for package in ("towerstrategy", "tensorflow", *packages)))

    def at_most(self, what: str, value: float, bound: float) -> None:
        """A difference and what it may be."""
        self.says(what, f"{value:.1e} (at most {bound:.0e})", value <= bound)

    def says(self, what: str, text: str, good: bool = True) -> None:
        """Anything else."""
        self.good = self.good and bool(good)
        print(f"{what}: {text}{'' if good else '   <-- NOT AS PROMISED'}", flush=True)

    def exit(self) -> None:
        """Ends the script, with an error where something is not as promised."""
        raise SystemExit(0 if self.good else 1)
