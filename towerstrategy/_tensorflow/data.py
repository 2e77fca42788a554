"""Iterators of ``tf.data``, loops over them, and the files of TensorFlow's profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.operators import control_flow, py_builtins
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.data.ops import iterator_ops, map_op, multi_device_iterator_ops, prefetch_op

OwnedIterator = iterator_ops.OwnedIterator  # the class of iter(dataset)
# One worker's part of a dataset, by its policy; tf.distribute applies it only to its own datasets.
AutoShardDataset = distribute._AutoShardDataset


def over_devices(dataset: tf.data.Dataset, devices: Sequence[str], ready: int) -> Any:
    """An iterator that deals elements to ``devices`` in turn and prefetches ``ready`` on each.

    The first device is the host, which runs the dataset.  It is made as by
    ``OwnedMultiDeviceIterator`` (``tf.data.experimental.prefetch_to_device`` supports one device
    only), but without autotuning threads, which a buffer of fixed size does not need: such a thread
    may miss the request to end; ending the iterator then takes up to a minute.
    """
    options = tf.data.Options()
    options.experimental_distribute.num_devices = len(devices)
    if not ready:
        options.experimental_optimization.inject_prefetch = False
    dataset, host = dataset.with_options(options), devices[0]
    with tf.device(host):
        resource = tf.raw_ops.AnonymousMultiDeviceIteratorV3(
            devices=devices, **dataset._flat_structure)
        incarnation = tf.raw_ops.MultiDeviceIteratorInit(
            dataset=dataset._variant_tensor, multi_device_iterator=resource,
            max_buffer_size=max(1, ready))
        source = tf.convert_to_tensor(host)
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    parts = []
    for shard, device in enumerate(devices):
        with tf.device(device):
            part = multi_device_iterator_ops._PerDeviceGenerator(
                shard, resource, incarnation, source, dataset.element_spec,
                iterator_is_anonymous=True)
            part = multi_device_iterator_ops._create_device_dataset(
                part, incarnation, ready, dataset.options().experimental_slack)
            parts.append(iter(part.with_options(untuned)))
    return multi_device_iterator_ops.OwnedMultiDeviceIterator(
        devices=devices, source_device=host, components=[resource, *parts],
        element_spec=dataset.element_spec)


def inputs_of_dataset(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    return list(dataset._inputs())


def batch_size(dataset: tf.data.Dataset) -> int | None:
    """The rows of a dataset's first element if it makes batches; None if there may be fewer."""
    size = tf.get_static_value(getattr(dataset, "_batch_size", None))
    if size is None:
        return None
    examples = int(dataset._inputs()[0].cardinality())
    return int(size) if examples >= size or examples == tf.data.INFINITE_CARDINALITY else None


def has_functions(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset calls a function with each element."""
    return bool(dataset._functions())


def map_in_place(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """``dataset.map(function)`` in the caller's thread: 10 us per element instead of 100."""
    return map_op._MapDataset(dataset, function, use_inter_op_parallelism=False)


def map_ahead(dataset: tf.data.Dataset, function: Callable[..., Any],
              ready: int) -> tf.data.Dataset:
    """``dataset.map(function).prefetch(ready)``."""
    # If `dataset` ends with a prefetch, it is mapped before this prefetch: one thread less.
    if ready and isinstance(dataset, prefetch_op._PrefetchDataset):
        size = tf.get_static_value(dataset._buffer_size)
        if size is not None and (size == tf.data.AUTOTUNE or size >= ready):
            dataset, ready = dataset._input_dataset, int(size)
    mapped = map_in_place(dataset, function)
    return mapped.prefetch(ready) if ready else mapped


def loop_over(kind: type, instead: Callable[[Any], Any]) -> None:
    """Makes autograph's ``for`` over iterators of this class iterate over ``instead(iterator)``."""
    control_flow.for_loop_registry.register(
        kind, lambda iterator, *loop: control_flow._tf_iterator_for_stmt(instead(iterator), *loop))


def python_loops_with(kinds: tuple[type, ...], instead: Callable[..., Any]) -> None:
    """Makes autograph call ``instead(zip, *args)`` for ``zip``, ``enumerate``, ``map``, ``filter``.

    All their iterables must be of classes in ``kinds``.
    """
    for python, registry in ((enumerate, py_builtins.enumerate_registry),
                             (filter, py_builtins.filter_registry),
                             (map, py_builtins.map_registry), (zip, py_builtins.zip_registry)):
        registry.register(kinds, functools.partial(instead, python))


def read_profile(serialized: bytes) -> Any:
    """The ``XSpace`` that TensorFlow's profiler wrote."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)
