"""Loops of one's own beside no strategy and MirroredStrategy, all in one process, in turns.

Goes in: cases, how many towers and rounds.  Comes out: a table: for each case and way to run a
step that is written by hand, the CPU seconds of its first call, and of a further one the
milliseconds, which and the CPU's are ratios to those without a strategy, too.

Each round calls all ways one after the other, so that what else the machine does meets all alike;
of each, the fastest round counts.
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


# A way to run a step -> its strategy, and what makes a function of a strategy and a step.
WAYS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "none": ("none", lambda _, step: tf.function(step)),
    "strategy.run": ("tower", _run),
    "strategy.function": ("tower", lambda strategy, step: strategy.function(step)),
    "mirrored": ("mirrored", _run),
}


@dataclasses.dataclass
class Cost:
    """What a way costs: CPU seconds of the first call, then seconds and CPU seconds of a step."""

    first: float
    step: float = float("inf")
    cpu: float = float("inf")


@functools.cache
def _strategy(who: str, devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """One for all cases: another MirroredStrategy of the same devices cancels functions."""
    return strategies.STRATEGIES[who](list(devices), None)


def _step_of(model: Any) -> Any:
    """A training step as people write it by hand."""

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def measure(keras: Any, case: cases.Case, devices: list[str], rounds: int, steps: int,
            small: bool = False) -> dict[str, Cost]:
    """The costs by way, of models of ``keras``; a round are so many steps."""
    loops, found = {}, {}
    for name, (who, make) in WAYS.items():
        strategy = _strategy(who, tuple(devices))
        with strategy.scope():
            model = cases.compiled(case, keras, small)
            model.optimizer.build(model.trainable_variables)
        batches = iter(strategy.experimental_distribute_dataset(cases.dataset(case).repeat()))
        loops[name] = make(strategy, _step_of(model)), batches
        found[name] = Cost(_timed(*loops[name], 1)[1])
    for _ in range(rounds):
        for name, loop in loops.items():
            seconds, cpu = _timed(*loop, steps)
            cost = found[name]
            cost.step, cost.cpu = min(cost.step, seconds / steps), min(cost.cpu, cpu / steps)
    return found


def _timed(step: Any, batches: Any, count: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of so many steps."""
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        loss = step(*next(batches))
    for part in getattr(loss, "values", (loss,)):
        part.numpy()
    return time.perf_counter() - start, time.process_time() - cpu


def told(found: dict[str, dict[str, Cost]]) -> str:
    """The table: what :func:`measure` found for each case."""
    lines = []
    for case, costs in found.items():
        none = costs["none"]
        lines += [[case, name, f"{cost.first:.2f}", f"{cost.step * 1000:.2f}",
                   f"{cost.step / none.step:.2f}", f"{cost.cpu / none.cpu:.2f}"]
                  for name, cost in costs.items()]
    return table.columns(("case", "step by", "first, CPU s", "step, ms", "/ none", "CPU / none"),
                         lines)


def main(keras: Any, names: Sequence[str], towers: int, rounds: int, quick: bool) -> None:
    """Measures and prints."""
    devices = strategies.devices("cpu", towers)
    print(told({name: measure(keras, cases.CASES[name], devices, rounds, 2 if quick else 30, quick)
                for name in names}))
