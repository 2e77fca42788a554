"""TODO
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tf_keras.src.engine import compile_utils, training
from tf_keras.src.metrics import base_metric
from tf_keras.src.mixed_precision import loss_scale_optimizer
from tf_keras.src.optimizers import optimizer as new_optimizer
from tf_keras.src.optimizers.legacy import optimizer_v2

OPTIMIZERS = (new_optimizer.Optimizer, optimizer_v2.OptimizerV2,
               loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3)


def is_model(model: Any) -> bool:
    """Whether ``model`` is a tf_keras model."""
    return isinstance(model, training.Model)


# The attributes that Model sets in __init__ and compile for training.
TRAINING_STATE = frozenset({
    "_autotune_steps_per_execution", "_checkpoint", "_cluster_coordinator", "_compile_config",
    "_compiled_trainable_state", "_distribute_reduction_method", "_distribution_strategy",
    "_is_compiled", "_jit_compile", "_predict_counter", "_pss_evaluation_shards", "_run_eagerly",
    "_steps_per_execution", "_steps_per_execution_tuner", "_test_counter", "_train_counter",
    "_training_state", "compiled_loss", "compiled_metrics", "history", "loss", "optimizer",
    "predict_function", "stop_training", "test_function", "train_function", "train_tf_function"})


def held_variables(model: Any) -> list[Any]:
    """The TensorFlow variables of ``model``, those of its metrics and optimizers left out."""
    own = {id(variable) for metric in model.metrics for variable in variables_of(metric)}
    return [getattr(variable, "_variable", variable)  # AutoCastVariable holds one
            for variable in variables_of(model) if id(variable) not in own]


def forget_functions(model: Any) -> None:
    """Drops the functions that ``model`` has traced."""
    model.train_function = model.test_function = model.predict_function = None
    model.train_tf_function = None


def metrics_of(model: Any) -> list[Any]:
    """The model's metrics, those given to ``compile`` and not built yet among them."""
    given: list[Any] = []
    if isinstance(model.compiled_metrics, compile_utils.MetricsContainer):
        given += tf.nest.flatten((model.compiled_metrics._user_metrics,
                                  model.compiled_metrics._user_weighted_metrics))
    if isinstance(model.compiled_loss, compile_utils.LossesContainer):
        given.append(model.compiled_loss._total_loss_mean)
    given = [part for part in given if isinstance(part, base_metric.Metric)]
    return list({id(metric): metric for metric in [*model.metrics, *given]}.values())


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers that the model holds, a GAN's several among them, and those inside them."""
    values = vars(model).values()
    held = [part for value in values for part in (value if isinstance(value, list) else [value])
            if isinstance(part, OPTIMIZERS)]
    inner = [part.inner_optimizer for part in held if hasattr(part, "inner_optimizer")]
    return [*held, *inner]


def optimizer_variables(optimizer: Any) -> list[Any]:
    held = optimizer.variables
    return list(held() if callable(held) and not isinstance(held, list) else held)


def variables_of(layer: Any) -> list[Any]:
    """All variables of a layer, also of a model that is not built to the end."""
    return [variable for part in layer._flatten_layers()
            for variable in (*part._trainable_weights, *part._non_trainable_weights)]
