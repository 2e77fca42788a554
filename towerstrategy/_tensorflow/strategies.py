"""A strategy's base classes, contexts, threads and seeds; helpers that ask for the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_util, distribute_lib, mirrored_run
from tensorflow.python.eager import context as eager_context
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import nn_impl_distribute

from towerstrategy._tensorflow import wrapping

# Has read_var, update_non_slot and call_for_each_replica, as MirroredStrategy has;
# tf.distribute.StrategyExtended (V2) lacks them.
StrategyExtended = distribute_lib.StrategyExtendedV1
# By which TensorFlow's variables know that StrategyExtended.update runs.
UpdateContext = distribute_lib.UpdateContext
# The class of tf.distribute.experimental.CommunicationOptions, a function.
Options = collective_util.Options
# Takes over the default graph, eager mode, variable creators, the summary writer and op callbacks
# from the thread that makes it; runs ``main_fn`` when ``should_run`` is set for the first time.
ReplicaThread = mirrored_run._MirroredReplicaThread

_LOSSES = (nn_impl_distribute, tf.nn, tf.compat.v1.nn, tf.compat.v2.nn)
AVERAGE = wrapping.Place(
    _LOSSES, "compute_average_loss", "takes all replicas to have as many rows")
REGULARIZATION = wrapping.Place(
    _LOSSES, "scale_regularization_loss", "counts a replica without rows")
KEYS = wrapping.Place(
    [tf.random.Generator], "_preprocess_key",
    "folds the number of the only replica into keys: a step that has all rows would draw other "
    "numbers than one device")
# An odd number, so that no two towers get the same multiple of it modulo 2**31.
SEED_STEP = 0x1E3779B1
global_seed = eager_context.global_seed  # of tf.random.set_seed; None where it was not called


def eager_if(eager: bool) -> contextlib.AbstractContextManager[None]:
    """Eager mode where ``eager``, nothing otherwise (``tf.init_scope`` inside a tower)."""
    return eager_context.eager_mode() if eager else contextlib.nullcontext()


def cross_replica_context(
        strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[None]:
    """Enters the cross-replica context of ``strategy`` on the current graph and thread."""
    return _entered(distribute_lib._CrossReplicaThreadMode(strategy))


def no_strategy() -> contextlib.AbstractContextManager[None]:
    """Leaves all strategies' contexts, on the current graph and thread."""
    return _entered(distribute_lib._get_default_replica_mode())


@contextlib.contextmanager
def _entered(mode: Any) -> Iterator[None]:
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


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
