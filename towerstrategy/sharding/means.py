"""The mean of what each tower has made of its rows, in which a tower counts by its rows.

Goes in: one value a tower, and a spec :data:`spec.MEAN`.  Comes out: parts that add up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from towerstrategy.sharding.builder import Ref


def parts(towers: Any, values: Sequence[Ref]) -> list[Ref]:
    """Each tower's value by its share of the rows; 0 of one without rows, were it no number."""
    build = towers.builder
    dtype = values[0].dtype
    shares = [towers.once(("share", tower, dtype), lambda tower=tower: build.make(
        "DivNoNan", [towers.count(tower, dtype), towers.total(dtype)], towers.host))
        for tower in range(len(values))]
    return [build.make("MulNoNan", [value, share], device, f"{scope}MulNoNan") for value, share,
            device, scope in zip(values, shares, towers.devices, towers.scopes)]
