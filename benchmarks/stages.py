"""Measures towers of several stages: step time, memory, and the bytes between stages.

Goes in: the flags of ``python -m benchmarks``.  Comes out: progress, two tables, the targets with
pass or MISS, and in the output folder ``stages.json`` and ``stages.png``.

    python -m benchmarks stages --stages_cases=mlp16 --rounds=1

Each job trains in a process of its own, on logical CPU devices, as in :mod:`micro_batches`.  Memory
is that of all stages together.  Then the step is traced once more, as for GPUs (:mod:`on_gpus`), to
count the bytes that cross.  A step with stages is also simulated (:mod:`schedule`), twice:

- with equal passes: the forward pass of a micro-batch through a stage takes 1 s, the backward pass
  2 s, divided over the pass's matrix products and convolutions.  So only the order of operations,
  given by data and control dependencies, makes devices idle;
- with TensorFlow's costs on ``MACHINE``: stages are unequal, launches and transfers take time, and
  weights are updated.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

import towerstrategy
from benchmarks import cases, micro_batches, on_gpus, results, table, traffic
from towerstrategy.batch import sub_batches
from towerstrategy.placement import scopes

STAGES = (1, 2, 4)
PARTS = (1, 2, 4, 8)
TOWERS = (2, 4)
MACHINE = "V100 NVLink"
CASES = {
    "mlp16": cases.Case("16 equal layers", 256, cases.dense([512] * 16, 512), cases.floats(512)),
    "conv": cases.CASES["conv"],
}
FIGURES = ("added_mb", "held_mb", "step_ms", "cpu_ms", "first_step_s")
CROSSING = ("activations", "gradients", "other", "scalars", "batch")
ADDED_OVER, STEP_OVER, IDLE_OVER = 0.35, 1.25, 1.1
_SCALAR = 64  # bytes; the largest tensor that counts as a scalar
_PRODUCTS = {"MatMul", "BatchMatMulV2", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter",
             "_FusedConv2D", "_FusedMatMul"}
_REPLICA = re.compile(r"\btower_(\d+)_")
_FORWARD, _BACKWARD = 1.0, 2.0  # seconds of a pass

Pass = tuple[int, int, bool]  # of a micro-batch through a stage: replica, stage, backward?
Figures = dict["Job", dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A case and its devices, which one process measures."""

    case: str
    towers: int = 1  # 0: no strategy
    stages: int = 1  # of each tower
    parts: int = 1  # micro-batches

    def __str__(self) -> str:
        if not self.towers:
            return f"{self.case}, no strategy"
        return f"{self.case}, {self.towers} x {self.stages} x {self.parts}"

    @property
    def rows(self) -> list[list[str]]:
        """The devices of each tower's stages: logical CPU devices; CPU:0 is the host."""
        names = on_gpus.towers(self.towers * self.stages)
        return [names[number:number + self.stages] for number in range(0, len(names), self.stages)]


def jobs(chosen: Sequence[str], quick: bool) -> list[Job]:
    """The jobs of a round."""
    shapes = [(0, 1, 1)]
    shapes += [(1, stages, parts) for stages in (STAGES[:2] if quick else STAGES)
               for parts in ((1, 8) if quick else PARTS)]
    shapes += [(towers, 1, 1) for towers in (TOWERS[:1] if quick else TOWERS)]
    return [Job(case, *shape) for case in chosen for shape in shapes]


def measure(job: Job, case: cases.Case, steps: int, small: bool) -> dict[str, Any]:
    """Trains a job: :data:`FIGURES`, :func:`crossing_bytes`, and :func:`simulate` with stages."""
    towerstrategy.split_cpu(1 + job.towers * job.stages)
    strategy = None
    if job.towers:
        devices = job.rows if job.stages > 1 else [name for name, in job.rows]
        strategy = towerstrategy.TowerStrategy(devices, micro_batches=job.parts)
    case = micro_batches.with_large_batch(case)
    model, figures = micro_batches.train(case, strategy, steps, small)
    if strategy is None:
        return figures
    step = traced(model, case, strategy)
    figures.update(crossing_bytes(step, job, case.batch))
    if job.stages > 1:
        figures["simulated"] = simulate(step, job)
    return figures


