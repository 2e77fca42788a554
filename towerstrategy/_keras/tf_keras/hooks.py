"""The table of hooks into tf_keras (``TF_USE_LEGACY_KERAS=1``).

Goes in: the imported Keras.  Comes out: :data:`HOOKS` and, for strategies with stages,
:data:`STAGES`.  The files beside this one have the replacements, by subject.  Owners and names are
those of tf_keras 2.21; ``tests/_keras/keras_hooks_test.py`` fails if a release has moved one.
"""

from __future__ import annotations

from typing import Any

from tf_keras.src import callbacks, losses as keras_losses
from tf_keras.src.distribute import distributed_training_utils
from tf_keras.src.engine import base_layer, data_adapter, training
from tf_keras.src.layers.rnn import gru_lstm_utils
from tf_keras.src.mixed_precision import loss_scale_optimizer
from tf_keras.src.optimizers import optimizer as new_optimizer
from tf_keras.src.utils import losses_utils

from towerstrategy._keras import batch_norm, hooks, optimizers as optimizers_rules, stages
from towerstrategy._keras.tf_keras import (
    names,
    optimizers,
    recurrent,
    training as training_lib,
)

# The hooks that every strategy needs.
HOOKS: dict[tuple[Any, str], hooks.Hook] = {
    (losses_utils, "scale_loss_for_distribution"): hooks.Hook(
        optimizers_rules.scale_loss,
        "multiplies a replica's mean by 1/R; a tower's mean needs the tower's share of the rows"),
    (keras_losses.Loss, "_get_reduction"): hooks.Hook(
        optimizers.get_reduction,
        "refuses means in a strategy's scope; in a step that has all rows they are right"),
    **{(cls, "apply_gradients"): hooks.Hook(
        optimizers.apply_gradients,
        "clips and decays each replica's gradients; they have to be merged first")
       for cls in names.OPTIMIZERS},
    (new_optimizer.Optimizer, "_distributed_apply_gradients_fn"): hooks.Hook(
        optimizers.distributed_apply,
        "makes a dozen operations and passes over memory per variable, even if there is a kernel"),
    (loss_scale_optimizer, "strategy_supports_loss_scaling"): hooks.Hook(
        optimizers.supports_loss_scaling,
        "refuses strategies with one copy of each variable, where each replica would unscale it; "
        "we check and apply merged gradients once"),
    (names.BATCH_NORM, "call"): hooks.Hook(
        batch_norm.call,
        "has a kernel over all rows only; without it, it makes a dozen operations, and as many for "
        "the gradient"),
    (names.BATCH_NORM, "build"): hooks.Hook(
        training_lib.batch_norm_build,
        "makes a copy of the moving statistics for each replica"),
    (gru_lstm_utils, "generate_defun_backend"): hooks.Hook(
        recurrent.generate_defun_backend,
        "leaves cuDNN to TensorFlow's graph optimizer, which finds no calls in a partitioned step"),
    (data_adapter.DataHandler, "__init__"): hooks.Hook(
        training_lib.data_handler_init,
        "does not say what batch size a dataset made of arrays has; builds a model on each "
        "replica, in a thread, where it has none of Keras' seeds"),
    (distributed_training_utils, "call_replica_local_fn"): hooks.Hook(
        training_lib.call_on_all_rows,
        "calls a metric on each replica, with all rows; their sum counts them R times"),
    (distributed_training_utils, "global_batch_size_supported"): hooks.Hook(
        training_lib.divides_batch_sizes,
        "makes inputs with a batch size for a replica's part of it; the step has all rows"),
    (training.Model, "compile"): hooks.Hook(
        training_lib.compile,
        "does not adopt a model that is compiled in the scope"),
    (training.Model, "__setattr__"): hooks.Hook(
        training_lib.set_attribute,
        "stores step functions whose graphs TensorFlow takes too long to optimize, or that use "
        "weights built since compile"),
    (callbacks.CallbackList, "set_model"): hooks.Hook(
        training_lib.set_model,
        "has BackupAndRestore, which works with listed strategies only, and deletes a backup file "
        "by file"),
}
# The hooks that only a strategy with stages needs.
STAGES = stages.hooks_of(base_layer.Layer, names)
