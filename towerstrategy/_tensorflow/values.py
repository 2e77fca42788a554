"""Per-replica values, composite tensors and how TensorFlow groups them."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_utils,
    reduce_util,
    values as values_lib,
)
from tensorflow.python.framework import (
    composite_tensor,
    none_tensor,
    ops as framework_ops,
)
from tensorflow.python.util import nest as private_nest

PRIVATE_NAMES = {
    "python.distribute.distribute_utils:regroup select_replica update_regroup value_container":
        "groups per-tower results exactly as TensorFlow groups them",
    "python.distribute.values:Mirrored PerReplica PerReplicaSpec":
        "the classes behind tf.types.experimental.distributed's",
    "python.framework.composite_tensor:CompositeTensor": "base of ragged and sparse values",
    "python.framework.none_tensor:NoneTensorSpec":
        "the spec of an absent component; tf.NoneTensorSpec is not there in every release",
    "python.distribute.reduce_util:ReduceOp": "tf.distribute.ReduceOp, an alias",
    "python.framework.ops:EagerTensor": "the class of eager tensors",
    "python.util.nest:flatten_with_joined_string_paths": "names components in errors",
}

PerReplica = values_lib.PerReplica
PerReplicaSpec = values_lib.PerReplicaSpec
Mirrored = values_lib.Mirrored
ReduceOp = reduce_util.ReduceOp
CompositeTensor = composite_tensor.CompositeTensor
NoneTensorSpec = none_tensor.NoneTensorSpec
regroup = distribute_utils.regroup
select_replica = distribute_utils.select_replica
update_regroup = distribute_utils.update_regroup
value_container = distribute_utils.value_container
flatten_with_paths = private_nest.flatten_with_joined_string_paths


def is_eager(tensor: tf.Tensor) -> bool:
    """Whether ``tensor`` holds a value now."""
    return isinstance(tensor, framework_ops.EagerTensor)