def traced(model: Any, case: cases.Case, strategy: tf.distribute.Strategy) -> Any:
    """Traces a training step, for GPUs, of a trained model on a batch of known shape."""
    replicas = strategy.num_replicas_in_sync
    specs = [tf.TensorSpec([case.batch // replicas, *spec.shape[1:]], spec.dtype)
             for spec in cases.dataset(case).element_spec]
    strategy.extended.keep_graphs = True
    with on_gpus.tracing(), strategy.extended.step():
        step = tf.function(lambda x, y: strategy.run(model.train_step, args=((x, y),)),
                           autograph=False)
        return step.get_concrete_function(*(
            sub_batches.SubBatchesSpec(*[spec] * replicas) for spec in specs))


def crossing_bytes(step: Any, job: Job, batch: int) -> dict[str, int]:
    """The bytes that cross devices in a step, by kind.

    Args:
      step: a ConcreteFunction, from :func:`traced`.
      job: the job of the step.
      batch: rows of the global batch.

    Returns:
      The bytes of each kind in :data:`CROSSING`.  Activations, and their gradients, are tensors
      with the rows of a micro-batch; activations cross to a later stage of the same tower,
      gradients to an earlier one.  ``scalars`` are small tensors; ``other`` are all others, except
      the ``batch`` itself.
    """
    places = {name: (tower, stage) for tower, row in enumerate(job.rows)
              for stage, name in enumerate(row)}
    sizes = dict.fromkeys(CROSSING, 0)
    for each in traffic.count(step, job.towers * job.parts).crossings:
        source, target = places.get(each.source), places.get(each.target)
        if each.from_batch:
            kind = "batch"
        elif each.size <= _SCALAR:
            kind = "scalars"
        elif source is None or target is None or source[0] != target[0] or \
                not each.shape.rank or each.shape[0] != batch // (job.towers * job.parts):
            kind = "other"
        else:
            kind = "gradients" if source[1] > target[1] else "activations"
        sizes[kind] += each.size
    return sizes


def simulate(step: Any, job: Job) -> dict[str, Any]:
    """Simulates a step on a tower of GPUs.

    Returns:
      ``idle``: the part of the step time in which a GPU is idle, the mean over GPUs, with equal
      passes.  ``held``: for each stage, the most micro-batches at a time that have begun their
      forward pass and not ended their backward pass.  ``idle_costed``: as ``idle``, with
      TensorFlow's costs on :data:`MACHINE`.
    """
    from benchmarks import flat, links, schedule  # they need TensorFlow's Grappler

    operations = flat.flatten(step, ["GPU:0"])
    passes = _passes(operations, job)
    machine = links.MACHINES[MACHINE]
    seconds = {operations[number].name: (_BACKWARD if key[2] else _FORWARD) / len(numbers)
               for key, numbers in passes.items() for number in numbers}
    equal = schedule.run(operations, seconds, machine)
    costed = schedule.run(operations, flat.Costs(machine).seconds(operations), machine)
    return {"idle": _idle(equal, job.stages), "held": _held(passes, equal.spans, job.stages),
            "idle_costed": _idle(costed, job.stages)}


def _passes(operations: Sequence[Any], job: Job) -> dict[Pass, list[int]]:
    """The numbers of the matrix products and convolutions of each pass."""
    passes: dict[Pass, list[int]] = collections.defaultdict(list)
    for number, operation in enumerate(operations):
        replica = _REPLICA.search(operation.traced_name)
        if operation.type in _PRODUCTS and replica:
            passes[int(replica[1]), int(operation.device.partition(":")[2]),
                   scopes.GRADIENTS in operation.traced_name].append(number)
    expected = 2 * job.parts * job.stages
    if len(passes) != expected:
        raise ValueError(f"{job}: expected matrix products or convolutions in {expected} passes, "
                         f"but {len(passes)} passes have some: {sorted(passes)}")
    return passes


def _idle(timeline: Any, stages: int) -> float:
    busy = sum(timeline.busy.get(f"GPU:{stage}", 0.0) for stage in range(stages))
    return 1 - busy / (stages * timeline.seconds)


def _held(passes: dict[Pass, list[int]], spans: Sequence[tuple[float, float]],
          stages: int) -> list[int]:
    """For each stage, the most micro-batches between forward and backward pass at a time."""
    most = []
    for stage in range(stages):
        begins = sorted(min(spans[number][0] for number in numbers)
                        for key, numbers in passes.items() if key[1:] == (stage, False))
        ends = sorted(max(spans[number][1] for number in numbers)
                      for key, numbers in passes.items() if key[1:] == (stage, True))
        most.append(max(sum(other <= begin for other in begins)
                        - sum(end <= begin for end in ends) for begin in begins))
    return most


def bubble(job: Job) -> float:
    """The part of the step time in which the stages of a pipeline must be idle."""
    return (job.stages - 1) / (job.parts + job.stages - 1)


def medians(runs: Sequence[tuple[Job, dict[str, Any]]]) -> Figures:
    """The medians of each job's rounds and its first simulation, or its first error."""
    medians_ = results.median_figures(runs, (*FIGURES, *CROSSING))
    for job, figures in runs:
        if "simulated" in figures and "error" not in medians_[job]:
            medians_[job].setdefault("simulated", figures["simulated"])
    return medians_


def verdicts(figures: Figures) -> list[results.Verdict]:
    """The verdicts on the targets whose figures were measured."""
    good = {job: values for job, values in figures.items() if "error" not in values}
    return [*_measured_verdicts(good), *_simulated_verdicts(good)]


def _measured_verdicts(good: Figures) -> Iterator[results.Verdict]:
    one, many = (good.get(Job("conv", 1, 1, parts)) for parts in (1, 8))
    if one and many:
        yield results.Verdict("conv, 1 stage, 8 micro-batches: MB added over 1 micro-batch",
                              many["added_mb"] / one["added_mb"], ADDED_OVER)
    for case in CASES:
        none, two = good.get(Job(case, 0)), good.get(Job(case, 1, 2, 8))
        if none and two:
            yield results.Verdict(f"{case}, 2 stages, 8 micro-batches: step over no strategy",
                                  two["step_ms"] / none["step_ms"], STEP_OVER)


def _simulated_verdicts(good: Figures) -> Iterator[results.Verdict]:
    for job, values in good.items():
        if "simulated" not in values:
            continue
        expected = [min(job.parts, job.stages - stage) for stage in range(job.stages)]
        held = values["simulated"]["held"]
        yield results.Verdict(f"{job}: idle over (P-1)/(M+P-1), simulated",
                              values["simulated"]["idle"] / bubble(job), IDLE_OVER)
        yield results.Verdict(f"{job}: micro-batches held beyond the stages left, simulated",
                              max(one - other for one, other in zip(held, expected)), 0)
        yield results.Verdict(f"{job}: bytes between stages that are neither activations nor "
                              "their gradients", values["other"], 0)


def format_tables(figures: Figures) -> str:
    """The tables of measured figures and of the simulation, and a line for each failed job."""
    header = ("case", "towers", "stages", "micro-batches", "MB added by training", "MB before",
              "step ms", "CPU ms per step", "first step s",
              *(f"{kind}, KB" for kind in CROSSING))
    rows, simulated, failed = [], [], []
    for job, values in figures.items():
        start = [job.case, *map(str, (job.towers, job.stages, job.parts) if job.towers
                                else ("no strategy", "-", "-"))]
        if "error" in values:
            failed.append(f"{job} failed: {values['error']}")
            continue
        rows.append([*start, *(f"{values[name]:,.1f}" for name in FIGURES),
                     *(f"{values[kind] / 1e3:,.1f}" if kind in values else "-"
                       for kind in CROSSING)])
        if "simulated" in values:
            result = values["simulated"]
            simulated.append([job.case, str(job.stages), str(job.parts), f"{bubble(job):.3f}",
                              f"{result['idle']:.3f}", f"{result['idle_costed']:.3f}",
                              " ".join(map(str, result["held"]))])
    simulation = table.columns(("case", "stages", "micro-batches", "(P-1)/(M+P-1)",
                                "idle, equal passes", f"idle, {MACHINE}",
                                "micro-batches held by stage"), simulated)
    return "\n".join([table.columns(header, rows), "", simulation, *failed])


def main(chosen: Sequence[str], rounds: int, steps: int, small: bool, seconds: float,
         legacy: bool, out: pathlib.Path, title: str) -> None:
    """Measures all jobs, prints the tables and writes ``stages.json`` and ``stages.png``."""
    from benchmarks import stages_chart  # not in measuring processes: they need no Matplotlib

    print(f"{title}; {micro_batches.BATCH_FACTOR} times the batch sizes of the cases; "
          "towers x stages x micro-batches", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    todo = [job for _ in range(rounds) for job in jobs(chosen, small)]
    runs: list[tuple[Job, dict[str, Any]]] = []
    for position, job in enumerate(todo, start=1):
        measured = micro_batches.run_in_process("benchmarks.stages", {
            **dataclasses.asdict(job), "steps": steps, "small": small}, seconds, legacy)
        runs.append((job, measured))
        print(f"[{position}/{len(todo)}] {job}: "
              + (f"failed: {measured['error']}" if "error" in measured else
                 ", ".join(f"{name} {measured[name]:,.1f}" for name in FIGURES)), flush=True)
        (out / "stages.json").write_text(json.dumps({
            "title": title, "steps": steps, "small": small,
            "runs": [{**dataclasses.asdict(each), **values} for each, values in runs],
            "targets": [{**dataclasses.asdict(verdict), "holds": verdict.holds}
                        for verdict in verdicts(medians(runs))]}, indent=1))
    figures = medians(runs)
    print(f"\n{format_tables(figures)}\n\n{table.targets(verdicts(figures))}")
    stages_chart.draw(out / "stages.png", figures, title)
    print(f"\n{out / 'stages.json'}\n{out / 'stages.png'}")


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    options = {name: arguments.pop(name) for name in ("steps", "small")}
    print(json.dumps(measure(Job(**arguments), CASES[arguments["case"]], **options)))
