"""The table of hooks into Keras 3 (``tf.keras`` of TensorFlow 2.16 and later).

Goes in: the imported Keras.  Comes out: the same, with every hook of :data:`HOOKS`; the rooms
beside this one hold what they do, by subject.  Upstream places are those of Keras 3.15;
``tests/_keras/keras_hooks_test.py`` fails where one has moved.
"""

from __future__ import annotations

from typing import Any

from keras.src.backend.common import variables as keras_variables
from keras.src.backend.tensorflow import numpy as tf_numpy
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import random as tf_random
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.callbacks import backup_and_restore, csv_logger, model_checkpoint, tensorboard
from keras.src.layers import layer as layer_module
from keras.src.layers.normalization import batch_normalization
from keras.src.layers.preprocessing.image_preprocessing import (
    aug_mix,
    base_image_preprocessing_layer,
    equalization,
)
from keras.src.losses import loss as loss_module
from keras.src.metrics import metric as metric_module
from keras.src.metrics import reduction_metrics
from keras.src.models import sequential
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils, data_adapters
from keras.src.trainers import trainer as base_trainer

from towerstrategy._keras import hooks, stages
from towerstrategy._keras.keras3 import callbacks, layers, losses, names, optimizers, training
from towerstrategy._keras.keras3 import metrics as metrics_lib

