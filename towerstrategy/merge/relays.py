"""Large variables on their way in pieces, which the towers hand on to each other.

Goes in: a large value at a variable's home, or one gradient a tower.  Comes out: the same value on
every tower, or the gradients' sum at the home, to the bit what they would be without.

There is one copy of a variable, so what all towers read leaves one device, and what they bring
comes to it: R-1 times the variable's bytes each way over one link, while the others idle.  Many
variables spread over the towers balance that; a few large ones, or all of them on one tower, do
not.  In pieces, one for each tower but the home, a value leaves its home once; each tower hands its
piece on to the others (a scatter and an all-gather).  Gradients go the same way back: each tower
sums one piece of all towers' gradients and sends the sum home (a reduce-scatter and a gather).  No
link carries more than the variable, each way.

So this is for towers with links of their own, GPUs (:attr:`devices.Placement.relays`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# Bytes. Of R towers, pieces take R transfers in place of R-1.
LEAST = 2**22


def chosen(homes: Sequence[str], sizes: Sequence[int], towers: Sequence[str]) -> list[bool]:
    """Which variables are to go in pieces: the large ones of homes that would send more than all.

    Args:
      homes: for each variable the device on which it lives.
      sizes: for each variable its bytes.
      towers: the devices that hand pieces on to each other; empty where they do not.
    """
    loads: dict[str, int] = collections.defaultdict(int)
    for home, size in zip(homes, sizes):
        loads[home] += size * (len(towers) - (home in towers))
    return [size >= LEAST and loads[home] > sum(sizes) and len(_others(home, towers)) > 1
            for home, size in zip(homes, sizes)]


def spread(value: tf.Tensor, home: str, towers: Sequence[str]) -> dict[str, tf.Tensor]:
    """``value``, which is at ``home``, on every tower's device."""
    others = _others(home, towers)
    with tf.device(home):
        pieces = _split(value, len(others))
    held = []
    for piece, tower in zip(pieces, others):
        with tf.device(tower):
            held.append(tf.identity(piece))
    found = {home: value}
    for tower in others:
        with tf.device(tower):
            found[tower] = tf.reshape(tf.concat(held, 0), value.shape)
    return found


def total(values: Sequence[tf.Tensor], towers: Sequence[str], home: str,
          add: Callable[[list[Any]], tf.Tensor]) -> tf.Tensor:
    """The sum of ``values`` at ``home``.

    Args:
      values: one a tower, of one static shape.
      towers: their devices.
      home: where the sum is to be.
      add: sums pieces, one of each value, on the current device.
    """
    others, parts = _others(home, towers), []
    for value, device in zip(values, towers):
        with tf.device(device):
            parts.append(_split(value, len(others)))
    sums = []
    for pieces, tower in zip(zip(*parts), others):
        with tf.device(tower):
            sums.append(add(list(pieces)))
    with tf.device(home):
        return tf.reshape(tf.concat(sums, 0), values[0].shape)


def _others(home: str, towers: Sequence[str]) -> list[str]:
    """The towers but ``home``, those behind it first, so that homes do not all begin with one."""
    if home not in towers:
        return list(towers)
    position = list(towers).index(home)
    return [*towers[position + 1:], *towers[:position]]


def _split(value: tf.Tensor, count: int) -> list[tf.Tensor]:
    """``value`` in ``count`` pieces as equal as can be; along its first dimension none is copied.
    """
    flat = tf.reshape(value, [-1])
    size, rest = divmod(flat.shape[0], count)
    if not rest:
        return list(tf.split(flat, count))
    return list(tf.split(flat, [size + (number < rest) for number in range(count)]))
