"""Measures TowerStrategy and its peers, each strategy in a process of its own.

Goes in: flags.  Comes out: progress, tables, the targets with pass or MISS, and in the output
folder ``benchmarks.json`` and ``benchmarks.png``.

    python -m benchmarks                   # all cases and strategies; hours on two cores
    python -m benchmarks --cases=mlp,deep --rounds=1
    python -m benchmarks --quick           # tries the benchmark itself, with small models
    make bench-jax                         # TowerStrategy and Keras 3 on JAX
    python -m benchmarks machines          # several workers; see machines.py
    python -m benchmarks micro_batches     # memory of one device; see micro_batches.py
    python -m benchmarks stages            # a model over several devices; see stages.py
    python -m benchmarks gpus              # simulated GPUs; see gpus.py
    python -m benchmarks one_gpu           # a real GPU; see one_gpu.py
    python -m benchmarks inference         # predict and evaluate; see inference.py
    python -m benchmarks loops             # custom training loops; see loops.py
    python -m benchmarks unequal           # a slower tower; see unequal.py
    python -m benchmarks partition         # the cost of partitioning; see partition.py
    python -m benchmarks guard             # compares counts with the recorded ones; partition.py
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from absl import app, flags

import towerstrategy
from benchmarks import (
    cases,
    chart,
    jax_peer,
    machines,
    micro_batches,
    one_gpu,
    results,
    strategies,
    table,
)

_CASES = flags.DEFINE_list("cases", [*cases.CASES, "scaling"], "the models to train")
_STRATEGIES = flags.DEFINE_list("strategies", list(strategies.NAMES), "the strategies to measure")
_TOWERS = flags.DEFINE_integer("towers", 4, "the number of towers", lower_bound=1)
_SCALING_TOWERS = flags.DEFINE_list("scaling_towers", ["1", "2", "4", "8", "16"],
                                    "the numbers of towers of the case `scaling`")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "measurements of each job; the medians are shown",
                               lower_bound=1)
_MERGE = flags.DEFINE_string("merge_device", None, "TowerStrategy's merge device")
_DEVICE = flags.DEFINE_enum("device", "auto", ["auto", "cpu", "gpu"],
                            "the towers' devices; auto: GPUs, if there are enough")
_SECONDS = flags.DEFINE_float("seconds", 6, "seconds for which to measure the step time of a job")
_LIMIT = flags.DEFINE_float("limit", 900, "seconds after which a process is killed")
_LEGACY = flags.DEFINE_bool("legacy", False, "whether to use tf_keras instead of Keras 3")
_QUICK = flags.DEFINE_bool("quick", False, "small models, one round, half a second for each job")
_MACHINES_STEPS = flags.DEFINE_integer("machines_steps", 20, "steps that `machines` measures",
                                       lower_bound=2)
_MACHINES_SHAPES = flags.DEFINE_list("machines_shapes", ["2x2", "4x1"],
                                     "the clusters of `machines`: workers x towers of each worker")
_MICRO_BATCHES_STEPS = flags.DEFINE_integer(
    "micro_batches_steps", 8, "steps that `micro_batches` measures", lower_bound=2)
_STAGES_CASES = flags.DEFINE_list("stages_cases", ["mlp16", "conv"], "the models of `stages`")
_STAGES_STEPS = flags.DEFINE_integer("stages_steps", 8, "steps that `stages` measures",
                                     lower_bound=2)
_GPUS_CASES = flags.DEFINE_list("gpus_cases", ["resnet50", "mlp", "transformer", "embedding"],
                                "the models of `gpus`")
_GPUS_TOWERS = flags.DEFINE_list("gpus_towers", ["1", "2", "4", "8"],
                                 "the numbers of GPUs of `gpus`")
_GPUS_CHECK = flags.DEFINE_bool("gpus_check", True, "compare `gpus` with published figures")
_ONE_GPU_CASES = flags.DEFINE_list("one_gpu_cases", list(one_gpu.CASES), "the models of `one_gpu`")
_ONE_GPU_WHO = flags.DEFINE_list("one_gpu_who", list(one_gpu.SETUPS), "the setups of `one_gpu`")
_ONE_GPU_LIMIT = flags.DEFINE_float("one_gpu_limit", 900, "seconds after which `one_gpu` ends")
_ONE_GPU_ROWS = flags.DEFINE_integer("one_gpu_rows", 0,
                                     "the batch size of `one_gpu`; 0: the default of the case")
_ONE_GPU_MEMORY = flags.DEFINE_integer("one_gpu_memory", 0, "MB of the GPU; 0: ask nvidia-smi")
_ONE_GPU_CONSTANTS = flags.DEFINE_bool("one_gpu_constants", False,
                                       "measure the constants of the simulation, not the models")
_ONE_GPU_COMPARE = flags.DEFINE_string("one_gpu_compare", None,
                                       "a file of `one_gpu` to compare with the simulation")
_UNEQUAL_FACTOR = flags.DEFINE_integer(
    "unequal_factor", 3, "the work of the slow tower of `unequal` over that of the other tower",
    lower_bound=2)
_UNEQUAL_ROUNDS = flags.DEFINE_integer("unequal_rounds", 20, "rounds of `unequal`", lower_bound=1)
_UNEQUAL_STEPS = flags.DEFINE_integer("unequal_steps", 60, "steps of a round of `unequal`",
                                      lower_bound=2)
_JAX_PYTHON = flags.DEFINE_string("jax_python", ".venv-jax/bin/python",
                                  "the Python of an environment with Keras 3 and JAX")
_RECORD = flags.DEFINE_bool("record", False, "record the counts of `guard`")
_OUT = flags.DEFINE_string("out", "out/benchmarks", "the folder for the JSON file and the picture")

_SCALING_STRATEGIES = ("tower", "mirrored")


def jobs() -> list[results.Job]:
    """The jobs of a round: for each case, each strategy."""
    todo = [results.Job(case, name, _TOWERS.value) for case in _CASES.value if case != "scaling"
            for name in _STRATEGIES.value if name not in strategies.JAX or not why_no_jax()]
    if "scaling" in _CASES.value:
        todo += [results.Job(case, name, int(count)) for case in cases.SCALING
                 for count in _SCALING_TOWERS.value
                 for name in _STRATEGIES.value if name in _SCALING_STRATEGIES]
    return list(dict.fromkeys(todo))


def why_no_jax() -> str:
    """The reason why JAX is not measured; "" if it is."""
    gpus = _DEVICE.value == "gpu" or (
        _DEVICE.value == "auto" and tf.config.list_physical_devices("GPU"))
    return "the towers are GPUs, but JAX is measured on the CPU" if gpus \
        else jax_peer.missing(_JAX_PYTHON.value)


def command(job: results.Job, number: int, device: str,
            output: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """The command that measures ``job``, and its environment variables.

    In round ``number`` 0 it counts the traffic, too.
    """
    small, seconds = _QUICK.value, 0.5 if _QUICK.value else _SECONDS.value
    if job.strategy in strategies.JAX:
        devices = 1 if job.strategy == "jax_one" else job.towers
        return jax_peer.command(_JAX_PYTHON.value, job.case, devices, seconds, small, output)
    options = {"case": job.case, "strategy": job.strategy, "towers": job.towers,
               "device": device, "seconds": seconds, "output": output}
    if _MERGE.value is not None:
        options["merge_device"] = _MERGE.value
    return [sys.executable, "-m", "benchmarks.measure",
            *(f"--{name}={value}" for name, value in options.items()),
            *(["--small"] if small else []), *(["--traffic"] if number == 0 else [])], {
                "TF_USE_LEGACY_KERAS": "1" if _LEGACY.value else "0", "TF_CPP_MIN_LOG_LEVEL": "3"}


def measure(job: results.Job, number: int, device: str) -> results.Run:
    """Measures ``job`` in round ``number``, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "figures.json"
        arguments, environment = command(job, number, device, output)
        try:
            done = subprocess.run(arguments, env={**os.environ, **environment}, capture_output=True,
                                  text=True, timeout=_LIMIT.value, check=False)
        except subprocess.TimeoutExpired:
            return results.Run(job, number, {"error": f"no end after {_LIMIT.value:.0f} s"})
        if output.exists():
            return results.Run(job, number, json.loads(output.read_text()))
    last = (done.stderr.strip() or "no message").splitlines()[-1][:300]
    return results.Run(job, number, {"error": f"exit status {done.returncode}: {last}"})


