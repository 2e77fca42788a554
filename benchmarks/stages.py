"""Measures what it takes to lay one model over several devices, and simulates it on GPUs.

Goes in: the flags of ``python -m benchmarks``.  Comes out: progress, two tables, the targets with
pass or MISS, and ``stages.json`` in the output folder.

    python -m benchmarks stages --cases=conv,mlp --rounds=1

Measured, on logical CPU devices that share the machine's cores: 1, 2 and 4 stages in 1 to 8
micro-batches, beside no strategy and four towers; each in a process of its own, memory as
:mod:`micro_batches` has it.  A step's seconds of processor time say what stages cost where other
work keeps the machine busy, and what crosses is counted on the traced step.  Simulated: how long
four GPUs of an A100 machine stand idle, as :mod:`gpus` does, with layers that cost the same.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
from typing import Any

import keras
import tensorflow as tf

import towerstrategy
from benchmarks import cases, flat, links, measure, micro_batches, on_gpus, results, schedule, table
from towerstrategy.batch import sub_batches

NONE, TOWERS = "no strategy", "4 towers"
LAYOUTS = [(NONE, 1), (TOWERS, 1), *((f"{stages} stages", parts) for stages in (1, 2, 4)
                                     for parts in (1, 2, 4, 8))]
FIGURES = ("added_mb", "step_ms", "step_cpu_ms", "crossing_mb")
# Figure, of which layout, over which, limit.
TARGETS = (("conv", "added_mb", ("1 stages", 8), ("1 stages", 1), 0.35),
           ("mlp", "step_cpu_ms", ("2 stages", 8), (NONE, 1), 1.25),
           ("conv", "step_cpu_ms", ("2 stages", 8), (NONE, 1), 1.25))
MACHINE, GPUS = "A100 NVLink", 4
_WIDTH, _LAYERS, _ROWS = 4096, 16, 512  # rows of a micro-batch
_IDLE = 1.1  # times the bubble

Job = tuple[str, str, int]  # case, layout, micro-batches


def measured(case: cases.Case, layout: str, parts: int, steps: int,
             small: bool) -> dict[str, float]:
    """Trains ``case`` in one layout; :data:`FIGURES`."""
    devices = towerstrategy.split_cpu(GPUS)
    strategy = None
    if layout == TOWERS:
        strategy = towerstrategy.TowerStrategy(devices)
    elif layout != NONE:
        strategy = towerstrategy.TowerStrategy([devices[:int(layout.split()[0])]],
                                               micro_batches=parts)
    found, model = micro_batches.trained(case, strategy, steps, small)
    crossing = 0
    if strategy is not None:
        traffic = measure.step_traffic(model, micro_batches.enlarged(case), strategy)
        crossing = traffic.total - traffic.batch
    return {**found, "crossing_mb": crossing / 2**20}


def medians(runs: list[tuple[Job, dict[str, Any]]]) -> dict[Job, dict[str, Any]]:
    """The medians of each job's rounds, or its first error."""
    grouped: dict[Job, list[dict[str, Any]]] = {}
    for job, figures in runs:
        grouped.setdefault(job, []).append(figures)
    return {job: next((each for each in mine if "error" in each), None) or {
        name: statistics.median(each[name] for each in mine) for name in FIGURES}
        for job, mine in grouped.items()}


def verdicts(figures: dict[Job, dict[str, Any]],
             idle: dict[int, float]) -> list[results.Verdict]:
    """The targets that these figures are enough for."""
    found = []
    for case, name, this, other, limit in TARGETS:
        one, two = figures.get((case, *this), {}), figures.get((case, *other), {})
        if name in one and two.get(name):
            found.append(results.Verdict(
                f"{case}, {this[0]}, {this[1]} micro-batches: {name} over {other[0]}",
                one[name] / two[name], limit))
    for parts, share in idle.items():
        found.append(results.Verdict(
            f"simulated, {GPUS} GPUs, {parts} micro-batches: idle over the bubble",
            share / bubble(GPUS, parts), _IDLE))
    return found


