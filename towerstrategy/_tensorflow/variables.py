"""Per-replica values and composite tensors; variables and their checkpoint dependencies."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_utils,
    shared_variable_creator,
    values as values_lib,
    values_util,
)
from tensorflow.python.eager import backprop_util, context as eager_context
from tensorflow.python.framework import composite_tensor
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.trackable import base as trackable_base
from tensorflow.python.util import nest as private_nest

# The classes of the public types in tf.types.experimental.distributed.
PerReplica = values_lib.PerReplica
PerReplicaSpec = values_lib.PerReplicaSpec
Mirrored = values_lib.Mirrored
CompositeTensor = composite_tensor.CompositeTensor  # the base of ragged and sparse values
# Group the towers' results exactly as TensorFlow does.
regroup = distribute_utils.regroup
select_replica = distribute_utils.select_replica
update_regroup = distribute_utils.update_regroup
value_container = distribute_utils.value_container
# Concatenates tf.IndexedSlices; if there are tensors among them, it adds up all to a tensor.
add_slices = backprop_util.AggregateIndexedSlicesGradients
# Gives the names of components in errors.
flatten_with_paths = private_nest.flatten_with_joined_string_paths
ResourceVariable = resource_variable_ops.ResourceVariable
BaseResourceVariable = resource_variable_ops.BaseResourceVariable
# TensorFlow's tower-local variable, which checkpoints and SavedModel support.
SyncOnReadVariable = values_lib.SyncOnReadVariable
SyncOnReadSaveable = values_lib._SyncOnReadSaveable
DistributedVariable = values_lib.DistributedVariable
# The initial value of a variable that is made after its checkpoint was restored.
CheckpointInitialValue = trackable_base.CheckpointInitialValue
# Notes for gradient tapes and functions that a variable is read; they watch its handle.
note_read = resource_variable_ops.variable_accessed
# Makes the other towers share the variables that tower 0 makes.
shared_variable_creator_for = shared_variable_creator.make_fn
# Whether a SavedModel is being written.
is_saving_one_copy = values_util.is_saving_non_distributed
# Raise TensorFlow's errors for colocation with a variable that is not the strategy's, and for
# unsupported synchronization and aggregation of a variable.
validate_colocate = distribute_utils.validate_colocate
check_synchronization = distribute_utils._validate_synchronization
check_aggregation = distribute_utils._validate_aggregation


def share_dependencies(copied: Any, original: Any, but: Collection[str]) -> None:
    """Gives ``copied``, a shallow copy, the checkpoint dependencies of ``original``.

    Its containers are new.  Dependencies of ``copied`` with names in ``but`` stay as they are.
    """
    name = "_self_unconditional_checkpoint_dependencies"
    originals, existing = vars(original).get(name, []), vars(copied).get(name, [])
    shared = [reference for reference in originals if reference.name not in but]
    kept = [] if existing is originals else [
        reference for reference in existing if reference.name in but]
    vars(copied).update(
        _self_unconditional_checkpoint_dependencies=shared + kept,
        _self_unconditional_dependency_names=dict(shared + kept),
        _self_unconditional_deferred_dependencies={},
        _self_update_uid=-1, _self_name_based_restores=set(), _self_saveable_object_factories={})


def is_variable(value: Any) -> bool:
    """Whether ``value`` is a variable; it may be a distributed value, too."""
    return isinstance(value, (tf.Variable, DistributedVariable))


def is_per_replica(value: Any) -> bool:
    """Whether ``value`` has a value for each replica, and is no variable."""
    return isinstance(value, tf.distribute.DistributedValues) and not is_variable(value)


def is_unread_variable(value: Any) -> bool:
    """Whether ``value`` was returned by a write to a plain variable inside a function."""
    return isinstance(value, resource_variable_ops._UnreadVariable)


def anonymous_variable(dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    """The handle of a new variable, which is freed when no op of the step needs it any more."""
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape,
                                  shared_name=eager_context.anonymous_name())
