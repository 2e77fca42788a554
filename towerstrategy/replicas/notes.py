"""What an error says of where it was raised.

Goes in: a tower and the shares of its batch, or the merge device.  Comes out: a note in words.
"""

from __future__ import annotations

from towerstrategy.merge import shares as shares_lib
from towerstrategy.placement import devices as devices_lib


def of_tower(tower: int, placement: devices_lib.Placement, shares: shares_lib.Shares) -> str:
    """What an error says that was raised in a tower."""
    device = placement.towers[tower]
    rows = shares.in_words(tower)
    none = (" Some operations cannot work on no rows, TensorFlow's convolutions on the CPU among "
            "them: give each batch as many rows as there are towers.")
    return (f"This happened in {placement.name(tower)} on {devices_lib.short_name(device)}"
            + (f", which has {rows}." if rows else ".") + none * rows.startswith("none"))


def of_merge(device: str) -> str:
    """What an error says that was raised in the function given to ``merge_call``."""
    return ("This happened at the sync point (merge_call), on the merge device "
            f"{devices_lib.short_name(device)}.")