# What is hooked and why; the test of upstream names reads this.
HOOKS: dict[tuple[Any, str], hooks.Hook] = {
    (loss_module, "scale_loss_for_distribution"): hooks.Hook(
        losses.scale,
        "scales a replica's mean by 1/R; a tower's counts by its share of the rows, and outside of "
        "towers a loss is of all rows as it is"),
    (tf_trainer.TensorFlowTrainer, "_aggregate_additional_loss"): hooks.Hook(
        losses.added,
        "takes whatever a layer adds for a mean over rows"),
    (loss_module, "unscale_loss_for_distribution"): hooks.Hook(
        losses.unscale,
        "the inverse, for the logged loss"),
    (loss_module, "apply_mask"): hooks.Hook(
        losses.apply_mask,
        "the mean over unmasked entries is the whole batch's"),
    (loss_module, "reduce_values"): hooks.Hook(
        losses.reduce_values,
        "mean_with_sample_weight divides by the whole batch's weights; a loss that is one number "
        "goes through unscaled"),
    (loss_module, "reduce_weighted_values"): hooks.Hook(
        losses.reduce_weighted_values,
        "multiplies a loss that is one number by weights, which then looks like values of rows"),
    (loss_module.Loss, "__call__"): hooks.Hook(
        losses.loss_call,
        "Dice, Tversky, Circle, and functions that return one number, may put all rows of a batch "
        "into it: it is not the mean of the towers'"),
    (compile_utils, "get_loss"): hooks.Hook(
        losses.get_loss,
        "makes a loss over the whole batch, and one with a call of its own, one that Keras calls"),
    (compile_utils, "get_metric"): hooks.Hook(
        metrics_lib.get_metric,
        "the same for a metric's function"),
    (compile_utils.CompileLoss, "call"): hooks.Hook(
        losses.compiled_loss,
        "adds a mean, scaled, to each of another output's losses, which count as they are"),
    (batch_normalization.BatchNormalization, "_moments"): hooks.Hook(
        layers.moments,
        "takes a tower's statistics for the batch's, also with synchronized=True where there is a "
        "mask; three meetings a layer without one, and E[x^2] - E[x]^2 cancels"),
    (base_optimizer.BaseOptimizer, "apply"): hooks.Hook(
        optimizers.apply,
        "merge first, then Keras' own code once"),
    (base_optimizer.BaseOptimizer, "apply_gradients"): hooks.Hook(
        optimizers.apply_gradients,
        "the same, for optimizers that override apply"),
    (loss_scale_optimizer.LossScaleOptimizer, "apply"): hooks.Hook(
        optimizers.apply,
        "one look for overflows, at merged gradients"),
    (tf_optimizer.TFOptimizer, "_distributed_tf_update_step"): hooks.Hook(
        optimizers.distributed_update_step,
        "a dozen operations and passes over memory a variable; one where TensorFlow has a kernel"),
    (metric_module.Metric, "__init__"): hooks.Hook(
        metrics_lib.metric_init,
        "a metric's result inside a tower is the whole batch's"),
    (reduction_metrics.MeanMetricWrapper, "update_state"): hooks.Hook(
        metrics_lib.wrapper_update_state,
        "calls a function that may return one number, of all rows, of a tower's rows"),
    (reduction_metrics.Mean, "update_state"): hooks.Hook(
        metrics_lib.mean_update_state,
        "a scalar counts by its tower's share"),
    (tf_numpy, "take"): hooks.Hook(
        layers.take,
        "reads a whole table to take rows of it; the rows are taken where the table lives, so that "
        "they alone go to the tower"),
    (keras_variables.Variable, "assign_add"): hooks.Hook(
        layers.added("assign_add"),
        "writes the sum of the old value and the new one, of which the towers' are summed: the old "
        "value counts once a tower"),
    (keras_variables.Variable, "assign_sub"): hooks.Hook(
        layers.added("assign_sub"),
        "the same"),
    (seed_generator.SeedGenerator, "next"): hooks.Hook(
        layers.next_seed,
        "random layers draw differently on every tower"),
    (layer_module.Layer, "__init__"): hooks.Hook(
        stages.layer_init,
        "does not know for which stage of a tower a layer is made"),
    (layer_module.Layer, "__call__"): hooks.Hook(
        stages.layer_call(names),
        "runs every layer of a tower on one device, and forgets the tf.device around a call"),
    (sequential.Sequential, "build"): hooks.Hook(
        stages.sequential_build,
        "calls all layers anew for each that is added, in the stage of that one"),
    (base_image_preprocessing_layer.BaseImagePreprocessingLayer, "call"): hooks.Hook(
        layers.mix,
        "MixUp and CutMix mix the rows of a batch, which are those of all towers"),
    (aug_mix.AugMix, "get_random_transformation"): hooks.Hook(
        layers.choose,
        "chooses by Python's random numbers, of which each tower would take others"),
    (aug_mix.AugMix, "_sample_from_dirichlet"): hooks.Hook(
        layers.of_no_rows,
        "draws a number for each chain, which may be as many as a tower has rows"),
    (equalization.Equalization, "_custom_histogram_fixed_width"): hooks.Hook(
        layers.histogram,
        "counts the colours of all pictures of a batch"),
    (tf_random, "shuffle"): hooks.Hook(
        layers.shuffle,
        "shuffles a tower's rows among themselves"),
    (layer_module.Layer, "add_loss"): hooks.Hook(
        losses.with_own_losses,
        "a layer has one list of losses, in which towers that run in turn would find each other's"),
    (layer_module.Layer, "_get_own_losses"): hooks.Hook(
        losses.with_own_losses,
        "the same"),
    (layer_module.Layer, "_clear_losses"): hooks.Hook(
        losses.with_own_losses,
        "the same"),
    (base_trainer.Trainer, "compile"): hooks.Hook(
        training.compile,
        "compiling in the scope adopts; jit_compile is refused early"),
    (base_trainer.Trainer, "compute_loss"): hooks.Hook(
        losses.compute_loss,
        "knows a loss that is scaled by share already"),
    (base_trainer.Trainer, "get_metrics_result"): hooks.Hook(
        metrics_lib.get_metrics_result,
        "all results in one meeting of the towers"),
    (tf_trainer, "reduce_per_replica"): hooks.Hook(
        training.reduce_per_replica,
        "means over replicas count each by its share; outputs of stand-ins are cut off"),
    (data_adapters, "is_tf_dataset"): hooks.Hook(
        training.is_tf_dataset,
        "knows distributed datasets by the module of TensorFlow's own class"),
    (tf_trainer.TFEpochIterator, "__init__"): hooks.Hook(
        training.epoch_iterator_init,
        "towers without rows get stand-ins"),
    (tf_trainer.TensorFlowTrainer, "_make_function"): hooks.Hook(
        training.unscaled_outputs,
        "a loss that an own train_step returns is a tower's part; the mean over towers is to be "
        "the whole batch's loss"),
    (tf_trainer.TensorFlowTrainer, "make_train_function"): hooks.Hook(
        training.make_function("train_function"),
        "train_on_batch hands over unsplit data"),
    (tf_trainer.TensorFlowTrainer, "make_test_function"): hooks.Hook(
        training.make_function("test_function"),
        "so does test_on_batch"),
    (tf_trainer.TensorFlowTrainer, "make_predict_function"): hooks.Hook(
        training.make_predict_function,
        "and predict_on_batch"),
    (tf_trainer.TensorFlowTrainer, "_maybe_symbolic_build"): hooks.Hook(
        training.symbolic_build,
        "takes a batch out of the data and means over it, which uneven sub-batches do not allow"),
    (model_checkpoint.ModelCheckpoint, "_save_model"): hooks.Hook(
        callbacks.checkpoint_save,
        "writes the same file on every machine; only the chief's is kept"),
    (csv_logger.CSVLogger, "on_train_begin"): hooks.Hook(
        callbacks.csv_begin,
        "so does this"),
    (tensorboard.TensorBoard, "set_model"): hooks.Hook(
        callbacks.tensorboard_set_model,
        "and this"),
    (tf_trainer.TensorFlowTrainer, "predict"): hooks.Hook(
        training.predict,
        "gathers rows of several machines in the order in which they hold them"),
    (backup_and_restore.BackupAndRestore, "_save_model"): hooks.Hook(
        callbacks.backup_save,
        "writes over the last backup, which is lost to a run that is killed meanwhile"),
    (backup_and_restore.BackupAndRestore, "on_train_begin"): hooks.Hook(
        callbacks.backup_begin,
        "knows nothing of a backup that a killed run has not finished"),
    (backup_and_restore.BackupAndRestore, "on_train_end"): hooks.Hook(
        callbacks.backup_end,
        "deletes the backup file by file"),
}


def install() -> None:
    """Installs every hook of :data:`HOOKS`."""
    hooks.install(HOOKS)
    metrics_lib.wrap_known()
