"""Losses and metrics over the rows of all towers, as both Kerases take them.

Goes in: what ``compile`` was given, :class:`over_rows.OverRows` among it.  Comes out: a model that
holds, and saves, the inner losses and trains on those over all rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from towerstrategy.losses import over_rows


def compiling(compile: Callable[..., None], holders: Mapping[str, Any], model: Any, args: Any,
              kwargs: Any) -> None:
    """``compile`` with the inner losses and metrics, and the model's containers with the outer.

    Args:
      compile: Keras' own.
      holders: for each argument of ``compile`` the attribute of the model that holds its container,
        and the names under which the container has it.
      model: whose ``compile`` this is.
      args: its arguments.
      kwargs: those by name.
    """
    given = inspect.signature(compile).bind(model, *args, **kwargs)
    # What a model adds is in kwargs, too.
    theirs = {name: value for name, value in given.arguments.items() if name in holders
              and any(isinstance(leaf, over_rows.OverRows) for leaf in tf.nest.flatten(value))}
    for name, value in theirs.items():
        given.arguments[name] = tf.nest.map_structure(
            lambda leaf: leaf.inner if isinstance(leaf, over_rows.OverRows) else leaf, value)
        if name != "loss":
            _check_metrics(value)
    compile(*given.args, **given.kwargs)
    for name, value in theirs.items():
        attribute, names = holders[name]
        for inner in names:
            setattr(getattr(model, attribute), inner, value)


def _check_metrics(value: Any) -> None:
    for leaf in tf.nest.flatten(value):
        if isinstance(leaf, over_rows.OverRows) and not inspect.isroutine(leaf.inner):
            raise TypeError("WholeBatch makes a function a metric over all rows, but among the "
                            f"metrics it has {leaf.inner!r} of type {type(leaf.inner).__name__}.")


def metric_function(metric: over_rows.OverRows) -> Callable[..., Any]:
    """A metric's function of all rows, with the inner one's name."""
    def function(y_true: Any, y_pred: Any) -> Any:
        return over_rows.mean_of(metric.inner, y_true, y_pred)

    function.__name__ = metric.name
    return function


def loss_of_all(loss: Callable[..., Any], y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The tower's part of ``loss``, called once with the rows, weights and mask of all towers."""
    def compute(y_true: Any, y_pred: Any, sample_weight: Any, mask: Any) -> Any:
        if mask is not None:
            y_pred._keras_mask = mask
        return loss(y_true, y_pred, sample_weight)

    return over_rows.part_of(compute, y_true, y_pred, sample_weight,
                             getattr(y_pred, "_keras_mask", None))


@contextlib.contextmanager
def on_one_device(loss: Any) -> Iterator[None]:
    """Within, a loss object of tf_keras takes a mean over its rows, though there is a strategy."""
    name = "_allow_sum_over_batch_size"
    before = getattr(loss, name, None)
    if before is not False:
        yield
        return
    setattr(loss, name, True)
    try:
        yield
    finally:
        setattr(loss, name, before)
