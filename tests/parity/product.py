"""The whole product of cases, Keras versions, towers and merge devices, in several processes.

Goes in: the command line of ``python -m tests.parity``.  Comes out: progress, and a table of the
worst difference of each case in each Keras version, as text or (``--markdown FILE``) for BUILD.md.
The exit status is 1 where a case is not within its bound.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import towerstrategy

from . import cases, kept, runner


class Found(NamedTuple):
    """The worst of a case in a Keras version: how far, on which towers, and what is to be said."""

    case: str
    keras: str
    worst: float
    towers: str
    details: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; the exit status."""
    options = _options(argv)
    work = _work(options)
    runs = sum(len(item[2]) for item in work)
    print(f"{len(work)} pairs of case and Keras version, {runs} runs on towers, "
          f"{options.jobs} process(es)", flush=True)
    started = time.time()
    found: dict[tuple[str, str], Found] = {}
    for done, result in enumerate(_not_kept(work, options), start=1):
        found[result.case, result.keras] = result
        print(f"[{done}/{len(work)}, {time.time() - started:.0f} s] {_line(result)}", flush=True)
    table = _table(found)
    print(f"\n{table}")
    if options.markdown:
        options.markdown.write_text(f"{table}\n")
    failed = [result for result in found.values() if not _within(result)]
    for result in failed:
        print(f"NOT WITHIN ITS BOUND: {_line(result)}\n{result.details}", file=sys.stderr)
    return 1 if failed else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--quick", action="store_true",
                        help="each case on one choice of towers, as in `make test-all`")
    parser.add_argument("--thirds", action="store_true",
                        help="each number of towers with one merge device, in turn")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has TEXT")
    parser.add_argument("--keras", choices=[cases.KERAS_3, cases.TF_KERAS], help="one version")
    parser.add_argument("--towers", type=int, nargs="+", metavar="R", help="only these numbers")
    parser.add_argument("--micro-batches", type=int, metavar="M", help="only this number of them")
    parser.add_argument("--merge", choices=runner.MERGES, help="one merge device")
    parser.add_argument("--stages", action="store_true", help="only towers of several stages")
    parser.add_argument("--unequal", action="store_true", help="only towers of unequal shares")
    parser.add_argument("--jit-compile", action="store_true",
                        help="the towers with XLA, beside one device without")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8),
                        help="processes side by side (default %(default)s)")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FILE",
                        help="each result goes there at once; what it has of the same code and "
                             "versions is not run again")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE",
                        help="where to write the table")
    return parser.parse_args(argv)


# A case, a Keras version, the towers to compare on, and whether with XLA.
Item = tuple[str, str, list[runner.Towers], bool]


def _work(options: argparse.Namespace) -> list[Item]:
    """Case, Keras version and the towers to compare on, for all that is asked for."""
    if options.quick:
        pairs = [(case, keras, [towers]) for case, keras, towers in runner.core()]
    else:
        pairs = [(case, keras, runner.ALL_TOWERS)
                 for case in cases.CASES.values() for keras in case.keras]
    if options.thirds:
        pairs = [(case, keras, _third(towers, number))
                 for number, (case, keras, towers) in enumerate(pairs)]
    work = []
    for case, keras, choices in pairs:
        if options.jit_compile:  # which micro-batches do not go with
            choices = list(dict.fromkeys(dataclasses.replace(one, micro_batches=1)
                                         for one in choices))
        towers = [one for one in choices if options.merge in (None, one.merge)
                  and (options.towers is None or one.count in options.towers)
                  and (one.shares is not None or not options.unequal)
                  and (one.stages > 1 or not options.stages)
                  and options.micro_batches in (None, one.micro_batches)]
        if options.only in case.name and options.keras in (None, keras) and towers:
            work.append((case.name, keras, towers, options.jit_compile))
    return work


def _third(choices: Sequence[runner.Towers], turn: int) -> list[runner.Towers]:
    """Of ``choices`` one merge device for each number of towers, another one each turn."""
    counts = sorted({one.count for one in choices})
    merges = len(runner.MERGES)
    return [one for one in choices if one.merge == runner.MERGES[
        (turn + turn // merges + counts.index(one.count)) % merges]]


def _not_kept(work: Sequence[Item], options: argparse.Namespace) -> Iterator[Found]:
    """The results of ``work``: first those that ``--keep`` has, then the others as they come."""
    if options.keep is None:
        yield from (found for _, found in _each(work, options.jobs))
        return
    file = kept.Kept(options.keep, Found)
    earlier = {item[:2]: file.get(item) for item in work}
    yield from (found for found in earlier.values() if found)
    for item, found in _each([item for item in work if not earlier[item[:2]]], options.jobs):
        file.add(item, found)
        yield found


def _each(work: Sequence[Item], jobs: int) -> Iterator[tuple[Item, Found]]:
    """What was asked for and the result, as they come."""
    if jobs == 1:
        _start()
        yield from ((item, _worst(item)) for item in work)
        return
    # A few cases a process: TensorFlow keeps what it has traced, and the memory for it.
    at_once = 10 * jobs
    for start in range(0, len(work), at_once):
        with concurrent.futures.ProcessPoolExecutor(
                jobs, multiprocessing.get_context("spawn"), _start) as pool:
            tasks = {pool.submit(_worst, item): item for item in work[start:start + at_once]}
            for task in concurrent.futures.as_completed(tasks):
                yield tasks[task], task.result()


def _start() -> None:
    towerstrategy.split_cpu(8)
    warnings.filterwarnings("ignore")


def _worst(item: Item) -> Found:
    name, keras, choices, jit_compile = item
    worst = Found(name, keras, -1.0, "", "")
    for towers in choices:
        try:
            found = runner.compare(cases.CASES[name], runner.keras_module(keras), towers,
                                   jit_compile)
            this = Found(name, keras, found.worst, str(towers), str(found))
        except Exception as error:  # a case that fails is a line, and the others go on
            if towers.stages > 1 and runner.UNCUT.search(str(error)):
                continue
            this = Found(name, keras, float("inf"), str(towers), traceback.format_exc())
        worst = max(worst, this, key=lambda result: result.worst)
    runner.clear_cache()
    return worst


def _within(result: Found) -> bool:
    return result.worst <= cases.CASES[result.case].bound


def _line(result: Found) -> str:
    if not result.towers:
        return f"         {result.case} ({result.keras}): cannot be cut into stages by itself"
    verdict = "" if _within(result) else "  <-- NOT WITHIN ITS BOUND"
    return f"{result.worst:.1e}  {result.case} ({result.keras}, {result.towers}){verdict}"


def _table(found: dict[tuple[str, str], Found]) -> str:
    """Cases x Keras versions, in Markdown."""
    versions = (cases.KERAS_3, cases.TF_KERAS)
    rows = [("case", *versions, "bound", "remark"), ("---", *("---:",) * 3, "---")]
    for case in cases.CASES.values():
        if any((case.name, keras) in found for keras in versions):
            rows.append((case.name, *(_cell(found.get((case.name, keras))) for keras in versions),
                         f"{case.bound:.0e}", case.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths))} |"
                     for row in rows)


def _cell(result: Found | None) -> str:
    return "-" if result is None or not result.towers else f"{result.worst:.1e}"
