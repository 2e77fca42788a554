"""``tf.distribute.InputOptions``, read for the towers.

Goes in: the options that a dataset is distributed with, or None.  Comes out: whether each tower has
a pipeline of its own, where its parts are fetched to, and how many elements are held ready.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from towerstrategy import arguments
from towerstrategy.batch import datasets, prefetching


def read(options: Any, extended: Any) -> tuple[bool, prefetching.Fetch, int]:
    """Whether each tower has a pipeline, where parts are fetched to, elements held ready.

    Args:
      options: a ``tf.distribute.InputOptions`` or None.
      extended: ``strategy.extended``, which knows the towers' devices and the CPU that feeds them.

    Raises:
      TypeError: ``options`` is something else.
    """
    towers = extended.worker_devices
    on_host = extended.placement.towers_on_host
    fetch = prefetching.Fetch(() if on_host else towers, extended.host_device)
    if options is None:
        return False, fetch, datasets.READY
    if not isinstance(options, tf.distribute.InputOptions):
        raise TypeError("options must be None or a tf.distribute.InputOptions, but got "
                        f"{options!r} of type {type(options).__name__}.")
    arguments.check_input_options(options)
    ready = options.experimental_per_replica_buffer_size
    devices = towers if options.experimental_fetch_to_device else ()
    mode = options.experimental_replication_mode
    return (mode == tf.distribute.InputReplicationMode.PER_REPLICA,
            fetch._replace(devices=devices, ready=ready), max(datasets.READY, ready))
