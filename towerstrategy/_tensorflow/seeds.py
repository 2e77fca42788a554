"""Seeds of random operations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import random_seed

from towerstrategy._tensorflow import wrapping

KEYS = wrapping.Place(
    [tf.random.Generator], "_preprocess_key",
    "folds the number of the only replica into keys: a step that has all rows would draw other "
    "numbers than one device")
# An odd number, so that no two towers get the same multiple of it modulo 2**31.
SEED_STEP = 0x1E3779B1
global_seed = eager_context.global_seed  # of tf.random.set_seed; None where it was not called


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


@contextlib.contextmanager
def operation_seeds_of_caller() -> Iterator[None]:
    """Within, the function being traced goes on with the caller's seeds of operations without one.

    After, the caller goes on with the function's, as if its operations had been the caller's.
    """
    # By graph, how many operations have been given a seed: the next one's.
    given, graph = random_seed._graph_to_seed_dict, tf.compat.v1.get_default_graph()
    given[graph] = given.get(graph.outer_graph, 0)
    yield
    given[graph.outer_graph] = given[graph]

