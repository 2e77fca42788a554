"""Iterators of ``tf.data``, loops over them, and what TensorFlow's profiler has written.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.data.ops import iterator_ops, map_op, multi_device_iterator_ops
from tensorflow.python.trackable import base as trackable

PRIVATE_NAMES = {
    "tensorflow.python.autograph.operators.control_flow:for_loop_registry":
        "what `for` in a tf.function goes over, by type; no public registry",
    "tensorflow.python.autograph.operators.control_flow:_tf_iterator_for_stmt":
        "the `for` over any iterator of tf.distribute's",
    "tensorflow.python.data.ops.iterator_ops:OwnedIterator": "what iter(dataset) makes",
    "tensorflow.python.data.ops.map_op:_MapDataset":
        "Dataset.map that runs its function in the caller's thread: 10 us an element and not 100",
    "tensorflow.python.data.ops.multi_device_iterator_ops:OwnedMultiDeviceIterator":
        "elements ready on several devices; tf.data.experimental.prefetch_to_device knows one",
    "tensorflow.python.trackable.base:Trackable":
        "what a checkpoint takes; an iterator that it cannot save says why",
    "tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace":
        "reads what tf.profiler.experimental.stop() writes; no public reader",
}

OwnedIterator = iterator_ops.OwnedIterator
OwnedMultiDeviceIterator = multi_device_iterator_ops.OwnedMultiDeviceIterator
Trackable = trackable.Trackable


def map_in_place(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """``dataset.map(function)`` without another thread; for functions of an operation or two."""
    return map_op._MapDataset(dataset, function, use_inter_op_parallelism=False)


def loop_over(kind: type, instead: Callable[[Any], Any]) -> None:
    """From now on ``for`` in a ``tf.function`` goes over ``instead`` of an iterator of a kind."""
    control_flow.for_loop_registry.register(
        kind, lambda iterator, *loop: control_flow._tf_iterator_for_stmt(instead(iterator), *loop))


def read_profile(serialized: bytes) -> Any:
    """The ``XSpace`` that TensorFlow's profiler wrote."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    return xplane_pb2.XSpace.FromString(serialized)
