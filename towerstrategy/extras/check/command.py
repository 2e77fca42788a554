"""The command: runs all checks, prints the results, and writes them as JSON.

Goes in: arguments.  Comes out: text, a JSON file if ``--json`` is set, and an exit status: 1 if
training on the towers fails or differs from one device, else 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _version, refused
from towerstrategy.extras.check import machine, same, speed
from towerstrategy.extras.report import description

SCHEMA = 1
# Seconds after which no more jobs start: two minutes less a slow job.
_LAST_START = 75
_SECONDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        print(f"towerstrategy {_version.__version__}\n")
        parser.print_help()
        return 0
    if options.towers is not None and options.towers < 1:
        parser.error(f"--towers must be at least 1, but got {options.towers}")
    try:
        if options.json is not None:
            refused.check_file("--json", options.json)
        devices, one_physical = machine.prepare(options.towers)
        tf.config.list_logical_devices()  # starts TensorFlow
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    tf.get_logger().setLevel("ERROR")  # TensorFlow warns of retracing; each network is traced anew
    document = _check(devices, one_physical, options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\n{options.json}: put this file into a bug report.")
    return 0 if document["passed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m towerstrategy", description="Data-parallel training with one copy of each "
        "weight. As a program, it looks at the machine it is on.")
    parser.add_argument("--version", action="version", version=_version.__version__)
    commands = parser.add_subparsers(dest="command", title="commands")
    check = commands.add_parser(
        "check", help="does it work here, and do towers pay? Takes less than two minutes",
        description="Prints what is installed and which devices there are, compares training on "
        "towers with one device, and measures one device, MirroredStrategy and each merge device. "
        "Exits with 1 where a result differs by more than rounding.")
    check.add_argument("--json", type=pathlib.Path, metavar="FILE",
                       help="writes everything there, for a bug report")
    check.add_argument("--towers", type=int, metavar="N",
                       help="how many towers; by default every GPU, the halves of the only one, "
                       f"or {machine.CPU_TOWERS} logical CPU devices")
    check.add_argument("--seconds", type=float, default=_SECONDS, metavar="S",
                       help="how long to measure the steps of each way (%(default)s)")
    return parser


def _check(devices: list[str], one_physical: bool, seconds: float) -> dict[str, Any]:
    """Runs all checks and prints the results; returns the content of the JSON file."""
    start, left_out, on_gpus = time.perf_counter(), list[str](), devices[0].startswith("GPU")
    run_jobs = functools.partial(_run_jobs, start, left_out)
    facts = machine.facts()
    print("\n".join(_lines(facts)))
    print(f"Towers: {', '.join(devices)}"
          + f"; parts of one {devices[0][:3]}" * (one_physical and len(devices) > 1))
    rates = machine.copies(devices) if on_gpus else []
    print("\nCopies between devices, GB/s (rows: from)\n" + _matrix(rates) if rates else
          "The devices are one memory: nothing is copied between them.", flush=True)
    print(f"\nThe same as one device? {len(devices)} towers", flush=True)
    compared = run_jobs(same.jobs(devices), str, lambda job: same.compare(job, devices), _outcome)
    print(f"\nSteps of {seconds:g} s each", flush=True)
    speeds = run_jobs(speed.ways(devices), _way_name,
                      lambda way: speed.measure(way, devices, one_physical, seconds),
                      lambda result: result.error or f"{result.step_ms:.1f} ms a step")
    print("\n" + _speed_table(speeds))
    advice = speed.advice(speeds, one_physical, on_gpus)
    if left_out:
        print(f"\nLeft out, as two minutes were over: {'; '.join(left_out)}")
    passed, verdict = _verdict(compared)
    print(f"\n{advice}\n{verdict}")
    return {
        "schema": SCHEMA, "written": datetime.datetime.now(datetime.timezone.utc).isoformat(),
        "machine": facts, "towers": devices, "one_physical_device": one_physical,
        "copies": rates, "same": [result.as_dict() for result in compared],
        "speed": [{**dataclasses.asdict(result), "rows_per_second": result.rows_per_second}
                  for result in speeds],
        "left_out": left_out, "advice": advice, "passed": passed,
        "seconds": round(time.perf_counter() - start, 1)}


def _run_jobs(start: float, left_out: list[str], jobs: Sequence[Any], name: Callable[[Any], str],
              run: Callable[[Any], Any], outcome: Callable[[Any], str]) -> list[Any]:
    """The results of the jobs, which it prints; adds the names of late jobs to ``left_out``."""
    results = []
    for job in jobs:
        if time.perf_counter() - start > _LAST_START:
            left_out.append(name(job))
            continue
        results.append(run(job))
        print(f"  {name(job)}: {outcome(results[-1])} [{time.perf_counter() - start:.0f} s]",
              flush=True)
    return results


def _lines(facts: dict[str, Any]) -> list[str]:
    """A line for each fact that is known and not empty."""
    lines = []
    for name, fact in facts.items():
        parts = ([f"{key} {value}" for key, value in fact.items()] if isinstance(fact, dict) else
                 [" ".join(each.values()) for each in fact] if isinstance(fact, list) else [fact])
        text = ", ".join(map(str, parts)) if fact else "none" if name == "gpus" else ""
        if text:
            lines.append(f"{name.replace('_', ' ')}:{chr(10) if chr(10) in text else ' '}{text}")
    return lines


def _matrix(rates: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(rate["from"] for rate in rates))
    cells = {(rate["from"], rate["to"]): f"{rate['gb_per_s']:.1f}" for rate in rates}
    rows = [[source, *(cells.get((source, target), "-") for target in names)] for source in names]
    return description.table(["", *names], rows, numbers=range(1, len(names) + 1))


def _outcome(result: same.Result) -> str:
    if result.error is not None:
        why = "not compared, one device alone fails" if result.alone else "FAILED"
        return f"{why}: {result.error}"
    return (f"largest difference {result.largest:.1e} "
            f"({'rounding' if result.holds else f'TOO LARGE: the bound is {result.bound:.0e}'})")


def _way_name(way: str) -> str:
    return way if way.startswith((speed.ONE_DEVICE, speed.MIRRORED)) else f"merge device {way}"


def _speed_table(results: Sequence[speed.Result]) -> str:
    rows = []
    for result in results:
        cells = [*["-"] * 5, f"failed: {result.error}"]
        if result.error is None:
            peak = max(result.peak_bytes.values(), default=0)
            cells = ["yes" if result.xla else "no", f"{result.step_ms:,.1f}",
                     f"{result.rows_per_second:,.0f}", f"{result.first_step_s:.1f}",
                     f"{peak / 2**20:,.0f}" if peak else "-",
                     ", ".join(f"{device} {size / 2**20:.1f}"
                               for device, size in result.state_bytes.items())]
        rows.append([_way_name(result.way), result.devices, *cells])
    return description.table(
        ("", "devices", "XLA", "step ms", "rows/s", "first step s", "peak MiB of the fullest GPU",
         "weights and slots, MiB"), rows, numbers=(1, *range(3, 7)))


def _verdict(results: Sequence[same.Result]) -> tuple[bool, str]:
    """Whether the towers train as one device does, if that does not fail; and a sentence."""
    results = [result for result in results if not result.alone]
    wrong = [str(result.job) for result in results if not result.holds]
    if wrong:
        return False, f"NOT the same as one device: {'; '.join(wrong)}."
    if not results:
        return False, "NOT compared with one device: there was no time, or one device alone failed."
    parts = []
    for prefix, is_half in (("", False), ("in mixed_float16 ", True)):
        differences = [result.largest for result in results
                       if (result.job.network == same.HALVES) is is_half]
        parts += [f"{prefix}{max(differences):.1e} at most"] if differences else []
    return True, f"Training on the towers is the same as on one device: {', '.join(parts)}."
