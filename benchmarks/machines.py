"""Measures TowerStrategy over several workers beside ``MultiWorkerMirroredStrategy``.

Goes in: the flags of ``python -m benchmarks``.  Comes out: progress, a table, the targets with pass
or MISS, and ``machines.json`` in the output folder.

    python -m benchmarks machines --rounds=1
    python -m benchmarks machines --rounds=1 --machines_shapes=2x1,8x1,2x2,4x2

All workers are processes on this machine; both strategies train tf_keras models, on batches that
divide evenly.  Bytes between processes are those that the loopback device has received, counted by
Linux in a network namespace of the workers' own; where none can be made, on the whole machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks import results, table

STRATEGIES = ("tower", "multi_worker")
SHAPES = ((2, 2), (4, 1))  # workers, towers of each
FIGURES = ("step_ms", "cpu_ms", "first_step_s", "first_cpu_s", "peak_mb", "worker_mb",
           "between_mb")
# Ratios to MultiWorkerMirroredStrategy: case, shape, figure, limit.
TARGETS = (("mlp", (2, 2), "step_ms", 0.6), ("mlp", (2, 2), "between_mb", 0.55))

Figures = dict["Job", dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What one cluster measures."""

    case: str
    strategy: str
    workers: int
    towers: int


def shapes(written: Sequence[str]) -> list[tuple[int, int]]:
    """Shapes as they are given on the command line: ``4x2`` is four workers of two towers.

    Raises:
      ValueError: one is not written so.
    """
    found = []
    for shape in written:
        numbers = shape.split("x")
        if len(numbers) != 2 or not all(part.isdecimal() and int(part) for part in numbers):
            raise ValueError("a cluster's shape is its workers x the towers of each, such as 4x2, "
                             f"but got {shape!r}.")
        found.append((int(numbers[0]), int(numbers[1])))
    return found


def jobs(cases: list[str], of_shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Job]:
    """What to measure in a round."""
    return [Job(case, strategy, *shape)
            for case in cases for shape in of_shapes for strategy in STRATEGIES]


def can_isolate() -> bool:
    """Whether a network namespace can be made for the workers."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return not subprocess.run(["unshare", "--map-root-user", "--net", "ip", "link", "set", "lo",
                               "up"], capture_output=True, check=False).returncode


def measure(job: Job, steps: int, small: bool, seconds: float, isolated: bool) -> dict[str, Any]:
    """Runs a cluster; its figures, or the ``error`` of the first worker that failed.

    Args:
      job: what to measure.
      steps: how many, after the first ones.
      small: whether to train small models.
      seconds: after which the workers are killed.
      isolated: whether to give the workers a network namespace.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        worker = [sys.executable, "-m", "benchmarks.machines_worker", f"--case={job.case}",
                  f"--strategy={job.strategy}", f"--towers={job.towers}", f"--steps={steps}",
                  f"--folder={folder}", f"--addresses={','.join(_addresses(job.workers))}",
                  *(["--small"] if small else [])]
        # "$@" is the worker's command.
        script = "".join(f'"$@" --index={index} > {folder}/{index}.log 2>&1 &\n'
                         for index in range(job.workers)) + "wait"
        isolation = ["unshare", "--map-root-user", "--net"] if isolated else []
        script = "ip link set lo up\n" + script if isolated else script
        ended = _run([*isolation, "sh", "-c", script, "sh", *worker], seconds)
        return _collected(folder, job.workers, f"no end after {seconds:.0f} s" if not ended else "")


def _run(command: list[str], seconds: float) -> bool:
    """Runs a command and all that it starts; False where they had to be killed."""
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def _collected(folder: pathlib.Path, workers: int, error: str) -> dict[str, Any]:
    """The workers' figures as one: the median step, the slowest first one, else sums."""
    found = []
    for index in range(workers):
        written = folder / f"{index}.json"
        if not written.exists():
            last = ((folder / f"{index}.log").read_text().strip() or "no message").splitlines()[-1]
            return {"error": error or f"worker {index}: {last[:300]}"}
        found.append(json.loads(written.read_text()))
    failed = [f"worker {index}: {each['error']}" for index, each in enumerate(found)
              if "error" in each]
    if failed:
        return {"error": failed[0]}
    return {"step_ms": statistics.median(each["step_ms"] for each in found),
            "cpu_ms": sum(each["cpu_ms"] for each in found),
            "first_step_s": max(each["first_step_s"] for each in found),
            "first_cpu_s": sum(each["first_cpu_s"] for each in found),
            "peak_mb": sum(each["peak_mb"] for each in found),
            "worker_mb": max(each["peak_mb"] for each in found),
            "between_mb": found[0]["between_mb"]}


