"""The table of hooks into Keras 3 (``tf.keras`` of TensorFlow 2.16 and later).

Goes in: the imported Keras.  Comes out: the same, with every hook of :data:`HOOKS`, and of
:data:`STAGES` where it is needed; the files beside this one hold what they do, by subject.
Upstream places are those of Keras 3.15; ``tests/_keras/keras_hooks_test.py`` fails where one
has moved.
"""

from __future__ import annotations

import functools
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

# What is hooked and why; the test of upstream names reads this.
HOOKS: dict[tuple[Any, str], hooks.Hook] = {
    (loss_module, "scale_loss_for_distribution"): hooks.Hook(
        optimizers_rules.scale_loss,
        "scales a replica's mean by 1/R; a tower's counts by its share of the rows, and outside of "
        "towers a loss is of all rows as it is"),
    (loss_module, "unscale_loss_for_distribution"): hooks.Hook(
        optimizers_rules.unscale_loss,
        "multiplies what a metric is given by R, of a tower's part and outside of towers, too"),
    (base_optimizer.BaseOptimizer, "apply"): hooks.Hook(
        optimizers.apply,
        "merge first, then Keras' own code once"),
    (loss_scale_optimizer.LossScaleOptimizer, "apply"): hooks.Hook(
        optimizers.apply,
        "one look for overflows, at merged gradients"),
    (tf_optimizer.TFOptimizer, "_distributed_tf_update_step"): hooks.Hook(
        optimizers.distributed_update_step,
        "a dozen operations and passes over memory a variable; one where TensorFlow has a kernel"),
    (names.BATCH_NORM, "call"): hooks.Hook(
        batch_norm.call,
        "a dozen operations, and as many for the gradient, where TensorFlow has a kernel"),
    (seed_generator.SeedGenerator, "next"): hooks.Hook(
        training.next_seed,
        "random layers draw differently on every tower"),
    (names.TRAINER, "__init__"): hooks.Hook(
        training.trainer_init,
        "calls a model that was made in the scope outside of it without entering it"),
    (names.MODEL, "compile"): hooks.Hook(
        training.compile,
        "compiling in the scope adopts"),
    (data_adapters, "is_tf_dataset"): hooks.Hook(
        training.is_tf_dataset,
        "knows distributed datasets by the module of TensorFlow's own class"),
    (tf_trainer.TFEpochIterator, "__init__"): hooks.Hook(
        training.epoch_iterator_init,
        "predicted rows are to come in the dataset's order"),
    (names.TRAINER, "_make_function"): hooks.Hook(
        training.make_function,
        "train_on_batch and test_on_batch hand over unsplit data; what was built after compile "
        "is to be adopted", in_models=True),
    (names.TRAINER, "make_predict_function"): hooks.Hook(
        training.make_predict_function,
        "so does predict_on_batch, and Python takes each batch of predict out of the data"),
    (names.TRAINER, "_maybe_symbolic_build"): hooks.Hook(
        training.symbolic_build,
        "takes a batch out of the data and means over it, which uneven sub-batches do not allow; "
        "what cannot be built symbolically the trace builds, as without a strategy"),
    (callback_list.CallbackList, "set_model"): hooks.Hook(
        callbacks.set_model,
        "callbacks write the same files on every machine, and over the last backup, which is lost "
        "to a run that is killed meanwhile"),
}
# Those that only a strategy whose towers have stages needs.
STAGES: dict[tuple[Any, str], hooks.Hook] = {
    (layer_module.Layer, "__init__"): hooks.Hook(
        stages.layer_init,
        "does not know for which stage of a tower a layer is made"),
    (layer_module.Layer, "__call__"): hooks.Hook(
        functools.partial(stages.layer_call, names),
        "runs every layer of a tower on one device, and forgets the tf.device around a call"),
    (sequential.Sequential, "build"): hooks.Hook(
        stages.sequential_build,
        "calls all layers anew for each that is added, in the stage of that one"),
}
