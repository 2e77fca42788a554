"""Measures what a tower of stages costs and saves, and counts what crosses from stage to stage.

Goes in: the flags of ``python -m benchmarks``.  Comes out: progress, two tables, the targets with
pass or MISS, and in the output folder ``stages.json`` and ``stages.png``.

    python -m benchmarks stages --stages_cases=mlp16 --rounds=1

Each job trains in a process of its own, on logical CPU devices, as in :mod:`micro_batches`: memory
is that of all stages together.  Then its step is traced once more, as it would be on GPUs
(:mod:`on_gpus`).  On that graph bytes are counted, and where there are stages it is run on paper
(:mod:`schedule`), in the order that its data and its control dependencies leave it:

- with legs that cost the same, 1 forwards and 2 backwards, dealt to the leg's products and
  convolutions, so that what is idle is so for the order's sake;
- with TensorFlow's costs on ``MACHINE``, where stages are as unequal as they are, operations take
  time to launch and tensors to cross, and weights are updated.
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
_SCALAR = 64  # bytes, at the most
_PRODUCTS = {"MatMul", "BatchMatMulV2", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter",
             "_FusedConv2D", "_FusedMatMul"}
_REPLICA = re.compile(r"\btower_(\d+)_")
_FORWARD, _BACKWARD = 1.0, 2.0  # seconds of a leg

Leg = tuple[int, int, bool]  # replica, stage, whether backwards
Figures = dict["Job", dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures; 0 towers: no strategy."""

    case: str
    towers: int = 1
    stages: int = 1
    parts: int = 1

    def __str__(self) -> str:
        if not self.towers:
            return f"{self.case}, no strategy"
        return f"{self.case}, {self.towers} x {self.stages} x {self.parts}"

    @property
    def rows(self) -> list[list[str]]:
        """The towers' stages: logical CPU devices; CPU:0 is the host."""
        names = on_gpus.towers(self.towers * self.stages)
        return [names[number:number + self.stages] for number in range(0, len(names), self.stages)]


def jobs(chosen: Sequence[str], quick: bool) -> list[Job]:
    """All there is to measure."""
    shapes = [(0, 1, 1)]
    shapes += [(1, stages, parts) for stages in (STAGES[:2] if quick else STAGES)
               for parts in ((1, 8) if quick else PARTS)]
    shapes += [(towers, 1, 1) for towers in (TOWERS[:1] if quick else TOWERS)]
    return [Job(case, *shape) for case in chosen for shape in shapes]


def measure(job: Job, case: cases.Case, steps: int, small: bool) -> dict[str, Any]:
    """:data:`FIGURES`, :data:`CROSSING` in bytes, and with stages what :func:`simulated` gives."""
    towerstrategy.split_cpu(1 + job.towers * job.stages)
    strategy = None
    if job.towers:
        devices = job.rows if job.stages > 1 else [name for name, in job.rows]
        strategy = towerstrategy.TowerStrategy(devices, micro_batches=job.parts)
    case = micro_batches.larger(case)
    model, found = micro_batches.trained(case, strategy, steps, small)
    if strategy is None:
        return found
    step = traced(model, case, strategy)
    found.update(crossing(step, job, case.batch))
    if job.stages > 1:
        found["simulated"] = simulated(step, job)
    return found


