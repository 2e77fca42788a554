"""What a training holds on each device, before it is begun.

Goes in: a compiled model and a number of towers.  Comes out: bytes by device for each merge device,
one device and ``MirroredStrategy``.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any, NamedTuple

from towerstrategy import _keras
from towerstrategy.extras.report import description
from towerstrategy.placement import homes as homes_lib, names


class Memory(NamedTuple):
    """What one device, or each of several that are alike, holds, in bytes.

    Attributes:
      way: ``"one device"``, ``"MirroredStrategy"``, ``"one memory"`` (towers that are logical CPU
        devices), or the merge device: ``"cpu"``, ``"GPU:0"`` (a tower), ``"balanced"``.
      device: which.
      weights: trained or not, that live there.
      slots: what the optimizer keeps there.
      step: what a step has there at most: gradients of weights, their sums, what an update makes
        of an embedding's table, and weights that were read from another device.  Most are gone
        before the last are made.
    """

    way: str
    device: str
    weights: int
    slots: int
    step: int

    @property
    def total(self) -> int:
        """All of these."""
        return self.weights + self.slots + self.step


class Estimate(list[Memory]):
    """The lines; ``str`` makes a table of them."""

    def __str__(self) -> str:
        cells = [(line.way, line.device,
                  *(f"{size / 2**20:,.1f}" for size in (*line[2:], line.total))) for line in self]
        return description.table(("merge device", "device", "weights, MiB", "slots", "in a step",
                                  "together"), cells, numbers=range(2, 6))


def estimate_memory(model: Any, towers: int = 2) -> Estimate:
    """How much memory weights, optimizer and gradients take on each device.

    Activations come on top, on each tower those of its rows; one device has those of all rows.  So
    do the rows that a batch looks up in embedding tables, and their gradients.  An optimizer with
    slots makes two of a table's size in a step, where the table is.  The model is to be built, so
    its weights are held where this runs.  Stages and micro-batches are not looked at.

    Args:
      model: a Keras or tf_keras model, built and compiled, with any strategy or none.
      towers: how many there are to be.

    Returns:
      A list of :class:`Memory`, bytes; printed, it is a table in MiB.

    Raises:
      TypeError: ``model`` is no Keras model, ``towers`` no whole number.
      ValueError: the model is not built or not compiled; less than one tower.

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
    # Rows of tables are looked up where these are.
    tables = sum(map(homes_lib.size_of, _keras.embedding_tables(model)))
    trained = sum(map(homes_lib.size_of, model.trainable_weights)) - tables
    # Where a table is: an update goes over all of it, with its gradient and another made whole.
    # Without slots rows alone are written, and the first write copies the table.
    whole = (2 if slots > tables else 1) * tables
    homes, spread = homes_lib.Homes(map(str, range(count)), balanced=True), Counter[str]()
    for size in sorted(map(homes_lib.size_of, model.weights), reverse=True):
        spread[homes.choose(size)] += size
    home = max(spread.values()) / weights  # what the fullest home has of the weights
    merged, tower = (count + 1) * trained + whole, weights - tables + trained
    found: list[tuple[str, str, float, float, float]]
    found = [("one device", "the device", weights, slots, trained + whole),
             ("MirroredStrategy", "each device", weights, slots, 2 * trained + whole)]
    if count > 1:
        found += [("cpu", "CPU", weights, slots, merged), ("cpu", "each tower", 0, 0, tower),
                  ("GPU:0", "GPU:0", weights, slots, merged),
                  ("GPU:0", "each other tower", 0, 0, tower),
                  # All gradients of its rows, and all towers' gradients of what lives there.
                  ("balanced", "the fullest tower", home * weights, home * slots,
                   (1 - home) * (weights - tables) + trained + home * (count * trained + whole)),
                  ("one memory", "the CPU", weights, slots, merged)]
    return Estimate(Memory(way, device, *map(round, sizes)) for way, device, *sizes in found)
