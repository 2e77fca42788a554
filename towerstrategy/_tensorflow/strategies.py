"""A strategy's base classes, contexts, threads and seeds; loss helpers that use the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.distribute import collective_util, distribute_lib, input_lib, mirrored_run
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops import nn_impl_distribute

from towerstrategy._tensorflow import wrapping

# Has read_var, update_non_slot and call_for_each_replica, as MirroredStrategy's has;
# tf.distribute.StrategyExtended (V2) lacks them.
StrategyExtended = distribute_lib.StrategyExtendedV1
# Tells TensorFlow's variables that StrategyExtended.update runs.
UpdateContext = distribute_lib.UpdateContext
# The class of the values that tf.distribute.experimental.CommunicationOptions, a function, returns.
Options = collective_util.Options
# Inherits the default graph, eager mode, variable creators, the summary writer and op callbacks of
# the thread that makes it; runs ``main_fn`` when ``should_run`` is first set.
ReplicaThread = mirrored_run._MirroredReplicaThread
# Folds a function over an iterator's elements, in a loop in the caller's graph, so that its body
# may run on the towers' devices; a loop of tf.data's would be in the input pipeline.
fold = input_lib._IterableInput.reduce

_LOSSES = (nn_impl_distribute, tf.nn, tf.compat.v1.nn, tf.compat.v2.nn)
AVERAGE = wrapping.Place(
    _LOSSES, "compute_average_loss", "assumes that all replicas have equally many rows")
REGULARIZATION = wrapping.Place(
    _LOSSES, "scale_regularization_loss", "counts a replica without rows")
KEYS = wrapping.Place(
    [tf.random.Generator], "_preprocess_key",
    "mixes the replica id into keys: a step with all rows would draw other numbers than one device")
# Odd, so that no two towers' multiples of it are equal modulo 2**31.
SEED_STEP = 0x1E3779B1
global_seed = eager_context.global_seed  # the seed of tf.random.set_seed; None if never called


def eager_if(eager: bool) -> contextlib.AbstractContextManager[None]:
    """A context with eager mode if ``eager``, as of ``tf.init_scope`` in a tower's thread."""
    return eager_context.eager_mode() if eager else contextlib.nullcontext()


@contextlib.contextmanager
def cross_replica_context(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """The cross-replica context of ``strategy``, for the current graph and thread."""
    distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(strategy))
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def graph_seeded(tower: int) -> Iterator[None]:
    """A context in which stateful random ops get a seed of ``tower``'s own, if a seed is set."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is None or graph.seed is None or tower == 0:
        yield
        return
    seed, graph.seed = graph.seed, (graph.seed + tower * SEED_STEP) % 2**31
    try:
        yield
    finally:
        graph.seed = seed
