"""Measures what micro-batches cost and save on one device.

Goes in: the flags of ``python -m benchmarks``.  Comes out: progress, a table, the target with pass
or MISS, and ``micro_batches.json`` in the output folder.

    python -m benchmarks micro_batches --cases=conv,mlp --rounds=1

Each number of micro-batches trains in a process of its own.  What training *adds* to memory is the
process's peak in steps of large batches, less what it holds after a step of a few rows: weights,
slots and the traced step are there by then, so what is left are activations and gradients.  Batch
norm is of a micro-batch's rows, as it holds all activations where it is of the whole batch's.
"""

from __future__ import annotations

import contextlib
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

PARTS = (0, 1, 2, 4, 8)  # 0: no strategy
TIMES = 4  # the case's batch
FIGURES = ("added_mb", "held_mb", "step_ms", "first_step_s")
# Of 8 micro-batches over 1: case, figure, limit.
TARGETS = (("conv", "added_mb", 0.35),)
_FEW = 16  # rows

Figures = dict[tuple[str, int], dict[str, Any]]


def measure(case: cases.Case, parts: int, steps: int, small: bool) -> dict[str, float]:
    """Trains ``case`` in ``parts`` micro-batches on one device; :data:`FIGURES`."""
    towerstrategy.split_cpu(1)
    strategy = towerstrategy.TowerStrategy(
        ["CPU:0"], micro_batches=parts, synchronize_batch_norm=False) if parts else None
    _, found = trained(larger(case), strategy, steps, small)
    return {name: found[name] for name in FIGURES}


def larger(case: cases.Case) -> cases.Case:
    """``case`` with :data:`TIMES` its batch."""
    return dataclasses.replace(case, batch=TIMES * case.batch)


def trained(case: cases.Case, strategy: tf.distribute.Strategy | None, steps: int,
            small: bool) -> tuple[Any, dict[str, float]]:
    """Trains ``case``; its model, :data:`FIGURES`, and ``cpu_ms``, of a step on all cores."""
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = cases.compiled(case, tf.keras, small)
    ends: list[tuple[float, float]] = []

    class Clock(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            del batch
            float(logs["loss"])  # the step has ended when it is known
            ends.append((time.perf_counter(), time.process_time()))

    batches = cases.dataset(case)
    few = batches.map(lambda x, y: (x[:_FEW], y[:_FEW]))
    options = {"shuffle": False, "verbose": 0, "callbacks": [Clock()]}
    start = time.perf_counter()
    model.fit(few, steps_per_epoch=1, **options)
    first = ends[-1][0] - start
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    held = _status("VmRSS")
    model.fit(batches, steps_per_epoch=steps, **options)
    wall, cpu = 1e3 * np.median(np.diff(ends[1:], axis=0), axis=0)
    return model, {"added_mb": _status("VmHWM") - held, "held_mb": held, "first_step_s": first,
                   "step_ms": float(wall), "cpu_ms": float(cpu)}


def _status(name: str) -> float:
    """A line of Linux' account of this process, in MB."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(name)


def medians(runs: list[tuple[str, int, dict[str, Any]]]) -> Figures:
    """The medians of each job's rounds, or its first error."""
    return results.middle((((case, parts), figures) for case, parts, figures in runs), FIGURES)


def verdicts(figures: Figures) -> list[results.Verdict]:
    """The targets that these figures are enough for."""
    found = []
    for case, name, limit in TARGETS:
        one, many = (figures.get((case, parts), {}) for parts in (1, 8))
        if name in many and one.get(name):
            found.append(results.Verdict(f"{case}, 8 micro-batches: {name} over 1 micro-batch",
                                         many[name] / one[name], limit))
    return found


def shown(figures: Figures) -> str:
    """The table."""
    header = ("case", "micro-batches", "MB added by training", "MB before", "step ms",
              "first step s")
    rows, failed = [], []
    for (case, parts), mine in figures.items():
        start = [case, str(parts or "no strategy")]
        if "error" in mine:
            failed.append(f"{' '.join(start)} failed: {mine['error']}")
        else:
            rows.append([*start, *(f"{mine[name]:,.1f}" for name in FIGURES)])
    return "\n".join([table.columns(header, rows), *failed])


def main(chosen: list[str], rounds: int, steps: int, small: bool, seconds: float,
         legacy: bool, out: pathlib.Path, title: str) -> None:
    """Measures, prints, writes."""
    print(f"{title}; {TIMES} times the cases' batches", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    todo = [(case, parts) for _ in range(rounds) for case in chosen for parts in PARTS]
    runs: list[tuple[str, int, dict[str, Any]]] = []
    for position, (case, parts) in enumerate(todo, start=1):
        found = in_a_process("benchmarks.micro_batches", {
            "case": case, "parts": parts, "steps": steps, "small": small}, seconds, legacy)
        runs.append((case, parts, found))
        print(f"[{position}/{len(todo)}] {case}, {parts or 'no strategy'}: "
              + (f"failed: {found['error']}" if "error" in found else
                 ", ".join(f"{name} {found[name]:,.1f}" for name in FIGURES)), flush=True)
        (out / "micro_batches.json").write_text(json.dumps({
            "title": title, "steps": steps, "small": small, "runs": [
                {"case": name, "micro_batches": count, **mine} for name, count, mine in runs]},
            indent=1))
    figures = medians(runs)
    print(f"\n{shown(figures)}\n\n{table.targets(verdicts(figures))}\n\n"
          f"{out / 'micro_batches.json'}")


def in_a_process(module: str, asked: dict[str, Any], seconds: float,
                 legacy: bool) -> dict[str, Any]:
    """What ``module`` prints of what it is asked, as JSON; or the ``error``."""
    command = [sys.executable, "-m", module, json.dumps(asked)]
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
    asked = json.loads(sys.argv[1])
    print(json.dumps(measure(cases.CASES[asked.pop("case")], **asked)))
