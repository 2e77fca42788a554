"""The hooks into tf_keras (``TF_USE_LEGACY_KERAS=1``).

Goes in: the imported ``tf_keras``.  Comes out: the same, with the hooks of :func:`install`.
Upstream places are those of tf_keras 2.21; ``tests/keras_hooks_test.py`` fails where one
has moved.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src import callbacks
from tf_keras.src.distribute import worker_training_state
from tf_keras.src.engine import compile_utils, data_adapter, training
from tf_keras.src.layers.normalization import batch_normalization
from tf_keras.src.layers.rnn import base_rnn
from tf_keras.src.metrics import base_metric
from tf_keras.src.mixed_precision import loss_scale_optimizer
from tf_keras.src.optimizers import optimizer as new_optimizer
from tf_keras.src.optimizers.legacy import optimizer_v2
from tf_keras.src.utils import losses_utils, metrics_utils

from towerstrategy import _tensorflow as _tf
from towerstrategy import merge, own_losses, parts, split, variables
from towerstrategy._keras import backup, common, twin
from towerstrategy._keras.common import is_tower_strategy, splitting_tower

_OPTIMIZERS = (new_optimizer.Optimizer, optimizer_v2.OptimizerV2,
               loss_scale_optimizer.LossScaleOptimizer, loss_scale_optimizer.LossScaleOptimizerV3)

# What is hooked and why; the test of upstream names reads this.
HOOKS: dict[tuple[Any, str], str] = {
    (losses_utils, "scale_loss_for_distribution"):
        "scales a replica's mean by 1/R; a tower's counts by its share of the rows",
    (losses_utils, "apply_valid_mask"): "the mean over unmasked entries is the whole batch's",
    (losses_utils, "compute_weighted_loss"):
        "a sum, and a loss that is one number, counts as it is; its mean is wanted in places",
    (compile_utils.LossesContainer, "__call__"):
        "scales each loss by itself, and multiplies a summed one by R for the log; all are means "
        "over the tower's rows there, and what comes out is scaled",
    **{(cls, "apply_gradients"): "merge first, then Keras' own code once" for cls in _OPTIMIZERS},
    (loss_scale_optimizer, "strategy_supports_loss_scaling"):
        "refuses strategies with one copy of a variable, which would unscale it once a replica; "
        "merged gradients are checked and applied once",
    (base_metric.Reduce, "update_state"): "a scalar counts by its tower's share",
    (batch_normalization.BatchNormalizationBase, "build"):
        "keeps moving statistics per replica and averages them plainly; they are one copy, moved "
        "by each tower's share, as in Keras 3",
    (data_adapter.DataHandler, "_configure_dataset_and_inferred_steps"):
        "towers without rows get stand-ins",
    (data_adapter, "single_batch_iterator"): "the same for *_on_batch",
    (training, "reduce_per_replica"): "outputs of stand-ins are cut off",
    (training.Model, "get_metrics_result"):
        "reads each metric's variables by themselves; those of all machines are read at once",
    (training.Model, "predict"):
        "gathers rows of several machines in the order in which they hold them",
    (training.Model, "compile"): "compiling in the scope adopts; jit_compile is refused early",
    (training.Model, "compute_loss"): "the loss of a stand-in is 0, and so are its gradients",
    (training.Model, "make_train_function"):
        "adopts what was built since compile; refuses a model in the scope that is not adopted",
    (training.Model, "make_test_function"): "the same for evaluate",
    (callbacks.BackupAndRestore, "__init__"): "lists the strategies that it works with",
    (worker_training_state.WorkerTrainingState, "delete_backup"):
        "deletes the backup file by file",
}


def install() -> None:
    """Installs every hook of :data:`HOOKS`."""
    makers: dict[str, Callable[..., Any]] = {
        "scale_loss_for_distribution": _scale,
        "apply_valid_mask": _apply_valid_mask,
        "compute_weighted_loss": _compute_weighted_loss,
        "__call__": _losses_call,
        "apply_gradients": _apply_gradients,
        "strategy_supports_loss_scaling": _supports_loss_scaling,
        "compute_loss": _compute_loss,
        "update_state": _mean_update_state,
        "get_metrics_result": _get_metrics_result,
        "predict": common.predict_in_order,
        "build": _batch_norm_build,
        "_configure_dataset_and_inferred_steps": _configure_dataset,
        "single_batch_iterator": _single_batch_iterator,
        "reduce_per_replica": _reduce_per_replica,
        "compile": _compile,
        "make_train_function": _make_function("train_function"),
        "make_test_function": _make_function("test_function"),
        "__init__": _backup_init,
        "delete_backup": _delete_backup,
    }
    common.require(HOOKS)
    for owner, name in HOOKS:
        common.wrap(owner, name, makers[name])


def is_model(model: Any) -> bool:
    """Whether ``model`` is a tf_keras model."""
    return isinstance(model, training.Model)


def adopt(strategy: tf.distribute.Strategy, model: Any) -> str:
    """See ``TowerStrategy.adopt``."""
    common.check_owner(strategy, f"model {model.name!r}", model._distribution_strategy)
    resident, local = _adopt_state(strategy, model)
    model._distribution_strategy = strategy
    without_xla = bool(model._jit_compile) and not strategy.extended.placement.compiles
    if without_xla:
        model._jit_compile = False
    strategy.extended.spread(resident)
    # Functions traced before know nothing of towers.
    forget_functions(model)
    return common.adopted_sentence(strategy, model, resident, local, without_xla)


# The attributes that Model sets in __init__ and compile for training.
_TRAINING_STATE = frozenset({
    "_autotune_steps_per_execution", "_checkpoint", "_cluster_coordinator", "_compile_config",
    "_compiled_trainable_state", "_distribute_reduction_method", "_distribution_strategy",
    "_is_compiled", "_jit_compile", "_predict_counter", "_pss_evaluation_shards", "_run_eagerly",
    "_steps_per_execution", "_steps_per_execution_tuner", "_test_counter", "_train_counter",
    "_training_state", "compiled_loss", "compiled_metrics", "history", "loss", "optimizer",
    "predict_function", "stop_training", "test_function", "train_function", "train_tf_function"})


def make_twin(strategy: tf.distribute.Strategy, model: Any) -> Any:
    """A second handle on ``model``, the strategy's."""
    common.check_owner(strategy, f"model {model.name!r}", model._distribution_strategy)
    common.check_variables(strategy, model, held_variables(model))
    state = {name: value for name, value in vars(training.Model()).items()
             if name in _TRAINING_STATE}
    built = {name: lambda: True for name in (
        "build", "_maybe_build", "_set_save_spec", "_build_graph_network_for_inferred_shape")
        if hasattr(model, name)}
    made = twin.make(model, _TRAINING_STATE, state, built)
    vars(made)["_checkpoint"] = tf.train.Checkpoint(root=weakref.ref(made))
    adopt(strategy, made)
    return made


