"""Measures TowerStrategy and ``MultiWorkerMirroredStrategy`` on several workers.

Goes in: the flags of ``python -m benchmarks``.  Comes out: progress, tables, the targets with pass
or MISS, and ``machines.json`` in the output folder.

    python -m benchmarks machines --rounds=1
    python -m benchmarks machines --rounds=1 --machines_shapes=2x1,8x1,2x2,4x2

All workers are processes on this machine.  Both strategies train tf_keras models, on batches that
divide evenly.  The bytes between processes are the bytes that the loopback device receives, which
Linux counts: in a network namespace of the workers, or on the whole machine if we cannot make one.
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
SHAPES = ((2, 2), (4, 1))  # workers, towers of each worker
FIGURES = ("step_ms", "cpu_ms", "first_step_s", "first_cpu_s", "peak_mb", "worker_mb",
           "between_mb")
# Limits of ratios to MultiWorkerMirroredStrategy: case, shape, figure, limit.
TARGETS = (("mlp", (2, 2), "step_ms", 0.6), ("mlp", (2, 2), "between_mb", 0.55))

Figures = dict["Job", dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Job:
    """A case and strategy, and the cluster that measures them."""

    case: str
    strategy: str
    workers: int
    towers: int


def parse_shapes(texts: Sequence[str]) -> list[tuple[int, int]]:
    """The shapes of clusters in a flag: ``4x2`` is four workers with two towers each.

    Raises:
      ValueError: a text is not a shape.
    """
    shapes = []
    for shape in texts:
        numbers = shape.split("x")
        if len(numbers) != 2 or not all(part.isdecimal() and int(part) for part in numbers):
            raise ValueError("a cluster's shape is its workers x the towers of each, such as 4x2, "
                             f"but got {shape!r}.")
        shapes.append((int(numbers[0]), int(numbers[1])))
    return shapes


def jobs(cases: list[str], shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Job]:
    """The jobs of a round."""
    return [Job(case, strategy, *shape)
            for case in cases for shape in shapes for strategy in STRATEGIES]


def can_isolate() -> bool:
    """Whether we can make a network namespace for the workers."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return not subprocess.run(["unshare", "--map-root-user", "--net", "ip", "link", "set", "lo",
                               "up"], capture_output=True, check=False).returncode


def measure(job: Job, steps: int, small: bool, seconds: float, isolated: bool) -> dict[str, Any]:
    """Runs a cluster; returns its figures, or the ``error`` of the first worker that failed.

    Args:
      job: the job to measure.
      steps: the number of steps after the warm-up.
      small: whether to train a small model.
      seconds: the time limit, after which the workers are killed.
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
        return _cluster_figures(folder, job.workers,
                                f"no end after {seconds:.0f} s" if not ended else "")


def _run(command: list[str], seconds: float) -> bool:
    """Runs a command; returns False if it, with all its processes, was killed at the time limit."""
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


def _cluster_figures(folder: pathlib.Path, workers: int, error: str) -> dict[str, Any]:
    """The figures of the cluster, or the ``error`` of a worker.

    Step time: the median over workers.  ``first_step_s``, ``worker_mb``: the maximum.  Bytes
    between processes: the first worker's count.  Others: the sum.
    """
    figures = []
    for index in range(workers):
        file = folder / f"{index}.json"
        if not file.exists():
            last = ((folder / f"{index}.log").read_text().strip() or "no message").splitlines()[-1]
            return {"error": error or f"worker {index}: {last[:300]}"}
        figures.append(json.loads(file.read_text()))
    failed = [f"worker {index}: {each['error']}" for index, each in enumerate(figures)
              if "error" in each]
    if failed:
        return {"error": failed[0]}
    return {"step_ms": statistics.median(each["step_ms"] for each in figures),
            "cpu_ms": sum(each["cpu_ms"] for each in figures),
            "first_step_s": max(each["first_step_s"] for each in figures),
            "first_cpu_s": sum(each["first_cpu_s"] for each in figures),
            "peak_mb": sum(each["peak_mb"] for each in figures),
            "worker_mb": max(each["peak_mb"] for each in figures),
            "between_mb": figures[0]["between_mb"]}


def medians(runs: list[tuple[Job, dict[str, Any]]]) -> Figures:
    """The medians of each job's rounds, or its first error."""
    return results.median_figures(runs, FIGURES)


