"""The cases of what a loss can be: each as an output, a layer or a term of as few models as go.

Goes in and comes out: what ``cases`` says; this file adds the group ``losses``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

import towerstrategy

from . import cases
from .cases import LABELS, Run, case, dense, is_keras_3, regression, sgd

Loss = Callable[[Any, Any], Any]


def _heads(keras: Any, losses: Mapping[str, Any], weighted: bool = False, **options: Any) -> Run:
    """A model with an output for each loss, all of the same targets."""
    data = regression()
    x = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh")(x)
    model = keras.Model(x, {name: keras.layers.Dense(3, name=name)(hidden) for name in losses})
    return Run(model, data["x"], dict.fromkeys(losses, data["y"]),
               weights={name: cases.row_weights() for name in losses} if weighted else None,
               compile={"loss": losses, "optimizer": sgd(keras, 0.01), **options})


def _reductions(keras: Any, weighted: bool) -> Run:
    """Losses a row, reduced by Keras in each way, and losses that are one number already."""
    class OneNumber(keras.losses.Loss):
        def __init__(self, number: Callable[[Any], Any], **reduction: Any) -> None:
            super().__init__(**reduction)
            self.number = number

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return self.number(tf.square(y_pred - y_true))

    def part(squares: Any) -> Any:
        return tf.reduce_sum(squares) / 24.0

    squares = keras.losses.MeanSquaredError
    losses = {
        "mean": squares(), "sum": squares(reduction="sum"),
        "function": lambda y, p: tf.reduce_mean(tf.math.log(tf.math.cosh(p - y)), -1),
        "number": lambda y, p: tf.reduce_mean(tf.square(p - y)),
        "number_mean": OneNumber(tf.reduce_mean), "number_sum": OneNumber(part, reduction="sum")}
    if is_keras_3(keras):  # tf_keras has no such mean, and refuses losses of several shapes
        losses |= {
            "each": squares(reduction=None), "number_each": OneNumber(part, reduction=None),
            "weighted": squares(reduction="mean_with_sample_weight"),
            "number_weighted": OneNumber(tf.reduce_mean, reduction="mean_with_sample_weight")}
    return _heads(keras, losses, weighted)


@case("losses/of each reduction", wide=True)
def _(keras: Any) -> Run:
    return _reductions(keras, weighted=False)


@case("losses/of each reduction, weighted", wide=True)
def _(keras: Any) -> Run:
    return _reductions(keras, weighted=True)


@case("losses/no reduction", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={
        "loss": keras.losses.MeanSquaredError(reduction="none"), "optimizer": sgd(keras, 0.01)})


# One number that is not made of the rows one by one.


def _masked(y: Any, p: Any) -> Any:
    kept = tf.cast(y > 0, p.dtype)
    return tf.reduce_sum(tf.square(y - p) * kept) / tf.reduce_sum(kept)


def _correlation(y: Any, p: Any) -> Any:
    one, other = (values - tf.reduce_mean(values) for values in (y, p))
    return -tf.reduce_mean(one * other) / (
        tf.math.reduce_std(y) * tf.math.reduce_std(p) + 0.1)


# More of them, as steps of `strategy.function`, are in tests/sharding/programs.py.
OF_ALL_ROWS: dict[str, Loss] = {
    "root_of_mean": tf.function(lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p)))),
    "ratio_of_sums": _masked,
    "correlation": _correlation,
    "each_row_in_turn": lambda y, p: tf.reduce_mean(
        tf.scan(lambda a, b: 0.5 * a + b, tf.reduce_mean(tf.square(y - p), -1))),
    "by_place_in_the_batch": lambda y, p: tf.reduce_sum(tf.square(y - p) * tf.cast(
        tf.range(1, tf.shape(y)[0] + 1), p.dtype)[:, None]) / 100.0}


def _named(number: Loss) -> Loss:
    """A function whose name Keras 3 takes for a scope."""
    def metric(y_true: Any, y_pred: Any) -> Any:
        return number(y_true, y_pred)

    return metric


def _of_all_rows(keras: Any, metrics: str, weighted: bool = False) -> Run:
    numbers = {name: _named(number) for name, number in OF_ALL_ROWS.items()}
    return _heads(keras, numbers, weighted,
                  **{metrics: {name: [number] for name, number in numbers.items()}})


@case("losses/one number of all rows", wide=True)
def _(keras: Any) -> Run:
    return _of_all_rows(keras, "metrics")


@case("losses/one number of all rows, weighted", wide=True)
def _(keras: Any) -> Run:
    # Keras 3 cannot weight a metric that is one number.
    return _of_all_rows(keras, "metrics" if is_keras_3(keras) else "weighted_metrics", True)


# Several outputs.


@case("losses/several outputs", wide=True)
def _(keras: Any) -> Run:
    return Run(cases.two_outputs(keras), **cases.two_targets(), compile={
        "loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 0.7, "b": 0.2},
        "metrics": {"a": ["mae"], "b": ["mse"]}, "optimizer": sgd(keras, 0.02)})


@case("losses/several outputs, one without a loss", wide=True)
def _(keras: Any) -> Run:
    data = cases.two_targets()
    return Run(cases.two_outputs(keras), data["x"], data["y"],
               compile={"loss": {"a": "mse", "b": None}})


# A compute_loss of one's own.


def _own_loss(keras: Any, compute: Callable[..., Any], **options: Any) -> Any:
    """A model with a ``compute_loss`` of its own; ``compute`` gets ``super`` 's and the data."""
    class OwnLoss(keras.Model):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tracker = keras.metrics.Mean(name="own")

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None,
                         sample_weight: Any = None) -> Any:
            return compute(self, super().compute_loss, x, y, y_pred, sample_weight)

        @property
        def metrics(self) -> list[Any]:
            return [*super().metrics, self.tracker]

    x = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh", **options)(x)
    return OwnLoss(x, keras.layers.Dense(3)(hidden))