def held_variables(model: Any) -> list[Any]:
    """The TensorFlow variables of ``model``, those of its metrics and optimizers left out."""
    own = {id(variable) for metric in model.metrics for variable in _variables_of(metric)}
    return [getattr(variable, "_variable", variable)  # AutoCastVariable holds one
            for variable in _variables_of(model) if id(variable) not in own]


def forget_functions(model: Any) -> None:
    """Drops the functions that ``model`` has traced."""
    model.train_function = model.test_function = model.predict_function = None
    model.train_tf_function = None


def _adopt_state(strategy: tf.distribute.Strategy, model: Any) -> tuple[list[Any], list[Any]]:
    """Adopts all variables that there are; returns those with one copy and the tower-local ones."""
    common.check_no_states(strategy, model, base_rnn.RNN)
    metrics, optimizers = _metrics_of(model), _optimizers_of(model)
    common.wrap_own_losses(type(model), training.Model)
    held = held_variables(model)
    slots = [variable for optimizer in optimizers for variable in _optimizer_variables(optimizer)]
    counters = [model._train_counter, model._test_counter, model._predict_counter]
    common.check_variables(strategy, model, [*held, *slots])
    for metric in metrics:
        common.check_variables(strategy, model, _variables_of(metric))
    local: list[Any] = []
    for metric in metrics:
        _adopt_metric(strategy, metric, local)
    for optimizer in optimizers:
        _adopt_optimizer(strategy, optimizer)
    resident = common.adopt_variables(strategy, [*held, *slots])
    common.adopt_variables(strategy, counters)
    return resident, local


