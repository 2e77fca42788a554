"""``tf.distribute.InputOptions``, read for the towers.

Goes in: the options that a dataset is distributed with, or None.  Comes out: whether each tower has
a pipeline of its own, where its parts are fetched to, and how many elements are held ready.
"""

from __future__ import annotations

import numbers
from typing import Any

import tensorflow as tf

from towerstrategy import refused
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
    refused.check_type("options", options, tf.distribute.InputOptions,
                       "None or a tf.distribute.InputOptions")
    _check(options)
    ready = options.experimental_per_replica_buffer_size
    devices = towers if options.experimental_fetch_to_device else ()
    mode = options.experimental_replication_mode
    return (mode == tf.distribute.InputReplicationMode.PER_REPLICA,
            fetch._replace(devices=devices, ready=ready), max(datasets.READY, ready))


def _check(options: tf.distribute.InputOptions) -> None:
    """TensorFlow takes anything as the fields of ``InputOptions``."""
    mode = options.experimental_replication_mode
    refused.check_type(
        "InputOptions: experimental_replication_mode", mode, tf.distribute.InputReplicationMode,
        "a tf.distribute.InputReplicationMode (PER_WORKER or PER_REPLICA)")
    size = options.experimental_per_replica_buffer_size
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise refused.wrong_type("InputOptions: experimental_per_replica_buffer_size", size,
                                 "a whole number")
    if size < 0:
        raise ValueError("InputOptions: experimental_per_replica_buffer_size must be at least 0, "
                         f"but got {size}.")
    if options.experimental_place_dataset_on_device:
        if mode != tf.distribute.InputReplicationMode.PER_REPLICA:
            raise ValueError(
                "InputOptions: experimental_place_dataset_on_device=True needs "
                "experimental_replication_mode=PER_REPLICA, a dataset for each tower, but got "
                f"{mode}.")
        if options.experimental_fetch_to_device:
            raise ValueError(
                "InputOptions: experimental_place_dataset_on_device=True needs "
                "experimental_fetch_to_device=False, but got True, which is the default: what is "
                "on the device already is not fetched to it.")
