"""TODO
"""

from __future__ import annotations

import warnings
from typing import Any

from keras.src import tree
from keras.src.backend.tensorflow import numpy as tf_numpy
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.callbacks import backup_and_restore, csv_logger, model_checkpoint, tensorboard
from keras.src.layers import layer as layer_module
from keras.src.layers.normalization import batch_normalization
from keras.src.losses import loss as loss_module
from keras.src.losses import losses as keras_losses
from keras.src.metrics import metric as metric_module
from keras.src.metrics import reduction_metrics
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils
from keras.src.trainers import trainer as base_trainer

from towerstrategy._keras import hooks
from towerstrategy._keras import training as training_rules
from towerstrategy._keras.keras3 import callbacks, layers, losses, optimizers, training
from towerstrategy._keras.keras3 import metrics as metrics_lib

# What is hooked and why; the test of upstream names reads this.
HOOKS: dict[tuple[Any, str], str] = {
    (loss_module, "scale_loss_for_distribution"):
        "scales a replica's mean by 1/R; a tower's counts by its share of the rows",
    (loss_module, "unscale_loss_for_distribution"): "the inverse, for the logged loss",
    (loss_module, "apply_mask"): "the mean over unmasked entries is the whole batch's",
    (loss_module, "reduce_values"):
        "mean_with_sample_weight divides by the whole batch's weights; a loss that is one number "
        "goes through unscaled",
    (compile_utils.CompileLoss, "call"):
        "adds a mean, scaled, to each of another output's losses, which count as they are",
    (batch_normalization.BatchNormalization, "_moments"):
        "forgets synchronized=True where there is a mask",
    (base_optimizer.BaseOptimizer, "apply"): "merge first, then Keras' own code once",
    (base_optimizer.BaseOptimizer, "apply_gradients"):
        "the same, for optimizers that override apply",
    (loss_scale_optimizer.LossScaleOptimizer, "apply"):
        "one look for overflows, at merged gradients",
    (metric_module.Metric, "__init__"): "a metric's result inside a tower is the whole batch's",
    (reduction_metrics.Mean, "update_state"): "a scalar counts by its tower's share",
    (tf_numpy, "take"):
        "reads a whole table to take rows of it; the rows are taken where the table lives, so that "
        "they alone go to the tower",
    (seed_generator.SeedGenerator, "next"): "random layers draw differently on every tower",
    (layer_module.Layer, "add_loss"):
        "a layer has one list of losses, in which towers that run in turn would find each other's",
    (layer_module.Layer, "_get_own_losses"): "the same",
    (layer_module.Layer, "_clear_losses"): "the same",
    (base_trainer.Trainer, "compile"):
        "compiling in the scope adopts; jit_compile is refused early",
    (base_trainer.Trainer, "compute_loss"): "knows a loss that is scaled by share already",
    (base_trainer.Trainer, "get_metrics_result"): "all results in one meeting of the towers",
    (tf_trainer, "reduce_per_replica"):
        "means over replicas count each by its share; outputs of stand-ins are cut off",
    (tf_trainer.TFEpochIterator, "__init__"): "towers without rows get stand-ins",
    (tf_trainer.TensorFlowTrainer, "_make_function"):
        "a loss that an own train_step returns is a tower's part; the mean over towers is to be "
        "the whole batch's loss",
    (tf_trainer.TensorFlowTrainer, "make_train_function"): "train_on_batch hands over unsplit data",
    (tf_trainer.TensorFlowTrainer, "make_test_function"): "so does test_on_batch",
    (tf_trainer.TensorFlowTrainer, "make_predict_function"): "and predict_on_batch",
    (tf_trainer.TensorFlowTrainer, "_maybe_symbolic_build"):
        "takes a batch out of the data and means over it, which uneven sub-batches do not allow",
    (model_checkpoint.ModelCheckpoint, "_save_model"):
        "writes the same file on every machine; only the chief's is kept",
    (csv_logger.CSVLogger, "on_train_begin"): "so does this",
    (tensorboard.TensorBoard, "set_model"): "and this",
    (tf_trainer.TensorFlowTrainer, "predict"):
        "gathers rows of several machines in the order in which they hold them",
    (backup_and_restore.BackupAndRestore, "_save_model"):
        "writes over the last backup, which is lost to a run that is killed meanwhile",
    (backup_and_restore.BackupAndRestore, "on_train_begin"):
        "knows nothing of a backup that a killed run has not finished",
    (backup_and_restore.BackupAndRestore, "on_train_end"):
        "deletes the backup file by file",
}


