"""The cases of steps of one's own, and of what they do with losses, gradients and logs.

Goes in and comes out: what ``cases`` says; this file adds to the groups ``models`` and ``metrics``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tests.sharding.program_features import FEATURES

from .cases import (
    ROWS,
    Run,
    adam,
    case,
    dense,
    is_keras_3,
    numbers,
    regression,
    row_weights,
    sgd,
)


def _own_step(keras: Any, step: Callable[[Any, Any], dict[str, Any]]) -> Any:
    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return step(self, data)

    x = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh")(x)
    return Own(x, keras.layers.Dense(3)(hidden))


def _apply(model: Any, tape: Any, loss: Any) -> None:
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def _scaled(loss: Any) -> Any:
    """What one writes in a step of one's own; without a strategy there is nothing to scale."""
    scale = getattr(tf.distribute.get_strategy(), "scale_loss", None)
    return loss if scale is None else scale(loss)


@case("models/own train_step, Keras' loss", wide=True)
def _(keras: Any) -> Run:
    def step(model: Any, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x, y, y_pred, weights)
        _apply(model, tape, loss)
        for metric in model.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in model.metrics}

    return Run(_own_step(keras, step), **regression(), compile={"metrics": ["mae"]},
               weights=row_weights())


def _variational(keras: Any) -> Any:
    """A variational auto-encoder; what it adds as noise comes with the rows."""
    layers = keras.layers

    class Variational(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = keras.Sequential([keras.Input((5,)), layers.Dense(4)])
            self.decoder = keras.Sequential([keras.Input((2,)), layers.Dense(5)])
            self.trackers = [keras.metrics.Mean(name=name)
                             for name in ("total", "reconstruction", "divergence")]

        def call(self, x: Any) -> Any:
            return self.decoder(self.encoder(x)[:, :2])

        @property
        def metrics(self) -> list[Any]:
            return self.trackers

        def train_step(self, data: Any) -> dict[str, Any]:
            x, noise = data
            with tf.GradientTape() as tape:
                mean, variance = tf.split(self.encoder(x), 2, axis=1)
                again = self.decoder(mean + tf.exp(0.5 * variance) * noise)
                reconstruction = tf.reduce_mean(tf.reduce_sum(tf.square(x - again), axis=1))
                divergence = -0.5 * (1 + variance - tf.square(mean) - tf.exp(variance))
                divergence = tf.reduce_mean(tf.reduce_sum(divergence, axis=1))
                loss = _scaled(reconstruction + 0.3 * divergence)
            _apply(self, tape, loss)
            for tracker, value in zip(self.trackers, (loss, reconstruction, divergence)):
                tracker.update_state(value)
            return {tracker.name: tracker.result() for tracker in self.trackers}

    model = Variational()
    model(numbers(2, 5))
    return model


@case("models/own train_step, scale_loss", wide=True)
def _(keras: Any) -> Run:
    return Run(_variational(keras), numbers(ROWS, 5), numbers(ROWS, 2, seed=1), compile={
        "loss": None, "optimizer": adam(keras)})


@case("models/own train_step, a loss of all kinds of terms", wide=True)
def _(keras: Any) -> Run:
    """Tracked with the rows as weights, changed and as it is."""
    trackers = [keras.metrics.Mean(name=name) for name in ("plain", "weighted", "changed")]
    squares = keras.losses.MeanSquaredError

    def terms(model: Any, y: Any, y_pred: Any) -> Any:
        rows = tf.reduce_mean(tf.square(y_pred - y), axis=-1)
        penalty = 0.01 * tf.nn.l2_loss(tf.convert_to_tensor(model.trainable_variables[0]))
        yield tf.nn.compute_average_loss(rows) + tf.nn.scale_regularization_loss(penalty)
        yield tf.nn.compute_average_loss(rows, global_batch_size=8)
        yield tf.reduce_sum(rows) * (1. / 8)
        yield squares(reduction="sum")(y, y_pred) / 8
        yield _scaled(0.1 * tf.reduce_mean(tf.abs(y_pred))) + _scaled(penalty)
        yield _scaled(tf.reduce_sum(rows) / (1.0 + tf.reduce_sum(tf.abs(y))))
        if is_keras_3(keras):  # tf_keras refuses a loss object's mean under a strategy
            yield squares()(y, y_pred)

    def step(model: Any, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.add_n(list(terms(model, y, model(x, training=True))))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        trackers[0].update_state(loss)
        trackers[1].update_state(loss, sample_weight=tf.shape(x)[0])
        trackers[2].update_state(2.0 * loss + tf.reduce_mean(y))
        return {"norm": tf.linalg.global_norm(gradients),
                **{tracker.name: tracker.result() for tracker in trackers}}

    return Run(_own_step(keras, step), **regression(), compile={"optimizer": sgd(keras, 0.02)})


@case("models/own train_step, gradients changed by hand")
def _(keras: Any) -> Run:
    """Clipped, decayed and kept as a moving sum, before they are applied."""
    kept: list[Any] = []

    def changed(model: Any, gradients: list[Any]) -> list[Any]:
        if not kept:
            with tf.init_scope():
                kept.extend(tf.Variable(tf.zeros(each.shape), trainable=False)
                            for each in gradients)
        for held, gradient, weight in zip(kept, tf.clip_by_global_norm(gradients, 0.1)[0],
                                          model.trainable_variables):
            held.assign(0.5 * held + gradient + 0.1 * tf.convert_to_tensor(weight))
        return [tf.identity(held) for held in kept]

    def step(model: Any, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        gradients = changed(model, tape.gradient(loss, model.trainable_variables))
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        for metric in model.metrics:
            metric.update_state(loss)
        return {metric.name: metric.result() for metric in model.metrics}

    return Run(_own_step(keras, step), **regression(), compile={"optimizer": sgd(keras)})


@case("models/own train_step and test_step, logs of all kinds")
def _(keras: Any) -> Run:
    def logs(model: Any, loss: Any, y: Any, y_pred: Any) -> dict[str, Any]:
        errors = tf.reduce_mean(tf.abs(y - y_pred), -1)
        return {
            "loss": loss, "mean": tf.reduce_mean(errors), "sum": tf.reduce_sum(errors),
            "right": tf.reduce_sum(tf.cast(y_pred > y, tf.int32)), "rate": tf.constant(0.25),
            "step": tf.constant(3), "both": loss + tf.reduce_mean(errors), "twice": 2.0 * loss,
            "root": tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))}

    class Logging(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred)
            _apply(self, tape, loss)
            return logs(self, loss, y, y_pred)

        def test_step(self, data: Any) -> Any:
            x, y = data
            y_pred = self(x)
            return logs(self, self.compute_loss(x, y, y_pred), y, y_pred)

    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh")(inputs)
    data = regression()
    return Run(Logging(inputs, keras.layers.Dense(3)(hidden)), **data, seen=lambda model: {
        "evaluated": model.evaluate(**data, batch_size=8, return_dict=True, verbose=0)})


@case("models/own train_step, logs beside Keras' own", wide=True)
def _(keras: Any) -> Run:
    class Logging(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {**super().train_step(data), "size": tf.reduce_mean(tf.abs(data[0])),
                    "positive": tf.reduce_sum(tf.cast(data[0] > 0, tf.int32))}

    inputs = keras.Input((5,))
    return Run(Logging(inputs, keras.layers.Dense(3)(inputs)), **regression(),
               compile={"metrics": ["mae"]})


@case("models/functions and control flow in a step")
def _(keras: Any) -> Run:
    """``call``, the loss and an update of moving averages in functions, a branch and a loop."""

    class Decorated(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(4, activation="tanh")
            self.norm = keras.layers.BatchNormalization()
            self.last = keras.layers.Dense(3)
            self.mean = tf.Variable(tf.zeros([5]), trainable=False)
            self.target = tf.Variable(8.0, trainable=False)

        @tf.function
        def call(self, x: Any, training: Any = None) -> Any:
            return self.last(self.hidden(self.norm(x, training=training)))

        @tf.function
        def loss_of(self, y: Any, predicted: Any) -> Any:
            return self.compute_loss(None, y, predicted)

        def move(self, x: Any) -> Any:
            self.mean.assign_add(0.1 * (tf.reduce_mean(x, 0) - self.mean))

            def halved(count: Any) -> tuple[Any]:
                self.target.assign(0.5 * self.target + 1.0)
                return (count + 1,)

            tf.while_loop(lambda count: count < 2, halved, (0,))
            return tf.constant(0)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss_of(y, self(x, training=True))
            _apply(self, tape, loss)
            tf.cond(tf.shape(x)[0] > 0, lambda: self.move(x), lambda: tf.constant(0))
            return {"own_loss": loss}

    model = Decorated()
    model(np.zeros([1, 5], "float32"))
    data = regression()
    return Run(model, **data, fit={"validation_split": 0.2},
               seen=lambda model: {"moved": [model.mean.numpy(), model.target.numpy()]})


@case("models/own test_step and predict_step", wide=True)
def _(keras: Any) -> Run:
    class Own(keras.Model):
        def test_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            return {"own": self.compute_loss(x, y, self(x, training=False))}

        def predict_step(self, data: Any) -> dict[str, Any]:
            x = keras.utils.unpack_x_y_sample_weight(data)[0]
            return {"y": self(x, training=False), "x": x}

    x = keras.Input((5,))
    return Run(Own(x, keras.layers.Dense(3)(x)), **regression(), fit={"validation_split": 0.4})


@case("models/own train_step, two optimizers", wide=True)
def _(keras: Any) -> Run:
    class Two(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.a = keras.layers.Dense(5, activation="tanh")
            self.b = keras.layers.Dense(3)
            self.a.build((None, 5))
            self.b.build((None, 5))

        def call(self, x: Any) -> Any:
            return self.b(self.a(x))

        def compile(self, optimizer: Any, second: Any, **options: Any) -> None:
            super().compile(optimizer=optimizer, **options)
            self.second = second  # each optimizer is built by the step, for its own variables

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            ours, theirs = self.a.trainable_variables, self.b.trainable_variables
            gradients = tape.gradient(loss, ours + theirs)
            self.optimizer.apply_gradients(zip(gradients[:len(ours)], ours))
            self.second.apply_gradients(zip(gradients[len(ours):], theirs))
            return {"loss": loss}

    return Run(Two(), **regression(), compile={
        "optimizer": sgd(keras, clipnorm=0.1), "second": adam(keras)})


# Rows that meet, as written for one device.


def _doubles() -> dict[str, Any]:
    return {name: values.astype("float64") for name, values in regression().items()}


@case("models/rows that meet in a layer", wide=True, policy="float64", bound=1e-9)
def _(keras: Any) -> Run:
    features = [FEATURES[name] for name in (
        "cumsum", "attention_over_rows", "argsort", "boolean_mask", "scan_over_rows",
        "py_function")]

    class Meeting(keras.layers.Layer):
        def call(self, h: Any) -> Any:
            return tf.add_n([feature(h) for feature in features]) / len(features)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    return Run(keras.Sequential([keras.Input((5,)), keras.layers.Dense(5, "tanh"), Meeting(),
                                 keras.layers.Dense(3)]), **_doubles())


@case("models/own train_step, rows that meet", policy="float64", bound=1e-9)
def _(keras: Any) -> Run:
    """Sharpness-aware, of in-batch negatives and of the worst rows; a queue of the newest."""
    class Meeting(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense(keras)
            self.queue = tf.Variable(tf.zeros([6, 5], tf.float64), trainable=False)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.inner(x, training=training)

        def slopes(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                pairs = tf.matmul(predicted, y, transpose_b=True)
                loss = tf.reduce_mean(tf.reduce_logsumexp(pairs, 1) - tf.linalg.diag_part(pairs))
                loss += tf.reduce_sum(tf.math.top_k(tf.reduce_sum((predicted - y) ** 2, -1),
                                                    tf.minimum(3, tf.shape(x)[0])).values)
            return loss, tape.gradient(loss, self.trainable_variables)

        def train_step(self, data: Any) -> dict[str, Any]:
            (x, y), weights = data, self.trainable_variables
            _, found = self.slopes(x, y)
            steps = [0.05 * gradient / tf.linalg.global_norm(found) for gradient in found]
            for weight, step in zip(weights, steps):
                weight.assign_add(step)
            loss, found = self.slopes(x, y)
            for weight, step in zip(weights, steps):
                weight.assign_sub(step)
            self.optimizer.apply_gradients(zip(found, weights))
            self.queue.assign(tf.concat([x, self.queue], 0)[:6])
            return {"loss": loss, "newest": tf.reduce_mean(self.queue)}

    return Run(Meeting(), **_doubles(), compile={"optimizer": sgd(keras, 0.02)})


@case("metrics/own, an extreme and ranks", wide=True)
def _(keras: Any) -> Run:
    class Largest(keras.metrics.Metric):
        """A state that is no sum: the largest error so far."""

        def __init__(self) -> None:
            super().__init__(name="largest")
            self.largest = self.add_weight(name="largest", initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            error = tf.reduce_max(tf.abs(y_true - y_pred))
            self.largest.assign(tf.maximum(self.largest, tf.cast(error, self.largest.dtype)))

        def result(self) -> Any:
            return self.largest + 0.0

    def ranks(y_true: Any, y_pred: Any) -> Any:
        orders = [tf.argsort(tf.argsort(value[:, 0])) for value in (y_true, y_pred)]
        return tf.cast(tf.abs(orders[0] - orders[1]), tf.float32)

    return Run(dense(keras), **regression(), compile={"metrics": [Largest(), ranks]})
