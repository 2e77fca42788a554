"""In which stage of which tower an operation ran, as a profile names it.

Goes in: traced steps, and names of operations.  Comes out: a tower and a stage for each name.
"""

from __future__ import annotations

import re

import tensorflow as tf

from towerstrategy.placement import devices as devices_lib, scopes

# From the scope on that is the same in a traced graph and in a profile of it.
_OWN = re.compile(rf"(?:^|/)((?:tower_(\d+)_[A-Z]+_\d+|{scopes.ONCE})/.+)")


class Places:
    """In which stage of which tower an operation ran, by the name that a profile has of it.

    Most names tell it by their scope.  Where others are is noted when a step has been traced.

    Args:
      placement: where the strategy runs.

    Attributes:
      kinds: by tower and stage, the kind of the device; empty where a tower is one device.
    """

    def __init__(self, placement: devices_lib.Placement) -> None:
        self._micro_batches = placement.micro_batches
        self.kinds = tuple(tuple(str(tf.DeviceSpec.from_string(device).device_type)
                                 for device in row) for row in placement.rows)
        self._at = {device: (tower, stage) for tower, row in enumerate(placement.rows)
                    for stage, device in enumerate(row)}
        self._noted: dict[str, tuple[int, int]] = {}

    def note(self, graph: tf.Graph) -> None:
        """A step has been traced in ``graph``, and each operation has its device."""
        for operation in graph.get_operations() if self._at else ():
            own = _OWN.search(operation.name)
            if own is not None and operation.device in self._at and _stage_in(own) is None:
                self._noted[own[1]] = self._at[operation.device]

    def of(self, name: str) -> tuple[int, int] | None:
        """The tower and the stage of the operation ``name``; None where they are not known."""
        own = _OWN.search(name)
        if own is None:
            return None
        stage = _stage_in(own)
        if stage is not None:
            return int(own[2]) // self._micro_batches, stage
        name = own[1]
        while name:  # of what is inside of a branch or a loop that is known itself
            if name in self._noted:
                return self._noted[name]
            name = name.rpartition("/")[0]
        return None


def _stage_in(own: re.Match[str]) -> int | None:
    """The stage that the name of a tower's operation tells."""
    return None if own[2] is None else scopes.stage_in(own[1])
