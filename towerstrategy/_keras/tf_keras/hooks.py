"""The table of hooks into tf_keras (``TF_USE_LEGACY_KERAS=1``).

Goes in: the imported Keras.  Comes out: the same, with every hook of :data:`HOOKS`; the rooms
beside this one hold what they do, by subject.  Upstream places are those of tf_keras 2.21;
``tests/_keras/keras_hooks_test.py`` fails where one has moved.
"""

from __future__ import annotations

from typing import Any

from tf_keras.src import backend, callbacks
from tf_keras.src import losses as keras_losses
from tf_keras.src.distribute import worker_training_state
from tf_keras.src.engine import base_layer, compile_utils, data_adapter, training
from tf_keras.src.layers.normalization import batch_normalization
from tf_keras.src.metrics import base_metric
from tf_keras.src.mixed_precision import loss_scale_optimizer
from tf_keras.src.optimizers import optimizer as new_optimizer
from tf_keras.src.utils import losses_utils

from towerstrategy._keras import hooks, stages
from towerstrategy._keras import training as training_rules
from towerstrategy._keras.tf_keras import callbacks as callbacks_lib
from towerstrategy._keras.tf_keras import layers, losses, metrics, names, optimizers
from towerstrategy._keras.tf_keras import training as training_lib

# What is hooked and why; the test of upstream names reads this.
HOOKS: dict[tuple[Any, str], hooks.Hook] = {
    (losses_utils, "scale_loss_for_distribution"): hooks.Hook(
        losses.scale,
        "scales a replica's mean by 1/R; a tower's counts by its share of the rows"),
    (losses_utils, "apply_valid_mask"): hooks.Hook(
        losses.apply_valid_mask,
        "the mean over unmasked entries is the whole batch's"),
    (losses_utils, "compute_weighted_loss"): hooks.Hook(
        losses.compute_weighted_loss,
        "a sum, and a loss that is one number, counts as it is; its mean is wanted in places"),
    (keras_losses.Loss, "__call__"): hooks.Hook(
        losses.loss_call,
        "functions that return one number may put all rows of a batch into it"),
    (keras_losses.Loss, "_get_reduction"): hooks.Hook(
        losses.get_reduction,
        "refuses means under a strategy; in a step that has all rows they are one device's"),
    (compile_utils.LossesContainer, "__call__"): hooks.Hook(
        losses.losses_call,
        "scales each loss by itself, and multiplies a summed one by R for the log; all are means "
        "over the tower's rows there, and what comes out is scaled"),
    (compile_utils.LossesContainer, "_get_loss_object"): hooks.Hook(
        losses.get_loss_object,
        "makes a loss over the whole batch, or with a call of its own, one that tf_keras calls"),
    (compile_utils.MetricsContainer, "_get_metric_object"): hooks.Hook(
        metrics.get_metric_object,
        "the same for a metric's function"),
    (base_metric.MeanMetricWrapper, "update_state"): hooks.Hook(
        metrics.wrapper_update_state,
        "calls a function that may return one number, of all rows, of a tower's rows"),
    **{(cls, "apply_gradients"): hooks.Hook(
        optimizers.apply_gradients, "merge first, then Keras' own code once")
       for cls in names.OPTIMIZERS},
    (new_optimizer.Optimizer, "_distributed_apply_gradients_fn"): hooks.Hook(
        optimizers.distributed_apply,
        "what all variables' updates have in common is made once"),
    (new_optimizer._BaseOptimizer, "_update_step"): hooks.Hook(
        optimizers.update_step,
        "a dozen operations and passes over memory a variable; one where TensorFlow has a kernel"),
    (loss_scale_optimizer, "strategy_supports_loss_scaling"): hooks.Hook(
        optimizers.supports_loss_scaling,
        "refuses strategies with one copy of a variable, which would unscale it once a replica; "
        "merged gradients are checked and applied once"),
    (base_metric.Reduce, "update_state"): hooks.Hook(
        metrics.mean_update_state,
        "a scalar counts by its tower's share"),
    (base_layer.Layer, "__init__"): hooks.Hook(
        stages.layer_init,
        "does not know for which stage of a tower a layer is made"),
    (base_layer.Layer, "__call__"): hooks.Hook(
        stages.layer_call(names),
        "runs every layer of a tower on one device"),
    (batch_normalization.BatchNormalizationBase, "build"): hooks.Hook(
        layers.batch_norm_build,
        "keeps moving statistics per replica and averages them plainly; they are one copy, moved "
        "by each tower's share, as in Keras 3"),
    (batch_normalization.BatchNormalizationBase, "_calculate_mean_and_var"): hooks.Hook(
        layers.calculate_mean_and_var,
        "takes a tower's statistics for the batch's; with synchronized=True three meetings a layer "
        "in place of one, and E[x^2] - E[x]^2 cancels"),
    (batch_normalization.BatchNormalizationBase, "_fused_batch_norm"): hooks.Hook(
        layers.fused_batch_norm,
        "a kernel that takes its statistics from its own rows"),
    (backend.RandomGenerator, "make_legacy_seed"): hooks.Hook(
        layers.make_legacy_seed,
        "counts up with each operation that is made, so that each tower would get other seeds"),
    (data_adapter.DataHandler, "__init__"): hooks.Hook(
        training_lib.data_handler_init,
        "asks for a number of steps where the model was not compiled in the dataset's scope"),
    (data_adapter.DataHandler, "_configure_dataset_and_inferred_steps"): hooks.Hook(
        training_lib.configure_dataset,
        "towers without rows get stand-ins"),
    (data_adapter, "single_batch_iterator"): hooks.Hook(
        training_lib.single_batch_iterator,
        "the same for *_on_batch"),
    (training, "reduce_per_replica"): hooks.Hook(
        training_lib.reduce_per_replica,
        "outputs of stand-ins are cut off"),
    (training.Model, "get_metrics_result"): hooks.Hook(
        metrics.get_metrics_result,
        "reads each metric's variables by themselves; those of all machines are read at once"),
    (training.Model, "predict"): hooks.Hook(
        training_rules.predict,
        "gathers rows of several machines in the order in which they hold them"),
    (training.Model, "compile"): hooks.Hook(
        training_lib.compile,
        "compiling in the scope adopts; jit_compile is refused early"),
    (training.Model, "compute_loss"): hooks.Hook(
        losses.compute_loss,
        "the loss of a stand-in is 0, and so are its gradients"),
    (training.Model, "make_train_function"): hooks.Hook(
        training_lib.make_function("train_function"),
        "adopts what was built since compile; refuses a model in the scope that is not adopted"),
    (training.Model, "make_test_function"): hooks.Hook(
        training_lib.make_function("test_function"),
        "the same for evaluate"),
    (training.Model, "make_predict_function"): hooks.Hook(
        training_lib.make_predict_function,
        "tells towers that a model with jit_compile=True predicts"),
    (callbacks.BackupAndRestore, "__init__"): hooks.Hook(
        callbacks_lib.backup_init,
        "lists the strategies that it works with"),
    (worker_training_state.WorkerTrainingState, "delete_backup"): hooks.Hook(
        callbacks_lib.delete_backup,
        "deletes the backup file by file"),
}


def install() -> None:
    """Installs every hook of :data:`HOOKS`."""
    hooks.install(HOOKS)
