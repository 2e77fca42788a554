"""Measures ``predict`` and ``evaluate`` of TowerStrategy, no strategy and MirroredStrategy.

Goes in: cases, numbers of towers and rounds.  Comes out: a table: for each case and call, the rows
per second without a strategy, and the ratios of TowerStrategy's to those of no strategy and of
MirroredStrategy.

Each round calls all strategies one after the other, in one process, so that other load on the
machine affects all alike.  The fastest round counts.
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
    """The seconds of the fastest round, by call and strategy.

    Args:
      keras: ``keras`` or ``tf_keras``.
      case: the model.
      devices: the devices of the towers.
      rounds: the number of rounds.
      batches: the number of batches of a call.
      small: whether to make a small model.
    """
    random = np.random.default_rng(0)
    rows = case.batch * batches
    x, y = case.draw_inputs(random, rows), random.integers(0, cases.CLASSES, rows).astype("int32")
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


def format_table(measured: dict[str, dict[str, dict[str, float]]], rows: dict[str, int]) -> str:
    """The table of the results of :func:`measure`, by case; ``rows`` are those of a call."""
    lines = []
    for case, by_call in measured.items():
        for call, seconds in by_call.items():
            tower = seconds["tower"]
            lines.append([case, call, f"{rows[case] / seconds['none']:,.0f}",
                          f"{seconds['none'] / tower:.2f}", f"{seconds['mirrored'] / tower:.2f}",
                          f"{LEAST_OVER_NONE.get(case, 0):.2f}", f"{LEAST_OVER_MIRRORED:.2f}"])
    return table.columns(("case", "call", "rows/s, none", "/ none", "/ mirrored", "at least",
                          "at least"), lines)


def main(keras: Any, names: Sequence[str], towers: int, rounds: int, quick: bool) -> None:
    """Measures the cases and prints the table."""
    devices = strategies.devices("cpu", towers)
    measured, rows = {}, {}
    for name in names:
        case = cases.CASES[name]
        batches = 2 if quick else _BATCHES.get(name, 10)
        measured[name] = measure(keras, case, devices, rounds, batches, quick)
        rows[name] = case.batch * batches
    print(format_table(measured, rows))
