"""The names of tf_keras: its classes and attributes, for the code that both Kerases share.

Goes in: a tf_keras model, optimizer, metric or layer.  Comes out: its variables or metrics.
``keras3.names`` says what each name means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tf_keras.src.engine import compile_utils, functional, sequential, training
from tf_keras.src.layers.core import embedding
from tf_keras.src.layers.normalization import batch_normalization
from tf_keras.src.metrics import base_metric
from tf_keras.src.mixed_precision import loss_scale_optimizer
from tf_keras.src.optimizers import optimizer as new_optimizer
from tf_keras.src.optimizers.legacy import optimizer_v2

from towerstrategy import _tensorflow as _tf
from towerstrategy.variables import one_copy, rules, tower_local

MODEL = TRAINER = training.Model
# An optimizer works with any strategy; only its slots belong to one.
OWNER, OWNER_OF_OPTIMIZER = "_distribution_strategy", ""
# All other methods enter the model's scope first.
ENTRIES = "compile", "make_train_function", "make_test_function", "make_predict_function"
METRIC = base_metric.Metric
OPTIMIZERS = (new_optimizer.Optimizer, optimizer_v2.OptimizerV2,
              loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3)
BATCH_NORM, EMBEDDING = batch_normalization.BatchNormalizationBase, embedding.Embedding
GRAPH_CALLS = functional.Functional.call, sequential.Sequential.call
BUILDERS = "build", "_maybe_build", "_set_save_spec", "_build_graph_network_for_inferred_shape"
# The attributes that Model sets in __init__ and compile for training.
TRAINING_STATE = frozenset({
    *ENTRIES,
    "_autotune_steps_per_execution", "_checkpoint", "_cluster_coordinator", "_compile_config",
    "_compiled_trainable_state", "_distribute_reduction_method", "_distribution_strategy",
    "_is_compiled", "_jit_compile", "_predict_counter", "_pss_evaluation_shards", "_run_eagerly",
    "_steps_per_execution", "_steps_per_execution_tuner", "_test_counter", "_train_counter",
    "_training_state", "compiled_loss", "compiled_metrics", "history", "loss", "optimizer",
    "predict_function", "stop_training", "test_function", "train_function", "train_tf_function"})


def compiled_metrics(model: Any) -> list[Any]:
    """The metrics given to ``compile``, among other values, and the mean of the loss."""
    metrics: list[Any] = []
    if isinstance(model.compiled_metrics, compile_utils.MetricsContainer):
        metrics += tf.nest.flatten((model.compiled_metrics._user_metrics,
                                    model.compiled_metrics._user_weighted_metrics))
    if isinstance(model.compiled_loss, compile_utils.LossesContainer):
        metrics.append(model.compiled_loss._total_loss_mean)
    return metrics


def variables_of(layer: Any) -> list[Any]:
    """All variables of a layer, also of a model that is only partly built."""
    return [variable for part in layer._flatten_layers()
            for variable in (*part._trainable_weights, *part._non_trainable_weights)]


def adopt_metric(strategy: tf.distribute.Strategy, metric: Any) -> list[Any]:
    """Makes a metric's variables tower-local, in place; returns them."""
    # With one tower, or without an aggregation to combine the towers' parts, it has one copy.
    local: list[Any] = []
    for layer in metric._flatten_layers():
        for variable in list(layer._trainable_weights) + list(layer._non_trainable_weights):
            if not isinstance(variable, _tf.BaseResourceVariable):
                pass
            elif strategy.num_replicas_in_sync > 1 and variable.aggregation.name != "NONE":
                parts = tower_local.make_tower_local(strategy, variable)
                _replace(layer, variable, parts)
                variable = parts
            elif not isinstance(variable, one_copy.TowerVariable):
                one_copy.into_tower_variable(variable, strategy)  # tf_keras checks its strategy
            local.append(variable)
    return local


def variables_of_layer(layer: Any) -> Iterator[tuple[Any, bool]]:
    """A layer's TensorFlow variables, and whether each is trained."""
    trained = {id(variable) for part in layer._flatten_layers() if part.trainable
               for variable in part._trainable_weights}  # a frozen layer's list has them, too
    for variable in variables_of(layer):
        tf_variable = rules.held_variable(variable)
        if isinstance(tf_variable, tf.Variable):  # weights also include tables of lookup layers
            yield tf_variable, id(variable) in trained


def _replace(layer: Any, old: Any, new: Any) -> None:
    """Replaces ``old`` by ``new`` in a layer's attributes, weights and checkpoint dependencies."""
    for weights in (layer._trainable_weights, layer._non_trainable_weights):
        weights[:] = [new if weight is old else weight for weight in weights]
    for name, value in list(vars(layer).items()):
        if value is old:
            layer.__dict__[name] = new
    for name, child in list(layer._trackable_children().items()):
        if child is old:
            layer._track_trackable(new, name, overwrite=True)
