"""The table of hooks into Keras 3 (``tf.keras`` of TensorFlow 2.16 and later).

Goes in: the imported Keras.  Comes out: :data:`HOOKS` and, for strategies with stages,
:data:`STAGES`.  The files beside this one have the replacements, by subject.  Owners and names are
those of Keras 3.15; ``tests/_keras/keras_hooks_test.py`` fails if a release has moved one.
"""

from __future__ import annotations

from typing import Any

from keras.src.backend.tensorflow import optimizer as tf_optimizer, trainer as tf_trainer
from keras.src.callbacks import callback_list
from keras.src.layers import layer as layer_module
from keras.src.losses import loss as loss_module
from keras.src.models import sequential
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.random import seed_generator
from keras.src.trainers import data_adapters

from towerstrategy._keras import batch_norm, hooks, optimizers as optimizers_rules, stages
from towerstrategy._keras.keras3 import callbacks, names, optimizers, training

# The hooks that every strategy needs.
HOOKS: dict[tuple[Any, str], hooks.Hook] = {
    (loss_module, "scale_loss_for_distribution"): hooks.Hook(
        optimizers_rules.scale_loss,
        "multiplies a replica's mean by 1/R; a tower's mean needs the tower's share of the rows, "
        "and a loss outside of towers is over all rows already"),
    (loss_module, "unscale_loss_for_distribution"): hooks.Hook(
        optimizers_rules.unscale_loss,
        "multiplies a metric's value by R, in place of 1 / share, and outside of towers, too"),
    (base_optimizer.BaseOptimizer, "apply"): hooks.Hook(
        optimizers.apply,
        "clips and decays each replica's gradients; they have to be merged first"),
    (loss_scale_optimizer.LossScaleOptimizer, "apply"): hooks.Hook(
        optimizers.apply,
        "looks for overflows in each replica's gradients; they have to be merged first"),
    (tf_optimizer.TFOptimizer, "_distributed_tf_update_step"): hooks.Hook(
        optimizers.distributed_update_step,
        "makes a dozen operations and passes over memory per variable, even if there is a kernel"),
    (names.BATCH_NORM, "call"): hooks.Hook(
        batch_norm.call,
        "makes a dozen operations, and as many for the gradient, even if there is a kernel"),
    (seed_generator.SeedGenerator, "next"): hooks.Hook(
        training.next_seed,
        "gives all towers one seed; random layers must draw other numbers on each tower"),
    (names.TRAINER, "__init__"): hooks.Hook(
        training.trainer_init,
        "makes a model whose methods do not enter the model's scope first"),
    (names.MODEL, "compile"): hooks.Hook(
        training.compile,
        "does not adopt a model that is compiled in the scope"),
    (data_adapters, "is_tf_dataset"): hooks.Hook(
        training.is_tf_dataset,
        "knows distributed datasets by the module of TensorFlow's own class"),
    (tf_trainer.TFEpochIterator, "__init__"): hooks.Hook(
        training.epoch_iterator_init,
        "does not say whether it lives longer than an epoch, nor its batch size; Python takes "
        "predict's batches from it"),
    (names.TRAINER, "_make_function"): hooks.Hook(
        training.make_function,
        "takes unsplit data in train_on_batch and test_on_batch, and does not adopt variables that "
        "were built after compile"),
    (names.TRAINER, "make_predict_function"): hooks.Hook(
        training.make_predict_function,
        "takes unsplit data in predict_on_batch; Python takes predict's batches from the data"),
    (names.TRAINER, "_maybe_symbolic_build"): hooks.Hook(
        training.symbolic_build,
        "takes a batch from the data and averages it over replicas, which fails for uneven "
        "sub-batches"),
    (callback_list.CallbackList, "set_model"): hooks.Hook(
        callbacks.set_model,
        "has callbacks that write the same files on every machine, and that overwrite the last "
        "backup, which is lost if the process is killed meanwhile"),
}
# The hooks that only a strategy with stages needs.
STAGES: dict[tuple[Any, str], hooks.Hook] = {
    **stages.hooks_of(layer_module.Layer, names),
    (sequential.Sequential, "build"): hooks.Hook(
        stages.sequential_build,
        "calls all layers again when one is added, in the stage of the added layer"),
}
