"""A tower's loss: a mean over its rows or a part of the batch's, found out and scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towerstrategy.losses.whole_batch import WholeBatch as WholeBatch

__all__ = ["WholeBatch"]


def __getattr__(name: str) -> Any:
    """WholeBatch, which stands on rooms that stand on rooms of this floor."""
    if name != "WholeBatch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from towerstrategy.losses import whole_batch

    return whole_batch.WholeBatch