def machine_info() -> dict[str, Any]:
    """The hardware and the versions of the packages."""
    keras = "tf_keras" if _LEGACY.value else "keras"
    gpus = [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name)
            for gpu in tf.config.list_physical_devices("GPU")]
    return {
        "cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpus": gpus,
        "versions": {name: importlib.metadata.version(name)
                     for name in ("tensorflow", keras, "numpy")},
        "python": platform.python_version()}


def _cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _device() -> str:
    """The kind of the towers' devices."""
    if _DEVICE.value != "auto":
        return _DEVICE.value
    most = max(job.towers for job in jobs())
    return "gpu" if len(tf.config.list_physical_devices("GPU")) >= most else "cpu"


def _check_flags() -> None:
    known = {"cases": [*cases.CASES, "scaling"], "strategies": list(strategies.NAMES)}
    for flag in (_CASES, _STRATEGIES):
        wrong = [name for name in flag.value if name not in known[flag.name]]
        if wrong or not flag.value:
            raise app.UsageError(f"--{flag.name} takes {', '.join(known[flag.name])}, but got "
                                 f"{', '.join(wrong) or 'none'}.")
    if set(_STRATEGIES.value) <= set(strategies.JAX) and why_no_jax():
        raise app.UsageError(f"JAX cannot be measured: {why_no_jax()}.")
    if not jobs():
        raise app.UsageError("--cases=scaling needs one of --strategies=" +
                             ",".join(_SCALING_STRATEGIES) + ".")


