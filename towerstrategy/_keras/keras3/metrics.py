"""Hooks into Keras 3: what a metric counts, and reads.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.metrics import metric as metric_module

from towerstrategy._keras import hooks
from towerstrategy._keras import over_rows as over_rows_rules
from towerstrategy._keras.keras3 import names
from towerstrategy.losses import over_rows, parts
from towerstrategy.placement import kind
from towerstrategy.towers import contexts


def metric_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _wrap_result(type(self))

    return __init__


def wrap_known() -> None:
    """Hooks the metrics whose objects may be there already."""
    waiting = [metric_module.Metric]
    while waiting:
        cls = waiting.pop()
        _wrap_result(cls)
        waiting += cls.__subclasses__()


def _wrap_result(cls: type) -> None:
    """Hooks ``result`` in ``cls`` and its bases."""
    for base in cls.__mro__:
        if "result" in base.__dict__ and base is not metric_module.Metric:
            hooks.wrap(base, "result", _result)


def _result(original: Callable[..., Any]) -> Callable[..., Any]:
    def result(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _once(self, lambda: original(self, *args, **kwargs))

    return result


def get_metrics_result(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_metrics_result(self: Any) -> Any:
        return _once(self, lambda: original(self))

    return get_metrics_result


def _once(holder: Any, result: Callable[[], Any]) -> Any:
    """``result`` computed once for all towers, from the tower-local variables' sums."""
    tower = contexts.splitting_tower()
    if tower is not None and not tower.can_merge:
        return result()
    if tower is None:
        strategy = tf.distribute.get_strategy()
        return _of_sums(strategy, holder, result) if _crosses(strategy) else result()
    return tower.merge_call(lambda strategy: _of_sums(strategy, holder, result))


def _crosses(strategy: Any) -> bool:
    """Whether reading metrics here, outside of towers, means to read those of all machines."""
    return (kind.is_tower_strategy(strategy) and strategy.extended.workers is not None
            and tf.distribute.in_cross_replica_context())


def _of_sums(strategy: tf.distribute.Strategy, holder: Any, result: Callable[[], Any]) -> Any:
    """``result`` of the metrics of ``holder`` (a model or a metric), their sums read at once."""
    parts = (holder,) if isinstance(holder, metric_module.Metric) else holder.metrics
    held = [names.held(variable) for metric in parts for variable in metric.variables]
    with strategy.extended.read_at_once(held):
        return result()


def mean_update_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        tower = contexts.splitting_tower()
        if tower is None:
            return original(self, values, sample_weight)
        value = tf.convert_to_tensor(values)
        if value.shape.rank != 0:
            return original(self, values, sample_weight)
        if sample_weight is None:
            sample_weight = tf.cast(tower.share, self.dtype)
        return original(self, parts.mean(tower, value), sample_weight)

    return update_state


def get_metric(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_metric(identifier: Any, y_true: Any, y_pred: Any) -> Any:
        if isinstance(identifier, over_rows.OverRows):
            identifier = over_rows_rules.metric_function(identifier)
        return original(identifier, y_true, y_pred)

    return get_metric


def wrapper_update_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return over_rows_rules.metric_of_rows(original, lambda function: function, self, y_true,
                                              y_pred, sample_weight)

    return update_state
