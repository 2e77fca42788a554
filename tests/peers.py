"""What tests compare TowerStrategy with, and how results are compared.

Goes in: per-replica values, nests, variables.  Comes out: plain Python values, so that what two
strategies return can be compared; and the process's one ``MirroredStrategy``.
"""

import functools

import tensorflow as tf

import towerstrategy


def two_towers(merge_device="CPU:0"):
    return towerstrategy.TowerStrategy(["CPU:1", "CPU:2"], merge_device)


@functools.cache
def mirrored():
    """The peer.  A second one in a process would clash with it over collective keys."""
    return tf.distribute.MirroredStrategy(
        ["CPU:1", "CPU:2"], cross_device_ops=tf.distribute.ReductionToOneDevice())


def per_replica(strategy, *values):
    """The per-replica value of ``values``, one a replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group]))


def plain(value):
    """``value`` as Python values; a per-replica value as ``("per replica", [...])``."""
    if isinstance(value, tf.distribute.DistributedValues) and not isinstance(value, tf.Variable):
        return "per replica", [plain(part) for part in value.values]
    if isinstance(value, tf.IndexedSlices):
        return plain(tf.convert_to_tensor(value))
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)._make(plain(part) for part in value)
    if isinstance(value, (list, tuple)):
        return type(value)(plain(part) for part in value)
    if isinstance(value, (tf.Tensor, tf.Variable)):
        array = value.numpy()
        return array.tolist() if hasattr(array, "tolist") else array
    return value


def outcome(function, *args):
    """What ``function`` returned, plain, or the name of the exception it raised."""
    try:
        return plain(function(*args))
    except Exception as error:
        return type(error).__name__
