"""Checks of the arguments of a strategy's methods, before anything runs.

Goes in: the arguments of ``run``, ``function``, ``reduce``, ``gather`` and of the methods that
distribute datasets and values.  Comes out: nothing, or an error with the argument's name, the value
given and the possible values.
"""

from __future__ import annotations

import contextlib
import inspect
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts, refused
from towerstrategy.placement import names

DRAWS = ("per row", "per_row", "per tower", "per_tower")


def check_constructor(cross_device_ops: Any, communication_options: Any,
                      synchronize_batch_norm: Any, draws: Any) -> None:
    """Checks the constructor's arguments, except devices and shares (see ``placement``)."""
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError("TowerStrategy needs TensorFlow 2 behaviour, but eager execution is off "
                           "(a tf.compat.v1 graph, or tf.compat.v1.disable_eager_execution).")
    for name, value, types, expected in (
            ("cross_device_ops", cross_device_ops, (type(None), tf.distribute.CrossDeviceOps),
             "None or a tf.distribute.CrossDeviceOps"),
            ("communication_options", communication_options, (type(None), _tf.Options),
             "None or a tf.distribute.experimental.CommunicationOptions"),
            ("synchronize_batch_norm", synchronize_batch_norm, bool, "True or False"),
            ("draws", draws, str, "'per row' or 'per tower'")):
        refused.check_type(name, value, types, expected)
    if draws not in DRAWS:
        raise ValueError(f"draws must be 'per row' or 'per tower', but got {draws!r}.")


def check_run(strategy: tf.distribute.Strategy, fn: Any, args: Any, kwargs: Any,
              options: Any) -> None:
    check_function("fn", fn)
    refused.check_type("kwargs", kwargs, (type(None), dict),
                       "None or a dictionary of keyword arguments")
    refused.check_type("options", options, (type(None), tf.distribute.RunOptions),
                       "None or a tf.distribute.RunOptions")
    _check_parts(strategy, {"args": args, "kwargs": kwargs})


def check_op(reduce_op: Any) -> None:
    refused.check_type("reduce_op", reduce_op, (str, tf.distribute.ReduceOp),
                       "'SUM', 'MEAN' or a tf.distribute.ReduceOp")


@contextlib.contextmanager
def merging(strategy: tf.distribute.Strategy, value: Any, axis: Any, axes: Sequence[Any],
            expected: str) -> Iterator[None]:
    """A context for ``strategy.reduce`` and ``gather`` that adds each tower's value to errors.

    ``axes`` are the numbers in ``axis`` and must be whole; ``expected`` says so in words.
    """
    if not all(isinstance(item, numbers.Integral) and not isinstance(item, bool) for item in axes):
        raise refused.wrong_type("axis", axis, expected)
    _check_parts(strategy, {"value": value})
    try:
        yield
    except (AttributeError, TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        placement = strategy.extended.placement
        parts = [f"{path} of {placement.name(tower)} on "
                 f"{names.short_name(placement.towers[tower])} is "
                 + (f"{part.dtype.name} {part.shape}" if tf.is_tensor(part)
                    else refused.shown(part))
                 for path, leaf in _tf.flatten_with_paths({"value": value})
                 if _tf.is_per_replica(leaf)
                 for tower, part in enumerate(leaf.values)]
        if not parts:
            raise
        kind = TypeError if isinstance(error, (AttributeError, TypeError)) else ValueError
        raise kind(f"the towers' values cannot be merged with axis={axis}: {'; '.join(parts)}. "
                   f"({error})") from error


def check_outside(what: str) -> None:
    """Raises ``RuntimeError`` in a tower; ``what`` says what is done once for all towers."""
    if contexts.current_tower() is not None:
        raise RuntimeError(
            f"{what}, so it belongs outside of the function given to strategy.run: that runs once "
            "in each tower.")


def check_function(argument: str, fn: Any) -> None:
    """Raises ``TypeError`` unless ``fn`` is a function that runs when it is called."""
    if not callable(fn):
        raise refused.wrong_type(argument, fn, "a function")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(f"{argument} must be a function that runs when it is called, but {fn!r} "
                        "has a yield or is async: a call of it gives a generator or a coroutine.")


def check_one_device_each(strategy: Any) -> None:
    """Raises ``NotImplementedError`` if towers have stages, for ``strategy.function``."""
    if strategy.extended.placement.rows:
        raise NotImplementedError("strategy.function partitions a step over towers of one device "
                                  "each, not over towers of several stages. Use strategy.run.")


def check_sharded(strategy: tf.distribute.Strategy, bound: dict[str, Any]) -> None:
    """Checks the arguments, by name, of a call of a function made by ``strategy.function``."""
    leaves = tf.nest.flatten(bound)
    if not any(isinstance(leaf, (tf.distribute.DistributedValues, tf.distribute.DistributedDataset,
                                 tf.distribute.DistributedIterator)) for leaf in leaves):
        return
    _check_parts(strategy, bound)
    for path, leaf in _tf.flatten_with_paths(bound):
        if isinstance(leaf, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
            raise TypeError(
                f"{path} is a distributed {'dataset' if hasattr(leaf, '__len__') else 'iterator'}, "
                "but must be a batch: a function made by strategy.function is written for one "
                "device, which takes no part of a batch. Give it next(iterator), or each batch of "
                "a loop, in eager code or in a tf.function around it.")
        if _tf.is_per_replica(leaf) and any(tf.TensorShape(getattr(part, "shape", ())).rank == 0
                                            for part in leaf.values):
            raise ValueError(
                f"{path} has a scalar for each tower, but must have rows, or be the same for all "
                "towers. strategy.reduce makes one value of it.")


def check_structures(argument: str, values: list[Any]) -> None:
    """Raises ``ValueError`` unless the values for all towers have the same structure."""
    for tower, value in enumerate(values):
        try:
            tf.nest.assert_same_structure(values[0], value, check_types=False)
        except (TypeError, ValueError):
            raise ValueError(
                f"{argument} must return the same structure for every tower, but for tower {tower} "
                f"it returned {refused.shown(value)}, and for tower 0 "
                f"{refused.shown(values[0])}.") from None


def _check_parts(strategy: tf.distribute.Strategy, arguments: dict[str, Any]) -> None:
    """Raises ``ValueError`` if a per-replica value lacks a tower's part: rows would be lost."""
    count = len(strategy.extended.worker_devices)
    leaves = tf.nest.flatten(arguments)
    if all(len(leaf.values) == count for leaf in leaves if _tf.is_per_replica(leaf)):
        return
    for path, leaf in _tf.flatten_with_paths(arguments):
        if _tf.is_per_replica(leaf) and len(leaf.values) != count:
            raise ValueError(
                f"{path} has a part for each of {len(leaf.values)} towers, but {strategy!r} has "
                f"{count}: it was split, distributed or returned by another strategy. Use this "
                "strategy's split or experimental_distribute_dataset.")


def check_stage(strategy: Any, index: Any) -> None:
    index, placement = names.whole_number("index", index), strategy.extended.placement
    if not placement.rows:
        raise ValueError(
            f"stage({index}) was called on a strategy whose towers are one device each: "
            f"{names.short_names(placement.devices)}. Give each tower a list of devices, one a "
            'stage: TowerStrategy([["GPU:0", "GPU:1"]]).')
    if not 0 <= index < placement.stages:
        raise ValueError(
            f"index must be from 0 to {placement.stages - 1}, as each tower has "
            f"{placement.stages} stages, but got {index}: stage({index}). The towers: "
            f"{'; '.join(map(names.short_names, placement.rows))}.")
