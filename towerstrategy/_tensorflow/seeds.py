"""Seeds of random operations.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context as eager_context

PRIVATE_NAMES = {
    "tensorflow.python.eager.context:global_seed": "what tf.random.set_seed set, if anything",
}

# An odd number, so that no two towers get the same multiple of it modulo 2**31.
SEED_STEP = 0x1E3779B1


def global_seed() -> int | None:
    """What ``tf.random.set_seed`` was last given; None where it was not called."""
    return eager_context.global_seed()


def graph_seed() -> int | None:
    """The seed of the graph that is being traced; None in eager code and where none is set."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph().seed


@contextlib.contextmanager
def graph_seeded(seed: int | None, tower: int) -> Iterator[None]:
    """Within, stateful random operations that are traced get a seed of ``tower``'s own."""
    if seed is None or tower == 0:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    graph.seed = (seed + tower * SEED_STEP) % 2**31
    try:
        yield
    finally:
        graph.seed = seed
