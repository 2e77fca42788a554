"""The home of each variable: the device on which its one copy lives.

Goes in: the devices that may be homes, and variables or their sizes.  Comes out: a device for each
variable; if the placement is balanced, the device that holds the fewest bytes.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

# Temporary graphs in which Keras builds models and infers shapes.
_KERAS_GRAPH = re.compile(r"(^|_)(scratch_graph|keras_graph|build_graph)(_\d+)?$")

COUNTER = 16  # the largest size of a counter in bytes: a seed has two numbers of 8 bytes
_NOT_YET = -1  # in place of a variable's stage, until it was moved to one


class Homes:
    """Chooses the device on which each variable lives.

    A fixed merge device is the home of all variables.  With ``balanced``, a new variable goes to
    the tower that holds the fewest bytes; counters and seeds, which kernels read from the host, go
    to ``merge``.  If towers have stages (``rows``: each tower's devices), a variable goes to the
    device of its stage, of any tower, that holds the fewest bytes.
    """

    def __init__(self, devices: Iterable[str], balanced: bool,
                 rows: Sequence[Sequence[str]] = (), merge: str = "") -> None:
        self._bytes = dict.fromkeys(devices, 0)
        self._balanced, self._merge = balanced, merge
        self._stages = list(zip(*rows))

    @property
    def least(self) -> str:
        """The home that holds the fewest bytes."""
        return min(self._bytes, key=self._bytes.__getitem__)

    def choose(self, size: int, stage: int | None = None, is_counter: bool = False) -> str:
        """Chooses the home of a variable of ``size`` bytes; ``stage`` is None if unknown."""
        if self._balanced and is_counter:
            return self._merge
        home = self.least if stage is None or not self._stages else min(
            self._stages[stage], key=self._bytes.__getitem__)
        self._bytes[home] += size
        return home

    def settle(self, used: Iterable[tuple[Any, int | None]]) -> None:
        """Moves variables, with their optimizer slots, to the stages that use them, largest first.

        ``used`` has pairs of a variable and its stage, or None.  A variable stays on its home if a
        traced function may have captured it, or if it was moved to this stage before.
        """
        movable = []
        for variable, stage in sorted(used, key=lambda pair: size_of(pair[0]), reverse=True):
            group = [variable, *followers_of(variable)]
            if getattr(variable, "_settled", _NOT_YET) != stage \
                    and all(getattr(member, "_home_may_change", False) for member in group):
                variable._settled = stage
                movable.append((group, sum(map(size_of, group)), stage))
                self._bytes[home_of(variable)] -= movable[-1][1]
        for group, size, stage in movable:
            home = self.choose(size, stage)
            for member in group if home != home_of(group[0]) else ():
                move(member, home)

    def spread(self, variables: Iterable[Any]) -> None:
        """With ``balanced``, chooses new homes for existing variables, the largest first."""
        if self._balanced:
            self.settle((variable, None) for variable in variables
                        if home_of(variable) in self._bytes)

    def add(self, device: str, size: int) -> None:
        """Adds ``size`` to the bytes on ``device``."""
        if device in self._bytes:
            self._bytes[device] += size


def follow(follower: Any, variable: Any) -> None:
    """Makes ``follower``, such as an optimizer's slot, move with ``variable``."""
    variable._followers = [*getattr(variable, "_followers", ()), weakref.ref(follower)]


def followers_of(variable: Any) -> list[Any]:
    """The variables that :func:`follow` made move with ``variable`` and that still exist."""
    return [follower for reference in getattr(variable, "_followers", ())
            if (follower := reference()) is not None]


def move(variable: tf.Variable, device: str) -> None:
    """Moves a resource variable to ``device``: same object, name and value.

    A ``tf.function`` traced before holds the old resource and must be traced again.
    """
    with tf.init_scope(), tf.device(device):
        # Not tf.Variable: a strategy whose scope is entered would choose another device.
        moved = _tf.ResourceVariable(variable.read_value(), trainable=False, dtype=variable.dtype,
                                     shape=variable.shape, name=variable.name.split(":")[0])
    variable._handle = moved._handle


def home_of(variable: Any) -> str:
    """The device on which ``variable`` lives; of a tensor, its device."""
    # Not ``variable.device``: it gets the handle, after which the variable may no longer move.
    return str(getattr(variable, "_handle", variable).device)


def size_of(value: Any) -> int:
    """The bytes of a tensor or variable (Keras', too); 0 if its shape or item size is unknown."""
    try:
        return (tf.TensorShape(value.shape).num_elements() or 0) * tf.as_dtype(value.dtype).size
    except TypeError:  # strings and variants have no item size
        return 0


def may_be_captured() -> bool:
    """Whether a variable that is used now may be captured by a function, not a temporary graph."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    # Graphs of branches and loops are of subclasses; the function around them decides.
    while type(graph) is not tf.__internal__.FuncGraph and hasattr(graph, "outer_graph"):
        graph = graph.outer_graph
    return _KERAS_GRAPH.search(getattr(graph, "name", "")) is None