@case("losses/own compute_loss, the inherited one, a mean and a sum", wide=True)
def _(keras: Any) -> Run:
    def compute(model: Any, inherited: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        loss = 0.5 * inherited(x, y, y_pred, weights) + 0.1 * tf.reduce_mean(tf.abs(y_pred))
        loss += tf.reduce_sum(tf.reduce_mean((y_pred - y) ** 2, axis=-1)) / 8.0
        model.tracker.update_state(loss * 1.0, sample_weight=tf.shape(y)[0])
        return loss

    return Run(_own_loss(keras, compute, kernel_regularizer="l2"), **regression(),
               weights=cases.row_weights())


@case("losses/own compute_loss, unreduced", wide=True)
def _(keras: Any) -> Run:
    def compute(model: Any, inherited: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        return inherited(x, y, y_pred, weights) + tf.reduce_mean(tf.abs(y_pred))

    return Run(_own_loss(keras, compute), **regression(), compile={
        "loss": keras.losses.MeanSquaredError(reduction="none"), "optimizer": sgd(keras, 0.01)})


# Losses that layers add.


@case("losses/add_loss")
def _(keras: Any) -> Run:
    return Run(_adding(keras, [lambda layer, x: 0.1 * tf.reduce_mean(tf.square(x))]),
               **regression())


@case("losses/add_loss alone", wide=True)
def _(keras: Any) -> Run:
    return Run(_adding(keras, [lambda layer, x: 0.1 * tf.reduce_sum(tf.square(x - 0.3))]),
               regression()["x"], compile={"loss": None})


def _adding(keras: Any, losses: list[Loss]) -> Any:
    """A model with a layer for each of ``losses``, which adds it of its own activations."""
    class Adding(keras.layers.Layer):
        def __init__(self, loss_of: Loss) -> None:
            super().__init__()
            self.loss_of = loss_of

        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(shape=(6,), initializer="ones", name="weight")

        def call(self, x: Any) -> Any:
            self.add_loss(self.loss_of(self, x))
            return x * self.weight

    layers = keras.layers
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh"),
                             *map(Adding, losses), layers.Dense(3)])


def _penalty(layer: Any) -> Any:
    return tf.reduce_sum(tf.square(tf.convert_to_tensor(layer.weight)))


