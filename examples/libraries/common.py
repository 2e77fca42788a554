"""The strategy and the checks that the examples of other libraries share.

Goes in: the results of an example.  Comes out: a ``TowerStrategy`` on the GPUs, or on logical CPU
devices if there are fewer than two GPUs; a line for each check, and the exit status.
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
    """A strategy on all GPUs, or on three CPU towers if there are fewer than two GPUs."""
    if len(tf.config.list_physical_devices("GPU")) > 1:
        return towerstrategy.TowerStrategy()
    return towerstrategy.TowerStrategy(towerstrategy.split_cpu(TOWERS))


def difference(arrays: Sequence[Any], references: Sequence[Any]) -> float:
    """The largest difference of two lists of arrays, relative to an array's largest entry.

    The largest entry counts as at least 1e-3: a bias before batch norm, whose gradient is zero in
    theory, has only rounding errors.
    """
    pairs = [(np.asarray(array, "float64"), np.asarray(reference, "float64"))
             for array, reference in zip(arrays, references, strict=True)]
    return max(float(np.max(np.abs(array - reference)) / max(np.max(np.abs(reference)), 1e-3))
               for array, reference in pairs if array.size)


def twins(strategy: towerstrategy.TowerStrategy, make: Callable[[], Any]) -> tuple[Any, Any]:
    """Two models of ``make`` with the same weights: one on the towers, one on one device."""
    single = make()
    with strategy.scope():
        on_towers = make()
    on_towers.set_weights(single.get_weights())
    return on_towers, single


class Findings:
    """Prints the results of checks, and remembers whether all are right.

    It turns each TowerWarning into an error, as the losses of the examples are right.
    """

    def __init__(self, *packages: str) -> None:
        self.good = True
        warnings.simplefilter("error", towerstrategy.TowerWarning)
        print(", ".join(f"{package} {importlib.metadata.version(package)}"
                        for package in ("towerstrategy", "tensorflow", *packages)))

    def at_most(self, what: str, value: float, bound: float) -> None:
        """Reports a difference, which must be at most ``bound``."""
        self.report(what, f"{value:.1e} (at most {bound:.0e})", value <= bound)

    def report(self, what: str, text: str, good: bool = True) -> None:
        """Reports any other result."""
        self.good = self.good and bool(good)
        print(f"{what}: {text}{'' if good else '   <-- WRONG'}", flush=True)

    def exit(self) -> None:
        """Ends the script, with exit status 1 if a result is wrong."""
        raise SystemExit(0 if self.good else 1)
