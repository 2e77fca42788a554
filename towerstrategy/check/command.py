"""The command: asks each room in turn, prints what it says, and writes it down as JSON.

Goes in: arguments.  Comes out: text, a file where asked for, and an exit status: 0, or 1 where
training on the towers is not the same as on one device, or fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _version
from towerstrategy.check import advice, machine, same, speed
from towerstrategy.report import description

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
        devices, one_physical = machine.prepare(given.towers)
        tf.config.list_logical_devices()  # starts TensorFlow
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    tf.get_logger().setLevel("ERROR")  # each network is traced anew, and TensorFlow says so
    document = _Check(devices, one_physical, given.seconds).run()
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


class _Check:
    """One run of the command."""

    def __init__(self, devices: Sequence[str], one_physical: bool, seconds: float) -> None:
        self._devices, self._one_physical, self._seconds = list(devices), one_physical, seconds
        self._start = time.perf_counter()
        self._left_out: list[str] = []

    def run(self) -> dict[str, Any]:
        """Prints everything; returns what the JSON file holds."""
        facts = machine.facts()
        print(_described(facts, self._devices, self._one_physical), flush=True)
        rates = machine.copies(self._devices)
        if rates:
            print("\nCopies between devices, GB/s (rows: from)\n" + _matrix(rates), flush=True)
        print(f"\nThe same as one device? {len(self._devices)} towers", flush=True)
        comparison = same.Comparison(self._devices)
        same_results = self._each(same.jobs(self._devices), str, comparison.run, _outcome)
        print(f"\nSteps of {self._seconds:g} s each", flush=True)
        speeds = self._each(
            speed.ways(self._devices), _way,
            lambda way: speed.measure(way, self._devices, self._one_physical, self._seconds),
            lambda result: result.error or f"{result.step_ms:.1f} ms a step")
        print("\n" + _speed_table(speeds))
        on_gpus = self._devices[0].startswith("GPU")
        advised = advice.sentence(speeds, self._one_physical, on_gpus)
        passed = bool(same_results) and all(result.holds for result in same_results)
        if self._left_out:
            print(f"\nLeft out, as two minutes were over: {'; '.join(self._left_out)}")
        print(f"\n{advised}\n{_verdict(same_results)}")
        return {
            "schema": SCHEMA, "written": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "machine": facts, "towers": self._devices, "one_physical_device": self._one_physical,
            "copies": rates,
            "same": [result.as_dict() for result in same_results],
            "speed": [{**dataclasses.asdict(result), "rows_per_second": result.rows_per_second}
                      for result in speeds],
            "left_out": self._left_out, "advice": advised, "passed": passed,
            "seconds": round(self._elapsed(), 1)}

    def _each(self, jobs: Sequence[Any], name: Callable[[Any], str], run: Callable[[Any], Any],
              outcome: Callable[[Any], str]) -> list[Any]:
        """What ``run`` finds of each job, printed; jobs for which it is too late are left out."""
        found = []
        for job in jobs:
            if self._elapsed() > _LAST_START:
                self._left_out.append(name(job))
                continue
            found.append(run(job))
            print(f"  {name(job)}: {outcome(found[-1])} [{self._elapsed():.0f} s]", flush=True)
        return found

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start


def _described(facts: dict[str, Any], devices: Sequence[str], one_physical: bool) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    built = facts["built_with"]
    gpus = [f"{gpu['name']} (compute capability {gpu['compute_capability']})"
            for gpu in facts["gpus"]]
    shared = f"; parts of one {devices[0][:3]}" if one_physical and len(devices) > 1 else ""
    lines = [
        f"towerstrategy {facts['towerstrategy']}, Python {facts['python']}, {facts['platform']}",
        f"{packages}; tf.keras is {facts['keras_of_tf']}",
        f"TensorFlow is built for CUDA {built.get('cuda_version', '-')}, cuDNN "
        f"{built.get('cudnn_version', '-')}; driver and memory: {facts['driver'] or 'none found'}",
        f"{facts['cores']} CPU cores; GPUs: {', '.join(gpus) or 'none'}",
        f"Towers: {', '.join(devices)}{shared}"]
    lines += [f"{name}={value}" for name, value in facts["environment"].items()]
    lines += [text for text in (facts["topology"], facts["peer_access"]) if text]
    if devices[0].startswith("CPU"):
        lines.append("The devices are one memory: nothing is copied between them.")
    return "\n".join(lines)


def _matrix(rates: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(rate["from"] for rate in rates))
    found = {(rate["from"], rate["to"]): f"{rate['gb_per_s']:.1f}" for rate in rates}
    rows = [[source, *(found.get((source, target), "-") for target in names)] for source in names]
    return description.table(["", *names], rows, numbers=range(1, len(names) + 1))


def _outcome(result: same.Result) -> str:
    if result.error is not None:
        return f"FAILED: {result.error}"
    return (f"largest difference {result.largest:.1e} "
            f"({'rounding' if result.holds else f'TOO LARGE: the bound is {result.bound:.0e}'})")


def _way(way: str) -> str:
    """A way to train as people read it."""
    return way if way.startswith((speed.ONE_DEVICE, speed.MIRRORED)) else f"merge device {way}"


def _speed_table(results: Sequence[speed.Result]) -> str:
    rows = []
    for result in results:
        if result.error is not None:
            rows.append([_way(result.way), result.devices, *["-"] * 5, f"failed: {result.error}"])
            continue
        peak = f"{max(result.peak_bytes.values()) / 2**20:,.0f}" if result.peak_bytes else "-"
        held = ", ".join(f"{device} {size / 2**20:.1f}"
                         for device, size in result.state_bytes.items())
        rows.append([_way(result.way), result.devices, "yes" if result.xla else "no",
                     f"{result.step_ms:,.1f}",
                     f"{result.rows_per_second:,.0f}", f"{result.first_step_s:.1f}", peak, held])
    return description.table(
        ("", "devices", "XLA", "step ms", "rows/s", "first step s", "peak MiB of the fullest GPU",
         "weights and slots, MiB"), rows, numbers=(1, *range(3, 7)))


def _verdict(results: Sequence[same.Result]) -> str:
    wrong = [str(result.job) for result in results if not result.holds]
    if wrong:
        return f"NOT the same as one device: {'; '.join(wrong)}."
    if not results:
        return "NOT compared with one device: there was no time."
    largest = max(result.largest for result in results)
    return f"Training on the towers is the same as on one device: {largest:.1e} at most."
