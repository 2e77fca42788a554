"""Every public layer, loss and metric of both Keras versions, each in a tiny fit, in processes.

Goes in: the command line of ``python -m tests.parity.sweep``.  Comes out: progress, and a table of
what differs from one device and why, as text or (``--markdown FILE``) in Markdown.  The exit status
is 1 where something differs that ``sweep_tables.DIFFERS`` does not list, where something listed no
longer differs, where a class can neither be run nor is in ``sweep_tables.CANNOT``, and where a
table names what is not there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import towerstrategy

from . import cases, runner, sweep_cases, sweep_tables

TOWERS = runner.Towers(3)
A_PROCESS = 40
TOGETHER = 6


class Found(NamedTuple):
    """An item of a Keras version: how far it is from one device, and what is to be said of it."""

    item: str
    keras: str
    worst: float
    bound: float
    details: str

    @property
    def fails(self) -> bool:
        """Whether it could not be run at all."""
        return not self.bound

    @property
    def reason(self) -> str:
        """Why it may differ; empty where it must not."""
        return reason_of(self.keras, self.item)

    @property
    def is_as_listed(self) -> bool:
        return not self.fails and (self.worst > self.bound) == bool(self.reason)

    def __str__(self) -> str:
        verdict = {(True, True): "differs as listed: " + self.reason, (True, False): "",
                   (False, True): "NO LONGER DIFFERS, is listed", (False, False): "DIFFERS"}[
                       self.is_as_listed, bool(self.reason)]
        verdict = "CANNOT BE RUN" if self.fails else verdict
        return f"{self.worst:.1e}  {self.item} ({self.keras})  {verdict}".rstrip()


def reason_of(keras: str, item: str) -> str:
    """Why an item is listed in ``sweep_tables.DIFFERS``, by its own name or its class'."""
    for version in (keras, ""):
        for name in (item, item.partition(" / ")[0]):
            if (version, name) in sweep_tables.DIFFERS:
                return sweep_tables.DIFFERS[version, name]
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; the exit status."""
    options = _options(argv)
    versions = [options.keras] if options.keras else [cases.KERAS_3, cases.TF_KERAS]
    unknown = [line for keras in versions for line in sweep_cases.unknown(
        runner.keras_module(keras))]
    work = {keras: _bundles(keras, options.only) for keras in versions}
    count = sum(len(names) for bundles in work.values() for names in bundles)
    print(f"{count} items on {TOWERS}, {options.jobs} process(es)", flush=True)
    started, found = time.time(), []
    for result in _each(work, options.jobs):
        found.append(result)
        print(f"[{len(found)}/{count}, {time.time() - started:.0f} s] {result}", flush=True)
    table = _table(found, versions)
    print(f"\n{table}")
    if options.markdown:
        options.markdown.write_text(f"{table}\n")
    wrong = [result for result in found if not result.is_as_listed]
    for result in wrong:
        print(f"{result}\n{result.details}", file=sys.stderr)
    for line in unknown:
        print(line, file=sys.stderr)
    return 1 if wrong or unknown else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.sweep", description=__doc__)
    parser.add_argument("--keras", choices=[cases.KERAS_3, cases.TF_KERAS], help="one version")
    parser.add_argument("--only", default="", metavar="TEXT", help="items whose name has TEXT")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8),
                        help="processes side by side (default %(default)s)")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE",
                        help="where to write the table")
    return parser.parse_args(argv)


def _bundles(keras: str, only: str) -> list[tuple[str, ...]]:
    """The names of the items, those together that one model can have and that must not differ."""
    bundles: list[list[sweep_cases.Item]] = []
    last: dict[Any, list[sweep_cases.Item]] = {}
    for item in sweep_cases.items(runner.keras_module(keras)):
        if only not in item.name:
            continue
        alone = bool(reason_of(keras, item.name))
        if alone or len(last.get(item.model, [None] * TOGETHER)) == TOGETHER:
            bundles.append([])
            if not alone:
                last[item.model] = bundles[-1]
        (bundles[-1] if alone else last[item.model]).append(item)
    return [tuple(item.name for item in bundle) for bundle in bundles]


def _each(work: Mapping[str, Sequence[tuple[str, ...]]], jobs: int) -> Iterator[Found]:
    """The results, as they come."""
    for keras, bundles in work.items():
        # A process is left after some of them: TensorFlow keeps what it has traced, and its memory.
        for start in range(0, len(bundles), A_PROCESS * jobs):
            with concurrent.futures.ProcessPoolExecutor(
                    jobs, multiprocessing.get_context("spawn"), _start, (keras,)) as pool:
                tasks = [pool.submit(_compare, keras, names)
                         for names in bundles[start:start + A_PROCESS * jobs]]
                for task in concurrent.futures.as_completed(tasks):
                    yield from task.result()


def _start(keras: str) -> None:
    if keras == cases.TF_KERAS:
        os.environ["TF_USE_LEGACY_KERAS"] = "1"  # some of its layers go by tf.keras
    towerstrategy.split_cpu(8)
    warnings.filterwarnings("ignore")


def _compare(keras: str, names: Sequence[str]) -> list[Found]:
    """Compares items in one model; each alone where that fails, to say which of them it is."""
    found = compare(keras, *names)
    if found.is_as_listed or len(names) == 1:
        return [found._replace(item=name) for name in names]
    return [compare(keras, name) for name in names]


def compare(keras: str, *names: str) -> Found:
    """Trains an item, or some in one model, on one device and on towers."""
    module = runner.keras_module(keras)
    items = {item.name: item for item in sweep_cases.items(module)}
    return compare_items(module, *(items[name] for name in names))


def compare_items(keras: Any, *items: sweep_cases.Item) -> Found:
    """As :func:`compare`, for items that need not be some of the sweep's; a failure is a result."""
    name = ", ".join(item.name for item in items)
    try:
        case = sweep_cases.case_of(*items)
        wanted = runner.train(case, keras, None)
        moved = runner.difference(wanted["weights"], wanted["initial weights"],
                                  runner.WEIGHT_FLOOR)
        if moved < 1e-3:
            raise AssertionError(f"it trains nothing: its weights moved by {moved}")
        got = runner.train(case, keras, TOWERS.strategy())
    except Exception:  # an item that fails is a line, and the others go on
        return Found(name, keras.__name__, float("inf"), 0.0, traceback.format_exc())
    found = runner.differences(got, wanted)
    logs = {name: runner.difference(got["epoch logs"][0].get(name), values)
            for name, values in wanted["epoch logs"][0].items()}
    return Found(name, keras.__name__, found.worst, case.bound,
                 f"{found}; epoch logs: {runner.Difference(logs)}")


def _table(found: Sequence[Found], versions: Sequence[str]) -> str:
    """What was compared and how far apart the worst is, then what differs and why."""
    lines = ["| group | Keras | compared | same as on one device | worst of these | bound |",
             "| --- | --- | ---: | ---: | ---: | ---: |"]
    for group in sweep_cases.GROUPS:
        for keras in versions:
            here = [one for one in found if (one.keras, one.item.split(".")[0]) == (keras, group)]
            same = [one for one in here if one.worst <= one.bound]
            worst = max((one.worst for one in same), default=0.0)
            bound = max((one.bound for one in same), default=0.0)
            lines.append(f"| {group} | {keras} | {len(here)} | {len(same)} | {worst:.1e} | "
                         f"{bound:.0e} |")
    lines += ["", "| differs | Keras | by | why |", "| --- | --- | ---: | --- |"]
    lines += [f"| {one.item} | {one.keras} | {one.worst:.1e} | {one.reason or '?'} |"
              for one in sorted(found) if one.worst > one.bound]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
