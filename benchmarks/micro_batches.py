"""Measures memory and step time of micro-batches on one device.

Goes in: the flags of ``python -m benchmarks``.  Comes out: progress, a table, the target with pass
or MISS, and ``micro_batches.json`` in the output folder.

    python -m benchmarks micro_batches --cases=conv,mlp --rounds=1

Each number of micro-batches trains in a process of its own.  ``added_mb`` is the peak memory of
steps minus the memory between steps (``held_mb``), when weights, slots and the traced step exist:
the memory of activations, gradients and the batch.  Batch norm uses the rows of a micro-batch: over
the whole batch, it would keep all activations in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf

import towerstrategy
from benchmarks import cases, results, table

MICRO_BATCHES = (0, 1, 2, 4, 8)  # 0: no strategy
BATCH_FACTOR = 4  # the batch size over that of the case
FIGURES = ("added_mb", "held_mb", "step_ms", "first_step_s")
# Limits of ratios of 8 micro-batches to 1: case, figure, limit.
TARGETS = (("conv", "added_mb", 0.35),)
# The options of mallopt (glibc's malloc.h) for what free gives back to the system, and how much it
# may keep.  By default it keeps blocks of up to 32 MB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _MOST_KEPT = -1, -3, 2**16

Figures = dict[tuple[str, int], dict[str, Any]]


def measure(case: cases.Case, micro_batches: int, steps: int, small: bool) -> dict[str, float]:
    """Trains ``case`` in micro-batches on one device; returns :data:`FIGURES`."""
    towerstrategy.split_cpu(1)
    strategy = towerstrategy.TowerStrategy(
        ["CPU:0"], micro_batches=micro_batches, synchronize_batch_norm=False) \
        if micro_batches else None
    _, figures = train(with_large_batch(case), strategy, steps, small)
    return {name: figures[name] for name in FIGURES}


def with_large_batch(case: cases.Case) -> cases.Case:
    """``case`` with :data:`BATCH_FACTOR` times its batch size."""
    return dataclasses.replace(case, batch=BATCH_FACTOR * case.batch)


def train(case: cases.Case, strategy: tf.distribute.Strategy | None, steps: int,
          small: bool) -> tuple[Any, dict[str, float]]:
    """Trains ``case``; returns the model, and :data:`FIGURES` with ``cpu_ms`` per step."""
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = cases.compiled(case, tf.keras, small)
    ends: list[tuple[float, float]] = []

    class Clock(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch
            float(logs["loss"])  # waits for the end of the step
            ends.append((time.perf_counter(), time.process_time()))

    batches = cases.dataset(case)
    options = {"shuffle": False, "verbose": 0, "callbacks": [Clock()]}
    start = time.perf_counter()
    model.fit(batches, steps_per_epoch=steps, **options)
    wall, cpu = 1e3 * np.median(np.diff(ends, axis=0), axis=0)
    libc = ctypes.CDLL(None)
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        libc.mallopt(option, _MOST_KEPT)
    libc.malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present memory
    held = _memory_mb("VmRSS")
    model.fit(batches, steps_per_epoch=2, **options)
    return model, {"added_mb": _memory_mb("VmHWM") - held, "held_mb": held,
                   "first_step_s": ends[0][0] - start, "step_ms": float(wall),
                   "cpu_ms": float(cpu)}


def _memory_mb(name: str) -> float:
    """A line of ``/proc/self/status`` in MB: ``VmRSS`` (memory) or ``VmHWM`` (its peak)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def medians(runs: list[tuple[str, int, dict[str, Any]]]) -> Figures:
    """The medians of each job's rounds, or its first error."""
    return results.median_figures(
        (((case, count), figures) for case, count, figures in runs), FIGURES)


def verdicts(figures: Figures) -> list[results.Verdict]:
    """The verdicts on the targets whose figures were measured."""
    verdicts_ = []
    for case, name, limit in TARGETS:
        one, many = (figures.get((case, count), {}) for count in (1, 8))
        if name in many and one.get(name):
            verdicts_.append(results.Verdict(f"{case}, 8 micro-batches: {name} over 1 micro-batch",
                                             many[name] / one[name], limit))
    return verdicts_


def format_table(figures: Figures) -> str:
    """The table of all cases, and a line for each that failed."""
    header = ("case", "micro-batches", "MB added by training", "MB before", "step ms",
              "first step s")
    rows, failed = [], []
    for (case, count), values in figures.items():
        start = [case, str(count or "no strategy")]
        if "error" in values:
            failed.append(f"{' '.join(start)} failed: {values['error']}")
        else:
            rows.append([*start, *(f"{values[name]:,.1f}" for name in FIGURES)])
    return "\n".join([table.columns(header, rows), *failed])


def main(chosen: list[str], rounds: int, steps: int, small: bool, seconds: float,
         legacy: bool, out: pathlib.Path, title: str) -> None:
    """Measures all cases, prints the table and writes ``micro_batches.json``."""
    print(f"{title}; {BATCH_FACTOR} times the batch sizes of the cases", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    todo = [(case, count) for _ in range(rounds) for case in chosen for count in MICRO_BATCHES]
    runs: list[tuple[str, int, dict[str, Any]]] = []
    for position, (case, count) in enumerate(todo, start=1):
        measured = run_in_process("benchmarks.micro_batches", {
            "case": case, "micro_batches": count, "steps": steps, "small": small}, seconds, legacy)
        runs.append((case, count, measured))
        print(f"[{position}/{len(todo)}] {case}, {count or 'no strategy'}: "
              + (f"failed: {measured['error']}" if "error" in measured else
                 ", ".join(f"{name} {measured[name]:,.1f}" for name in FIGURES)), flush=True)
        (out / "micro_batches.json").write_text(json.dumps({
            "title": title, "steps": steps, "small": small, "runs": [
                {"case": name, "micro_batches": number, **values}
                for name, number, values in runs]},
            indent=1))
    figures = medians(runs)
    print(f"\n{format_table(figures)}\n\n{table.targets(verdicts(figures))}\n\n"
          f"{out / 'micro_batches.json'}")


def run_in_process(module: str, arguments: dict[str, Any], seconds: float,
                   legacy: bool) -> dict[str, Any]:
    """Runs ``module`` with ``arguments`` in JSON; returns the JSON that it prints, or ``error``."""
    command = [sys.executable, "-m", module, json.dumps(arguments)]
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1" if legacy else "0",
                   "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True,
                              timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {seconds:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip() or "no message").splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    print(json.dumps(measure(cases.CASES[arguments.pop("case")], **arguments)))
