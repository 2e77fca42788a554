"""A replica function that is written for one device, run for the whole batch.

Goes in: what ``strategy.run`` was given by a step of Keras.  Comes out: one device's results, not
one a tower.

In a ``tf.function`` the towers do it, see :mod:`step`.  In eager code, which is for debugging, one
device does it with all rows, so that all that is printed is printed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.sharding import step


def run(strategy: Any, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What one device would return for ``fn(*args, **kwargs)`` and all rows."""
    devices = strategy.extended.worker_devices
    extended = strategy.extended
    alone = len(devices) == 1 and extended.workers is None
    if tf.executing_eagerly() or alone and not (extended.placement.rows or extended.modes.compiles):
        device = devices[0] if len(devices) == 1 else strategy.extended.merge_device
        with tf.device(device):
            args, kwargs = tf.nest.map_structure(
                lambda leaf: step.whole(strategy, leaf), (args, kwargs))
        if not tf.executing_eagerly():
            fn = _tf.autograph_convert(fn)
        with contexts.OneReplicaContext(strategy), tf.device(device):
            return fn(*args, **kwargs)
    return step.call(strategy, fn, args, kwargs)
