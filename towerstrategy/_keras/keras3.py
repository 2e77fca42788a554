"""The hooks into Keras 3 (``tf.keras`` of TensorFlow 2.16 and later).

Goes in: the imported ``keras``.  Comes out: the same, with the hooks of :func:`install`.  Upstream
places are those of Keras 3.15; ``tests/keras_hooks_test.py`` fails where one has moved.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src import tree
from keras.src.backend import config as keras_config
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.tensorflow import numpy as tf_numpy
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.callbacks import backup_and_restore, csv_logger, model_checkpoint, tensorboard
from keras.src.layers import layer as layer_module
from keras.src.layers.normalization import batch_normalization
from keras.src.layers.rnn import rnn
from keras.src.losses import loss as loss_module
from keras.src.losses import losses as keras_losses
from keras.src.metrics import metric as metric_module
from keras.src.metrics import reduction_metrics
from keras.src.optimizers import base_optimizer, loss_scale_optimizer
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils
from keras.src.trainers import trainer as base_trainer

from towerstrategy import _tensorflow as _tf
from towerstrategy import merge, own_losses, parts, split, variables
from towerstrategy._keras import backup, chief, common, twin
from towerstrategy._keras.common import is_tower_strategy, splitting_tower

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
        (metric_module.Metric, "__init__"): _metric_init,
        (tf_trainer.TFEpochIterator, "__init__"): _epoch_iterator_init,
        "reduce_per_replica": _reduce_per_replica,
        "scale_loss_for_distribution": _scale,
        "unscale_loss_for_distribution": _unscale,
        "apply_mask": _apply_mask,
        "reduce_values": _reduce_values,
        (compile_utils.CompileLoss, "call"): _compiled_loss,
        "_moments": _moments,
        "apply": _apply,
        "apply_gradients": _apply_gradients,
        "update_state": _mean_update_state,
        "take": _take,
        "next": _next_seed,
        "add_loss": _with_own_losses,
        "_get_own_losses": _with_own_losses,
        "_clear_losses": _with_own_losses,
        "compile": _compile,
        "compute_loss": _compute_loss,
        "get_metrics_result": _get_metrics_result,
        "_make_function": _unscaled_outputs,
        "make_train_function": _make_function("train_function"),
        "make_test_function": _make_function("test_function"),
        "make_predict_function": _make_predict_function,
        "_maybe_symbolic_build": _symbolic_build,
        (model_checkpoint.ModelCheckpoint, "_save_model"): _checkpoint_save,
        (csv_logger.CSVLogger, "on_train_begin"): _csv_begin,
        (tensorboard.TensorBoard, "set_model"): _tensorboard_set_model,
        "predict": common.predict_in_order,
        "_save_model": _backup_save,
        "on_train_begin": _backup_begin,
        "on_train_end": _backup_end,
    }
    common.require(HOOKS)
    for owner, name in HOOKS:
        common.wrap(owner, name, makers.get((owner, name)) or makers[name])


def is_model(model: Any) -> bool:
    """Whether ``model`` is a Keras 3 model."""
    return isinstance(model, tf_trainer.TensorFlowTrainer)


def adopt(strategy: tf.distribute.Strategy, model: Any) -> str:
    """See ``TowerStrategy.adopt``."""
    common.check_owner(strategy, f"model {model.name!r}", model._distribute_strategy)
    resident, local = _adopt_state(strategy, model)
    model._distribute_strategy = strategy
    without_xla = bool(model._jit_compile) and not strategy.extended.placement.compiles
    if without_xla:
        model.jit_compile = False
    strategy.extended.spread(resident)
    # Functions traced before know nothing of towers.
    forget_functions(model)
    return common.adopted_sentence(strategy, model, resident, local, without_xla)


# The attributes that Keras' Trainer sets in __init__ and compile: a model's training state.
_TRAINING_STATE = frozenset({*vars(tf_trainer.TensorFlowTrainer()), "optimizer", "history",
                             "stop_training", "stop_evaluating", "stop_predicting",
                             "_compile_config", "_compiled_trainable_state",
                             "_eval_epoch_iterator"} - {"_lock"})


def make_twin(strategy: tf.distribute.Strategy, model: Any) -> Any:
    """A second handle on ``model``, the strategy's."""
    common.check_owner(strategy, f"model {model.name!r}", model._distribute_strategy)
    common.check_variables(strategy, model, held_variables(model))
    state = {name: value for name, value in vars(tf_trainer.TensorFlowTrainer()).items()
             if name in _TRAINING_STATE}
    made = twin.make(model, _TRAINING_STATE, state, {"build": lambda: not model.built})
    adopt(strategy, made)
    return made