def install() -> None:
    """Installs every hook of :data:`HOOKS`."""
    makers: dict[Any, Any] = {
        (metric_module.Metric, "__init__"): metrics_lib.metric_init,
        (tf_trainer.TFEpochIterator, "__init__"): training.epoch_iterator_init,
        "reduce_per_replica": training.reduce_per_replica,
        "scale_loss_for_distribution": losses.scale,
        "unscale_loss_for_distribution": losses.unscale,
        "apply_mask": losses.apply_mask,
        "reduce_values": losses.reduce_values,
        (compile_utils.CompileLoss, "call"): losses.compiled_loss,
        "_moments": layers.moments,
        "apply": optimizers.apply,
        "apply_gradients": optimizers.apply_gradients,
        "update_state": metrics_lib.mean_update_state,
        "take": layers.take,
        "next": layers.next_seed,
        "add_loss": losses.with_own_losses,
        "_get_own_losses": losses.with_own_losses,
        "_clear_losses": losses.with_own_losses,
        "compile": training.compile,
        "compute_loss": losses.compute_loss,
        "get_metrics_result": metrics_lib.get_metrics_result,
        "_make_function": training.unscaled_outputs,
        "make_train_function": training.make_function("train_function"),
        "make_test_function": training.make_function("test_function"),
        "make_predict_function": training.make_predict_function,
        "_maybe_symbolic_build": training.symbolic_build,
        (model_checkpoint.ModelCheckpoint, "_save_model"): callbacks.checkpoint_save,
        (csv_logger.CSVLogger, "on_train_begin"): callbacks.csv_begin,
        (tensorboard.TensorBoard, "set_model"): callbacks.tensorboard_set_model,
        "predict": training_rules.predict_in_order,
        "_save_model": callbacks.backup_save,
        "on_train_begin": callbacks.backup_begin,
        "on_train_end": callbacks.backup_end,
    }
    hooks.require(HOOKS)
    for owner, name in HOOKS:
        hooks.wrap(owner, name, makers.get((owner, name)) or makers[name])


def overwriting(targets: Any) -> list[bool]:
    return [getattr(target, "overwrite_with_gradient", False) for target in targets]


# Losses that are made of all rows of a batch at once; with axes given, the first two are not.
_COUPLED = {"dice": keras_losses.Dice, "tversky": keras_losses.Tversky,
            "circle": keras_losses.Circle}


def warn_of_coupled_rows(model: Any) -> None:
    """Warns of losses that see one tower's rows where one device's see the whole batch's."""
    given = model._compile_loss._user_loss if model._compile_loss is not None else None
    for loss in tree.flatten(given):
        name = next((name for name, cls in _COUPLED.items() if isinstance(loss, cls)
                     or str(getattr(loss, "__name__", loss)).lower() == name), None)
        axis = getattr(loss, "axis", None)
        if name is None or (axis is not None and 0 not in tree.flatten(axis)):
            continue
        warnings.warn(
            f"model {model.name!r} is compiled with the loss {name!r}, which puts all rows of a "
            "batch into one number. On several towers it is computed on each tower's rows, and the "
            "mean of the towers' losses is trained: not what one device computes. Use a strategy "
            "of one tower to have that"
            + (", or give the loss the axes of one row, as axis=(1, 2, 3)." if name != "circle"
               else "."), UserWarning, stacklevel=3)
