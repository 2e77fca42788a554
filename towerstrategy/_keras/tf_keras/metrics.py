"""Hooks into tf_keras: what a metric counts, and reads.

Goes in: Keras' own function.  Comes out: the same, right in towers of a ``TowerStrategy``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tf_keras.src.utils import metrics_utils

from towerstrategy import _tensorflow as _tf
from towerstrategy._keras import over_rows as over_rows_rules
from towerstrategy._keras.tf_keras import losses, names
from towerstrategy.losses import over_rows, parts
from towerstrategy.towers import contexts


def mean_update_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or self.reduction != metrics_utils.Reduction.WEIGHTED_MEAN:
            return original(self, values, sample_weight=sample_weight)
        value = tf.convert_to_tensor(values)
        unreduced_loss = (value.shape.rank != 0 and sample_weight is not None
                          and isinstance(tower.num_replicas_in_sync, losses.One))
        if unreduced_loss:  # each value counts with the rows of the whole batch
            sample_weight = tf.math.divide_no_nan(tf.cast(sample_weight, value.dtype),
                                                  tf.cast(tower.share, value.dtype))
        if value.shape.rank != 0:
            return original(self, values, sample_weight=sample_weight)
        if sample_weight is None:
            sample_weight = tf.cast(tower.share, self.dtype)
        return original(self, parts.mean(tower, value), sample_weight=sample_weight)

    return update_state


def get_metrics_result(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_metrics_result(self: Any) -> Any:
        tower = contexts.splitting_tower()
        if tower is None or tower.shares.workers is None or not tower.can_merge:
            return original(self)

        def of_sums(strategy: tf.distribute.Strategy) -> Any:
            held = [variable for metric in self.metrics for variable in names.variables_of(metric)]
            with strategy.extended.read_at_once(held):
                return original(self)

        return tower.merge_call(of_sums)

    return get_metrics_result


def get_metric_object(original: Callable[..., Any]) -> Callable[..., Any]:
    def _get_metric_object(self: Any, metric: Any, y_t: Any, y_p: Any) -> Any:
        if isinstance(metric, over_rows.OverRows):
            metric = over_rows_rules.metric_function(metric)
        return original(self, metric, y_t, y_p)

    return _get_metric_object


def wrapper_update_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return over_rows_rules.metric_of_rows(original, _tf.autograph_convert, self, y_true,
                                              y_pred, sample_weight)

    return update_state