def verdicts(figures: Figures) -> list[results.Verdict]:
    """The verdicts on the targets whose figures were measured."""
    verdicts_ = []
    for case, shape, name, limit in TARGETS:
        tower, peer = (figures.get(Job(case, strategy, *shape), {}) for strategy in STRATEGIES)
        if name in tower and peer.get(name):
            verdicts_.append(results.Verdict(
                f"{case}, {shape[0]} workers x {shape[1]} towers: {name} over MultiWorkerMirrored",
                tower[name] / peer[name], limit))
    return verdicts_


def format_table(figures: Figures) -> str:
    """The table of all jobs, and a line for each that failed."""
    header = ("case", "workers", "towers", "strategy", "step ms", "CPU ms per step",
              "first step s", "first step CPU s", "peak MB", "peak MB per worker",
              "MB between processes per step")
    rows, failed = [], []
    for job, values in figures.items():
        start = [job.case, str(job.workers), str(job.towers), job.strategy]
        if "error" in values:
            failed.append(f"{' '.join(start)} failed: {values['error']}")
        else:
            rows.append([*start, *(f"{values[name]:,.2f}" for name in FIGURES)])
    return "\n".join([table.columns(header, rows), *failed])


def format_growth(figures: Figures) -> str:
    """The table of figures per worker, over those in the smallest cluster of such workers."""
    lines = []
    for job, values in figures.items():
        similar = [other for other in figures if "error" not in figures[other]
                   and (other.case, other.strategy, other.towers)
                   == (job.case, job.strategy, job.towers)]
        if "error" in values or len(similar) < 2 or job == (
                smallest := min(similar, key=lambda other: other.workers)):
            continue
        base, few = figures[smallest], smallest.workers
        lines.append([job.case, job.strategy, f"{few} -> {job.workers} x {job.towers}", *(
            f"{values[name] / job.workers / (base[name] / few):.2f}" if base[name] else "-"
            for name in ("first_cpu_s", "cpu_ms", "peak_mb", "between_mb"))])
    return table.columns(("case", "strategy", "workers", "first step CPU", "step CPU", "memory",
                          "bytes"), lines) if lines else ""


def main(cases: list[str], rounds: int, steps: int, small: bool, seconds: float,
         out: pathlib.Path, title: str, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
    """Measures all jobs, prints the tables and writes ``machines.json``."""
    isolated = can_isolate()
    counted = ("in a network namespace of the workers" if isolated
               else "on the whole machine, with those of other programs")
    print(f"{title}\nbytes between processes: loopback, {counted}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    todo = [job for _ in range(rounds) for job in jobs(cases, shapes)]
    runs: list[tuple[Job, dict[str, Any]]] = []
    for position, job in enumerate(todo, start=1):
        measured = measure(job, steps, small, seconds, isolated)
        runs.append((job, measured))
        print(f"[{position}/{len(todo)}] {job.case} {job.workers} x {job.towers} {job.strategy}: "
              + (f"failed: {measured['error']}" if "error" in measured else
                 ", ".join(f"{name} {measured[name]:,.2f}" for name in FIGURES)), flush=True)
        (out / "machines.json").write_text(json.dumps({
            "title": title, "isolated": isolated, "steps": steps, "small": small,
            "runs": [{**dataclasses.asdict(each), **values} for each, values in runs]}, indent=1))
    figures = medians(runs)
    growth = format_growth(figures)
    print(f"\n{format_table(figures)}\n" + (
        f"\nper worker, over the cluster with the fewest workers:\n{growth}\n" if growth else "")
          + f"\n{table.targets(verdicts(figures))}\n\n{out / 'machines.json'}")
