"""A strategy's base classes, and the contexts in which TensorFlow looks for one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import collective_util, distribute_lib

# Has read_var, update_non_slot and call_for_each_replica, as MirroredStrategy has;
# tf.distribute.StrategyExtended (V2) lacks them.
StrategyExtended = distribute_lib.StrategyExtendedV1
# By which TensorFlow's variables know that StrategyExtended.update runs.
UpdateContext = distribute_lib.UpdateContext
# The class of tf.distribute.experimental.CommunicationOptions, a function.
Options = collective_util.Options


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