def traced(model: Any, case: cases.Case, strategy: tf.distribute.Strategy) -> Any:
    """A training step of a model that has been trained, on a batch of known shape."""
    replicas = strategy.num_replicas_in_sync
    specs = [tf.TensorSpec([case.batch // replicas, *spec.shape[1:]], spec.dtype)
             for spec in cases.dataset(case).element_spec]
    strategy.extended.keep_graphs = True
    with on_gpus.tracing(), strategy.extended.step():
        step = tf.function(lambda x, y: strategy.run(model.train_step, args=((x, y),)),
                           autograph=False)
        return step.get_concrete_function(*(
            sub_batches.SubBatchesSpec(*[spec] * replicas) for spec in specs))


def crossing(step: Any, job: Job, batch: int) -> dict[str, int]:
    """Bytes that cross devices in a step.

    Args:
      step: a ConcreteFunction, as :func:`traced` gives.
      job: whose.
      batch: rows of the whole batch.

    Returns:
      Those of :data:`CROSSING`.  Activations have a row for each of a micro-batch and go to a later
      stage of the same tower, their gradients have, too, and go back.  All else is ``other``, but
      for ``scalars`` and the ``batch`` itself.
    """
    places = {name: (tower, stage) for tower, row in enumerate(job.rows)
              for stage, name in enumerate(row)}
    found = dict.fromkeys(CROSSING, 0)
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
        found[kind] += each.size
    return found


def simulated(step: Any, job: Job) -> dict[str, Any]:
    """What a step comes to on a tower of GPUs.

    Returns:
      ``idle`` (of all GPUs together, the part of the time in which they compute nothing, with legs
      of equal cost), ``held`` (by stage: how many micro-batches have begun their way forwards and
      not ended that back, at the most) and ``idle_costed`` (``idle`` by TensorFlow's costs on
      :data:`MACHINE`).
    """
    from benchmarks import flat, links, schedule  # they need TensorFlow's Grappler

    operations = flat.flatten(step, ["GPU:0"])
    legs = _legs(operations, job)
    machine = links.MACHINES[MACHINE]
    seconds = {operations[number].name: (_BACKWARD if leg[2] else _FORWARD) / len(numbers)
               for leg, numbers in legs.items() for number in numbers}
    equal = schedule.run(operations, seconds, machine)
    costed = schedule.run(operations, flat.Costs(machine).seconds(operations), machine)
    return {"idle": _idle(equal, job.stages), "held": _held(legs, equal.spans, job.stages),
            "idle_costed": _idle(costed, job.stages)}


def _legs(operations: Sequence[Any], job: Job) -> dict[Leg, list[int]]:
    """The numbers of the products of each leg: one way of a micro-batch through a stage."""
    legs: dict[Leg, list[int]] = collections.defaultdict(list)
    for number, operation in enumerate(operations):
        replica = _REPLICA.search(operation.traced_name)
        if operation.type in _PRODUCTS and replica:
            legs[int(replica[1]), int(operation.device.partition(":")[2]),
                 scopes.GRADIENTS in operation.traced_name].append(number)
    wanted = 2 * job.parts * job.stages
    if len(legs) != wanted:
        raise ValueError(f"{job}: {wanted} legs were expected to have products or convolutions, "
                         f"but {len(legs)} have: {sorted(legs)}")
    return legs


def _idle(line: Any, stages: int) -> float:
    busy = sum(line.busy.get(f"GPU:{stage}", 0.0) for stage in range(stages))
    return 1 - busy / (stages * line.seconds)


def _held(legs: dict[Leg, list[int]], spans: Sequence[tuple[float, float]],
          stages: int) -> list[int]:
    """For each stage the most micro-batches that are on their way at a time."""
    most = []
    for stage in range(stages):
        begins = sorted(min(spans[number][0] for number in numbers)
                        for leg, numbers in legs.items() if leg[1:] == (stage, False))
        ends = sorted(max(spans[number][1] for number in numbers)
                      for leg, numbers in legs.items() if leg[1:] == (stage, True))
        most.append(max(sum(other <= begin for other in begins)
                        - sum(end <= begin for end in ends) for begin in begins))
    return most


def bubble(job: Job) -> float:
    """The part of the time in which a pipeline's stages have to be idle."""
    return (job.stages - 1) / (job.parts + job.stages - 1)


def medians(runs: Sequence[tuple[Job, dict[str, Any]]]) -> Figures:
    """The medians of each job's rounds, or its first error; what is simulated is so once."""
    found = results.middle(runs, (*FIGURES, *CROSSING))
    for job, figures in runs:
        if "simulated" in figures and "error" not in found[job]:
            found[job].setdefault("simulated", figures["simulated"])
    return found


def verdicts(figures: Figures) -> list[results.Verdict]:
    """The targets that these figures are enough for."""
    good = {job: mine for job, mine in figures.items() if "error" not in mine}
    return [*_measured(good), *_counted(good)]


def _measured(good: Figures) -> Iterator[results.Verdict]:
    one, many = (good.get(Job("conv", 1, 1, parts)) for parts in (1, 8))
    if one and many:
        yield results.Verdict("conv, 1 stage, 8 micro-batches: MB added over 1 micro-batch",
                              many["added_mb"] / one["added_mb"], ADDED_OVER)
    for case in CASES:
        alone, two = good.get(Job(case, 0)), good.get(Job(case, 1, 2, 8))
        if alone and two:
            yield results.Verdict(f"{case}, 2 stages, 8 micro-batches: step over no strategy",
                                  two["step_ms"] / alone["step_ms"], STEP_OVER)


def _counted(good: Figures) -> Iterator[results.Verdict]:
    for job, mine in good.items():
        if "simulated" not in mine:
            continue
        most = [min(job.parts, job.stages - stage) for stage in range(job.stages)]
        held = mine["simulated"]["held"]
        yield results.Verdict(f"{job}: idle over (P-1)/(M+P-1), simulated",
                              mine["simulated"]["idle"] / bubble(job), IDLE_OVER)
        yield results.Verdict(f"{job}: micro-batches held beyond the stages left, simulated",
                              max(one - other for one, other in zip(held, most)), 0)
        yield results.Verdict(f"{job}: bytes between stages that are neither activations nor "
                              "their gradients", mine["other"], 0)


def shown(figures: Figures) -> str:
    """The tables: what was measured and counted, and what was simulated."""
    header = ("case", "towers", "stages", "micro-batches", "MB added by training", "MB before",
              "step ms", "CPU ms a step", "first step s",
              *(f"{kind}, KB" for kind in CROSSING))
    rows, paper, failed = [], [], []
    for job, mine in figures.items():
        start = [job.case, *map(str, (job.towers, job.stages, job.parts) if job.towers
                                else ("no strategy", "-", "-"))]
        if "error" in mine:
            failed.append(f"{job} failed: {mine['error']}")
            continue
        rows.append([*start, *(f"{mine[name]:,.1f}" for name in FIGURES),
                     *(f"{mine[kind] / 1e3:,.1f}" if kind in mine else "-" for kind in CROSSING)])
        if "simulated" in mine:
            found = mine["simulated"]
            paper.append([job.case, str(job.stages), str(job.parts), f"{bubble(job):.3f}",
                          f"{found['idle']:.3f}", f"{found['idle_costed']:.3f}",
                          " ".join(map(str, found["held"]))])
    simulation = table.columns(("case", "stages", "micro-batches", "(P-1)/(M+P-1)",
                                "idle, equal legs", f"idle, {MACHINE}",
                                "micro-batches held by stage"), paper)
    return "\n".join([table.columns(header, rows), "", simulation, *failed])


def main(chosen: Sequence[str], rounds: int, steps: int, small: bool, seconds: float,
         legacy: bool, out: pathlib.Path, title: str) -> None:
    """Measures, prints, writes."""
    from benchmarks import stages_chart  # Matplotlib has no place in the processes that measure

    print(f"{title}; {micro_batches.TIMES} times the cases' batches; towers x stages x "
          "micro-batches", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    todo = [job for _ in range(rounds) for job in jobs(chosen, small)]
    runs: list[tuple[Job, dict[str, Any]]] = []
    for position, job in enumerate(todo, start=1):
        found = micro_batches.in_a_process("benchmarks.stages", {
            **dataclasses.asdict(job), "steps": steps, "small": small}, seconds, legacy)
        runs.append((job, found))
        print(f"[{position}/{len(todo)}] {job}: "
              + (f"failed: {found['error']}" if "error" in found else
                 ", ".join(f"{name} {found[name]:,.1f}" for name in FIGURES)), flush=True)
        found_so_far = medians(runs)
        (out / "stages.json").write_text(json.dumps({
            "title": title, "steps": steps, "small": small,
            "runs": [{**dataclasses.asdict(each), **mine} for each, mine in runs],
            "targets": [{**dataclasses.asdict(verdict), "holds": verdict.holds}
                        for verdict in verdicts(found_so_far)]}, indent=1))
    figures = medians(runs)
    print(f"\n{shown(figures)}\n\n{table.targets(verdicts(figures))}")
    stages_chart.draw(out / "stages.png", figures, title)
    print(f"\n{out / 'stages.json'}\n{out / 'stages.png'}")


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    how = {name: asked.pop(name) for name in ("steps", "small")}
    print(json.dumps(measure(Job(**asked), CASES[asked["case"]], **how)))
