"""Measures the cost of ``TowerReport``: CPU time of steps with and without it, in turns.

Goes in: nothing.  Comes out: a line for each model: the CPU time of a step, and what is added by
counting rows in each step, and by a sampled step.  The cost of counting is the median over several
pairs of iterators, as two iterators differ by more than this cost.

    python -m benchmarks.report_cost
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towerstrategy
from towerstrategy.extras.report import epochs

_TOWERS, _BATCH, _PAIRS = 4, 64, 6
_WARM_UP = 20  # steps
_MODELS = ((512, 4, 100), (64, 4, 400), (8, 1, 800))  # width, layers, steps of a pair


def _cpu_ms(call: Callable[[], Any]) -> float:
    """The CPU milliseconds of the process in a call."""
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def measure(width: int, layers: int, steps: int) -> tuple[float, float, float]:
    """The CPU milliseconds of a step, of counting in a step, and of a sample."""
    strategy = towerstrategy.TowerStrategy([f"CPU:{tower}" for tower in range(_TOWERS)])
    with strategy.scope():
        model = keras.Sequential([keras.Input([width]), *(
            keras.layers.Dense(width, activation="relu") for _ in range(layers))])
        model.compile("adam", "mse")
    rows = np.random.rand(1000, width).astype("float32")
    model.fit(rows[:2 * _BATCH], rows[:2 * _BATCH], batch_size=_BATCH, verbose=0)
    batches = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((rows, rows)).batch(_BATCH).cache().repeat())
    plain, added, samples = [], [], []
    for _ in range(_PAIRS):
        without, counted = _alternate(model, batches, steps)
        plain.append(statistics.median(without))
        added.append(statistics.median(counted) - plain[-1])
        samples += _sampled_steps(model, iter(batches))
    step = statistics.median(plain)
    return step, statistics.median(added), statistics.median(samples) - step


def _alternate(model: Any, batches: Any, steps: int) -> tuple[list[float], list[float]]:
    """The times of steps without and with counting, in turns, each kind with its own iterator."""
    modes, without = model.distribute_strategy.extended.modes, iter(batches)
    watched = epochs.Watch(model, most=1e-12)
    watched.begin(0)
    watched.tried_in = 0
    counted = iter(batches)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(steps + _WARM_UP):
        turn = [(0, None, without), (1, watched, counted)][::1 if step % 2 else -1]
        for kind, watch, iterator in turn:
            modes.watch = watch
            spent = _cpu_ms(functools.partial(model.train_function, iterator))
            if step >= _WARM_UP:
                times[kind].append(spent)
    watched.close()
    return times


def _sampled_steps(model: Any, iterator: Any) -> list[float]:
    """The times of steps that ``TowerReport`` samples."""
    watched, times = epochs.Watch(model, most=1.), []
    for epoch in range(4):
        watched.begin(epoch)
        calls = [_cpu_ms(functools.partial(model.train_function, iterator)) for _ in range(3)]
        watched.end()
        if watched.sampled_in == epoch > 0:
            times.append(max(calls))
    watched.close()
    return times


def main() -> None:
    """Measures the models and prints a line for each."""
    towerstrategy.split_cpu(_TOWERS)
    for width, layers, steps in _MODELS:
        step, counting, sample = measure(width, layers, steps)
        print(f"{layers} layers of {width}: step {step:.2f} ms, counting {counting:+.3f} ms "
              f"({counting / step:.1%}), a sample {sample:+.1f} ms", flush=True)


if __name__ == "__main__":
    main()
