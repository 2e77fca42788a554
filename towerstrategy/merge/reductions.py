"""``strategy.reduce``, ``gather``, ``extended.update``: merging values outside of towers.

Goes in: per-replica values, and destinations.  Comes out: one value, merged over the towers of all
machines, on each destination's device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import merging
from towerstrategy.placement import homes as homes_lib


def the_one(number: int, structured: Any) -> Any:
    """Arguments of an update of a variable with one copy; raises for per-replica values."""
    for leaf in tf.nest.flatten(structured):
        if isinstance(leaf, _tf.PerReplica):
            raise ValueError(
                "an update of a variable that has one copy got a value that differs between the "
                f"towers: {leaf!r}. Reduce it first, with strategy.extended.reduce_to.")
    return _tf.select_replica(number, structured)


def _parts(value: Any, reduce_op: Any) -> list[Any] | None:
    """The towers' values if ``value`` is per-replica, else None.

    Raises:
      ValueError: for a mirrored value, which is the same on all towers, unless the op is a mean.
    """
    if isinstance(value, _tf.SyncOnReadVariable):
        return [part.value() for part in value._values]
    if isinstance(value, _tf.Mirrored):
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            return None
        raise ValueError(f"A mirrored value {value} cannot be reduced with the given reduce op "
                         f"{reduce_op}.")
    is_per_replica = isinstance(value, tf.distribute.DistributedValues)
    return merging.numbers(value.values) if is_per_replica else None


def reduce_one(reduce_op: Any, value: Any, destinations: Any, count: int) -> Any:
    """Reduces ``value`` over the towers of a single machine; ``count``: the number of towers."""
    parts = _parts(value, reduce_op)
    if parts is not None:
        number = len(parts) if reduce_op == tf.distribute.ReduceOp.MEAN else None
        return onto(destinations, lambda: merging.divided(merging.total(parts), number))
    if tf.nest.is_nested(value) and not isinstance(value, tf.IndexedSlices):
        return tf.nest.map_structure(
            lambda part: reduce_one(reduce_op, part, destinations, count), value)
    if reduce_op == tf.distribute.ReduceOp.MEAN or count == 1:
        return value
    if isinstance(value, (int, float, np.ndarray)) and np.all(value == 0):
        return value
    raise ValueError(f"A non-DistributedValues value {value} cannot be reduced with the given "
                     f"reduce op {reduce_op}.")


def reduce_across(workers: Any, reduce_op: Any, pairs: Any) -> list[Any]:
    """Reduces over all machines: first on each machine, then all values by one collective."""
    leaves = [(leaf, _parts(leaf, reduce_op))
              for value, _ in pairs for leaf in tf.nest.flatten(value)]
    # Each machine has one value that is not per-replica, as in MultiWorkerMirroredStrategy.
    totals = workers.sum([
        None if isinstance(leaf, _tf.Mirrored) else leaf if parts is None else merging.total(parts)
        for leaf, parts in leaves])

    def reduced() -> Iterator[Any]:
        for total, (leaf, parts) in zip(totals, leaves):
            number = None if reduce_op == tf.distribute.ReduceOp.SUM else (
                workers.count if parts is None else workers.replicas)
            yield tf.nest.map_structure(
                tf.identity, leaf if total is None else merging.divided(total, number))

    results = reduced()
    return [onto(destinations, functools.partial(
        tf.nest.map_structure, lambda _: next(results), value)) for value, destinations in pairs]


def gather(value: Any, destinations: Any, axis: int, workers: Any) -> Any:
    """The values of all towers concatenated along ``axis``."""
    is_per_replica = isinstance(value, tf.distribute.DistributedValues)
    if workers is None and not is_per_replica:
        return value

    def gathered() -> Any:
        here = merging.concat(value.values, axis) if is_per_replica else value
        return here if workers is None else workers.gather(here, axis)

    return onto(destinations, gathered)


def onto(destinations: Any, make: Callable[[], Any]) -> Any:
    """The result of ``make()``; mirrored if ``destinations`` has several devices."""
    devices = _devices_of(destinations)
    with tf.device(devices[0]):
        result = make()
    if len(devices) == 1:
        return result
    copies = [result]
    for device in devices[1:]:
        with tf.device(device):
            copies.append(tf.nest.map_structure(tf.identity, result, expand_composites=True))
    return _tf.Mirrored(copies)


def _devices_of(destinations: Any) -> list[str]:
    if isinstance(destinations, str):
        return [destinations]
    if isinstance(destinations, tuple) and all(isinstance(item, str) for item in destinations):
        return list(destinations)
    if isinstance(destinations, tf.distribute.DistributedValues):
        return [value.device for value in destinations.values]
    return [homes_lib.home_of(destinations)]
