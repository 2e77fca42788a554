"""The text of ``strategy.describe``.

Goes in: a strategy.  Comes out: a table of its devices, their roles, variables and bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import refused
from towerstrategy.placement import devices as devices_lib, homes as homes_lib, names


def describe(strategy: tf.distribute.Strategy, state: Sequence[tuple[str, str, str]] = (),
             stages: Sequence[tuple[str, str, str]] = ()) -> str:
    """Tables: the strategy's devices, then the stages and state of a model, and slow operations.

    Args:
      strategy: a ``TowerStrategy``.
      state: the lines of a table of a model's state: where it is kept, and how it is merged.
      stages: the lines of a table of a model's stages: their bytes and layers.
    """
    text = _devices(strategy)
    done_once = [(op_type, f"{gathered:,}", name, line) for op_type, (name, gathered, line)
                 in strategy.extended.done_with_all_rows.items()]
    for title, header, lines, numbers in (
            ("Stages of the model", ("stage", "bytes", "layers"), stages, (1,)),
            ("State of the model", ("state", "kept", "merged in strategy.run"), state, ()),
            ("Done once, with the rows of all towers", (
                "done with all rows", "bytes an example", "first one", "line"), done_once, (1,))):
        if lines:
            text += f"\n\n{title}\n{table(header, lines, numbers)}"
    return text


def _devices(strategy: tf.distribute.Strategy) -> str:
    """The table of the strategy's devices, with its title."""
    placement = getattr(getattr(strategy, "extended", None), "placement", None)
    if placement is None:
        raise refused.wrong_type("strategy", strategy, "a TowerStrategy")
    counts, sizes = Counter[str](), Counter[str]()
    for variable in strategy.extended.variables():
        for part in getattr(variable, "_values", (variable,)):
            device = names.short_name(homes_lib.home_of(part))
            counts[device] += 1
            sizes[device] += homes_lib.size_of(part)
    roles, shares = _roles(placement), _shares(strategy)
    title = f"TowerStrategy: {placement.title}, merge device {placement.merge_name}"
    measuring = strategy.extended.inputs.measuring
    if measuring is not None:
        title += (f", shares measured (rounds: {measuring.rounds}, changes: {measuring.changes})"
                  if measuring.rounds else ", shares to be measured")
    header = ("device", "role", *["share"] * bool(shares), "variables", "bytes")
    rows = [(device, roles.get(device, "variables only"),
             *[shares.get(device, "")] * bool(shares), f"{counts[device]:,}", f"{sizes[device]:,}")
            for device in [*roles, *sorted(set(counts) - set(roles))]]
    return f"{title}\n{table(header, rows, numbers=range(2, len(header)))}"


def _shares(strategy: tf.distribute.Strategy) -> dict[str, str]:
    """Each tower's share of a batch, by its device; empty if the user asked for no shares."""
    extended, placement = strategy.extended, strategy.extended.placement
    if placement.shares is None:
        return {}
    parts, number = placement.micro_batches, strategy.num_replicas_in_sync
    units = extended.inputs.units or (1,) * number
    local_units = units[extended.first_replica::parts]
    return {names.short_name(tower): f"{unit * parts / sum(units):.1%}"
            for tower, unit in zip(placement.devices, local_units)}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    """A plain text table; the columns whose indices are in ``numbers`` align right."""
    columns = []
    for index, (name, *cells) in enumerate(zip(header, *rows)):
        texts = [name, *map(str, cells)]
        width, pad = max(map(len, texts)), str.rjust if index in numbers else str.ljust
        texts.insert(1, "-" * width)
        columns.append([pad(text, width) for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns))


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
