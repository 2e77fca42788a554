"""Steps on one real GPU: what do XLA and one program make of them, measured?

Goes in: a machine with one GPU.  Comes out: for each model and strategy the step, the first step
and the GPU's peak memory; in the output folder ``one_gpu.json``, written after each of them.

    python -m benchmarks one_gpu                         # --one_gpu_limit seconds at most
    python -m benchmarks one_gpu --limit=150 --seconds=3 # of each process, of each steady step
    python -m benchmarks one_gpu --one_gpu_constants     # what the simulation rests on; a minute
    python -m benchmarks one_gpu --quick                 # does it work? On CPU devices, too
    python -m benchmarks one_gpu --one_gpu_compare=out/benchmarks/one_gpu.json    # needs no GPU

The models are those that ``gpus`` simulates, with Keras 3 and its defaults (:mod:`one_gpu_cell`).
``none`` is no strategy, which Keras compiles on a GPU; ``_plain`` is with ``jit_compile=False``.
What starts with ``halves`` has the GPU as two logical ones, and of each of them half of the rows:
it shows that towers work, with what memory, and what partitioning costs. Copies between the halves
cross no link, and their kernels take turns on one GPU.

Each runs in a process of its own, one after another. While one builds its model the next one
imports TensorFlow; it asks for the GPU when the one before has ended.

``--one_gpu_compare`` takes such a file and puts beside it what ``gpus`` simulates of one GPU: the
factor by which all is off is that of the GPU's ResNet-50 with XLA, see :mod:`links`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import links, table


@dataclasses.dataclass(frozen=True)
class Who:
    """Who trains.

    Attributes:
      kind: ``"none"``, ``"tower"`` or ``"mirrored"``.
      merge: the merge device, or the name of MirroredStrategy's ``cross_device_ops``.
      halves: whether on two halves of the GPU.
      plain: whether with ``jit_compile=False``; else with Keras' default.
    """

    kind: str
    merge: str | None = None
    halves: bool = False
    plain: bool = False


WHO = {
    "none": Who("none"),
    "none_plain": Who("none", plain=True),
    "tower": Who("tower"),
    "tower_plain": Who("tower", plain=True),
    "mirrored": Who("mirrored"),
    "halves_balanced": Who("tower", "balanced", halves=True),
    "halves_mirrored": Who("mirrored", "ReductionToOneDevice", halves=True),
    "halves_cpu": Who("tower", "cpu", halves=True),
    "halves_balanced_plain": Who("tower", "balanced", halves=True, plain=True),
    "halves_hierarchical": Who("mirrored", "HierarchicalCopyAllReduce", halves=True),
}
CASES = ("resnet50", "transformer", "mlp", "embedding")
CONSTANTS = "constants"
_LEAST = 10.0  # seconds: in less no process measures anything
_COMPILED = "Compiled cluster using XLA"  # what TensorFlow logs, once a process


@dataclasses.dataclass(frozen=True)
class Cell:
    """One thing to measure: ``who``, a name of :data:`WHO`, trains ``case``."""

    case: str
    who: str = "none"
    policy: str = "float32"

    def __str__(self) -> str:
        return " ".join([self.case, self.who, *[self.policy] * (self.policy != "float32")])


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
      device: ``"auto"``, ``"cpu"`` or ``"gpu"``.
      seconds: how long to measure the steady step.
      quick: small models.
      rows: of the global batch; 0 for the case's.
      memory: MB of the GPU, of which each half gets 0.45; 0: ``nvidia-smi`` is asked.
    """

    device: str = "auto"
    seconds: float = 5
    quick: bool = False
    rows: int = 0
    memory: int = 0


def cells(cases: Sequence[str], who: Sequence[str]) -> list[Cell]:
    """What to measure, what tells most first."""
    whole = [name for name in who if not WHO[name].halves]
    large = [case for case in CASES[:2] if case in cases]
    found = [Cell(case, name) for names in (whole, who) for case in large for name in names]
    found += [Cell(case, name) for case in CASES[2:] if case in cases for name in who
              if name in [*whole, "halves_balanced", "halves_mirrored"]]
    found += [Cell("resnet50", name, "mixed_float16") for name in who
              if "resnet50" in cases and name in ("none", "tower")]
    return list(dict.fromkeys(found))


