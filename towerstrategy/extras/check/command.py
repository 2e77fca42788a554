"""The command: runs each check in turn, prints what it found, and writes it as JSON.

Goes in: arguments.  Comes out: text, a file where asked for, and an exit status: 0, or 1 where
training on the towers is not the same as on one device, or fails.
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
# Seconds from the start after which nothing more is begun: two minutes less a slow step.
_LAST_START = 75
_SECONDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        print(f"towerstrategy {_version.__version__}\n")
        parser.print_help()
        return 0
    if given.towers is not None and given.towers < 1:
        parser.error(f"--towers must be at least 1, but got {given.towers}")
    try:
        if given.json is not None:
            refused.check_file("--json", given.json)
        devices, one_physical = machine.prepare(given.towers)
        tf.config.list_logical_devices()  # starts TensorFlow
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    tf.get_logger().setLevel("ERROR")  # each network is traced anew, and TensorFlow says so
    document = _check(devices, one_physical, given.seconds)
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\n{given.json}: put this file into a bug report.")
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
    """Prints everything; returns what the JSON file holds."""
    start, left_out, on_gpus = time.perf_counter(), list[str](), devices[0].startswith("GPU")
    each = functools.partial(_each, start, left_out)
    facts = machine.facts()
    print("\n".join(_described(facts)))
    print(f"Towers: {', '.join(devices)}"
          + f"; parts of one {devices[0][:3]}" * (one_physical and len(devices) > 1))
    rates = machine.copies(devices) if on_gpus else []
    print("\nCopies between devices, GB/s (rows: from)\n" + _matrix(rates) if rates else
          "The devices are one memory: nothing is copied between them.", flush=True)
    print(f"\nThe same as one device? {len(devices)} towers", flush=True)
    compared = each(same.jobs(devices), str, lambda job: same.compare(job, devices), _outcome)
    print(f"\nSteps of {seconds:g} s each", flush=True)
    speeds = each(speed.ways(devices), _way,
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


def _each(start: float, left_out: list[str], jobs: Sequence[Any], name: Callable[[Any], str],
          run: Callable[[Any], Any], outcome: Callable[[Any], str]) -> list[Any]:
    """What ``run`` finds of each job, printed; those for which it is too late are left out."""
    found = []
    for job in jobs:
        if time.perf_counter() - start > _LAST_START:
            left_out.append(name(job))
            continue
        found.append(run(job))
        print(f"  {name(job)}: {outcome(found[-1])} [{time.perf_counter() - start:.0f} s]",
              flush=True)
    return found


def _described(facts: dict[str, Any]) -> list[str]:
    """A line a fact; what was not found, or is empty, has none."""
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
    found = {(rate["from"], rate["to"]): f"{rate['gb_per_s']:.1f}" for rate in rates}
    rows = [[source, *(found.get((source, target), "-") for target in names)] for source in names]
    return description.table(["", *names], rows, numbers=range(1, len(names) + 1))


def _outcome(result: same.Result) -> str:
    if result.error is not None:
        why = "not compared, one device alone fails" if result.alone else "FAILED"
        return f"{why}: {result.error}"
    return (f"largest difference {result.largest:.1e} "
            f"({'rounding' if result.holds else f'TOO LARGE: the bound is {result.bound:.0e}'})")


def _way(way: str) -> str:
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
        rows.append([_way(result.way), result.devices, *cells])
    return description.table(
        ("", "devices", "XLA", "step ms", "rows/s", "first step s", "peak MiB of the fullest GPU",
         "weights and slots, MiB"), rows, numbers=(1, *range(3, 7)))


def _verdict(results: Sequence[same.Result]) -> tuple[bool, str]:
    """Whether something was compared, and nothing is wrong that one device gets right; in words."""
    results = [result for result in results if not result.alone]
    wrong = [str(result.job) for result in results if not result.holds]
    if wrong:
        return False, f"NOT the same as one device: {'; '.join(wrong)}."
    if not results:
        return False, "NOT compared with one device: there was no time, or one device alone failed."
    said = []
    for where, of_halves in (("", False), ("in mixed_float16 ", True)):
        found = [result.largest for result in results
                 if (result.job.network == same.HALVES) is of_halves]
        said += [f"{where}{max(found):.1e} at most"] if found else []
    return True, f"Training on the towers is the same as on one device: {', '.join(said)}."