def held_variables(model: Any) -> list[Any]:
    """The TensorFlow variables of ``model``, those of its metrics and optimizers left out."""
    own = {id(variable) for metric in model.metrics for variable in metric.variables}
    return [_held(variable) for variable in model.variables if id(variable) not in own]


def forget_functions(model: Any) -> None:
    """Drops the functions that ``model`` has traced."""
    model.train_function = model.test_function = model.predict_function = None


def _adopt_state(strategy: tf.distribute.Strategy, model: Any) -> tuple[list[Any], list[Any]]:
    """Adopts all variables that there are; returns those with one copy and the tower-local ones."""
    common.check_no_states(strategy, model, rnn.RNN)
    metrics, optimizers = _metrics_of(model), _optimizers_of(model)
    local = {id(variable): variable for metric in metrics for variable in metric.variables}
    held = [_held(variable)
            for part in (model, *optimizers) for variable in part.variables
            if id(variable) not in local]
    common.check_variables(strategy, model, held)
    common.check_variables(strategy, model, map(_held, local.values()))
    for optimizer in optimizers:
        common.check_owner(strategy, f"optimizer {optimizer.name!r} of model {model.name!r}",
                           optimizer._distribution_strategy)
    for optimizer in optimizers:
        optimizer._distribution_strategy = strategy
    for metric in metrics:
        _wrap_result(type(metric))
    common.wrap_own_losses(type(model), base_trainer.Trainer)
    for variable in local.values():
        _adopt_metric_variable(strategy, variable)
    return common.adopt_variables(strategy, held), list(local.values())


def _held(variable: Any) -> Any:
    """The TensorFlow variable that a Keras variable holds."""
    return variable._value if isinstance(variable, keras_variables.Variable) else variable


def _metrics_of(model: Any) -> list[Any]:
    """The model's metrics, those given to ``compile`` and not built yet among them."""
    compiled = model._compile_metrics
    given = [] if compiled is None else tree.flatten(
        (compiled._user_metrics, compiled._user_weighted_metrics))
    return [*model.metrics, *(part for part in given if isinstance(part, metric_module.Metric))]


def _optimizers_of(model: Any) -> list[Any]:
    """The optimizers that the model holds, a GAN's several among them, and those inside them."""
    held = [part for part in vars(model).values()
            if isinstance(part, base_optimizer.BaseOptimizer)]
    inner = [part.inner_optimizer for part in held if hasattr(part, "inner_optimizer")]
    return [*held, *inner]


def _adopt_metric_variable(strategy: tf.distribute.Strategy, variable: Any) -> None:
    value = variable._value
    if isinstance(value, _tf.BaseResourceVariable) and strategy.num_replicas_in_sync > 1:
        variable._value = variables.make_tower_local(strategy, value)


def _strategy_of(model: Any) -> Any:
    """The model's TowerStrategy, or None."""
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if is_tower_strategy(strategy) else None


# Losses.


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_loss_for_distribution(value: Any) -> Any:
        tower = splitting_tower()
        return original(value) if tower is None else parts.scaled(tower, value)

    return scale_loss_for_distribution


def _unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    def unscale_loss_for_distribution(value: Any) -> Any:
        tower = splitting_tower()
        if tower is None:
            return original(value)
        if value.shape.rank != 0:  # not reduced, so not scaled
            return value
        return parts.unscaled(tower, value)

    return unscale_loss_for_distribution


def _apply_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weights = original(sample_weight, mask, dtype, reduction)
        tower = splitting_tower()
        if tower is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weights
        return common.whole_batch_mask(tower, weights, mask)

    return apply_mask


def _reduce_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_values(values: Any, sample_weight: Any = None,
                      reduction: Any = "sum_over_batch_size") -> Any:
        tower = splitting_tower()
        if tower is not None and reduction not in (None, "none") and values.shape == (0,):
            # Keras gives no rows back as they are, and the towers' losses would differ in shape.
            values = tf.reduce_sum(values, keepdims=True)
        if tower is None:
            return original(values, sample_weight, reduction)
        if values.shape.rank == 0:
            own_losses.check_number(tower, values, reduction)
        if reduction in (None, "none", "sum"):
            loss = original(values, sample_weight, reduction)
            return parts.summed(tower, loss) if loss.shape.rank == 0 else loss
        if values.shape.rank == 0:
            return parts.scaled(tower, values)
        if reduction != "mean_with_sample_weight" or sample_weight is None:
            return original(values, sample_weight, reduction)
        weight = tf.reduce_sum(tf.cast(sample_weight, tf.float64))
        all_weight = tower.all_reduce(_tf.ReduceOp.SUM, weight)
        with tower.weighted(tf.math.divide_no_nan(weight, all_weight)):
            return original(values, sample_weight, reduction)

    return reduce_values


