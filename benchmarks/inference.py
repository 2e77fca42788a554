"""Predict and evaluate beside no strategy and MirroredStrategy, all in one process, in turns.

Goes in: cases, how many towers and rounds.  Comes out: a table: for each case and call, rows a
second without a strategy and, as ratios to it and to MirroredStrategy's, with one.

Each round calls all strategies one after the other, so that what else the machine does meets all
alike; of each, the fastest round counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import cases, strategies, table

STRATEGIES = ("none", "tower", "mirrored")
CALLS = ("predict", "evaluate")
CASES = ("input", "mlp", "conv")  # by default
_BATCHES = {"input": 100, "mlp": 10, "conv": 10}
LEAST_OVER_NONE = {"input": 0.6, "mlp": 0.9, "conv": 0.9}
LEAST_OVER_MIRRORED = 2.0


def measure(keras: Any, case: cases.Case, devices: list[str], rounds: int, batches: int,
            small: bool = False) -> dict[str, dict[str, float]]:
    """Seconds of the fastest round, by call and strategy.

    Args:
      keras: the Keras to predict with.
      case: with what.
      devices: the towers'.
      rounds: how often to call each.
      batches: how many there are in a call.
      small: whether to make a small model.
    """
    random = np.random.default_rng(0)
    rows = case.batch * batches
    x, y = case.rows(random, rows), random.integers(0, cases.CLASSES, rows).astype("int32")
    models = {}
    for name in STRATEGIES:
        with strategies.STRATEGIES[name](devices, None).scope():
            models[name] = cases.compiled(case, keras, small)
    best: dict[str, dict[str, float]] = {call: {} for call in CALLS}
    for number in range(rounds + 1):
        for name, model in models.items():
            for call in CALLS:
                data = (x,) if call == "predict" else (x, y)
                start = time.perf_counter()
                getattr(model, call)(*data, batch_size=case.batch, verbose=0)
                if number:  # the first call traces
                    seconds = time.perf_counter() - start
                    best[call][name] = min(seconds, best[call].get(name, seconds))
    return best


def told(found: dict[str, dict[str, dict[str, float]]], rows: dict[str, int]) -> str:
    """The table: what :func:`measure` found for each case."""
    lines = []
    for case, by_call in found.items():
        for call, seconds in by_call.items():
            mine = seconds["tower"]
            lines.append([case, call, f"{rows[case] / seconds['none']:,.0f}",
                          f"{seconds['none'] / mine:.2f}", f"{seconds['mirrored'] / mine:.2f}",
                          f"{LEAST_OVER_NONE.get(case, 0):.2f}", f"{LEAST_OVER_MIRRORED:.2f}"])
    return table.columns(("case", "call", "rows/s, none", "/ none", "/ mirrored", "at least",
                          "at least"), lines)


def main(keras: Any, names: Sequence[str], towers: int, rounds: int, quick: bool) -> None:
    """Measures and prints."""
    devices = strategies.devices("cpu", towers)
    found, rows = {}, {}
    for name in names:
        case = cases.CASES[name]
        batches = 2 if quick else _BATCHES.get(name, 10)
        found[name] = measure(keras, case, devices, rounds, batches, quick)
        rows[name] = case.batch * batches
    print(told(found, rows))
