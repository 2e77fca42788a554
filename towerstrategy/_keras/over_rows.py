"""Losses and metrics over the rows of all towers, as both Kerases take them.

Goes in: what ``compile`` was given, :class:`over_rows.OverRows` among it.  Comes out: a model that
holds, and saves, the inner losses and trains on those over all rows.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from towerstrategy.losses import marks, one_number, over_rows, own_losses, parts
from towerstrategy.towers import contexts


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


def loss_of_rows(loss: Callable[..., Any], y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The tower's part of ``loss``: of its own rows where the parts make up one device's.

    Where they do not, as those of a ratio do not, ``loss`` is called once, with all rows.
    """
    tower = contexts.splitting_tower()
    if tower is None or not one_number.can_try(tower):
        return loss(y_true, y_pred, sample_weight)
    with one_number.trial(tower, (y_true, y_pred)) as tried:
        result = loss(y_true, y_pred, sample_weight)
    if tried.fails:
        result = loss_of_all(loss, y_true, y_pred, sample_weight)
    return marks.mark_made_of(result, (y_true, y_pred, sample_weight))


def loss_with_own_call(loss: Callable[..., Any], y_true: Any, y_pred: Any,
                       sample_weight: Any) -> Any:
    """The tower's part of a loss of a class that has a ``__call__`` of its own.

    What it returns nobody has scaled, and by no reduction: it is a number as one device has it.
    """
    tower = contexts.splitting_tower()
    if tower is None:
        return loss(y_true, y_pred, sample_weight)
    given = (y_true, y_pred, sample_weight)
    can_try = one_number.can_try(tower)
    with one_number.trial(tower, given) if can_try else contextlib.nullcontext() as tried:
        with parts.own_means(tower):
            result = tf.convert_to_tensor(loss(y_true, y_pred, sample_weight))
        if can_try:
            result = one_number.whole(tower, result, is_sum=False, weighted=False)
            own_losses.check_number(tower, result, "sum_over_batch_size")
    if tried is not None and tried.fails:
        result = loss_of_all(loss, y_true, y_pred, sample_weight)
    elif result.shape.rank == 0:
        result = parts.scaled(tower, result)
    return marks.mark_made_of(result, given)


class _Held:
    """What a metric calls in the place of its function while a tower updates it."""

    def __init__(self, function: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self.function, self._instead = function, instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._instead(*args, **kwargs)


def metric_of_rows(update: Callable[..., Any], converted: Callable[..., Any], metric: Any,
                   y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """``update``, a metric's own, with its function of all rows where a tower's number fails.

    Args:
      update: Keras' own ``update_state``.
      converted: makes of a function what Keras would call.
      metric: the metric that holds the function.
      y_true: what it is given, and so on.
      y_pred: likewise.
      sample_weight: likewise.
    """
    tower = contexts.splitting_tower()
    if tower is None or not one_number.can_try(tower):
        return update(metric, y_true, y_pred, sample_weight)

    held = metric._fn  # perhaps of another tower, which has paused in here
    function = held.function if isinstance(held, _Held) else held
    called = converted(function)

    def of_all(*rows: Any, **options: Any) -> Any:
        return over_rows.mean_of(functools.partial(called, **options), *rows)

    weighted = sample_weight is not None or getattr(y_pred, "_keras_mask", None) is not None
    vars(metric)["_fn"] = _Held(function, one_number.of_rows(called, of_all, weighted))
    try:
        return update(metric, y_true, y_pred, sample_weight)
    finally:
        vars(metric)["_fn"] = function


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