def _compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        tower = splitting_tower()
        if tower is None or loss is None:
            return loss
        if tower.own_means:  # an override's super()
            return tower.mark_mean(loss)
        if _is_keras_own(self):
            loss = common.silence_stand_ins(tower, loss)
        return tower.mark_scaled(loss)

    return compute_loss


def _compiled_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = splitting_tower()
        unreduced = any(getattr(loss, "reduction", "mean") in (None, "none")
                        for loss in tree.flatten(self._user_loss))
        if tower is None or tower.own_means or not unreduced:
            return original(self, *args, **kwargs)
        return parts.own_loss(tower, lambda: original(self, *args, **kwargs))

    return call


def _is_keras_own(model: Any) -> bool:
    """Whether all gradients of ``model``'s step come of the loss that Keras computes."""
    return (type(model).train_step is tf_trainer.TensorFlowTrainer.train_step
            and type(model).compute_loss is base_trainer.Trainer.compute_loss)


def _with_own_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def with_own_losses(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = splitting_tower()
        if tower is None or tower.is_copied:
            return original(self, *args, **kwargs)
        shared = self._losses
        vars(self)["_losses"] = tower.losses_of(self)  # past Keras' own tracking of lists
        try:
            return original(self, *args, **kwargs)
        finally:
            vars(self)["_losses"] = shared

    return with_own_losses


# Layers.


def _moments(original: Callable[..., Any]) -> Callable[..., Any]:
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        tower = splitting_tower()
        if tower is None or mask is None or not self.synchronized:
            return original(self, inputs, mask)
        kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))

        def total(values: Any) -> Any:
            values = tf.where(kept, values, tf.zeros_like(values))
            return tower.all_reduce(_tf.ReduceOp.SUM, tf.reduce_sum(values, self._reduction_axes))

        count = total(tf.ones_like(inputs)) + keras_config.epsilon()
        mean = total(inputs) / count
        return mean, total(tf.square(inputs - mean)) / count

    return _moments


# Optimizers.


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        tower = splitting_tower()
        if tower is None:
            with common.merged_if_alone():
                return original(self, grads, trainable_variables)
        grads = list(grads)
        targets = list(self._trainable_variables if trainable_variables is None
                       else trainable_variables)
        return common.merge_then(tower, grads, [_tf_variable(target) for target in targets],
                                 lambda merged: original(self, merged, trainable_variables),
                                 overwriting=_overwriting(targets))

    return apply


def _apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(self: Any, grads_and_vars: Any) -> Any:
        tower = splitting_tower()
        if tower is None:
            return original(self, grads_and_vars)
        grads, targets = zip(*grads_and_vars)
        return common.merge_then(tower, grads, [_tf_variable(target) for target in targets],
                                 lambda merged: original(self, zip(merged, targets)),
                                 overwriting=_overwriting(targets))

    return apply_gradients


def _overwriting(targets: Any) -> list[bool]:
    return [getattr(target, "overwrite_with_gradient", False) for target in targets]


def _tf_variable(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras_variables.Variable) else variable


# Metrics.


def _metric_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _wrap_result(type(self))

    return __init__


def _wrap_result(cls: type) -> None:
    """Hooks ``result`` in ``cls`` and its bases."""
    for base in cls.__mro__:
        if "result" in base.__dict__ and base is not metric_module.Metric:
            common.wrap(base, "result", _result)


