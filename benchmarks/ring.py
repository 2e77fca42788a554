"""MirroredStrategy's step: one GPU's own, whose gradients pass a ring before the update has them.

Goes in: a Keras optimizer before its step is traced; then the step's operations and a machine.
Comes out: the operations, of which those that stand for the ring occupy it, and their seconds.

A dense gradient is all-reduced as soon as it is made; the slices of a sparse one are gathered, and
each GPU updates with all GPUs' slices.  The ring takes one after another, at its full rate, without
a start.  This is the best that MirroredStrategy can do: TensorFlow starts when the last gradient is
there, takes tens of microseconds to start, and reduces metrics and batch norm's statistics as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from benchmarks import flat, links

LINK = "ring"
_SCOPE = "ring/"
_GATHERED, _REDUCED = "Tile", "Identity"


def put(optimizer: Any, devices: int) -> None:
    """From here on, gradients that ``optimizer`` applies have passed a ring of ``devices``."""
    apply = optimizer.apply

    def apply_passed(gradients: Sequence[Any], variables: Any = None) -> Any:
        with tf.name_scope(_SCOPE):
            passed = [_passed(gradient, devices) for gradient in gradients]
        return apply(passed, variables)

    optimizer.apply = apply_passed


def _passed(gradient: Any, devices: int) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.identity(gradient)
    values = tf.tile(gradient.values, [devices] + [1] * (gradient.values.shape.rank - 1))
    return tf.IndexedSlices(values, tf.tile(gradient.indices, [devices]), gradient.dense_shape)


def on_the_ring(operations: Sequence[flat.Operation]) -> list[flat.Operation]:
    """The same, but that what stands for the ring occupies it and not the GPU."""
    return [dataclasses.replace(each, link=LINK) if _stands_for_it(each) else each
            for each in operations]


def seconds(operations: Sequence[flat.Operation], machine: links.Machine,
            devices: int) -> dict[str, float]:
    """How long each of ``operations`` holds the ring, by name."""
    return {each.name: machine.ring(_reduced_bytes(each), devices)
            for each in operations if each.link == LINK}


def _stands_for_it(operation: flat.Operation) -> bool:
    return operation.traced_as.startswith(_SCOPE) and operation.type in (_GATHERED, _REDUCED)


def _reduced_bytes(operation: flat.Operation) -> float:
    """Bytes whose all-reduce takes as long: of R GPUs' slices R-1 pass each link, once."""
    size, = operation.sizes
    return size / 2 if operation.type == _GATHERED else size
