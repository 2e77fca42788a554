"""Estimates the memory of a training on each device, before it begins.

Goes in: a compiled model and a number of towers.  Comes out: the bytes on each device, for one
device, ``MirroredStrategy``, and each merge device.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

from towerstrategy import _keras
from towerstrategy.extras.report import description
from towerstrategy.placement import homes as homes_lib, names


class Memory(NamedTuple):
    """The bytes on one device, or on each of several equal devices.

    Attributes:
      way: ``"one device"``, ``"MirroredStrategy"``, ``"one memory"`` (towers that are logical CPU
        devices), or the merge device: ``"cpu"``, ``"GPU:0"`` (a tower), ``"balanced"``.
      device: which device.
      weights: the weights on it, trained or not.
      slots: the optimizer's variables on it.
      step: the tensors of a step on it: gradients of weights, their sums, tensors that an update
        makes for an embedding's table, and weights read from another device.  It is an upper
        bound: most are freed before the last are made.
    """

    way: str
    device: str
    weights: int
    slots: int
    step: int

    @property
    def total(self) -> int:
        """The sum of weights, slots and step."""
        return self.weights + self.slots + self.step


class Estimate(list[Memory]):
    """A list of :class:`Memory`; ``str`` makes a table of it."""

    def __str__(self) -> str:
        cells = [(line.way, line.device,
                  *(f"{size / 2**20:,.1f}" for size in (*line[2:], line.total))) for line in self]
        return description.table(("merge device", "device", "weights, MiB", "slots", "in a step",
                                  "together"), cells, numbers=range(2, 6))


def estimate_memory(model: Any, towers: int = 2) -> Estimate:
    """Estimates the memory of weights, optimizer and gradients on each device.

    Activations are not included: each tower has those of its rows, one device those of all rows.
    Nor are the rows that a batch looks up in embedding tables, and their gradients.  In a step, an
    optimizer with slots makes two tensors of a table's size, on the table's device.  The model must
    be built, so its weights take memory in this process.  Stages and micro-batches do not count.

    Args:
      model: a Keras or tf_keras model, built and compiled, with any strategy or none.
      towers: the number of towers.

    Returns:
      A list of :class:`Memory`, in bytes; printed, it is a table in MiB.

    Raises:
      TypeError: ``model`` is no Keras model, or ``towers`` no whole number.
      ValueError: the model is not built or not compiled, or there is less than one tower.

    >>> model = tf.keras.Sequential([tf.keras.Input([999]), tf.keras.layers.Dense(1000)])
    >>> model.compile("adam", "mse")
    >>> print(estimate_memory(model, towers=4))
    merge device      device             weights, MiB  slots  in a step  together
    ----------------  -----------------  ------------  -----  ---------  --------
    one device        the device                  3.8    7.6        3.8      15.3
    MirroredStrategy  each device                 3.8    7.6        7.6      19.1
    cpu               CPU                         3.8    7.6       19.1      30.5
    cpu               each tower                  0.0    0.0        7.6       7.6
    GPU:0             GPU:0                       3.8    7.6       19.1      30.5
    GPU:0             each other tower            0.0    0.0        7.6       7.6
    balanced          the fullest tower           3.8    7.6       19.1      30.5
    one memory        the CPU                     3.8    7.6       19.1      30.5
    """
    count = names.count("towers", towers, sys.maxsize, "how many there are to be")
    slots = sum(map(homes_lib.size_of, _keras.optimizer_slots(model)))
    if not model.weights:
        raise ValueError(f"model {model.name!r} has no weights yet, so nothing is known of it: "
                         "build it, or call it with a batch, first.")
    weights = sum(map(homes_lib.size_of, model.weights))
    # The rows of a table are looked up on the table's device, so towers do not read the table.
    tables = sum(map(homes_lib.size_of, _keras.embedding_tables(model)))
    trained = sum(map(homes_lib.size_of, model.trainable_weights)) - tables
    # On the table's device, an update with slots makes the gradient and another tensor of the
    # table's size.  Without slots it writes only some rows, but the first write copies the table.
    update = (2 if slots > tables else 1) * tables
    homes, spread = homes_lib.Homes(map(str, range(count)), balanced=True), Counter[str]()
    for size in sorted(map(homes_lib.size_of, model.weights), reverse=True):
        spread[homes.choose(size)] += size
    share = max(spread.values()) / weights  # the fullest home's share of the weights
    merged, tower = (count + 1) * trained + update, weights - tables + trained
    lines: list[tuple[str, str, float, float, float]]
    lines = [("one device", "the device", weights, slots, trained + update),
             ("MirroredStrategy", "each device", weights, slots, 2 * trained + update)]
    if count > 1:
        lines += [("cpu", "CPU", weights, slots, merged), ("cpu", "each tower", 0, 0, tower),
                  ("GPU:0", "GPU:0", weights, slots, merged),
                  ("GPU:0", "each other tower", 0, 0, tower),
                  # Its own gradients of all weights, and all towers' gradients of its weights.
                  ("balanced", "the fullest tower", share * weights, share * slots,
                   (1 - share) * (weights - tables) + trained + share * (count * trained + update)),
                  ("one memory", "the CPU", weights, slots, merged)]
    return Estimate(Memory(way, device, *map(round, sizes)) for way, device, *sizes in lines)
