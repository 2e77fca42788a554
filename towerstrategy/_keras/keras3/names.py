"""The names of Keras 3: its classes and attributes, for the code that both Kerases share.

Goes in: a Keras 3 model, optimizer, metric or layer.  Comes out: its variables or metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.layers.core import embedding
from keras.src.layers.normalization import batch_normalization
from keras.src.metrics import metric as metric_module
from keras.src.models import functional, sequential
from keras.src.optimizers import base_optimizer
from keras.src.trainers import trainer as base_trainer

from towerstrategy import _tensorflow as _tf
from towerstrategy.variables import rules, tower_local

# The base class of models on every backend, and on TensorFlow; Keras 3.16 renames both.
MODEL, TRAINER = ((base_trainer.BaseTrainer, tf_trainer.Trainer)
                  if hasattr(base_trainer, "BaseTrainer")
                  else (base_trainer.Trainer, tf_trainer.TensorFlowTrainer))
# The attribute of a model, and of an optimizer, that holds its strategy.
OWNER, OWNER_OF_OPTIMIZER = "_distribute_strategy", "_distribution_strategy"
# The methods of a model that run code before Keras enters the model's scope.
ENTRIES = ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch",
           "predict_on_batch", "make_train_function", "make_test_function", "make_predict_function",
           "_maybe_symbolic_build")
METRIC, OPTIMIZERS = metric_module.Metric, base_optimizer.BaseOptimizer
BATCH_NORM, EMBEDDING = batch_normalization.BatchNormalization, embedding.Embedding
# The ``call`` methods of functional and sequential models, whose order of layers is known.
GRAPH_CALLS = functional.Functional.call, sequential.Sequential.call
# The methods that build a model.
BUILDERS = "build", "_maybe_build"
# The attributes that Keras' Trainer sets in __init__ and compile: a model's training state.
TRAINING_STATE = frozenset({*vars(TRAINER()), *ENTRIES, "optimizer", "history", "stop_training",
                             "stop_evaluating", "stop_predicting", "_compile_config",
                             "_compiled_trainable_state", "_eval_epoch_iterator"} - {"_lock"})


def variables_of(layer: Any) -> list[Any]:
    """All variables of a layer, a model or a metric."""
    return list(layer.variables)


def compiled_metrics(model: Any) -> list[Any]:
    """The metrics given to ``compile``, among other values such as None."""
    compiled = model._compile_metrics
    return [] if compiled is None else tree.flatten(
        (compiled._user_metrics, compiled._user_weighted_metrics))


def adopt_metric(strategy: tf.distribute.Strategy, metric: Any) -> list[Any]:
    """Makes a metric's variables tower-local, in place; returns them."""
    for variable in metric.variables:
        value = variable._value
        if isinstance(value, _tf.BaseResourceVariable) and strategy.num_replicas_in_sync > 1:
            variable._value = tower_local.make_tower_local(strategy, value)
    return list(metric.variables)


def variables_of_layer(layer: Any) -> Iterator[tuple[Any, bool]]:
    """A layer's TensorFlow variables, as far as they are made, and whether each is trained."""
    for variable in layer.variables:
        if (tf_variable := rules.held_variable(variable)) is not None:
            yield tf_variable, variable.trainable
