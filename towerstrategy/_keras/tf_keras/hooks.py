"""The table of hooks into tf_keras (``TF_USE_LEGACY_KERAS=1``).

Goes in: the imported Keras.  Comes out: the same, with every hook of :data:`HOOKS`, and of
:data:`STAGES` where it is needed; the files beside this one hold what they do, by subject.
Upstream places are those of tf_keras 2.21; ``tests/_keras/keras_hooks_test.py`` fails where one
has moved.
"""

from __future__ import annotations

import functools
from typing import Any

from tf_keras.src import callbacks, losses as keras_losses
from tf_keras.src.engine import base_layer, data_adapter, training
from tf_keras.src.layers.rnn import gru_lstm_utils
from tf_keras.src.mixed_precision import loss_scale_optimizer
from tf_keras.src.optimizers import optimizer as new_optimizer
from tf_keras.src.optimizers.legacy import optimizer_v2
from tf_keras.src.utils import losses_utils

from towerstrategy._keras import batch_norm, hooks, optimizers as optimizers_rules, stages
from towerstrategy._keras.tf_keras import (
    names,
    optimizers,
    recurrent,
    training as training_lib,
)

# What is hooked and why; the test of upstream names reads this.
HOOKS: dict[tuple[Any, str], hooks.Hook] = {
    (losses_utils, "scale_loss_for_distribution"): hooks.Hook(
        optimizers_rules.scale_loss,
        "scales a replica's mean by 1/R; a tower's counts by its share of the rows"),
    (keras_losses.Loss, "_get_reduction"): hooks.Hook(
        optimizers.get_reduction,
        "refuses means under a strategy; in a step that has all rows they are one device's"),
    **{(cls, "apply_gradients"): hooks.Hook(
        optimizers.apply_gradients, "merge first, then Keras' own code once")
       for cls in (new_optimizer.Optimizer, optimizer_v2.OptimizerV2,
                   loss_scale_optimizer.LossScaleOptimizerV3)},
    (new_optimizer.Optimizer, "_distributed_apply_gradients_fn"): hooks.Hook(
        optimizers.distributed_apply,
        "a dozen operations and passes over memory a variable; one where TensorFlow has a kernel"),
    (loss_scale_optimizer, "strategy_supports_loss_scaling"): hooks.Hook(
        optimizers.supports_loss_scaling,
        "refuses strategies with one copy of a variable, which would unscale it once a replica; "
        "merged gradients are checked and applied once"),
    (names.BATCH_NORM, "call"): hooks.Hook(
        batch_norm.call,
        "has one kernel of all rows alone; without it, a dozen operations and as many for the "
        "gradient"),
    (names.BATCH_NORM, "build"): hooks.Hook(
        training_lib.batch_norm_build,
        "keeps a copy of the moving statistics a replica"),
    (gru_lstm_utils, "generate_defun_backend"): hooks.Hook(
        recurrent.generate_defun_backend,
        "leaves cuDNN to TensorFlow's graph optimizer, which finds no call in a partitioned step"),
    (data_adapter.DataHandler, "__init__"): hooks.Hook(
        training_lib.data_handler_init,
        "predicted rows are to come in the dataset's order"),
    (training.Model, "compile"): hooks.Hook(
        training_lib.compile,
        "compiling in the scope adopts"),
    (training.Model, "__setattr__"): hooks.Hook(
        training_lib.set_attribute,
        "makes functions for steps of which TensorFlow optimizes the graph too long, and around "
        "weights that were built since compile, or of a model that is not adopted"),
    (callbacks.CallbackList, "set_model"): hooks.Hook(
        training_lib.set_model,
        "BackupAndRestore lists the strategies that it works with, and deletes a backup file by "
        "file"),
}
# Those that only a strategy whose towers have stages needs.
STAGES: dict[tuple[Any, str], hooks.Hook] = {
    (base_layer.Layer, "__init__"): hooks.Hook(
        stages.layer_init,
        "does not know for which stage of a tower a layer is made"),
    (base_layer.Layer, "__call__"): hooks.Hook(
        functools.partial(stages.layer_call, names),
        "runs every layer of a tower on one device"),
}