def _metrics_of(model: Any) -> list[Any]:
    """The model's metrics, those given to ``compile`` and not built yet among them."""
    given: list[Any] = []
    if isinstance(model.compiled_metrics, compile_utils.MetricsContainer):
        given += tf.nest.flatten((model.compiled_metrics._user_metrics,
                                  model.compiled_metrics._user_weighted_metrics))
    if isinstance(model.compiled_loss, compile_utils.LossesContainer):
        given.append(model.compiled_loss._total_loss_mean)
    given = [part for part in given if isinstance(part, base_metric.Metric)]
    return list({id(metric): metric for metric in [*model.metrics, *given]}.values())


def _optimizers_of(model: Any) -> list[Any]:
    """The optimizers that the model holds, a GAN's several among them, and those inside them."""
    values = vars(model).values()
    held = [part for value in values for part in (value if isinstance(value, list) else [value])
            if isinstance(part, _OPTIMIZERS)]
    inner = [part.inner_optimizer for part in held if hasattr(part, "inner_optimizer")]
    return [*held, *inner]


def _optimizer_variables(optimizer: Any) -> list[Any]:
    held = optimizer.variables
    return list(held() if callable(held) and not isinstance(held, list) else held)


def _variables_of(layer: Any) -> list[Any]:
    """All variables of a layer, also of a model that is not built to the end."""
    return [variable for part in layer._flatten_layers()
            for variable in (*part._trainable_weights, *part._non_trainable_weights)]


def _adopt_metric(strategy: tf.distribute.Strategy, metric: Any, local: list[Any]) -> None:
    for layer in metric._flatten_layers():
        for variable in list(layer._trainable_weights) + list(layer._non_trainable_weights):
            if (isinstance(variable, _tf.BaseResourceVariable)
                    and strategy.num_replicas_in_sync > 1):
                parts = variables.make_tower_local(strategy, variable)
                _replace(layer, variable, parts)
                variable = parts
            local.append(variable)


def _replace(layer: Any, old: Any, new: Any) -> None:
    """Puts ``new`` wherever ``layer`` holds ``old``, checkpoint dependencies included."""
    for weights in (layer._trainable_weights, layer._non_trainable_weights):
        weights[:] = [new if weight is old else weight for weight in weights]
    for name, value in list(vars(layer).items()):
        if value is old:
            layer.__dict__[name] = new
    for reference in list(layer._trackable_children().items()):
        name, child = reference
        if child is old:
            layer._track_trackable(new, name, overwrite=True)


def _adopt_optimizer(strategy: tf.distribute.Strategy, optimizer: Any) -> None:
    # A LossScaleOptimizer has none of its own and asks the one inside.
    if "_distribution_strategy" in vars(optimizer):
        optimizer._distribution_strategy = strategy


# Losses.


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_loss_for_distribution(loss_value: Any) -> Any:
        tower = splitting_tower()
        return original(loss_value) if tower is None else parts.scaled(tower, loss_value)

    return scale_loss_for_distribution


def _apply_valid_mask(original: Callable[..., Any]) -> Callable[..., Any]:
    means = (losses_utils.ReductionV2.AUTO, losses_utils.ReductionV2.SUM_OVER_BATCH_SIZE)

    def apply_valid_mask(losses: Any, sw: Any, mask: Any, reduction: Any) -> Any:
        weights = original(losses, sw, mask, reduction)
        tower = splitting_tower()
        if tower is None or mask is None or reduction not in means:
            return weights
        return common.whole_batch_mask(tower, weights, mask)

    return apply_valid_mask


def _compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(self, *args, **kwargs)
        tower = splitting_tower()
        if tower is None or loss is None:
            return loss
        if tower.own_means:  # an override's super()
            return tower.mark_mean(loss)
        if not _is_keras_own(self):
            return loss
        return tower.mark_scaled(common.silence_stand_ins(tower, loss))

    return compute_loss


def _is_keras_own(model: Any) -> bool:
    """Whether all gradients of ``model``'s step come of the loss that tf_keras computes."""
    return (type(model).train_step is training.Model.train_step
            and type(model).compute_loss is training.Model.compute_loss)


