"""TODO
"""

from __future__ import annotations

from typing import Any

from keras.src import tree
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.metrics import metric as metric_module
from keras.src.optimizers import base_optimizer

from towerstrategy.placement import kind


def is_model(model: Any) -> bool:
    """Whether ``model`` is a Keras 3 model."""
    return isinstance(model, tf_trainer.TensorFlowTrainer)


# The attributes that Keras' Trainer sets in __init__ and compile: a model's training state.
TRAINING_STATE = frozenset({*vars(tf_trainer.TensorFlowTrainer()), "optimizer", "history",
                             "stop_training", "stop_evaluating", "stop_predicting",
                             "_compile_config", "_compiled_trainable_state",
                             "_eval_epoch_iterator"} - {"_lock"})


def held_variables(model: Any) -> list[Any]:
    """The TensorFlow variables of ``model``, those of its metrics and optimizers left out."""
    own = {id(variable) for metric in model.metrics for variable in metric.variables}
    return [held(variable) for variable in model.variables if id(variable) not in own]


def forget_functions(model: Any) -> None:
    """Drops the functions that ``model`` has traced."""
    model.train_function = model.test_function = model.predict_function = None


def held(variable: Any) -> Any:
    """The TensorFlow variable that a Keras variable holds."""
    return variable._value if isinstance(variable, keras_variables.Variable) else variable


def metrics_of(model: Any) -> list[Any]:
    """The model's metrics, those given to ``compile`` and not built yet among them."""
    compiled = model._compile_metrics
    given = [] if compiled is None else tree.flatten(
        (compiled._user_metrics, compiled._user_weighted_metrics))
    return [*model.metrics, *(part for part in given if isinstance(part, metric_module.Metric))]


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers that the model holds, a GAN's several among them, and those inside them."""
    held = [part for part in vars(model).values()
            if isinstance(part, base_optimizer.BaseOptimizer)]
    inner = [part.inner_optimizer for part in held if hasattr(part, "inner_optimizer")]
    return [*held, *inner]


def strategy_of(model: Any) -> Any:
    """The model's TowerStrategy, or None."""
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if kind.is_tower_strategy(strategy) else None


def tf_variable(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras_variables.Variable) else variable
