"""Measures custom training loops with TowerStrategy, no strategy and MirroredStrategy.

Goes in: cases, numbers of towers and rounds.  Comes out: a table: for each case and variant of the
loop, the CPU seconds of the first step, the step time, and the ratios of step time and CPU time to
those without a strategy.

Each round runs all variants one after the other, in one process, so that other load on the machine
affects all alike.  The fastest round counts.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from benchmarks import cases, strategies, table

CASES = ("mlp", "conv", "deep")  # by default


def _run(strategy: Any, step: Any) -> Any:
    return tf.function(lambda *batch: strategy.run(step, batch))


# A variant of the loop -> its strategy, and what makes a function from a strategy and a step.
VARIANTS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "none": ("none", lambda _, step: tf.function(step)),
    "strategy.run": ("tower", _run),
    "strategy.function": ("tower", lambda strategy, step: strategy.function(step)),
    "mirrored": ("mirrored", _run),
}


@dataclasses.dataclass
class Cost:
    """The CPU seconds of the first step, then the seconds and CPU seconds of a step."""

    first: float
    step: float = float("inf")
    cpu: float = float("inf")


@functools.cache
def _strategy(name: str, devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """The strategy for all cases: a second MirroredStrategy on these devices cancels functions."""
    return strategies.STRATEGIES[name](list(devices), None)


def _make_step(model: Any) -> Any:
    """A custom training step for ``model``."""

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def measure(keras: Any, case: cases.Case, devices: list[str], rounds: int, steps: int,
            small: bool = False) -> dict[str, Cost]:
    """The costs by variant, of models of ``keras``; a round has ``steps`` steps."""
    loops, costs = {}, {}
    for name, (strategy_name, make) in VARIANTS.items():
        strategy = _strategy(strategy_name, tuple(devices))
        with strategy.scope():
            model = cases.compiled(case, keras, small)
            model.optimizer.build(model.trainable_variables)
        batches = iter(strategy.experimental_distribute_dataset(cases.dataset(case).repeat()))
        loops[name] = make(strategy, _make_step(model)), batches
        costs[name] = Cost(_time_steps(*loops[name], 1)[1])
    for _ in range(rounds):
        for name, loop in loops.items():
            seconds, cpu = _time_steps(*loop, steps)
            cost = costs[name]
            cost.step, cost.cpu = min(cost.step, seconds / steps), min(cost.cpu, cpu / steps)
    return costs


def _time_steps(step: Any, batches: Any, count: int) -> tuple[float, float]:
    """The seconds and CPU seconds of ``count`` steps."""
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        loss = step(*next(batches))
    for part in getattr(loss, "values", (loss,)):
        part.numpy()
    return time.perf_counter() - start, time.process_time() - cpu


def format_table(costs_by_case: dict[str, dict[str, Cost]]) -> str:
    """The table of the results of :func:`measure`, by case."""
    lines = []
    for case, costs in costs_by_case.items():
        none = costs["none"]
        lines += [[case, name, f"{cost.first:.2f}", f"{cost.step * 1000:.2f}",
                   f"{cost.step / none.step:.2f}", f"{cost.cpu / none.cpu:.2f}"]
                  for name, cost in costs.items()]
    return table.columns(("case", "variant", "first step, CPU s", "step ms", "/ none",
                          "CPU / none"), lines)


def main(keras: Any, names: Sequence[str], towers: int, rounds: int, quick: bool) -> None:
    """Measures the cases and prints the table."""
    devices = strategies.devices("cpu", towers)
    print(format_table({
        name: measure(keras, cases.CASES[name], devices, rounds, 2 if quick else 30, quick)
        for name in names}))
