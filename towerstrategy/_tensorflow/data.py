"""Iterators of ``tf.data``, loops over them, and what TensorFlow's profiler has written.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.operators import control_flow, py_builtins
from tensorflow.python.data.ops import iterator_ops, map_op, multi_device_iterator_ops
from tensorflow.python.trackable import base as trackable

PRIVATE_NAMES = {
    "tensorflow.python.autograph.operators.control_flow:for_loop_registry":
        "what `for` in a tf.function goes over, by type; no public registry",
    "tensorflow.python.autograph.operators.control_flow:_tf_iterator_for_stmt":
        "the `for` over any iterator of tf.distribute's",
    "tensorflow.python.autograph.operators.py_builtins:enumerate_registry":
        "what `enumerate` in a tf.function does, by type; no public registry",
    "tensorflow.python.data.ops.iterator_ops:OwnedIterator": "what iter(dataset) makes",
    "tensorflow.python.data.ops.map_op:_MapDataset":
        "Dataset.map that runs its function in the caller's thread: 10 us an element and not 100",
    "tensorflow.python.data.ops.multi_device_iterator_ops:OwnedMultiDeviceIterator":
        "elements ready on several devices; tf.data.experimental.prefetch_to_device knows one",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_PerDeviceGenerator":
        "what such an iterator has for a device, which it gives no options",
    "tensorflow.python.data.ops.multi_device_iterator_ops:_create_device_dataset":
        "the same with a buffer on the device",
    "tensorflow.python.trackable.base:Trackable":
        "what a checkpoint takes; an iterator that it cannot save says why",
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace":
        "reads what tf.profiler.experimental.stop() writes; no public reader",
}

OwnedIterator = iterator_ops.OwnedIterator
Trackable = trackable.Trackable


def over_devices(dataset: tf.data.Dataset, devices: Sequence[str], ready: int) -> Any:
    """An iterator whose elements are dealt to ``devices`` in turn, ``ready`` of them held on each.

    As ``OwnedMultiDeviceIterator`` makes it, but that the devices' parts have no threads of
    tf.data's to tune them: in a buffer of a fixed size is nothing to tune.  Such a thread may miss
    that it is to end, as TensorFlow wakes it before it says so, and holds up whoever ends the
    iterator for as long as it sleeps: up to a minute.

    Args:
      dataset: what is dealt.
      devices: the host first, which runs ``dataset``.
      ready: with 0 nothing is fetched ahead.
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


def map_in_place(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """``dataset.map(function)`` without another thread; for functions of an operation or two."""
    return map_op._MapDataset(dataset, function, use_inter_op_parallelism=False)


def loop_over(kind: type, instead: Callable[[Any], Any]) -> None:
    """From now on ``for`` in a ``tf.function`` goes over ``instead`` of an iterator of a kind."""
    control_flow.for_loop_registry.register(
        kind, lambda iterator, *loop: control_flow._tf_iterator_for_stmt(instead(iterator), *loop))


def enumerate_with(kind: type, instead: Callable[..., Any]) -> None:
    """From now on ``enumerate`` in a ``tf.function`` is ``instead`` for what is of a kind."""
    py_builtins.enumerate_registry.register(kind, instead)


def read_profile(serialized: bytes) -> Any:
    """The ``XSpace`` that TensorFlow's profiler wrote."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)
