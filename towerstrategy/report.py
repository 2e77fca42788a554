"""Where everything sits and how busy each tower is, for people to read.

Goes in: a strategy.  Comes out: text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import devices as devices_lib
from towerstrategy import variables


def merge_name(placement: devices_lib.Placement) -> str:
    """The merge device as people write it: ``CPU:0`` or ``balanced``."""
    return devices_lib.BALANCED if placement.balanced else devices_lib.short_name(placement.merge)


def describe(strategy: tf.distribute.Strategy) -> str:
    """A table of the strategy's devices: their role, and the variables and bytes they hold."""
    placement = strategy.extended.placement
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for variable in strategy.extended.variables():
        for part in getattr(variable, "_values", (variable,)):
            device = devices_lib.short_name(variables.home_of(part))
            counts[device] = counts.get(device, 0) + 1
            sizes[device] = sizes.get(device, 0) + variables.size_of(part)
    roles = _roles(placement)
    devices = list(roles) + sorted(set(counts) - set(roles))
    rows = [(device, roles.get(device, "variables only"), f"{counts.get(device, 0):,}",
             f"{sizes.get(device, 0):,}") for device in devices]
    number = len(placement.towers)
    title = (f"TowerStrategy: {number} tower{'s' if number > 1 else ''}, merge device "
             f"{merge_name(placement)}")
    return f"{title}\n{table(('device', 'role', 'variables', 'bytes'), rows, numbers=(2, 3))}"


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
    roles = {devices_lib.short_name(device): f"tower {number}"
             for number, device in enumerate(placement.towers)}
    if placement.balanced:
        return {device: f"{role} and home" for device, role in roles.items()}
    merge = devices_lib.short_name(placement.merge)
    roles[merge] = f"{roles[merge]} and merge" if merge in roles else "merge"
    return roles