def _compute_weighted_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    means = (losses_utils.ReductionV2.AUTO, losses_utils.ReductionV2.SUM_OVER_BATCH_SIZE)

    def compute_weighted_loss(losses: Any, sample_weight: Any = None, reduction: Any = means[1],
                              name: Any = None) -> Any:
        loss = original(losses, sample_weight, reduction, name)
        tower = splitting_tower()
        if tower is not None and isinstance(losses, tf.Tensor):
            own_losses.check_number(tower, losses, reduction)
        if tower is None or reduction in means or loss.shape.rank != 0:
            return loss
        return parts.summed(tower, loss)

    return compute_weighted_loss


class _One(int):
    """How many replicas there are for losses that are a tower's own means."""


def _losses_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        tower = splitting_tower()
        if tower is None:
            return original(self, *args, **kwargs)
        if tower.own_means:
            return _own_mean(tower, original, self, *args, **kwargs)
        return parts.own_loss(tower, lambda: _own_mean(tower, original, self, *args, **kwargs))

    return __call__


def _own_mean(tower: Any, loss: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``loss`` returns where it takes its tower for the only one."""
    with tower.strategy.extended.counted_as(_One(1)):
        result = loss(*args, **kwargs)
    return result if result is None else tower.mark_mean(result)


# Optimizers and metrics.


def _apply_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        tower = splitting_tower()
        if tower is None:
            return original(self, grads_and_vars, *args, **kwargs)
        grads, targets = zip(*grads_and_vars)
        homes = [getattr(target, "_variable", target) for target in targets]
        return common.merge_then(
            tower, grads, homes,
            lambda merged: original(self, list(zip(merged, targets)), *args, **kwargs),
            _are_merged(original, args, kwargs))

    return apply_gradients


def _are_merged(original: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call of an optimizer's ``apply_gradients`` says that its gradients are merged."""
    given = inspect.signature(original).bind(None, None, *args, **kwargs).arguments
    given = {**given, **given.get("kwargs", {})}
    return bool(given.get("skip_gradients_aggregation", False)
                or not given.get("experimental_aggregate_gradients", True))


def _supports_loss_scaling(original: Callable[..., Any]) -> Callable[..., Any]:
    def strategy_supports_loss_scaling() -> bool:
        return is_tower_strategy(tf.distribute.get_strategy()) or original()

    return strategy_supports_loss_scaling


def _mean_update_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        tower = splitting_tower()
        if tower is None or self.reduction != metrics_utils.Reduction.WEIGHTED_MEAN:
            return original(self, values, sample_weight=sample_weight)
        value = tf.convert_to_tensor(values)
        unreduced_loss = (value.shape.rank != 0 and sample_weight is not None
                          and isinstance(tower.num_replicas_in_sync, _One))
        if unreduced_loss:  # each value counts with the rows of the whole batch
            sample_weight = tf.math.divide_no_nan(tf.cast(sample_weight, value.dtype),
                                                  tf.cast(tower.share, value.dtype))
        if value.shape.rank != 0:
            return original(self, values, sample_weight=sample_weight)
        if sample_weight is None:
            sample_weight = tf.cast(tower.share, self.dtype)
        return original(self, parts.mean(tower, value), sample_weight=sample_weight)

    return update_state


def _get_metrics_result(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_metrics_result(self: Any) -> Any:
        tower = splitting_tower()
        if tower is None or tower.shares.workers is None or not tower.can_merge:
            return original(self)

        def of_sums(strategy: tf.distribute.Strategy) -> Any:
            held = [variable for metric in self.metrics for variable in _variables_of(metric)]
            with strategy.extended.read_at_once(held):
                return original(self)

        return tower.merge_call(of_sums)

    return get_metrics_result


def _batch_norm_build(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(self: Any, input_shape: Any) -> Any:
        strategy = tf.distribute.get_strategy()
        if not is_tower_strategy(strategy):
            return original(self, input_shape)
        with strategy.extended.one_copy_of_means():
            return original(self, input_shape)

    return build


# Training.


def _configure_dataset(original: Callable[..., Any]) -> Callable[..., Any]:
    def _configure_dataset_and_inferred_steps(self: Any, strategy: Any, x: Any, *args: Any,
                                              **kwargs: Any) -> Any:
        if not is_tower_strategy(strategy):
            return original(self, strategy, x, *args, **kwargs)
        with strategy.extended.stand_ins():
            result = original(self, strategy, x, *args, **kwargs)
        if isinstance(self._dataset, split.TowerDataset):
            self._dataset = self._dataset.with_stand_ins()
        return result

    return _configure_dataset_and_inferred_steps


def _single_batch_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
    def single_batch_iterator(strategy: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_tower_strategy(strategy):
            return original(strategy, *args, **kwargs)
        with strategy.extended.stand_ins():
            return original(strategy, *args, **kwargs)

    return single_batch_iterator


def _reduce_per_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if not is_tower_strategy(strategy) or strategy.num_replicas_in_sync == 1:
            return original(values, strategy, reduction)
        with tf.device(strategy.extended.merge_device):
            return tf.nest.map_structure(lambda value: _reduce(value, reduction), values)

    return reduce_per_replica


def _reduce(value: Any, reduction: str) -> Any:
    if not isinstance(value, _tf.PerReplica):
        return value
    if reduction == "first":
        return value.shares.firsts(value.values[0])
    if reduction == "concat":
        return common.joined(value, training.concat)
    return merge.total_of_filled(list(value.values), value.shares)


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        scope = tf.distribute.get_strategy()
        strategy = scope if is_tower_strategy(scope) else self._distribution_strategy
        if not is_tower_strategy(strategy):
            return original(self, *args, **kwargs)
        if kwargs.get("jit_compile") and not strategy.extended.placement.compiles:
            raise ValueError(
                "jit_compile=True is not supported with several towers, nor away from "
                "TensorFlow's default device: XLA compiles a step for that one device. Compile the "
                "model with jit_compile=False or leave it out.")
        with strategy.scope():
            # tf_keras checks in compile that all variables are the strategy's.
            adopt(strategy, self)
            for part in tf.nest.flatten((args, kwargs)):
                if isinstance(part, base_metric.Metric):
                    common.check_variables(strategy, self, _variables_of(part))
                    _adopt_metric(strategy, part, [])
                elif isinstance(part, _OPTIMIZERS):
                    common.check_variables(strategy, self, _optimizer_variables(part))
                    _adopt_optimizer(strategy, part)
                    common.adopt_variables(strategy, _optimizer_variables(part))
            original(self, *args, **kwargs)

    return compile


def _make_function(attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        def make_function(self: Any, force: bool = False) -> Any:
            strategy = self._distribution_strategy
            if strategy is None:
                common.check_trains_on_towers(self, tf.distribute.get_strategy())
            if is_tower_strategy(strategy) and (force or getattr(self, attribute) is None):
                # What was built after compile, outside of the scope.
                _adopt_state(strategy, self)
                _build_optimizers(strategy, self)
            before = getattr(self, attribute)
            result, step = original(self, force), getattr(self, attribute)
            if not is_tower_strategy(strategy) or step is before:
                return result

            def function(iterator: Any) -> Any:
                with strategy.extended.step():
                    return step(iterator)

            setattr(self, attribute, function)
            return function

        return make_function

    return hook


def _build_optimizers(strategy: tf.distribute.Strategy, model: Any) -> None:
    """Makes the slots before the first step is traced: making them there would trace it twice."""
    if not model._is_compiled or not model.built:
        return
    for optimizer in tf.nest.flatten(model.optimizer or []):
        new = isinstance(optimizer, new_optimizer.Optimizer)
        if new and not getattr(optimizer, "_built", True):
            with strategy.scope():
                optimizer.build(model.trainable_variables)


def _delete_backup(original: Callable[..., Any]) -> Callable[..., Any]:
    def delete_backup(self: Any) -> None:
        theirs = self.write_checkpoint_manager is not self.read_checkpoint_manager
        if is_tower_strategy(self._model.distribute_strategy) and not theirs:
            backup.delete(self.write_checkpoint_manager.directory)
        original(self)

    return delete_backup


def _backup_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from towerstrategy.strategy import TowerStrategy

        original(self, *args, **kwargs)
        self._supported_strategies += (TowerStrategy,)

    return __init__
