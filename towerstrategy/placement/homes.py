"""The home of each variable: the device on which its one copy lives.

Goes in: the devices that may be homes, and variables or their sizes.  Comes out: a device for each,
chosen by bytes where the placement is balanced.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

# Keras builds and measures models in these graphs, which it throws away.
_KERAS_GRAPH = re.compile(r"(^|_)(scratch_graph|keras_graph|build_graph)(_\d+)?$")


COUNTER = 16  # bytes: two numbers of a seed, of 8 bytes each
_NOT_YET = -1  # the stage of a variable that was not brought to one


class Homes:
    """Chooses the device on which each variable lives.

    With a fixed merge device that is the home of all.  ``balanced`` gives a new variable to the
    tower that holds the fewest bytes, and a few integers (seeds and counters, which kernels take
    from the host) to ``merge``.  Where towers have stages, given as ``rows`` of devices, it goes to
    that device of its stage, of whichever tower, that holds the fewest.
    """

    def __init__(self, devices: Iterable[str], balanced: bool,
                 rows: Sequence[Sequence[str]] = (), merge: str = "") -> None:
        self._bytes = dict.fromkeys(devices, 0)
        self._balanced, self._merge = balanced, merge
        self._stages = list(zip(*rows))

    @property
    def of_stages(self) -> bool:
        """Whether variables live with the stages that use them."""
        return bool(self._stages)

    @property
    def least(self) -> str:
        """The home that holds the fewest bytes."""
        return min(self._bytes, key=self._bytes.__getitem__)

    def choose(self, size: int, stage: int | None = None, is_counter: bool = False) -> str:
        """The home of a variable of ``size`` bytes, of a stage where that is known."""
        if self._balanced and is_counter:
            return self._merge
        home = self.least if stage is None or not self._stages else min(
            self._stages[stage], key=self._bytes.__getitem__)
        self._bytes[home] += size
        return home

    def settle(self, used: Iterable[tuple[Any, int | None]]) -> None:
        """Brings variables to the stages that use them, the largest first, slots with them.

        ``used`` are pairs of a variable and its stage, or None.  Those stay where they are that a
        traced function may have, or that have come there before.
        """
        movable = []
        for variable, stage in sorted(used, key=lambda pair: size_of(pair[0]), reverse=True):
            together = [variable, *followers_of(variable)]
            if getattr(variable, "_settled", _NOT_YET) != stage \
                    and all(getattr(part, "_home_may_change", False) for part in together):
                variable._settled = stage
                movable.append((together, sum(map(size_of, together)), stage))
                self._bytes[home_of(variable)] -= movable[-1][1]
        for together, size, stage in movable:
            home = self.choose(size, stage)
            for part in together if home != home_of(together[0]) else ():
                move(part, home)

    def spread(self, variables: Iterable[Any]) -> None:
        """Chooses anew, the largest first, for variables that were made one by one."""
        if self._balanced:
            self.settle((variable, None) for variable in variables
                        if home_of(variable) in self._bytes)

    def add(self, device: str, size: int) -> None:
        """Counts ``size`` bytes more on ``device``."""
        if device in self._bytes:
            self._bytes[device] += size


def follow(follower: Any, variable: Any) -> None:
    """Remembers that ``follower``, such as an optimizer's slot, is to live with ``variable``."""
    variable._followers = [*getattr(variable, "_followers", ()), weakref.ref(follower)]


def followers_of(variable: Any) -> list[Any]:
    """The living variables given to :func:`follow`."""
    return [follower for reference in getattr(variable, "_followers", ())
            if (follower := reference()) is not None]


def move(variable: tf.Variable, device: str) -> None:
    """Moves a resource variable to ``device``: same object, name and value.

    A ``tf.function`` traced before holds the resource that the variable had; trace it anew.
    """
    with tf.init_scope(), tf.device(device):
        # Not tf.Variable: a strategy whose scope is entered would choose another device.
        moved = _tf.ResourceVariable(variable.read_value(), trainable=False, dtype=variable.dtype,
                                     shape=variable.shape, name=variable.name.split(":")[0])
    variable._handle = moved._handle


def home_of(variable: tf.Variable) -> str:
    """The device on which ``variable`` lives."""
    # Who asks for ``variable.device`` asks for the handle, which may be captured then.
    return str(getattr(variable, "_handle", variable).device)


def size_of(value: Any) -> int:
    """Bytes of a tensor or a variable, Keras' too; 0 where its shape or item size is not known."""
    try:
        return (tf.TensorShape(value.shape).num_elements() or 0) * tf.as_dtype(value.dtype).size
    except TypeError:  # strings and variants have no item size
        return 0


def may_be_captured() -> bool:
    """Whether what is used here may be captured by a function that stays."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    # Branches and loops are graphs of subclasses, which go with the function around them.
    while type(graph) is not tf.__internal__.FuncGraph and hasattr(graph, "outer_graph"):
        graph = graph.outer_graph
    return _KERAS_GRAPH.search(getattr(graph, "name", "")) is None
