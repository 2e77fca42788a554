"""Variables: their classes, their resources, and what is behind a checkpoint's.

Each entry of :data:`PRIVATE_NAMES` says where the name stands upstream and why no public name does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import (
    shared_variable_creator,
    values as values_lib,
    values_util,
)
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops import (
    resource_variable_ops,
    variable_scope,
)
from tensorflow.python.trackable import base as trackable_base

PRIVATE_NAMES = {
    "tensorflow.python.ops.resource_variable_ops:variable_accessed":
        "tells gradient tapes and functions that a variable is read; they watch its handle",
    "tensorflow.python.distribute.shared_variable_creator:make_fn":
        "lets towers 1.. find the variables that tower 0 made",
    "tensorflow.python.distribute.values:DistributedVariable": "base of SyncOnReadVariable",
    "tensorflow.python.distribute.values:SyncOnReadVariable":
        "TensorFlow's own tower-local variable; checkpoints and SavedModel know it",
    "tensorflow.python.distribute.values:_SyncOnReadSaveable":
        "how it is written to a checkpoint and read again",
    "tensorflow.python.distribute.values_util:is_saving_non_distributed":
        "asks whether a SavedModel is being written",
    "tensorflow.python.autograph.pyct.error_utils:ErrorMetadataBase":
        "an error's ag_error_metadata, from which autograph makes the error that users see",
    "tensorflow.python.eager.context:anonymous_name":
        "names a variable that lives as long as somebody has its handle, also in a graph",
    "tensorflow.python.ops.resource_variable_ops:ResourceVariable":
        "the class of tf.Variable's instances",
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable":
        "its base, and that of variables made while a tf.function is traced",
    "tensorflow.python.ops.variable_scope:variable_creator_scope":
        "tf.variable_creator_scope without its deprecation of stacked graphs",
    "tensorflow.python.trackable.base:CheckpointInitialValue":
        "an initial value that a checkpoint gives to a variable made after it was restored",
    "tensorflow.python.trackable.base:Trackable._maybe_initialize_trackable":
        "sets the attributes that share_dependencies gives a second handle on a model",
    "tensorflow.python.ops.variable_scope:variable_scope":
        "the v1 variable scope, handed to tower threads",
    "tensorflow.python.ops.resource_variable_ops:_UnreadVariable":
        "what an assign in a function returns",
}

ResourceVariable = resource_variable_ops.ResourceVariable
BaseResourceVariable = resource_variable_ops.BaseResourceVariable
SyncOnReadVariable = values_lib.SyncOnReadVariable
SyncOnReadSaveable = values_lib._SyncOnReadSaveable
DistributedVariable = values_lib.DistributedVariable
shared_variable_creator_for = shared_variable_creator.make_fn
is_saving_one_copy = values_util.is_saving_non_distributed
variable_creator_scope = variable_scope.variable_creator_scope


def replace_resource(variable: Any, other: Any) -> None:
    """Puts the resource of ``other`` behind ``variable``, whose identity and name stay."""
    variable._handle = other._handle


def share_dependencies(copied: Any, original: Any, but: Collection[str]) -> None:
    """Gives ``copied`` the checkpoint dependencies of ``original`` in containers of its own.

    Args:
      copied: a shallow copy of ``original``; dependencies under the names in ``but`` are its own
        and stay as they are.
      original: a ``Trackable``.
      but: names that are not taken over.
    """
    name = "_self_unconditional_checkpoint_dependencies"
    theirs, ours = vars(original).get(name, []), vars(copied).get(name, [])
    taken = [reference for reference in theirs if reference.name not in but]
    own = [] if ours is theirs else [reference for reference in ours if reference.name in but]
    vars(copied).update(
        _self_unconditional_checkpoint_dependencies=taken + own,
        _self_unconditional_dependency_names=dict(taken + own),
        _self_unconditional_deferred_dependencies={},
        _self_update_uid=-1, _self_name_based_restores=set(), _self_saveable_object_factories={})


def is_checkpoint_value(value: Any) -> bool:
    """Whether ``value`` is an initial value from a checkpoint."""
    return isinstance(value, trackable_base.CheckpointInitialValue)


def tell_read(variable: Any) -> None:
    """Tells gradient tapes, and the function that is being traced, that ``variable`` is read."""
    resource_variable_ops.variable_accessed(variable)


def is_variable(value: Any) -> bool:
    """Whether ``value`` is a variable, be it one that is a distributed value as well."""
    return isinstance(value, (tf.Variable, DistributedVariable))


def is_unread_variable(value: Any) -> bool:
    """Whether ``value`` is what a write to a plain variable returns inside a function."""
    return isinstance(value, resource_variable_ops._UnreadVariable)


def anonymous_variable(dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    """The handle of a new variable, which is freed when nothing in the step needs it any more."""
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=shape,
                                  shared_name=eager_context.anonymous_name())
