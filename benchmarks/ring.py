"""A model of MirroredStrategy's step: the step of one GPU, with a ring all-reduce of gradients.

Goes in: a Keras optimizer, before its step is traced; then the operations of the step and a
machine.  Comes out: the operations, with those that stand for collectives on the link ``ring``, and
the seconds of these.

A dense gradient is all-reduced as soon as it is computed.  The slices of a sparse gradient are
gathered, and each GPU updates with the slices of all GPUs.  The ring runs one collective at a time,
at its full bandwidth and without latency.  This is a lower bound for MirroredStrategy: TensorFlow
starts after the last gradient, needs tens of microseconds to start, and reduces metrics and the
statistics of batch norm, too.
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


def add_collectives(optimizer: Any, devices: int) -> None:
    """Makes ``optimizer`` apply gradients that have passed a collective of ``devices`` GPUs."""
    apply = optimizer.apply

    def apply_reduced(gradients: Sequence[Any], variables: Any = None) -> Any:
        with tf.name_scope(_SCOPE):
            reduced = [_reduced(gradient, devices) for gradient in gradients]
        return apply(reduced, variables)

    optimizer.apply = apply_reduced


def _reduced(gradient: Any, devices: int) -> Any:
    """The gradient behind an operation that stands for its all-reduce or all-gather."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.identity(gradient)
    values = tf.tile(gradient.values, [devices] + [1] * (gradient.values.shape.rank - 1))
    return tf.IndexedSlices(values, tf.tile(gradient.indices, [devices]), gradient.dense_shape)


def with_links(operations: Sequence[flat.Operation]) -> list[flat.Operation]:
    """``operations``, in which those that stand for collectives occupy the ring, not the GPU."""
    return [dataclasses.replace(each, link=LINK) if _is_collective(each) else each
            for each in operations]


def seconds(operations: Sequence[flat.Operation], machine: links.Machine,
            devices: int) -> dict[str, float]:
    """The time of each collective among ``operations`` on the ring, by name."""
    return {each.name: machine.all_reduce_seconds(_all_reduce_bytes(each), devices)
            for each in operations if each.link == LINK}


def _is_collective(operation: flat.Operation) -> bool:
    return operation.traced_name.startswith(_SCOPE) and operation.type in (_GATHERED, _REDUCED)


def _all_reduce_bytes(operation: flat.Operation) -> float:
    """The bytes whose all-reduce takes as long as the collective.

    Slices pass each link once in an all-gather, twice in an all-reduce.
    """
    size, = operation.sizes
    return size / 2 if operation.type == _GATHERED else size
