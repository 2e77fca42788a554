"""Where everything sits, for people to read.

Goes in: a strategy.  Comes out: a table of its devices, their roles, variables and bytes.
"""

from __future__ import annotations

import html
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import refused
from towerstrategy.placement import devices as devices_lib, homes as homes_lib, names


class Shown(str):
    """Text that a notebook shows line by line."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"


def describe(strategy: tf.distribute.Strategy, state: Sequence[tuple[str, str, str]] = (),
             stages: Sequence[tuple[str, str, str]] = ()) -> str:
    """A table of the strategy's devices: their role, and the variables and bytes they hold.

    Args:
      strategy: a ``TowerStrategy``.
      state: lines of a second table: what is kept where, and how it is merged.
      stages: lines of another table: the layers and the bytes of each stage.
    """
    text = _described(strategy)
    done_once = [(kind, f"{gathered:,}", name, line) for kind, (name, gathered, line)
                 in strategy.extended.done_with_all_rows.items()]
    for title, header, lines, numbers in (
            ("Stages of the model", ("stage", "bytes", "layers"), stages, (1,)),
            ("State of the model", ("state", "kept", "merged in strategy.run"), state, ()),
            ("Done once, with the rows of all towers", (
                "done with all rows", "bytes an example", "first one", "line"), done_once, (1,))):
        if lines:
            text += f"\n\n{title}\n{table(header, lines, numbers)}"
    shell = sys.modules.get("IPython")
    if shell is None or shell.get_ipython() is None:
        return text  # plain: R's reticulate takes no kind of str but str
    return Shown(text)


def _described(strategy: tf.distribute.Strategy) -> str:
    placement = getattr(getattr(strategy, "extended", None), "placement", None)
    if placement is None:
        raise refused.wrong_type("strategy", strategy, "a TowerStrategy")
    counts, sizes = Counter[str](), Counter[str]()
    for variable in strategy.extended.variables():
        for part in getattr(variable, "_values", (variable,)):
            device = names.short_name(homes_lib.home_of(part))
            counts[device] += 1
            sizes[device] += homes_lib.size_of(part)
    roles = _roles(placement)
    devices = list(roles) + sorted(set(counts) - set(roles))
    shares = _shares(strategy)
    rows: list[tuple[str, ...]]
    rows = [(device, roles.get(device, "variables only"), shares.get(device, ""),
             f"{counts[device]:,}", f"{sizes[device]:,}") for device in devices]
    title = (f"TowerStrategy: {placement.title}, merge device {placement.merge_name}"
             + _how_measured(strategy))
    header: tuple[str, ...] = ("device", "role", "share", "variables", "bytes")
    if not shares:
        header, *rows = ((*row[:2], *row[3:]) for row in (header, *rows))
    return f"{title}\n{table(header, rows, numbers=range(2, len(header)))}"


def _how_measured(strategy: tf.distribute.Strategy) -> str:
    measuring = strategy.extended.inputs.measuring
    if measuring is None:
        return ""
    if not measuring.rounds:
        return ", shares to be measured"
    return f", shares measured (rounds: {measuring.rounds}, changes: {measuring.changes})"


def _shares(strategy: tf.distribute.Strategy) -> dict[str, str]:
    """Each tower's share of a batch, by its device; nothing where none were asked for."""
    extended, placement = strategy.extended, strategy.extended.placement
    if placement.shares is None:
        return {}
    parts, number = placement.micro_batches, strategy.num_replicas_in_sync
    units = extended.inputs.units or (1,) * number
    here = units[extended.first_replica::parts]
    return {names.short_name(tower): f"{unit * parts / sum(units):.1%}"
            for tower, unit in zip(placement.devices, here)}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    """A plain text table; the columns whose positions are in ``numbers`` align right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) if column in numbers else cell.ljust(width)
                  for column, (cell, width) in enumerate(zip(row, widths))]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def _roles(placement: devices_lib.Placement) -> dict[str, str]:
    roles = {names.short_name(device): f"tower {number}"
             for number, device in enumerate(placement.devices)}
    if placement.rows:
        return {names.short_name(device): f"tower {number}, stage {stage}"
                for number, row in enumerate(placement.rows) for stage, device in enumerate(row)}
    if placement.balanced:
        return {device: f"{role} and home" for device, role in roles.items()}
    merge = names.short_name(placement.merge)
    roles[merge] = f"{roles[merge]} and merge" if merge in roles else "merge"
    return roles
