"""How Keras 3 names things: what the rules for both Kerases ask for.

Goes in: a Keras 3 model, optimizer, metric or variable.  Comes out: what it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.layers.core import embedding
from keras.src.layers.normalization import batch_normalization
from keras.src.metrics import metric as metric_module
from keras.src.models import functional, sequential
from keras.src.optimizers import base_optimizer
from keras.src.trainers import trainer as base_trainer

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import training
from towerstrategy.placement import kind
from towerstrategy.variables import tower_local

# The base class whose methods are hooked, and that of models.
MODEL, TRAINER = base_trainer.Trainer, tf_trainer.TensorFlowTrainer
# Where a model has its strategy.
OWNER = "_distribute_strategy"
# The methods of a model that Keras runs in no scope.
ENTRIES = ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch",
           "predict_on_batch", "make_train_function", "make_test_function", "make_predict_function",
           "_make_function")
# The layers of batch norm, and those that look rows up in a table.
BATCH_NORM, LOOK_UP = batch_normalization.BatchNormalization, embedding.Embedding
# The calls of models of which the order of layers is known beforehand.
OPENED = functional.Functional.call, sequential.Sequential.call
# The attributes that Keras' Trainer sets in __init__ and compile: a model's training state.
TRAINING_STATE = frozenset({*vars(tf_trainer.TensorFlowTrainer()), *ENTRIES, "optimizer", "history",
                             "stop_training", "stop_evaluating", "stop_predicting",
                             "_compile_config", "_compiled_trainable_state",
                             "_eval_epoch_iterator"} - {"_lock"})


def held_variables(model: Any) -> list[Any]:
    """The TensorFlow variables of ``model``, those of its metrics and optimizers left out."""
    own = {id(variable) for metric in metrics_of(model) for variable in metric.variables}
    return [held(variable) for variable in model.variables if id(variable) not in own]


def held(variable: Any) -> Any:
    """The TensorFlow variable that a Keras variable holds."""
    return variable._value if isinstance(variable, keras_variables.Variable) else variable


def _listed_metrics(model: Any) -> list[Any]:
    listed = getattr(model, "metrics", None)  # its own may need what it makes after compile
    return list(MODEL.metrics.fget(model) if listed is None else listed)


def metrics_of(model: Any) -> list[Any]:
    """The model's metrics, those given to ``compile`` and not built yet among them."""
    compiled = model._compile_metrics
    given = [] if compiled is None else tree.flatten(
        (compiled._user_metrics, compiled._user_weighted_metrics))
    return [*_listed_metrics(model),
            *(part for part in given if isinstance(part, metric_module.Metric))]


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers that the model holds, a GAN's several among them, and those inside them."""
    held = [part for part in vars(model).values()
            if isinstance(part, base_optimizer.BaseOptimizer)]
    inner = [part.inner_optimizer for part in held if hasattr(part, "inner_optimizer")]
    return [*held, *inner]


def optimizer_variables(optimizer: Any) -> list[Any]:
    """The TensorFlow variables of an optimizer."""
    return [held(variable) for variable in optimizer.variables]


def metric_variables(metric: Any) -> list[Any]:
    """The TensorFlow variables of a metric."""
    return [held(variable) for variable in metric.variables]


def adopt_metric(strategy: tf.distribute.Strategy, metric: Any) -> list[Any]:
    """Makes a metric's variables tower-local, in place; returns them."""
    for variable in metric.variables:
        value = variable._value
        if isinstance(value, _tf.BaseResourceVariable) and strategy.num_replicas_in_sync > 1:
            variable._value = tower_local.make_tower_local(strategy, value)
    return list(metric.variables)


def owner_of_optimizer(optimizer: Any) -> Any:
    """The strategy that an optimizer belongs to."""
    return optimizer._distribution_strategy


@contextlib.contextmanager
def towers_alone_compiled(model: Any) -> Iterator[None]:
    """Within, Keras makes step functions that XLA does not compile as a whole."""
    compiles = training.compiles_towers(model)
    if compiles:
        model._jit_compile = False
    try:
        yield
    finally:
        if compiles:
            model._jit_compile = True


def builders(model: Any) -> dict[str, Any]:
    """The methods that build a model, each with whether it is still to be built."""
    return {"build": lambda: not model.built}


def strategy_of(model: Any) -> Any:
    """The model's TowerStrategy, or None."""
    strategy = getattr(model, OWNER, None)
    return strategy if kind.is_tower_strategy(strategy) else None


def variables_of_layer(layer: Any) -> Iterator[tuple[Any, bool]]:
    """The TensorFlow variables of a layer that are made, and whether they are trained."""
    for variable in layer.variables:
        if held(variable) is not None:
            yield held(variable), variable.trainable