def medians(runs: list[tuple[Job, dict[str, Any]]]) -> Figures:
    """The medians of each job's rounds, or its first error."""
    grouped: dict[Job, list[dict[str, Any]]] = {}
    for job, figures in runs:
        grouped.setdefault(job, []).append(figures)
    return {job: next((each for each in mine if "error" in each), None) or {
        name: statistics.median(each[name] for each in mine) for name in FIGURES}
        for job, mine in grouped.items()}


def verdicts(figures: Figures) -> list[results.Verdict]:
    """The targets that these figures are enough for."""
    found = []
    for case, shape, name, limit in TARGETS:
        own, peer = (figures.get(Job(case, strategy, *shape), {}) for strategy in STRATEGIES)
        if name in own and peer.get(name):
            found.append(results.Verdict(
                f"{case}, {shape[0]} workers x {shape[1]} towers: {name} over MultiWorkerMirrored",
                own[name] / peer[name], limit))
    return found


def shown(figures: Figures) -> str:
    """The table."""
    header = ("case", "workers", "towers", "strategy", "step ms", "CPU ms a step",
              "first step s", "its CPU s", "peak MB", "a worker's", "MB between processes a step")
    rows, failed = [], []
    for job, mine in figures.items():
        start = [job.case, str(job.workers), str(job.towers), job.strategy]
        if "error" in mine:
            failed.append(f"{' '.join(start)} failed: {mine['error']}")
        else:
            rows.append([*start, *(f"{mine[name]:,.2f}" for name in FIGURES)])
    return "\n".join([table.columns(header, rows), *failed])


def growth(figures: Figures) -> str:
    """What a worker takes beside what it takes in the smallest cluster of its towers."""
    lines = []
    for job, mine in figures.items():
        alike = [other for other in figures if "error" not in figures[other]
                 and (other.case, other.strategy, other.towers)
                 == (job.case, job.strategy, job.towers)]
        if "error" in mine or len(alike) < 2 or job == (
                few := min(alike, key=lambda other: other.workers)):
            continue
        base = figures[few]
        lines.append([job.case, job.strategy, f"{few.workers} -> {job.workers} x {job.towers}", *(
            f"{mine[name] / job.workers / (base[name] / few.workers):.2f}" if base[name] else "-"
            for name in ("first_cpu_s", "cpu_ms", "peak_mb", "between_mb"))])
    return table.columns(("case", "strategy", "workers", "first step's CPU", "step's CPU", "memory",
                          "bytes"), lines) if lines else ""


def main(cases: list[str], rounds: int, steps: int, small: bool, seconds: float,
         out: pathlib.Path, title: str, of_shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
    """Measures, prints, writes."""
    isolated = can_isolate()
    counted = ("in a network namespace of the workers' own" if isolated
               else "of the whole machine, other programs' included")
    print(f"{title}\nbytes between processes: loopback, {counted}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    todo = [job for _ in range(rounds) for job in jobs(cases, of_shapes)]
    runs: list[tuple[Job, dict[str, Any]]] = []
    for position, job in enumerate(todo, start=1):
        found = measure(job, steps, small, seconds, isolated)
        runs.append((job, found))
        print(f"[{position}/{len(todo)}] {job.case} {job.workers} x {job.towers} {job.strategy}: "
              + (f"failed: {found['error']}" if "error" in found else
                 ", ".join(f"{name} {found[name]:,.2f}" for name in FIGURES)), flush=True)
        (out / "machines.json").write_text(json.dumps({
            "title": title, "isolated": isolated, "steps": steps, "small": small,
            "runs": [{**dataclasses.asdict(each), **mine} for each, mine in runs]}, indent=1))
    figures = medians(runs)
    grown = growth(figures)
    print(f"\n{shown(figures)}\n" + (f"\na worker's part beside the fewest workers:\n{grown}\n"
                                      if grown else "")
          + f"\n{table.targets(verdicts(figures))}\n\n{out / 'machines.json'}")