def main(argv: list[str]) -> None:
    """Runs the subcommand; without one, measures all jobs, prints tables and writes the files."""
    if argv[1:] == ["machines"]:
        _measure_machines()
        return
    if argv[1:] == ["micro_batches"]:
        _measure_micro_batches()
        return
    if argv[1:] == ["stages"]:
        _measure_stages()
        return
    if argv[1:] == ["gpus"]:
        _simulate_gpus()
        return
    if argv[1:] == ["one_gpu"]:
        _measure_one_gpu()
        return
    if argv[1:] in (["inference"], ["loops"]):
        _measure_in_one_process(argv[1])
        return
    if argv[1:] == ["unequal"]:
        _measure_unequal()
        return
    if argv[1:] == ["partition"]:
        _measure_partition()
        return
    if argv[1:] == ["guard"]:
        from benchmarks import partition

        sys.exit(partition.guard(_RECORD.value))
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    _check_flags()
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    info, device = machine_info(), _device()
    rounds = 1 if _QUICK.value else _ROUNDS.value
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    title = (f"{info['cpu']}, {info['cores']} cores, {len(info['gpus'])} GPUs; "
             f"Python {info['python']}, {versions}; {device} towers, "
             f"merge device {_MERGE.value or 'by default'}")
    print(title)
    skipped = [name for name in _STRATEGIES.value if name in strategies.JAX and why_no_jax()]
    if skipped:
        print(f"{', '.join(skipped)} skipped: {why_no_jax()}.")
    runs: list[results.Run] = []
    todo = [(number, job) for number in range(rounds) for job in jobs()]
    for position, (number, job) in enumerate(todo, start=1):
        start = time.perf_counter()
        runs.append(measure(job, number, device))
        print(f"[{position}/{len(todo)}] round {number + 1}/{rounds} {job.case} {job.strategy} "
              f"R={job.towers}: {table.progress(runs[-1].figures)} "
              f"[{time.perf_counter() - start:.0f} s]", flush=True)
        _write(out / "benchmarks.json", info, device, runs)

    figures = results.medians(runs)
    verdicts = results.verdicts(figures, _TOWERS.value, _MERGE.value == "balanced")
    print(f"\n{table.jobs(figures)}\n\n{table.devices(figures)}\n\n{table.targets(verdicts)}")
    picture = out / "benchmarks.png"
    chart.draw(picture, figures, _TOWERS.value, title)
    print(f"\n{out / 'benchmarks.json'}\n{picture}")