def bubble(stages: int, parts: int) -> float:
    """The part of a step for which devices stand idle, with stages of equal length."""
    return (stages - 1) / (parts + stages - 1)


def shown(figures: dict[Job, dict[str, Any]]) -> str:
    """The table of what was measured."""
    header = ("case", "layout", "micro-batches", "MB added by training", "step ms",
              "processor ms", "MB that cross")
    rows, failed = [], []
    for (case, layout, parts), mine in figures.items():
        start = [case, layout, str(parts)]
        if "error" in mine:
            failed.append(f"{' '.join(start)} failed: {mine['error']}")
        else:
            rows.append([*start, *(f"{mine[name]:,.1f}" for name in FIGURES)])
    return "\n".join([table.columns(header, rows), *failed])


def simulated(parts: int, stages: int = GPUS, width: int = _WIDTH) -> float:
    """The part of a step for which the GPUs of :data:`MACHINE` stand idle.

    The optimizer is SGD: what counts is the pipeline, and not how the update is spread.
    """
    machine = links.MACHINES[MACHINE]
    strategy = towerstrategy.TowerStrategy([on_gpus.towers(stages)], micro_batches=parts)
    strategy.extended.keep_graphs = True
    with on_gpus.tracing():
        with strategy.scope():
            model = keras.Sequential([keras.Input([width], batch_size=_ROWS), *(
                keras.layers.Dense(width, activation="relu") for _ in range(_LAYERS))])
            model.compile("sgd", "mse", jit_compile=False)
            model.optimizer.build(model.trainable_variables)
        step = tf.function(lambda x, y: strategy.run(model.train_step, args=((x, y),)),
                           autograph=False)
        spec = tf.TensorSpec([_ROWS, width])
        rows = sub_batches.SubBatchesSpec(*[spec] * parts) if parts > 1 else spec
        function = step.get_concrete_function(rows, rows)
    operations = flat.flatten(function, ["GPU:0"])
    line = schedule.run(operations, flat.costs(operations, machine).seconds, machine)
    gpus = [f"GPU:{number}" for number in range(stages)]
    return 1 - sum(line.busy.get(gpu, 0.) for gpu in gpus) / (stages * line.seconds)


def main(chosen: list[str], rounds: int, steps: int, small: bool, seconds: float,
         legacy: bool, out: pathlib.Path, title: str) -> None:
    """Measures, simulates, prints, writes."""
    print(f"{title}; {micro_batches.TIMES} times the cases' batches", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(case, *layout) for case in chosen for layout in LAYOUTS]
    todo = [job for _ in range(rounds) for job in jobs]
    runs: list[tuple[Job, dict[str, Any]]] = []
    for position, (case, layout, parts) in enumerate(todo, start=1):
        found = micro_batches.in_a_process("benchmarks.stages", {
            "case": case, "layout": layout, "parts": parts, "steps": steps, "small": small},
            seconds, legacy)
        runs.append(((case, layout, parts), found))
        print(f"[{position}/{len(todo)}] {case}, {layout}, {parts}: "
              + (f"failed: {found['error']}" if "error" in found else
                 ", ".join(f"{name} {found[name]:,.1f}" for name in FIGURES)), flush=True)
        (out / "stages.json").write_text(json.dumps({
            "title": title, "steps": steps, "small": small, "runs": [
                {"job": job, **mine} for job, mine in runs]}, indent=1))
    towerstrategy.split_cpu(GPUS + 1)
    idle = {parts: simulated(parts, width=64 if small else _WIDTH) for parts in (1, 2, 4, 8, 16)}
    lines = [[str(parts), f"{share:.3f}", f"{bubble(GPUS, parts):.3f}"]
             for parts, share in idle.items()]
    figures = medians(runs)
    print(f"\n{shown(figures)}\n\n{GPUS} stages on {MACHINE}, simulated\n"
          + table.columns(("micro-batches", "idle", "(P-1)/(M+P-1)"), lines)
          + f"\n\n{table.targets(verdicts(figures, idle))}\n\n{out / 'stages.json'}")


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(measured(cases.CASES[asked.pop("case")], **asked)))
