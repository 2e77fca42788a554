"""The argument ``shares``: how each batch's rows are divided over the towers.

Goes in: ``shares`` as given to ``TowerStrategy``, and the towers' devices.  Comes out: one valid
number per replica.  Only their proportions over the towers of all machines matter.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf, refused
from towerstrategy.placement import names

MEASURED = "measured"
MEMORY = "memory"

_CHOICES = f'None, a list of a number for each device, "{MEASURED}" or "{MEMORY}"'


def checked(shares: Any, towers: Sequence[str],
            micro_batches: int = 1) -> tuple[float, ...] | None:
    """The initial shares of the replicas of ``towers``; None if ``shares`` is None.

    A tower's micro-batches, each of which is a replica, have equal shares.
    """
    if shares is None:
        return None
    if isinstance(shares, str):
        if shares not in (MEASURED, MEMORY):
            raise ValueError(f"shares must be {_CHOICES}, but got {shares!r}.")
        if shares == MEASURED and micro_batches > 1:
            raise ValueError(f'shares="{MEASURED}" does not go with micro_batches={micro_batches}, '
                             "as the parts of a tower have no times of their own. Give a list of a "
                             "number for each device.")
        each = (1.,) * len(towers) if shares == MEASURED else _memory(towers)
    else:
        each = _numbers(shares, towers)
    return tuple(share for share in each for _ in range(micro_batches))


def _numbers(shares: Any, towers: Sequence[str]) -> tuple[float, ...]:
    if isinstance(shares, (np.ndarray, tf.Tensor)):
        shares = np.asarray(shares).tolist()
    refused.check_type("shares", shares, (list, tuple), _CHOICES)
    if len(shares) != len(towers):
        raise ValueError(f"shares must have a number for each of the {len(towers)} towers, but "
                         f"got {len(shares)}: {refused.shown(shares)}. The towers: "
                         f"{names.short_names(towers)}.")
    for share, tower in zip(shares, towers):
        where = f"for {names.short_name(tower)} in {refused.shown(shares)}"
        is_number = isinstance(share, numbers.Real) and not isinstance(share, bool)
        if not is_number:
            raise TypeError(f"shares must be numbers, but got {share!r} of type "
                            f"{type(share).__name__} {where}.")
        if not sys.float_info.min <= share <= sys.float_info.max:  # fractions, too
            raise ValueError(f"shares must be above 0 and finite, but got {share!r} {where}. A "
                             "device that is to get no rows belongs into no strategy: leave it "
                             "out.")
    return tuple(map(float, shares))


def _memory(towers: Sequence[str]) -> tuple[float, ...]:
    limits = _tf.memory_limits() if {*map(names.kind_of, towers)} == {"GPU"} else {}
    known = [limits.get(tf.DeviceSpec.from_string(tower).device_index) for tower in towers]
    if not all(known):
        raise ValueError(f'shares="{MEMORY}" needs to know the memory of each tower, which '
                         "TensorFlow tells of GPUs alone, but the towers are "
                         f"{names.short_names(towers)}. Give a list of numbers.")
    return tuple(float(limit) for limit in known if limit)