def _simulate_gpus() -> None:
    """Simulates ``--gpus_cases`` on ``--gpus_towers`` GPUs."""
    from benchmarks import gpus, links  # they need Keras 3 and TensorFlow's Grappler

    wrong = [name for name in _GPUS_CASES.value if name not in gpus.CASES]
    if wrong:
        raise app.UsageError(f"--gpus_cases takes {', '.join(gpus.CASES)}, but got "
                             f"{', '.join(wrong)}.")
    gpus.main(_GPUS_CASES.value, [int(count) for count in _GPUS_TOWERS.value],
              [name for name in links.MACHINES if not name.startswith("P100")],
              _GPUS_CHECK.value, pathlib.Path(_OUT.value))


def _measure_one_gpu() -> None:
    """Measures models or constants on one GPU, or compares a file with the simulation."""
    for flag, known in ((_ONE_GPU_CASES, one_gpu.CASES), (_ONE_GPU_WHO, one_gpu.SETUPS)):
        wrong = [name for name in flag.value if name not in known]
        if wrong:
            raise app.UsageError(f"--{flag.name} takes {', '.join(known)}, but got "
                                 f"{', '.join(wrong)}.")
    if _ONE_GPU_COMPARE.value:
        figures = one_gpu.read(pathlib.Path(_ONE_GPU_COMPARE.value))
        towerstrategy.split_cpu(2)  # the host, and a device that stands for the GPU
        print(one_gpu.format_comparison(figures, one_gpu.gpu_kind(figures)))
        return
    quick = _QUICK.value
    todo = [one_gpu.Cell(one_gpu.CONSTANTS)] if _ONE_GPU_CONSTANTS.value else one_gpu.cells(
        _ONE_GPU_CASES.value, _ONE_GPU_WHO.value)
    seconds = 0.5 if quick else _SECONDS.value
    one_gpu.main(todo, one_gpu.Options(_DEVICE.value, seconds, quick, _ONE_GPU_ROWS.value,
                                       _ONE_GPU_MEMORY.value),
                 _ONE_GPU_LIMIT.value, _LIMIT.value, pathlib.Path(_OUT.value), _title("keras"))


def _measure_in_one_process(name: str) -> None:
    """Runs ``inference`` or ``loops``, by default with the cases of the module."""
    module = importlib.import_module(f"benchmarks.{name}")
    keras = importlib.import_module("tf_keras" if _LEGACY.value else "keras")
    module.main(keras, _chosen_cases(name, module.CASES), _TOWERS.value,
                1 if _QUICK.value else _ROUNDS.value, _QUICK.value)


def _measure_partition() -> None:
    """Partitions ``--cases``, which may have ``large`` models, for ``--scaling_towers``."""
    from benchmarks import partition

    chosen = _CASES.value if flags.FLAGS["cases"].present else ["conv", "deep", "large"]
    names = [name for case in chosen for name in (partition.LARGE if case == "large" else [case])]
    known = [*cases.CASES, *partition.LARGE]
    wrong = [name for name in names if name not in known]
    if wrong:
        raise app.UsageError(f"partition: --cases takes {', '.join(known)} and large, but got "
                             f"{', '.join(wrong)}.")
    # One tower's step is not partitioned.
    partition.main(names, [int(count) for count in _SCALING_TOWERS.value if int(count) > 1])


