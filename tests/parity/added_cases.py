"""The cases of what a model adds to its loss, and of what a step of one's own logs.

Goes in and comes out: what ``cases`` says; this room adds to the groups ``losses`` and ``models``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import towerstrategy

from . import cases
from .cases import Run, case, regression


def _adding(keras: Any, loss_of: Callable[[Any, Any], Any]) -> Any:
    """A model that adds ``loss_of(layer, rows)``."""
    class Adding(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(shape=(6,), initializer="ones", name="weight")

        def call(self, x: Any) -> Any:
            self.add_loss(loss_of(self, x))
            return x * self.weight

    layers = keras.layers
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh"), Adding(),
                             layers.Dense(3)])


def _penalty(layer: Any) -> Any:
    return tf.reduce_sum(tf.square(tf.convert_to_tensor(layer.weight)))


def _added(name: str, loss_of: Callable[[Any, Any], Any], **options: Any) -> None:
    @case(f"losses/add_loss of {name}", **{"wide": True, **options})
    def make(keras: Any) -> Run:
        return Run(_adding(keras, loss_of), **regression())


_added("a sum over rows", lambda layer, x: 0.01 * tf.reduce_sum(tf.square(x)))
_added("a sum over rows, of a mean over each",
       lambda layer, x: tf.reduce_sum(tf.reduce_mean(tf.square(x), axis=-1)) / 8)
_added("a sum over rows and one over weights",
       lambda layer, x: 0.01 * tf.reduce_sum(tf.square(x)) + 0.02 * _penalty(layer), wide=False)
_added("a sum over rows, by a count of them",
       lambda layer, x: tf.reduce_sum(tf.square(x)) / tf.cast(tf.shape(x)[0], x.dtype))
_added("a mean, by a count of rows",
       lambda layer, x: tf.reduce_mean(tf.square(x)) / tf.cast(tf.shape(x)[0], x.dtype))
_added("a mean and a sum of the mean over rows", lambda layer, x: (
    tf.reduce_mean(tf.square(x)) + 0.1 * tf.reduce_sum(tf.reduce_mean(tf.abs(x), axis=0))))
_added("whole numbers", lambda layer, x: tf.reduce_sum(tf.cast(x > 0, tf.int32)))


@case("losses/add_loss of a sum over rows, one batch size", wide=True)
def _(keras: Any) -> Run:
    model = _adding(keras, lambda layer, x: 0.01 * tf.reduce_sum(tf.square(x)))
    data = regression()
    batches = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
    return Run(model, batches.batch(8, drop_remainder=True), fit={"batch_size": None})


@case("losses/add_loss of a sum over all rows, eagerly", wide=True)
def _(keras: Any) -> Run:
    def loss_of(layer: Any, x: Any) -> Any:
        return 0.01 * tf.reduce_sum(tf.square(towerstrategy.whole_batch(x)))

    return Run(_adding(keras, loss_of), **regression(), compile={"run_eagerly": True})


@case("losses/add_loss of a sum over rows, an own compute_loss", wide=True)
def _(keras: Any) -> Run:
    class Own(keras.Model):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2.0 * super().compute_loss(*args, **kwargs)

    inner = _adding(keras, lambda layer, x: 0.01 * tf.reduce_sum(tf.square(x)))
    inputs = keras.Input((5,))
    return Run(Own(inputs, inner(inputs)), **regression())


@case("losses/add_loss of a sum over rows alone", wide=True)
def _(keras: Any) -> Run:
    return Run(_adding(keras, lambda layer, x: 0.1 * tf.reduce_sum(tf.square(x - 0.3))),
               regression()["x"], compile={"loss": None})


def _activity(name: str, regularizer: Callable[[Any], Any], wide: bool = True) -> None:
    @case(f"losses/activity regularizer, {name}", wide=wide)
    def make(keras: Any) -> Run:
        return Run(cases.dense(keras, activity_regularizer=regularizer), **regression())


_activity("a mean over rows", lambda x: tf.reduce_mean(tf.square(x)))
_activity("a mean over rows of a sum", lambda x: tf.reduce_mean(tf.reduce_sum(tf.abs(x), -1)))
_activity("a sum and a mean", lambda x: 0.1 * tf.reduce_sum(tf.abs(x)) + tf.reduce_mean(x),
          wide=False)


@case("losses/regularizer, a mean", wide=True)
def _(keras: Any) -> Run:
    return Run(cases.dense(keras, kernel_regularizer=lambda w: tf.reduce_mean(tf.square(w))),
               **regression())


def _logging(name: str, logs_of: Callable[[Any, Any, Any], dict[str, Any]], **options: Any) -> None:
    """A step that returns tensors for logs, in ``fit`` and in ``evaluate``."""
    @case(f"models/own train_step, logs of {name}", **{"wide": True, **options})
    def make(keras: Any) -> Run:
        class Logging(keras.Model):
            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape() as tape:
                    y_pred = self(x, training=True)
                    loss = self.compute_loss(x, y, y_pred)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
                return {"loss": loss, **logs_of(loss, y, y_pred)}

            def test_step(self, data: Any) -> Any:
                x, y = data
                y_pred = self(x)
                loss = self.compute_loss(x, y, y_pred)
                return {"loss": loss, **logs_of(loss, y, y_pred)}

        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(6, activation="tanh")(inputs)
        data = regression()
        return Run(Logging(inputs, keras.layers.Dense(3)(hidden)), **data, seen=lambda model: {
            "evaluated": model.evaluate(**data, batch_size=8, return_dict=True, verbose=0)})


def _errors(y: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.abs(y - y_pred), -1)


_logging("a mean", lambda loss, y, y_pred: {"error": tf.reduce_mean(_errors(y, y_pred))})
_logging("a sum", lambda loss, y, y_pred: {"error": tf.reduce_sum(_errors(y, y_pred))})
_logging("a sum of whole numbers",
         lambda loss, y, y_pred: {"right": tf.reduce_sum(tf.cast(y_pred > y, tf.int32))},
         wide=False)
_logging("a number", lambda loss, y, y_pred: {"rate": tf.constant(0.25), "step": tf.constant(3)})
_logging("the loss and a mean", lambda loss, y, y_pred: {
    "both": loss + tf.reduce_mean(_errors(y, y_pred)), "twice": 2.0 * loss}, wide=False)


@case("models/positions")
def _(keras: Any) -> Run:
    """Positions are the same for all rows: each is looked up once a batch, however many towers."""
    class Placed(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.words = keras.layers.Embedding(11, 4)
            self.places = keras.layers.Embedding(9, 4)

        def call(self, x: Any) -> Any:
            return self.words(x) + self.places(tf.range(tf.shape(x)[1]))

    layers = keras.layers
    return Run(keras.Sequential([keras.Input((5,), dtype="int32"), Placed(),
                                 layers.Dense(11, activation="softmax")]),
               **cases.words(), compile={**cases.LABELS, "optimizer": cases.adam(keras)})


@case("models/own train_step, logs beside Keras' own", wide=True)
def _(keras: Any) -> Run:
    class Logging(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "size": tf.reduce_mean(tf.abs(data[0])),
                    "positive": tf.reduce_sum(tf.cast(data[0] > 0, tf.int32))}

    inputs = keras.Input((5,))
    return Run(Logging(inputs, keras.layers.Dense(3)(inputs)), **regression(),
               compile={"metrics": ["mae"]})


def _of_all(name: str, number: Callable[[Any, Any], Any], **options: Any) -> None:
    """A loss, and a metric, of one number that is not made of the rows one by one."""
    @case(f"losses/one number of all rows, {name}", **{"wide": True, **options})
    def make(keras: Any) -> Run:
        def metric(y_true: Any, y_pred: Any) -> Any:
            return number(y_true, y_pred)

        return Run(cases.dense(keras), **regression(),
                   compile={"loss": number, "metrics": [metric]})


def _masked(y_true: Any, y_pred: Any) -> Any:
    kept = tf.cast(y_true > 0, y_pred.dtype)
    return tf.reduce_sum(tf.square(y_true - y_pred) * kept) / tf.reduce_sum(kept)


def _correlation(y_true: Any, y_pred: Any) -> Any:
    one, other = (values - tf.reduce_mean(values) for values in (y_true, y_pred))
    return -tf.reduce_mean(one * other) / (
        tf.math.reduce_std(y_true) * tf.math.reduce_std(y_pred) + 0.1)


_of_all("a root of a mean", lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p))), wide=False)
_of_all("a ratio of sums", _masked, wide=False)
_of_all("a correlation", _correlation)
_of_all("pairs by reshape", lambda y, p: tf.reduce_mean(tf.nn.softplus(
    (tf.reshape(p, [-1, 1]) - tf.reshape(p, [1, -1])) * tf.reshape(y, [-1, 1]))), wide=False)
_of_all("each row in turn", lambda y, p: tf.reduce_mean(
    tf.scan(lambda a, b: 0.5 * a + b, tf.reduce_mean(tf.square(y - p), -1))))
_of_all("weights by place in the batch", lambda y, p: tf.reduce_sum(tf.square(y - p) * tf.cast(
    tf.range(1, tf.shape(y)[0] + 1), p.dtype)[:, None]) / 100.0)
_of_all("other rows by index", lambda y, p: tf.reduce_mean(tf.square(
    p - tf.gather(y, tf.shape(y)[0] - 1 - tf.range(tf.shape(y)[0])))))
_of_all("by the root of a count", lambda y, p: tf.reduce_sum(tf.square(y - p)) / tf.sqrt(
    tf.cast(tf.shape(y)[0], p.dtype)))
_of_all("a nested function", tf.function(lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p)))))
_of_all("a mean of some", lambda y, p: tf.reduce_mean(tf.boolean_mask(tf.square(y - p), y > 0)))
_of_all("a mean of the worst", lambda y, p: tf.reduce_mean(
    tf.math.top_k(tf.reshape(tf.square(y - p), [-1]), 4)[0]))
_of_all("a mean of deviations from one", lambda y, p: tf.reduce_mean(
    tf.square(y - p)) + tf.reduce_mean(tf.square(p - tf.reduce_mean(p, axis=0))))
_of_all("a sum", lambda y, p: 0.02 * tf.reduce_sum(tf.square(y - p)))
_of_all("a sum over rows, by a count of them", lambda y, p: tf.reduce_sum(
    tf.square(y - p)) / tf.cast(tf.shape(y)[0], p.dtype))


@case("losses/one number of all rows, weighted", wide=True)
def _(keras: Any) -> Run:
    return Run(cases.dense(keras), **regression(), weights=cases.row_weights(), compile={
        "loss": lambda y_true, y_pred: tf.reduce_mean(tf.square(y_true - y_pred)),
        # Keras 3 cannot weight a metric that is one number.
        "weighted_metrics": [] if cases.is_keras_3(keras) else [_masked]})


@case("losses/one number of all rows, a mask", wide=True)
def _(keras: Any) -> Run:
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((5,), dtype="int32"), layers.Embedding(11, 4, mask_zero=True),
        layers.Dense(1, activation="tanh")])
    data = cases.words()

    def ratio(y_true: Any, y_pred: Any) -> Any:
        y_true = tf.cast(tf.reshape(y_true, tf.shape(y_pred)), y_pred.dtype)
        return tf.reduce_sum(tf.square(y_true - y_pred)) / (1.0 + tf.reduce_sum(y_true))

    return Run(model, data["x"], data["y"], compile={
        "loss": ratio, "metrics": [] if cases.is_keras_3(keras) else [ratio]})


@case("losses/one number of all rows, several outputs", wide=True)
def _(keras: Any) -> Run:
    x = keras.Input((5,))
    model = keras.Model(x, {name: keras.layers.Dense(3, name=name)(x) for name in ("a", "b")})
    data = regression()
    return Run(model, data["x"], {"a": data["y"], "b": data["y"] ** 2}, compile={
        "loss": {"a": _masked, "b": "mse"}, "loss_weights": {"a": 0.3, "b": 0.7},
        "metrics": {"a": [_correlation], "b": ["mae"]}})


def _spread(layer: Any, x: Any) -> Any:
    """How unequally the rows use the features: of sums over rows, but no sum of them."""
    used = tf.reduce_sum(tf.square(x), axis=0)
    return 0.1 * tf.square(tf.math.reduce_std(used) / tf.reduce_mean(used))


_added("a ratio of sums", _spread, wide=False)
_added("a root of a mean and weights", lambda layer, x: tf.sqrt(
    tf.reduce_mean(tf.square(x)) + 0.1 * _penalty(layer)))


@case("models/own train_step, a ratio, and logs of it and of gradients")
def _(keras: Any) -> Run:
    def step(model: Any, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            rows = tf.square(model(x, training=True) - y)
            ratio = tf.reduce_sum(rows) / (1.0 + tf.reduce_sum(tf.abs(y)))
            loss = cases._scaled(ratio)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        model.optimizer.apply_gradients(zip(gradients, weights))
        return {"ratio": ratio, "root": tf.sqrt(tf.reduce_mean(rows)),
                "norm": tf.linalg.global_norm(gradients)}

    return Run(cases._own_step(keras, step), **regression())