class _Process:
    """A process that measures a cell once it is told to; until then it imports."""

    def __init__(self, cell: Cell, options: Options, folder: str) -> None:
        self._output, self._log = (pathlib.Path(folder) / name for name in ("out.json", "log"))
        environment = {name: value for name, value in os.environ.items() if name != "TF_XLA_FLAGS"}
        environment.update(TF_USE_LEGACY_KERAS="0", TF_CPP_MIN_LOG_LEVEL="0")
        if not WHO[cell.who].halves:
            environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        job = json.dumps([dataclasses.asdict(cell), dataclasses.asdict(options)])
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.one_gpu_cell", job, str(self._output)],
                env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def begin(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its log says why
            self._process.stdin.close()

    def figures(self, seconds: float) -> dict[str, Any]:
        """What it measured, or the ``error`` that came instead, with the end of its ``log``."""
        found: dict[str, Any] = {}
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            found["error"] = f"no end after {seconds:.0f} s"
        self.end()
        log = self._log.read_text(errors="replace")
        if self._output.exists():
            found = json.loads(self._output.read_text())
        elif not found:
            found["error"] = f"exit status {self._process.returncode}"
        return {**found, "xla": _COMPILED in log, **({"log": log[-6000:]} if "error" in found
                                                     else {})}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measured(todo: Sequence[Cell], options: Options, limit: float, cell_limit: float
             ) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Measures ``todo``, and ends early.

    Args:
      todo: what.
      options: how.
      limit: seconds after which all has ended; what is then not measured does not come.
      cell_limit: seconds after which a process counts as hung.
    """
    end = time.perf_counter() + limit
    with contextlib.ExitStack() as stack:
        def started(cell: Cell) -> _Process:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            process = _Process(cell, options, folder)
            stack.callback(process.end)
            return process

        following = [started(cell) for cell in todo[:1]]
        for number, cell in enumerate(todo):
            left = end - time.perf_counter()
            if left < _LEAST:
                return
            process = following.pop()
            process.begin()
            following = [started(other) for other in todo[number + 1:number + 2]]
            yield cell, process.figures(min(left, cell_limit))


def line(figures: dict[str, Any]) -> str:
    """What a process measured, for the progress."""
    if "error" in figures:
        return f"failed: {figures['error']}"
    if "step_ms" not in figures:
        return "done"
    return (f"step {figures['step_ms']:,.2f} ms ({figures['steps']} steps), first "
            f"{figures['first_step_s']:.1f} s, GPU peak {figures['gpu_peak_mb']:,.0f} MB, "
            f"{'XLA' if figures['xla'] else 'no XLA'}")


def shown(found: dict[Cell, dict[str, Any]], left_out: Sequence[Cell]) -> str:
    """A line for each cell, and what failed or is left out."""
    rows, notes = [], []
    for cell, mine in found.items():
        if "error" in mine:
            notes.append(f"{cell} failed: {mine['error']}")
        elif "step_ms" in mine:
            alone = found.get(Cell(cell.case, "none", cell.policy), {}).get("step_ms")
            rows.append([str(cell), "yes" if mine["xla"] else "no", f"{mine['step_ms']:,.2f}",
                         f"{mine['step_ms'] / alone:.3f}" if alone else "-",
                         f"{mine['rows_per_second']:,.0f}", f"{mine['first_step_s']:.1f}",
                         f"{mine['gpu_peak_mb']:,.0f}", f"{mine['gpu_step_peak_mb']:,.0f}",
                         str(mine["steps"])])
    header = ("case, who", "XLA", "step ms", "/ none", "rows/s", "first step s", "GPU peak MB",
              "in a later step", "steps")
    if left_out:
        notes.append(f"left out, as the time was up: {', '.join(map(str, left_out))}")
    return "\n".join([table.columns(header, rows), *notes])


def constants(figures: dict[str, float | str], gpu: str) -> str:
    """What :mod:`one_gpu_constants` measured beside what :mod:`links` says of ``gpu``."""
    machine = next(each for each in links.MACHINES.values() if each.gpu == gpu)
    far = links.GPUS[gpu]
    said = {
        "to the GPU, GB/s": min(machine.route("CPU:0", "GPU:0").values()),
        "to the host, GB/s": min(machine.route("GPU:0", "CPU:0").values()),
        "4 bytes there and back, us":
            1e6 * (2 * links.LATENCY + links.LAUNCH["GPU"] + links.LAUNCH["CPU"]),
        "an operation on the GPU, us": 1e6 * links.LAUNCH["GPU"],
        "the host, to start one, us": 1e6 * links.EXECUTOR,
        "an operation on the CPU, us": 1e6 * links.LAUNCH["CPU"],
        "GPU memory, GB/s": far.memory_bandwidth,
        "matrix product, TFLOP/s": far.tflops,
    }
    return table.columns(("what", "measured", f"links.py, {gpu}"), [
        [what, value if isinstance(value, str) else f"{value:,.2f}",
         f"{said[what]:,.2f}" if what in said else "-"]
        for what, value in figures.items()])


def compared(found: dict[Cell, dict[str, Any]], gpu: str) -> str:
    """One GPU's measured steps beside the simulated ones; needs two logical CPU devices."""
    from benchmarks import gpus  # it needs Keras 3 and TensorFlow's Grappler

    simulation = gpus.Simulation(lambda text: print(text, flush=True))
    machine = next(name for name, each in links.MACHINES.items() if each.gpu == gpu)
    rows = []
    for case in CASES:
        mine = {who: found[cell]["step_ms"] for who in ("none", "none_plain", "tower")
                if "step_ms" in found.get(cell := Cell(case, who), {})}
        for result in simulation.case(case, gpus.CASES[case], [1], [machine]) if mine else ():
            who = "none" if result.xla else "none_plain"
            step, peak = mine.get(who), (result.gpu_peak + result.gpu_state) / 2**20
            real = found.get(Cell(case, who), {}).get("gpu_step_peak_mb", 0)
            rows.append([case, who, f"{step:,.2f}" if step else "-", f"{result.step_ms:,.2f}",
                         f"{step / result.step_ms:.2f}" if step else "-",
                         f"{real:,.0f}" if real else "-", "-" if result.xla else f"{peak:,.0f}"])
    header = ("case", "who", "measured ms", f"simulated {gpu}", "over it", "GPU peak MB",
              "simulated")
    factors = ", ".join(f"{name} {value:.2f}" for name, value in simulation.factors.items())
    return f"{table.columns(header, rows)}\ntimes TensorFlow's costs: {factors}"


def read(path: pathlib.Path) -> dict[Cell, dict[str, Any]]:
    """What :func:`main` wrote."""
    return {Cell(**each["cell"]): each["figures"]
            for each in json.loads(path.read_text())["cells"]}


def simulated_as(found: dict[Cell, dict[str, Any]]) -> str:
    """The name in :data:`links.GPUS` of the GPU that was measured; ``"H100"`` for another one."""
    names = " ".join(str(mine.get("gpu")) for mine in found.values())
    return next((name for name in links.GPUS if name in names), "H100")


def main(todo: Sequence[Cell], options: Options, limit: float, cell_limit: float,
         out: pathlib.Path, title: str) -> None:
    """Measures, prints and writes ``one_gpu.json``."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / ("constants.json" if todo == [Cell(CONSTANTS)] else "one_gpu.json")
    found: dict[Cell, dict[str, Any]] = {}
    start = time.perf_counter()
    for cell, figures in measured(todo, options, limit, cell_limit):
        found[cell] = figures
        print(f"[{time.perf_counter() - start:.0f} s, {len(found)}/{len(todo)}] {cell}: "
              f"{line(figures)}", flush=True)
        path.write_text(json.dumps({
            "title": title, "options": dataclasses.asdict(options),
            "cells": [{"cell": dataclasses.asdict(cell), "figures": mine}
                      for cell, mine in found.items()]}, indent=1))
    names = {mine["gpu"] for mine in found.values() if mine.get("gpu")}
    print(f"\n{title}; {', '.join(sorted(names)) or 'no GPU'}")
    if "constants" in found.get(Cell(CONSTANTS), {}):
        print(constants(found[Cell(CONSTANTS)]["constants"], simulated_as(found)))
    else:
        print(shown(found, [cell for cell in todo if cell not in found]))
    print(f"\n{path}")