def _measure_unequal() -> None:
    """Measures two towers, one of which is slower, with several shares."""
    from benchmarks import unequal

    name = "tf_keras" if _LEGACY.value else "keras"
    quick = _QUICK.value
    unequal.main(importlib.import_module(name), _UNEQUAL_FACTOR.value,
                 1 if quick else _UNEQUAL_ROUNDS.value, 8 if quick else _UNEQUAL_STEPS.value,
                 quick, pathlib.Path(_OUT.value), _title(name))


def _measure_machines() -> None:
    """Measures ``--cases`` (default: ``mlp``) on clusters of ``--machines_shapes``."""
    try:
        shapes = machines.parse_shapes(_MACHINES_SHAPES.value)
    except ValueError as error:
        raise app.UsageError(f"--machines_shapes: {error}") from error
    machines.main(_chosen_cases("machines", ["mlp"]), 1 if _QUICK.value else _ROUNDS.value,
                  _MACHINES_STEPS.value, _QUICK.value, _LIMIT.value, pathlib.Path(_OUT.value),
                  _title("tf_keras"), shapes)


def _measure_micro_batches() -> None:
    """Measures ``--cases`` (default: ``conv``) in one to eight micro-batches."""
    micro_batches.main(
        _chosen_cases("micro_batches", ["conv"]), 1 if _QUICK.value else _ROUNDS.value,
        _MICRO_BATCHES_STEPS.value, _QUICK.value, _LIMIT.value, _LEGACY.value,
        pathlib.Path(_OUT.value), _title("tf_keras" if _LEGACY.value else "keras"))


def _measure_stages() -> None:
    """Measures ``--stages_cases`` on one to four stages, in one to eight micro-batches."""
    from benchmarks import stages

    wrong = [name for name in _STAGES_CASES.value if name not in stages.CASES]
    if wrong:
        raise app.UsageError(f"--stages_cases takes {', '.join(stages.CASES)}, but got "
                             f"{', '.join(wrong)}.")
    stages.main(_STAGES_CASES.value, 1 if _QUICK.value else _ROUNDS.value,
                _STAGES_STEPS.value, _QUICK.value, _LIMIT.value, _LEGACY.value,
                pathlib.Path(_OUT.value), _title("tf_keras" if _LEGACY.value else "keras"))


def _chosen_cases(subcommand: str, default: Iterable[str]) -> list[str]:
    """``--cases``, or ``default`` if the flag is not given."""
    chosen = _CASES.value if flags.FLAGS["cases"].present else list(default)
    wrong = [each for each in chosen if each not in cases.CASES]
    if wrong:
        raise app.UsageError(f"{subcommand}: --cases takes {', '.join(cases.CASES)}, but got "
                             f"{', '.join(wrong)}.")
    return chosen


def _title(keras: str) -> str:
    """A line with the machine and the versions of TensorFlow and of the Keras package."""
    versions = [f"{package} {importlib.metadata.version(package)}"
                for package in ("tensorflow", keras)]
    return f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores; {', '.join(versions)}"


def _write(path: pathlib.Path, info: dict[str, Any], device: str,
           runs: list[results.Run]) -> None:
    """Writes all runs so far, so that they are kept if the benchmark is interrupted."""
    figures = results.medians(runs)
    verdicts = results.verdicts(figures, _TOWERS.value, _MERGE.value == "balanced")
    path.write_text(json.dumps({
        "machine": info, "device": device,
        "flags": {flag.name: flag.value for flag in (
            _CASES, _STRATEGIES, _TOWERS, _SCALING_TOWERS, _ROUNDS, _MERGE, _SECONDS, _LEGACY,
            _QUICK)},
        "runs": [dataclasses.asdict(run) for run in runs],
        "medians": [{**dataclasses.asdict(job), **values} for job, values in figures.items()],
        "targets": [{**dataclasses.asdict(verdict), "holds": verdict.holds}
                    for verdict in verdicts]}, indent=1))


if __name__ == "__main__":
    app.run(main)
