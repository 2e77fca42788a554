"""Per-replica values, composite tensors and how TensorFlow groups them."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, reduce_util, values as values_lib
from tensorflow.python.framework import composite_tensor, none_tensor, ops as framework_ops
from tensorflow.python.util import nest as private_nest

# The classes behind tf.types.experimental.distributed's.
PerReplica = values_lib.PerReplica
PerReplicaSpec = values_lib.PerReplicaSpec
Mirrored = values_lib.Mirrored
ReduceOp = reduce_util.ReduceOp  # of which tf.distribute.ReduceOp is an alias
CompositeTensor = composite_tensor.CompositeTensor  # the base of ragged and sparse values
NoneTensorSpec = none_tensor.NoneTensorSpec  # tf.NoneTensorSpec is not in every release
# Group per-tower results exactly as TensorFlow groups them.
regroup = distribute_utils.regroup
select_replica = distribute_utils.select_replica
update_regroup = distribute_utils.update_regroup
value_container = distribute_utils.value_container
# Names components in errors.
flatten_with_paths = private_nest.flatten_with_joined_string_paths


def is_eager(tensor: tf.Tensor) -> bool:
    """Whether ``tensor`` holds a value now."""
    return isinstance(tensor, framework_ops.EagerTensor)