def _result(original: Callable[..., Any]) -> Callable[..., Any]:
    def result(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _once(self, lambda: original(self, *args, **kwargs))

    return result


def _get_metrics_result(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_metrics_result(self: Any) -> Any:
        return _once(self, lambda: original(self))

    return get_metrics_result


def _once(holder: Any, result: Callable[[], Any]) -> Any:
    """``result`` computed once for all towers, from the tower-local variables' sums."""
    tower = splitting_tower()
    if tower is not None and not tower.can_merge:
        return result()
    if tower is None:
        strategy = tf.distribute.get_strategy()
        return _of_sums(strategy, holder, result) if _crosses(strategy) else result()
    return tower.merge_call(lambda strategy: _of_sums(strategy, holder, result))


def _crosses(strategy: Any) -> bool:
    """Whether reading metrics here, outside of towers, means to read those of all machines."""
    return (is_tower_strategy(strategy) and strategy.extended.workers is not None
            and tf.distribute.in_cross_replica_context())


def _of_sums(strategy: tf.distribute.Strategy, holder: Any, result: Callable[[], Any]) -> Any:
    """``result`` of the metrics of ``holder`` (a model or a metric), their sums read at once."""
    parts = (holder,) if isinstance(holder, metric_module.Metric) else holder.metrics
    held = [_held(variable) for metric in parts for variable in metric.variables]
    with strategy.extended.read_at_once(held):
        return result()


def _mean_update_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        tower = splitting_tower()
        if tower is None:
            return original(self, values, sample_weight)
        value = tf.convert_to_tensor(values)
        if value.shape.rank != 0:
            return original(self, values, sample_weight)
        if sample_weight is None:
            sample_weight = tf.cast(tower.share, self.dtype)
        return original(self, parts.mean(tower, value), sample_weight)

    return update_state


def _take(original: Callable[..., Any]) -> Callable[..., Any]:
    def take(x: Any, indices: Any, axis: int | None = None) -> Any:
        table = _tf_variable(x)
        tower = splitting_tower()
        if tower is None or axis != 0 or not isinstance(table, variables.TowerVariable):
            return original(x, indices, axis=axis)
        with tower.at(variables.home_of(table)):
            return original(x, indices, axis=axis)

    return take


# Random numbers.


def _next_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    def next(self: Any, ordered: bool = True) -> Any:
        tower = splitting_tower()
        if tower is None:
            return original(self, ordered)
        with tower.strategy.extended.writes_alike():
            seed = original(self, ordered)
        return tower.own_seed(seed)

    return next


# Training.


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        scope = tf.distribute.get_strategy()
        strategy = scope if is_tower_strategy(scope) else _strategy_of(self)
        if strategy is None:
            return original(self, *args, **kwargs)
        owner = self._distribute_strategy
        common.check_owner(strategy, f"model {self.name!r}", owner)
        with strategy.scope():
            # From here on "auto" means no XLA, as for any model of a strategy.
            self._distribute_strategy = strategy
            try:
                original(self, *args, **kwargs)
            except Exception:
                self._distribute_strategy = owner
                raise
            if self.jit_compile and not strategy.extended.placement.compiles:
                raise ValueError(
                    "jit_compile=True is not supported with several towers, nor away from "
                    "TensorFlow's default device: XLA compiles a step for that one device. "
                    'Compile the model with jit_compile=False or leave it at "auto".')
            adopt(strategy, self)
            if strategy.num_replicas_in_sync > 1:
                _warn_of_coupled_rows(self)

    return compile


# Losses that are made of all rows of a batch at once; with axes given, the first two are not.
_COUPLED = {"dice": keras_losses.Dice, "tversky": keras_losses.Tversky,
            "circle": keras_losses.Circle}


def _warn_of_coupled_rows(model: Any) -> None:
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


def _epoch_iterator_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if isinstance(self._distributed_dataset, split.TowerDataset):
            self._distributed_dataset = self._distributed_dataset.with_stand_ins()

    return __init__


def _reduce_per_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if not is_tower_strategy(strategy) or strategy.num_replicas_in_sync == 1:
            return original(values, strategy, reduction)
        with tf.device(strategy.extended.merge_device):
            return tree.map_structure(lambda value: _reduce(value, reduction), values)

    return reduce_per_replica


def _reduce(value: Any, reduction: str) -> Any:
    if not isinstance(value, _tf.PerReplica):
        return value
    if reduction == "first":
        return value.shares.firsts(value.values[0])
    if reduction == "concat":
        return common.joined(value, tf_trainer.concat)
    if reduction == "sum":
        return merge.total_of_filled(list(value.values), value.shares)
    mean = merge.weighted_mean if value.values[0].dtype.is_floating else merge.mean_of_filled
    return mean(list(value.values), value.shares)


def _unscaled_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def _make_function(self: Any, step_function: Any) -> Any:
        @functools.wraps(step_function)
        def step(data: Any) -> Any:
            outputs = step_function(data)
            tower = splitting_tower()
            if tower is None:
                return outputs
            return tree.map_structure(
                lambda output: parts.mean(tower, output)
                if isinstance(output, tf.Tensor) else output, outputs)

        return original(self, step)

    return _make_function


def _make_function(attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``*_on_batch`` gives the step function plain data: split it."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_function(self: Any, force: bool = False) -> Any:
            before = getattr(self, attribute)
            strategy = _strategy_of(self)
            if strategy is None:
                common.check_trains_on_towers(self, tf.distribute.get_strategy())
            result, step = original(self, force), getattr(self, attribute)
            if strategy is None or step is before:
                return result
            # What was built after compile, outside of the scope.
            _adopt_state(strategy, self)

            def function(iterator: Any) -> Any:
                if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                    iterator = (common.split_plain(strategy, data) for data in iterator)
                with strategy.extended.step():
                    return step(iterator)

            setattr(self, attribute, function)
            return function

        return make_function

    return hook


def _make_predict_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_predict_function(self: Any, force: bool = False) -> Any:
        before = self.predict_function
        result, step = original(self, force), self.predict_function
        if step is before or not is_tower_strategy(self.distribute_strategy):
            return result

        def function(steps: Any) -> Any:
            # A model that is not adopted predicts on the towers in whose scope it is called.
            strategy = self.distribute_strategy
            if not is_tower_strategy(strategy):
                return step(steps)
            with strategy.extended.step():
                return step([common.split_plain(strategy, data) for data in steps])

        self.predict_function = function
        return function

    return make_predict_function


def _symbolic_build(original: Callable[..., Any]) -> Callable[..., Any]:
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = _strategy_of(self)
        if strategy is None:
            return original(self, iterator, data_batch)
        if self.train_function is None:
            # The optimizer is built here, around weights that may have been built outside.
            _adopt_state(strategy, self)
        if iterator is not None:
            data_batch = _batch_spec(iterator._distributed_dataset.element_spec,
                                     _has_fixed_rows(self))
        try:
            with strategy.scope():
                self._symbolic_build(data_batch=data_batch)
        except RuntimeError as error:
            if "Unable to automatically build the model" not in str(error):
                raise
            # A model that cannot be called symbolically is built while its step is traced, as on
            # one device.

    return _maybe_symbolic_build


def _has_fixed_rows(model: Any) -> bool:
    """Whether the model was made for batches of one size, as by ``Input(batch_size=...)``."""
    inputs = getattr(getattr(model, "_functional", model), "inputs", None)
    return any(tensor.shape and tensor.shape[0] is not None
               for tensor in tree.flatten(inputs or []))


def _batch_spec(element_spec: Any, fixed_rows: bool) -> Any:
    """Shapes and dtypes of a batch, from the spec of its sub-batches.

    Its rows are left open, or with ``fixed_rows`` are those of tower 0.
    """

    def whole(spec: Any) -> Any:
        if isinstance(spec, (_tf.NoneTensorSpec, tf.OptionalSpec)):
            return None
        if isinstance(spec, split.SubBatchesSpec):
            spec = spec._component_specs[0]
        rows = spec.shape[:1] if fixed_rows else tf.TensorShape([None])
        return _Symbol(rows.concatenate(spec.shape[1:]), spec.dtype)

    return tree.map_structure(whole, element_spec)


class _Symbol:
    """Shape and dtype, as Keras' symbolic build asks for them."""

    def __init__(self, shape: tf.TensorShape, dtype: tf.DType) -> None:
        self.shape = tuple(shape.as_list())
        self.dtype = dtype


# Callbacks.


def _checkpoint_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def _save_model(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            if not chief.writes(self):
                stack.enter_context(chief.thrown_away(self, "filepath"))
            original(self, *args, **kwargs)

    return _save_model


def _csv_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if not chief.writes(self):
            self.filename = os.devnull
        original(self, logs)

    return on_train_begin


def _tensorboard_set_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_model(self: Any, model: Any) -> None:
        self._model = model
        if not chief.writes(self):
            # Lives as long as the callback, whose writers keep files open.
            self._towerstrategy_folder = tempfile.TemporaryDirectory()
            self.log_dir = self._towerstrategy_folder.name
        original(self, model)

    return set_model


def _backup_save(original: Callable[..., Any]) -> Callable[..., Any]:
    def _save_model(self: Any) -> None:
        if _strategy_of(self.model) is None:
            original(self)
        elif chief.writes(self):
            backup.save(self, original)

    return _save_model


def _backup_begin(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        if _strategy_of(self.model) is not None and chief.writes(self):
            backup.clean(self)
        if chief.workers_of(self) is None:
            original(self, logs)
        else:
            chief.restore(self, lambda: original(self, logs), lambda: _saved_of(self.model))

    return on_train_begin


def _saved_of(model: Any) -> list[Any]:
    """The TensorFlow variables that ``save_weights`` saves."""
    held = [*held_variables(model),
            *(_held(variable) for part in _optimizers_of(model) for variable in part.variables)]
    return list({id(variable): variable for variable in held
                 if isinstance(variable, _tf.BaseResourceVariable)}.values())


def _backup_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_train_end(self: Any, logs: Any = None) -> None:
        if _strategy_of(self.model) is None:
            original(self, logs)
        elif chief.writes(self):
            if self.delete_checkpoint:
                backup.delete(self.backup_dir)
            original(self, logs)

    return on_train_end
