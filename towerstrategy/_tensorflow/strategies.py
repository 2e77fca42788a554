"""What a strategy is made of, and the contexts in which TensorFlow looks for one.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_util,
    distribute_lib,
    input_lib,
)

PRIVATE_NAMES = {
    "tensorflow.python.distribute.input_lib:MultiStepContext":
        "what extended.experimental_run_steps_on_iterator gives its function",
    "tensorflow.python.distribute.collective_util:Options":
        "tf.distribute.experimental.CommunicationOptions, whose public name is an alias",
    "tensorflow.python.distribute.distribute_lib:UpdateContext":
        "tells TensorFlow's variables that StrategyExtended.update runs; no public counterpart",
    "tensorflow.python.distribute.distribute_lib:_CrossReplicaThreadMode":
        "the cross-replica context that merge_call enters; only scope() is public",
    "tensorflow.python.distribute.distribute_lib:_get_default_replica_mode":
        "the context of a program without a strategy, which is entered again",
    "tensorflow.python.distribute.distribute_lib:_push_per_thread_mode":
        "enters that context on the current graph",
    "tensorflow.python.distribute.distribute_lib:_pop_per_thread_mode": "leaves it",
    "tensorflow.python.distribute.distribute_lib:StrategyExtendedV1":
        "has read_var, update_non_slot and call_for_each_replica; tf.distribute.StrategyExtended "
        "(V2) lacks them although MirroredStrategy offers them",
    "tensorflow.python.eager.context:context": "per-thread eager state handed to tower threads",
}

StrategyExtended = distribute_lib.StrategyExtendedV1
UpdateContext = distribute_lib.UpdateContext
Options = collective_util.Options
MultiStepContext = input_lib.MultiStepContext


@contextlib.contextmanager
def cross_replica_context(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Enters the cross-replica context of ``strategy`` on the current graph and thread."""
    distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(strategy))
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def no_strategy() -> Iterator[None]:
    """Leaves all strategies' contexts, on the current graph and thread."""
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
