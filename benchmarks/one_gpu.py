"""Measures steps on one real GPU: the effect of XLA and of the partitioned program.

Goes in: a machine with one GPU.  Comes out: for each model and setup the step time, the time of the
first step and the GPU's peak memory; ``one_gpu.json`` in the output folder, written after each.

    python -m benchmarks one_gpu                          # at most --one_gpu_limit seconds
    python -m benchmarks one_gpu --limit=150 --seconds=3  # limits of a process, of measuring steps
    python -m benchmarks one_gpu --one_gpu_constants      # the simulation's constants; a minute
    python -m benchmarks one_gpu --quick                  # tries the benchmark, also on CPU devices
    python -m benchmarks one_gpu --one_gpu_compare=out/benchmarks/one_gpu.json    # needs no GPU

The models are those of ``gpus``, with Keras 3 and its defaults (:mod:`one_gpu_cell`).  The setup
``none`` is no strategy, which Keras compiles with XLA on a GPU; ``_plain`` means
``jit_compile=False``.  ``halves`` splits the GPU into two logical devices, each with half of the
rows: it shows that towers work, their memory, and the cost of partitioning.  Copies between the
halves cross no link, and their kernels take turns on one GPU.

Each measurement runs in a process of its own, one after another.  While one builds its model, the
next one imports TensorFlow; it uses the GPU only when the one before has ended.

``--one_gpu_compare`` takes such a file and compares it with what ``gpus`` simulates for one GPU.
The simulation's factor is that of ResNet-50 with XLA on this GPU, see :mod:`links`.
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
class Setup:
    """A strategy and its options.

    Attributes:
      kind: ``"none"``, ``"tower"`` or ``"mirrored"``.
      merge: the merge device, or the name of MirroredStrategy's ``cross_device_ops``.
      halves: whether to train on two halves of the GPU.
      plain: whether to compile with ``jit_compile=False``; else with Keras' default.
    """

    kind: str
    merge: str | None = None
    halves: bool = False
    plain: bool = False


SETUPS = {
    "none": Setup("none"),
    "none_plain": Setup("none", plain=True),
    "tower": Setup("tower"),
    "tower_plain": Setup("tower", plain=True),
    "mirrored": Setup("mirrored"),
    "halves_balanced": Setup("tower", "balanced", halves=True),
    "halves_mirrored": Setup("mirrored", "ReductionToOneDevice", halves=True),
    "halves_cpu": Setup("tower", "cpu", halves=True),
    "halves_balanced_plain": Setup("tower", "balanced", halves=True, plain=True),
    "halves_hierarchical": Setup("mirrored", "HierarchicalCopyAllReduce", halves=True),
}
CASES = ("resnet50", "transformer", "mlp", "embedding")
CONSTANTS = "constants"
_MIN_SECONDS = 10.0  # no process measures anything in less time
_COMPILED = "Compiled cluster using XLA"  # TensorFlow logs this once per process


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measurement: a model, a setup (``who``, a name of :data:`SETUPS`) and a dtype policy."""

    case: str
    who: str = "none"
    policy: str = "float32"

    def __str__(self) -> str:
        return " ".join([self.case, self.who, *[self.policy] * (self.policy != "float32")])


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of all measurements.

    Attributes:
      device: ``"auto"``, ``"cpu"`` or ``"gpu"``.
      seconds: how long to measure the step time.
      quick: whether to use small models.
      rows: the global batch size; 0 for the default of the case.
      memory: MB of the GPU, of which each half gets 0.45; 0 to ask ``nvidia-smi``.
    """

    device: str = "auto"
    seconds: float = 5
    quick: bool = False
    rows: int = 0
    memory: int = 0


def cells(cases: Sequence[str], who: Sequence[str]) -> list[Cell]:
    """The measurements of ``cases`` by the setups ``who``, the most important ones first."""
    whole = [name for name in who if not SETUPS[name].halves]
    large = [case for case in CASES[:2] if case in cases]
    todo = [Cell(case, name) for names in (whole, who) for case in large for name in names]
    todo += [Cell(case, name) for case in CASES[2:] if case in cases for name in who
             if name in [*whole, "halves_balanced", "halves_mirrored"]]
    todo += [Cell("resnet50", name, "mixed_float16") for name in who
             if "resnet50" in cases and name in ("none", "tower")]
    return list(dict.fromkeys(todo))


class _Process:
    """A process that imports TensorFlow, and measures a cell after :meth:`begin`."""

    def __init__(self, cell: Cell, options: Options, folder: str) -> None:
        self._output, self._log = (pathlib.Path(folder) / name for name in ("out.json", "log"))
        environment = {name: value for name, value in os.environ.items() if name != "TF_XLA_FLAGS"}
        environment.update(TF_USE_LEGACY_KERAS="0", TF_CPP_MIN_LOG_LEVEL="0")
        if not SETUPS[cell.who].halves:
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
        """The figures of the cell, or an ``error`` with the end of the ``log``."""
        figures: dict[str, Any] = {}
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            figures["error"] = f"no end after {seconds:.0f} s"
        self.end()
        log = self._log.read_text(errors="replace")
        if self._output.exists():
            figures = json.loads(self._output.read_text())
        elif not figures:
            figures["error"] = f"exit status {self._process.returncode}"
        return {**figures, "xla": _COMPILED in log, **({"log": log[-6000:]} if "error" in figures
                                                       else {})}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure_all(todo: Sequence[Cell], options: Options, limit: float, cell_limit: float
                ) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Measures the cells in order, as many as the time allows; yields each with its figures.

    Args:
      todo: the cells.
      options: the options.
      limit: seconds after which to stop.
      cell_limit: seconds after which to kill a process.
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
            if left < _MIN_SECONDS:
                return
            process = following.pop()
            process.begin()
            following = [started(other) for other in todo[number + 1:number + 2]]
            yield cell, process.figures(min(left, cell_limit))


def progress(figures: dict[str, Any]) -> str:
    """A line of progress with the figures of a cell."""
    if "error" in figures:
        return f"failed: {figures['error']}"
    if "step_ms" not in figures:
        return "done"
    return (f"step {figures['step_ms']:,.2f} ms ({figures['steps']} steps), first "
            f"{figures['first_step_s']:.1f} s, GPU peak {figures['gpu_peak_mb']:,.0f} MB, "
            f"{'XLA' if figures['xla'] else 'no XLA'}")


def format_table(figures: dict[Cell, dict[str, Any]], skipped: Sequence[Cell]) -> str:
    """The table of all cells, and lines for those that failed or were skipped."""
    rows, notes = [], []
    for cell, values in figures.items():
        if "error" in values:
            notes.append(f"{cell} failed: {values['error']}")
        elif "step_ms" in values:
            none = figures.get(Cell(cell.case, "none", cell.policy), {}).get("step_ms")
            rows.append([str(cell), "yes" if values["xla"] else "no", f"{values['step_ms']:,.2f}",
                         f"{values['step_ms'] / none:.3f}" if none else "-",
                         f"{values['rows_per_second']:,.0f}", f"{values['first_step_s']:.1f}",
                         f"{values['gpu_peak_mb']:,.0f}", f"{values['gpu_step_peak_mb']:,.0f}",
                         str(values["steps"])])
    header = ("case, setup", "XLA", "step ms", "/ none", "rows/s", "first step s", "GPU peak MB",
              "in later steps", "steps")
    if skipped:
        notes.append(f"skipped, as the time was up: {', '.join(map(str, skipped))}")
    return "\n".join([table.columns(header, rows), *notes])


def format_constants(figures: dict[str, float | str], gpu: str) -> str:
    """The table of measured constants (:mod:`one_gpu_constants`) and of those of :mod:`links`."""
    machine = next(each for each in links.MACHINES.values() if each.gpu == gpu)
    peaks = links.GPUS[gpu]
    assumed = {
        "to the GPU, GB/s": min(machine.route("CPU:0", "GPU:0").values()),
        "to the host, GB/s": min(machine.route("GPU:0", "CPU:0").values()),
        "4 bytes there and back, us":
            1e6 * (2 * links.LATENCY + links.LAUNCH["GPU"] + links.LAUNCH["CPU"]),
        "an operation on the GPU, us": 1e6 * links.LAUNCH["GPU"],
        "the host, to start one, us": 1e6 * links.EXECUTOR,
        "an operation on the CPU, us": 1e6 * links.LAUNCH["CPU"],
        "GPU memory, GB/s": peaks.memory_bandwidth,
        "matrix product, TFLOP/s": peaks.tflops,
    }
    return table.columns(("what", "measured", f"links.py, {gpu}"), [
        [what, value if isinstance(value, str) else f"{value:,.2f}",
         f"{assumed[what]:,.2f}" if what in assumed else "-"]
        for what, value in figures.items()])


def format_comparison(figures: dict[Cell, dict[str, Any]], gpu: str) -> str:
    """The table of measured and simulated steps on one GPU; needs two logical CPU devices."""
    from benchmarks import gpus  # it needs Keras 3 and TensorFlow's Grappler

    simulation = gpus.Simulation(lambda text: print(text, flush=True))
    machine = next(name for name, each in links.MACHINES.items() if each.gpu == gpu)
    rows = []
    for case in CASES:
        steps = {name: figures[cell]["step_ms"] for name in ("none", "none_plain", "tower")
                 if "step_ms" in figures.get(cell := Cell(case, name), {})}
        for result in simulation.case(case, gpus.CASES[case], [1], [machine]) if steps else ():
            name = "none" if result.xla else "none_plain"
            step, peak = steps.get(name), (result.gpu_peak + result.gpu_state) / 2**20
            real = figures.get(Cell(case, name), {}).get("gpu_step_peak_mb", 0)
            rows.append([case, name, f"{step:,.2f}" if step else "-", f"{result.step_ms:,.2f}",
                         f"{step / result.step_ms:.2f}" if step else "-",
                         f"{real:,.0f}" if real else "-", "-" if result.xla else f"{peak:,.0f}"])
    header = ("case", "setup", "measured ms", f"simulated {gpu}", "ratio", "GPU peak MB",
              "simulated")
    factors = ", ".join(f"{name} {value:.2f}" for name, value in simulation.factors.items())
    return f"{table.columns(header, rows)}\nfactors on TensorFlow's costs: {factors}"


def read(path: pathlib.Path) -> dict[Cell, dict[str, Any]]:
    """The figures by cell in a file that :func:`main` wrote."""
    return {Cell(**each["cell"]): each["figures"]
            for each in json.loads(path.read_text())["cells"]}


def gpu_kind(figures: dict[Cell, dict[str, Any]]) -> str:
    """The name in :data:`links.GPUS` of the measured GPU; ``"H100"`` if it is not there."""
    names = " ".join(str(values.get("gpu")) for values in figures.values())
    return next((name for name in links.GPUS if name in names), "H100")


def main(todo: Sequence[Cell], options: Options, limit: float, cell_limit: float,
         out: pathlib.Path, title: str) -> None:
    """Measures the cells, prints the table and writes ``one_gpu.json`` or ``constants.json``."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / ("constants.json" if todo == [Cell(CONSTANTS)] else "one_gpu.json")
    figures: dict[Cell, dict[str, Any]] = {}
    start = time.perf_counter()
    for cell, measured in measure_all(todo, options, limit, cell_limit):
        figures[cell] = measured
        print(f"[{time.perf_counter() - start:.0f} s, {len(figures)}/{len(todo)}] {cell}: "
              f"{progress(measured)}", flush=True)
        path.write_text(json.dumps({
            "title": title, "options": dataclasses.asdict(options),
            "cells": [{"cell": dataclasses.asdict(cell), "figures": values}
                      for cell, values in figures.items()]}, indent=1))
    names = {values["gpu"] for values in figures.values() if values.get("gpu")}
    print(f"\n{title}; {', '.join(sorted(names)) or 'no GPU'}")
    if "constants" in figures.get(Cell(CONSTANTS), {}):
        print(format_constants(figures[Cell(CONSTANTS)]["constants"], gpu_kind(figures)))
    else:
        print(format_table(figures, [cell for cell in todo if cell not in figures]))
    print(f"\n{path}")