def _spread(layer: Any, x: Any) -> Any:
    """How unequally the rows use the features: of sums over rows, but no sum of them."""
    used = tf.reduce_sum(tf.square(x), axis=0)
    return 0.1 * tf.square(tf.math.reduce_std(used) / tf.reduce_mean(used))


ADDED: list[Loss] = [
    lambda layer, x: 0.01 * tf.reduce_sum(tf.square(x)) + 0.02 * _penalty(layer),
    lambda layer, x: tf.reduce_mean(tf.square(x)) / tf.cast(tf.shape(x)[0], x.dtype),
    lambda layer, x: tf.reduce_sum(tf.cast(x > 0, tf.int32)),
    lambda layer, x: tf.sqrt(tf.reduce_mean(tf.square(x)) + 0.1 * _penalty(layer)),
    lambda layer, x: 0.01 * tf.reduce_sum(tf.square(towerstrategy.whole_batch(x))),
    _spread]
GENTLY = 0.01  # six losses at once


@case("losses/add_loss of all kinds")
def _(keras: Any) -> Run:
    return Run(_adding(keras, ADDED), **regression(), compile={"optimizer": sgd(keras, GENTLY)})


@case("losses/add_loss of all kinds, one batch size", wide=True)
def _(keras: Any) -> Run:
    data = regression()
    batches = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
    return Run(_adding(keras, ADDED), batches.batch(8, drop_remainder=True),
               fit={"batch_size": None}, compile={"optimizer": sgd(keras, GENTLY)})


@case("losses/add_loss, one a row", wide=True)
def _(keras: Any) -> Run:
    class Errors(keras.layers.Layer):
        """As a layer of a connectionist temporal loss does it: an added loss for each row."""

        def call(self, y: Any, y_pred: Any) -> Any:
            self.add_loss(tf.reduce_sum(tf.square(y - y_pred), -1))
            return y_pred

    x, y = keras.Input((5,)), keras.Input((3,))
    data = regression()
    return Run(keras.Model([x, y], Errors()(y, keras.layers.Dense(3)(x))), [data["x"], data["y"]],
               compile={"loss": None, "optimizer": sgd(keras, 0.01)})


@case("losses/regularizers", wide=True)
def _(keras: Any) -> Run:
    layers, regularizers = keras.layers, keras.regularizers
    options = [
        {"kernel_regularizer": regularizers.L1L2(0.01, 0.02), "bias_regularizer": "l2"},
        {"kernel_regularizer": lambda w: tf.reduce_mean(tf.square(w))},
        {"activity_regularizer": regularizers.L2(0.01)},
        {"activity_regularizer": lambda x: tf.reduce_mean(tf.square(x))},
        {"activity_regularizer": lambda x: tf.reduce_mean(tf.reduce_sum(tf.abs(x), -1))},
        {"activity_regularizer": lambda x: 0.1 * tf.reduce_sum(tf.abs(x)) + tf.reduce_mean(x)}]
    x = inputs = keras.Input((5,))
    for each in options:
        x = layers.Concatenate()([x, layers.Dense(4, activation="tanh", **each)(inputs)])
    return Run(keras.Model(inputs, layers.Dense(3)(x)), **regression(),
               compile={"optimizer": sgd(keras, 0.02)})


# Masks.


@case("losses/a mask", wide=True)
def _(keras: Any) -> Run:
    return Run(cases.tagger(keras, keras.layers.LSTM(4, return_sequences=True)), **cases.words(),
               compile={**LABELS, "metrics": ["accuracy"]})


@case("losses/a mask and sample weights", wide=True)
def _(keras: Any) -> Run:
    return Run(cases.tagger(keras), **cases.words(), weights=cases.row_weights()[:, None],
               compile={**LABELS, "metrics": ["accuracy"]})


@case("losses/a mask and a sum", wide=True)
def _(keras: Any) -> Run:
    return Run(cases.tagger(keras), **cases.words(), compile={
        "loss": keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
        "optimizer": sgd(keras, 0.01)})


@case("losses/a mask that leaves a tower nothing")
def _(keras: Any) -> Run:
    data = cases.words()
    data["x"][:3] = 0
    data["x"][17:] = 0
    return Run(cases.tagger(keras), **data, compile=LABELS)
