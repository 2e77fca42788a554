"""Formats the results of the benchmarks as tables.

Goes in: medians by job, and verdicts.  Comes out: tables to print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import results

_HEADER = ("case", "R", "strategy", "step ms", "/ none", "/ mirrored", "/ jax", "first step s",
           "peak MB", "crossing MB")


def jobs(figures: results.Medians) -> str:
    """A line for each job: its medians, and the ratios of its step time to those of its peers."""
    failed = [f"{job.case} {job.strategy} R={job.towers} failed: {values['error']}"
              for job, values in figures.items() if "error" in values]
    return "\n".join([columns(_HEADER, [_row(figures, job) for job in figures]), *failed])


def _row(figures: results.Medians, job: results.Job) -> list[str]:
    values = figures[job]
    start = [job.case, str(job.towers), job.strategy]
    if "error" in values:
        return [*start, *["-"] * (len(_HEADER) - len(start))]
    ratios = [results.ratio(figures, "step_ms", job, results.Job(job.case, peer, job.towers))
              for peer in ("none", "mirrored", "jax")]
    crossing = values.get("traffic")
    return [*start, f"{values['step_ms']:,.2f}",
            *("-" if value is None else f"{value:.2f}" for value in ratios),
            f"{values['first_step_s']:.2f}", f"{values['peak_mb']:,.0f}",
            "-" if not crossing else f"{crossing['total'] / 1e6:,.2f}"]


def devices(figures: results.Medians) -> str:
    """A line for each device of TowerStrategy's jobs: bytes that it holds, sends and receives."""
    rows = []
    for job, values in figures.items():
        if job.strategy != "tower" or not values.get("traffic"):
            continue
        crossing, state = values["traffic"], values["state_bytes"]
        for device in sorted({*state, *crossing["sent"], *crossing["received"]}):
            counts = (state.get(device, 0), crossing["sent"].get(device, 0),
                      crossing["received"].get(device, 0))
            rows.append([job.case, str(job.towers), device, *(f"{count:,}" for count in counts)])
    return columns(
        ("case", "R", "device", "weights and slots, bytes", "sent per step", "received"), rows)


def targets(verdicts: Sequence[results.Verdict]) -> str:
    """A line for each target, with pass or MISS."""
    return columns(("target", "measured", "limit", ""), [
        [verdict.what, f"{verdict.measured:.3f}", f"{verdict.limit:.2f}",
         "pass" if verdict.holds else "MISS"] for verdict in verdicts])


def progress(figures: dict[str, Any]) -> str:
    """A line of progress with the figures of a job."""
    if "error" in figures:
        return f"failed: {figures['error']}"
    return (f"step {figures['step_ms']:,.2f} ms ({figures['steps']} steps), first "
            f"{figures['first_step_s']:.2f} s, peak {figures['peak_mb']:,.0f} MB")


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns of text; columns of numbers are aligned right."""
    lines = [list(header), *map(list, rows)]
    columns = range(len(header))
    widths = [max(len(line[column]) for line in lines) for column in columns]
    right = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in columns]

    def text(line: Sequence[str]) -> str:
        cells = [line[column].rjust(widths[column]) if right[column]
                 else line[column].ljust(widths[column]) for column in columns]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([text(lines[0]), rule, *map(text, lines[1:])])


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").replace(".", "", 1).isdigit()
