"""The cases: what is trained, on what, with which settings.

Goes in: a Keras module, ``keras`` (Keras 3) or ``tf_keras``.  Comes out: a :class:`Run`, a model
with its data, ``compile`` and ``fit`` arguments, made by a function that :func:`case` has named.

All models are smooth where they are trained.  A kink (ReLU, max pooling) or a gradient that is zero
in theory (a bias right before batch normalization, an attention's key bias) turns rounding of 1e-8
into a step of the learning rate under optimizers that divide by the gradient's size; that is no
property of a strategy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.losses import WholeBatch

KERAS_3, TF_KERAS = "keras", "tf_keras"


@dataclasses.dataclass
class Run:
    """One training: everything that ``compile`` and ``fit`` get.

    Attributes:
      model: not compiled, unless ``compile`` is None.
      x: what ``fit``, ``evaluate`` and (without labels) ``predict`` get.
      y: labels; None where ``x`` is a dataset.
      compile: arguments of ``compile``, over ``optimizer=SGD(0.1, momentum=0.9), loss="mse"``.
      fit: arguments of ``fit``, over ``batch_size=8, epochs=2``.
      fits: several ``fit`` calls instead: the arguments of each, over ``fit``.
      weights: ``sample_weight`` for ``fit`` and ``evaluate``.
      callbacks: makes the callbacks of one ``fit``.
      seen: called with the model when all is done; more arrays to compare, by name.
    """

    model: Any
    x: Any
    y: Any = None
    compile: dict[str, Any] | None = dataclasses.field(default_factory=dict)
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    fits: Sequence[dict[str, Any]] = ({},)
    weights: Any = None
    callbacks: Callable[[], list[Any]] = list
    seen: Callable[[Any], dict[str, Any]] = lambda model: {}


@dataclasses.dataclass(frozen=True)
class Case:
    """A named :class:`Run`, where it applies and how exact it has to be.

    Attributes:
      name: the group and what it covers, as ``"losses/sum"``.
      make: builds the run for a Keras module.
      keras: the Keras versions it applies to.
      bound: the largest relative difference allowed.
      reason: why the bound is larger than 1e-5, or why a Keras version is left out.
      policy: the global dtype policy.
      moves: whether training changes the weights (some cases are there to see that it does not).
      strategy: arguments of the strategy.
      wide: whether it is run in the whole product alone, as a relative of others.
    """

    name: str
    make: Callable[[Any], Run]
    keras: tuple[str, ...] = (KERAS_3, TF_KERAS)
    bound: float = 1e-5
    reason: str = ""
    policy: str = "float32"
    moves: bool = True
    strategy: dict[str, Any] = dataclasses.field(default_factory=dict)
    wide: bool = False


CASES: dict[str, Case] = {}


def case(name: str, **options: Any) -> Callable[[Callable[[Any], Run]], Callable[[Any], Run]]:
    """Names a function that makes a :class:`Run`; ``options`` are those of :class:`Case`."""

    def add(make: Callable[[Any], Run]) -> Callable[[Any], Run]:
        if name in CASES:
            raise ValueError(f"two cases are named {name!r}")
        CASES[name] = Case(name, make, **options)
        return make

    return add


def is_keras_3(keras: Any) -> bool:
    """Whether ``keras`` is Keras 3."""
    return keras.__name__ == KERAS_3


# Data.  19 rows in batches of 8 are 8, 8 and 3: rows that most numbers of towers do not divide, and
# from four towers on a last batch with fewer rows than towers.

ROWS = 19


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.RandomState(seed).randn(*shape).astype("float32")


def regression(rows: int = ROWS) -> dict[str, Any]:
    """Five features, three targets."""
    x = numbers(rows, 5)
    return {"x": x, "y": np.tanh(x[:, :3]) + 0.3 * numbers(rows, 3, seed=1)}


def labelled(rows: int = ROWS, classes: int = 3) -> dict[str, Any]:
    """Five features, one label."""
    return {"x": numbers(rows, 5), "y": np.random.RandomState(2).randint(0, classes, rows)}


def binary() -> dict[str, Any]:
    """Five features, yes or no."""
    data = labelled(classes=2)
    return {"x": data["x"], "y": data["y"][:, None].astype("float32")}


def images(rows: int = ROWS, channels: int = 2) -> dict[str, Any]:
    """Images of 6 x 6 and one of three labels."""
    return {"x": numbers(rows, 6, 6, channels), "y": np.random.RandomState(3).randint(0, 3, rows)}


def words(rows: int = ROWS, steps: int = 5, vocabulary: int = 11) -> dict[str, Any]:
    """Sentences of ids that end in zeros, each with a label a step."""
    state = np.random.RandomState(4)
    ids = state.randint(1, vocabulary, (rows, steps))
    lengths = state.randint(1, steps + 1, rows)
    ids[np.arange(steps)[None] >= lengths[:, None]] = 0
    return {"x": ids, "y": state.randint(0, 3, (rows, steps))}


def row_weights(rows: int = ROWS) -> np.ndarray:
    """Sample weights, some of them 0."""
    weights = np.random.RandomState(5).uniform(0.2, 2.0, rows).astype("float32")
    weights[::5] = 0.0
    return weights


# Models.


def dense(keras: Any, outputs: int = 3, activation: str | None = None,
          **options: Any) -> Any:
    """Two dense layers; ``options`` go to the first."""
    layers = keras.layers
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh", **options),
                             layers.Dense(outputs, activation=activation)])


def classifier(keras: Any, *inner: Any, shape: tuple[int, ...] = (6, 6, 2),
               classes: int = 3) -> Any:
    """``inner`` layers, then a softmax."""
    layers = keras.layers
    return keras.Sequential([keras.Input(shape), *inner, layers.Flatten(),
                             layers.Dense(classes, activation="softmax")])


def tagger(keras: Any, *inner: Any, mask_zero: bool = True) -> Any:
    """A label for each word of a sentence."""
    layers = keras.layers
    return keras.Sequential([
        keras.Input((5,), dtype="int32"), layers.Embedding(11, 4, mask_zero=mask_zero), *inner,
        layers.Dense(3, activation="softmax")])


LABELS = {"loss": "sparse_categorical_crossentropy"}


def sgd(keras: Any, rate: float = 0.1, **options: Any) -> Any:
    """SGD with momentum."""
    return keras.optimizers.SGD(rate, momentum=0.9, **options)


def adam(keras: Any, rate: float = 0.02, **options: Any) -> Any:
    """Adam."""
    return keras.optimizers.Adam(rate, **options)


# Batches.


def _batches(name: str, rows: int, size: int, **options: Any) -> None:
    @case(f"batches/{name}", **options)
    def make(keras: Any) -> Run:
        return Run(dense(keras), **regression(rows), fit={"batch_size": size})


_batches("even", 240, 120, wide=True)
_batches("a remainder", 22, 8)
_batches("fewer rows than towers", 18, 8)
_batches("a single row", 17, 8)
_batches("a size that R does not divide", 21, 7, wide=True)
_batches("a dataset smaller than one batch", 5, 16, wide=True)
_batches("batches of one row", 4, 1)


@case("batches/a tf.data dataset", wide=True)
def _(keras: Any) -> Run:
    data = regression()
    return Run(dense(keras), tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(8),
               fit={"batch_size": None})


@case("batches/a dataset whose batch sizes change")
def _(keras: Any) -> Run:
    data = regression(20)
    rows = tf.data.Dataset.from_tensor_slices((data["x"], data["y"]))
    ragged = rows.take(8).batch(8).concatenate(rows.skip(8).take(3).batch(3)).concatenate(
        rows.skip(11).batch(9))
    return Run(dense(keras), ragged, fit={"batch_size": None})


@case("batches/a generator")
def _(keras: Any) -> Run:
    data = regression()

    class Batches(keras.utils.Sequence):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            rows = slice(8 * index, 8 * index + 8)
            return data["x"][rows], data["y"][rows]

    return Run(dense(keras), Batches(), fit={"batch_size": None})


@case("batches/shuffled")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), fit={"shuffle": True})


@case("batches/steps_per_epoch")
def _(keras: Any) -> Run:
    data = regression()
    endless = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(8).repeat()
    return Run(dense(keras), endless,
               fit={"batch_size": None, "steps_per_epoch": 4, "validation_data": (
                   data["x"], data["y"]), "validation_batch_size": 7})


# Losses.


@case("losses/sum_over_batch_size")
def _(keras: Any) -> Run:
    return Run(dense(keras, activation="softmax"), **labelled(), compile={
        "loss": keras.losses.SparseCategoricalCrossentropy()})


@case("losses/sum")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={
        "loss": keras.losses.MeanSquaredError(reduction="sum"), "optimizer": sgd(keras, 0.01)})


@case("losses/mean_with_sample_weight", keras=(KERAS_3,), reason="tf_keras has no such reduction")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), weights=row_weights(), compile={
        "loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")})


@case("losses/a function")
def _(keras: Any) -> Run:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.math.log(tf.math.cosh(y_pred - y_true)), axis=-1)

    return Run(dense(keras), **regression(), weights=row_weights(), compile={"loss": loss})


@case("losses/no reduction")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={
        "loss": keras.losses.MeanSquaredError(reduction="none"), "optimizer": sgd(keras, 0.01)})


def _two_outputs(keras: Any) -> Any:
    x = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh")(x)
    return keras.Model(x, {"a": keras.layers.Dense(3, name="a")(hidden),
                           "b": keras.layers.Dense(1, name="b")(hidden)})


def _two_targets() -> dict[str, Any]:
    data = regression()
    return {"x": data["x"], "y": {"a": data["y"], "b": data["y"][:, :1] ** 2}}


@case("losses/several outputs")
def _(keras: Any) -> Run:
    return Run(_two_outputs(keras), **_two_targets(), compile={
        "loss": {"a": "mse", "b": "mae"}, "loss_weights": {"a": 0.7, "b": 0.2},
        "metrics": {"a": ["mae"], "b": ["mse"]}, "optimizer": sgd(keras, 0.02)})


@case("losses/several outputs, eagerly")
def _(keras: Any) -> Run:
    return Run(_two_outputs(keras), **_two_targets(), compile={
        "loss": {"a": "mse", "b": "mae"}, "run_eagerly": True, "optimizer": sgd(keras, 0.02)})


@case("losses/several outputs, one summed", wide=True)
def _(keras: Any) -> Run:
    return Run(_two_outputs(keras), **_two_targets(), compile={
        "loss": {"a": keras.losses.MeanSquaredError(reduction="sum"), "b": "mse"},
        "loss_weights": {"a": 0.1, "b": 0.5}, "optimizer": sgd(keras, 0.02)})


@case("losses/several outputs, one unreduced", wide=True, keras=(KERAS_3,),
      reason="tf_keras refuses losses of several shapes, on one device, too")
def _(keras: Any) -> Run:
    return Run(_two_outputs(keras), **_two_targets(), compile={
        "loss": {"a": keras.losses.MeanSquaredError(reduction=None), "b": "mse"},
        "loss_weights": {"a": 0.1, "b": 0.5}, "optimizer": sgd(keras, 0.02)})


@case("losses/several outputs, one unreduced, one summed", wide=True, keras=(KERAS_3,),
      reason="tf_keras refuses losses of several shapes, on one device, too")
def _(keras: Any) -> Run:
    return Run(_two_outputs(keras), **_two_targets(), compile={
        "loss": {"a": keras.losses.MeanSquaredError(reduction=None),
                 "b": keras.losses.MeanSquaredError(reduction="sum")},
        "loss_weights": {"a": 0.1, "b": 0.01}, "optimizer": sgd(keras, 0.02)})


def _one_number(name: str, reduction: str | None, number: Callable[[Any], Any],
                **options: Any) -> None:
    """A loss that is one number already, whatever its reduction is."""
    @case(f"losses/one number, {name}", **options)
    def make(keras: Any) -> Run:
        class OneNumber(keras.losses.Loss):
            def call(self, y_true: Any, y_pred: Any) -> Any:
                return number(tf.square(y_pred - y_true))

        given = {} if reduction is None else {"reduction": reduction}
        return Run(dense(keras), **regression(), compile={"loss": OneNumber(**given)})


_one_number("a mean", None, tf.reduce_mean)
_one_number("a mean, weighted", "mean_with_sample_weight", tf.reduce_mean, keras=(KERAS_3,),
            reason="tf_keras has no such reduction", wide=True)
_one_number("a sum over the global batch, summed", "sum", lambda x: tf.reduce_sum(x) / 24.0,
            wide=True)
_one_number("a sum over the global batch, unreduced", "none", lambda x: tf.reduce_sum(x) / 24.0)


@case("losses/one number, a function", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={
        "loss": lambda y_true, y_pred: tf.reduce_mean(tf.square(y_pred - y_true)),
        "metrics": ["mae"]})


@case("losses/one number, several outputs")
def _(keras: Any) -> Run:
    return Run(_two_outputs(keras), **_two_targets(), compile={
        "loss": {"a": lambda y_true, y_pred: tf.reduce_mean(tf.square(y_pred - y_true)),
                 "b": "mse"}, "optimizer": sgd(keras, 0.02)})


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


@case("losses/own compute_loss", wide=True)
def _(keras: Any) -> Run:
    def compute(model: Any, inherited: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        loss = tf.reduce_mean((y_pred - y) ** 2)
        loss += tf.add_n(model.losses)
        model.tracker.update_state(loss)
        return loss

    return Run(_own_loss(keras, compute, kernel_regularizer="l2"), **regression())


@case("losses/own compute_loss, eagerly")
def _(keras: Any) -> Run:
    def compute(model: Any, inherited: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        loss = inherited(x, y, y_pred, weights) + tf.reduce_mean(tf.abs(y_pred))
        model.tracker.update_state(loss)
        return loss

    return Run(_own_loss(keras, compute), **regression(), compile={"run_eagerly": True})


@case("losses/own compute_loss, the inherited one and a term")
def _(keras: Any) -> Run:
    def compute(model: Any, inherited: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        loss = inherited(x, y, y_pred, weights) + 0.1 * tf.reduce_mean(tf.abs(y_pred))
        model.tracker.update_state(loss * 1.0, sample_weight=tf.shape(y)[0])
        return loss

    return Run(_own_loss(keras, compute, kernel_regularizer="l2"), **regression(),
               weights=row_weights())


@case("losses/own compute_loss, a sum and a term", wide=True)
def _(keras: Any) -> Run:
    def compute(model: Any, inherited: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        loss = inherited(x, y, y_pred, weights) + tf.reduce_mean(tf.abs(y_pred))
        model.tracker.update_state(loss)
        return loss

    return Run(_own_loss(keras, compute, kernel_regularizer="l2"), **regression(), compile={
        "loss": keras.losses.MeanSquaredError(reduction="sum"), "optimizer": sgd(keras, 0.01)})


@case("losses/own compute_loss, a sum over the global batch", wide=True)
def _(keras: Any) -> Run:
    def compute(model: Any, inherited: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        loss = tf.reduce_sum(tf.reduce_mean((y_pred - y) ** 2, axis=-1)) / 8.0
        loss += 0.1 * tf.reduce_mean(tf.abs(y_pred))
        model.tracker.update_state(loss)
        return loss

    return Run(_own_loss(keras, compute), **regression())


@case("losses/own compute_loss, unreduced", wide=True)
def _(keras: Any) -> Run:
    def compute(model: Any, inherited: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> Any:
        return inherited(x, y, y_pred, weights) + tf.reduce_mean(tf.abs(y_pred))

    return Run(_own_loss(keras, compute), **regression(), compile={
        "loss": keras.losses.MeanSquaredError(reduction="none"), "optimizer": sgd(keras, 0.01)})


@case("losses/several outputs, one without a loss")
def _(keras: Any) -> Run:
    data = _two_targets()
    return Run(_two_outputs(keras), data["x"], data["y"],
               compile={"loss": {"a": "mse", "b": None}})


@case("losses/add_loss")
def _(keras: Any) -> Run:
    class Penalty(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * tf.reduce_mean(tf.square(x)))
            return x

    layers = keras.layers
    return Run(keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh"), Penalty(),
                                 layers.Dense(3)]), **regression())


@case("losses/add_loss alone", wide=True)
def _(keras: Any) -> Run:
    class Reconstruct(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(5, activation="tanh")

        def call(self, x: Any) -> Any:
            y = self.inner(x)
            self.add_loss(tf.reduce_mean(tf.square(x - y)))
            return y

    return Run(Reconstruct(), regression()["x"], compile={"loss": None})


def _row_errors(name: str, eagerly: bool = False, **options: Any) -> None:
    @case(f"losses/{name}", **options)
    def make(keras: Any) -> Run:
        class Errors(keras.layers.Layer):
            """As a layer of a connectionist temporal loss does it: an added loss for each row."""

            def call(self, y: Any, y_pred: Any) -> Any:
                self.add_loss(tf.reduce_sum(tf.square(y - y_pred), -1))
                return y_pred

        x, y = keras.Input((5,)), keras.Input((3,))
        data = regression()
        return Run(keras.Model([x, y], Errors()(y, keras.layers.Dense(3)(x))),
                   [data["x"], data["y"]], compile={"loss": None, "optimizer": sgd(keras, 0.01),
                                                    "run_eagerly": eagerly})


_row_errors("add_loss, one a row")
_row_errors("add_loss, one a row, eagerly", eagerly=True, wide=True)


@case("losses/regularizers")
def _(keras: Any) -> Run:
    return Run(dense(keras, kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02),
                     bias_regularizer="l2"), **regression())


@case("losses/activity regularizer")
def _(keras: Any) -> Run:
    return Run(dense(keras, activity_regularizer=keras.regularizers.L2(0.01)), **regression())


@case("losses/activity regularizer before a synchronizing layer, eagerly")
def _(keras: Any) -> Run:
    layers = keras.layers
    convolution = layers.Conv2D(4, 3, use_bias=False,
                                activity_regularizer=keras.regularizers.L2(0.1))
    return Run(classifier(keras, convolution, layers.BatchNormalization(synchronized=True),
                          layers.Activation("tanh")),
               **images(), compile={**LABELS, "run_eagerly": True}, fit={"epochs": 1})


@case("losses/a mask")
def _(keras: Any) -> Run:
    return Run(tagger(keras, keras.layers.LSTM(4, return_sequences=True)), **words(),
               compile={**LABELS, "metrics": ["accuracy"]})


@case("losses/a mask and sample weights")
def _(keras: Any) -> Run:
    return Run(tagger(keras), **words(), weights=row_weights()[:, None],
               compile={**LABELS, "metrics": ["accuracy"]})


@case("losses/a mask and a sum", wide=True)
def _(keras: Any) -> Run:
    return Run(tagger(keras), **words(), compile={
        "loss": keras.losses.SparseCategoricalCrossentropy(reduction="sum"),
        "optimizer": sgd(keras, 0.01)})


@case("losses/a mask that leaves a tower nothing")
def _(keras: Any) -> Run:
    data = words()
    data["x"][:3] = 0
    data["x"][17:] = 0
    return Run(tagger(keras), **data, compile=LABELS)


# Weights.


@case("weights/sample_weight")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), weights=row_weights(), compile={
        "metrics": ["mae"], "weighted_metrics": ["mse"]})


@case("weights/class_weight")
def _(keras: Any) -> Run:
    return Run(dense(keras, activation="softmax"), **labelled(), compile=LABELS,
               fit={"class_weight": {0: 0.5, 1: 2.0, 2: 0.0}})


@case("weights/temporal", wide=True)
def _(keras: Any) -> Run:
    weights = np.random.RandomState(6).uniform(0, 2, (ROWS, 5)).astype("float32")
    return Run(tagger(keras, mask_zero=False), **words(), weights=weights,
               compile={**LABELS, "weighted_metrics": ["accuracy"]})


@case("weights/temporal, with a mask")
def _(keras: Any) -> Run:
    weights = np.random.RandomState(6).uniform(0, 2, (ROWS, 5)).astype("float32")
    return Run(tagger(keras), **words(), weights=weights,
               compile={**LABELS, "weighted_metrics": ["accuracy"]})


@case("weights/one an output")
def _(keras: Any) -> Run:
    return Run(_two_outputs(keras), **_two_targets(),
               weights={"a": row_weights(), "b": row_weights()[::-1].copy()},
               compile={"loss": {"a": "mse", "b": "mse"}, "optimizer": sgd(keras, 0.02)})


# Metrics and validation.


@case("metrics/binary")
def _(keras: Any) -> Run:
    metrics = keras.metrics
    return Run(dense(keras, 1, "sigmoid"), **binary(), compile={
        "loss": "binary_crossentropy", "metrics": [
            "accuracy", metrics.AUC(num_thresholds=20, name="auc"),
            metrics.Precision(thresholds=0.4, name="precision"), metrics.Recall(name="recall"),
            metrics.F1Score(threshold=0.5, name="f1"),
            metrics.TruePositives(name="hits"), metrics.PrecisionAtRecall(0.5, name="par")]})


@case("metrics/classes")
def _(keras: Any) -> Run:
    metrics = keras.metrics
    data = labelled()
    return Run(dense(keras, 3, "softmax"), data["x"], np.eye(3, dtype="float32")[data["y"]],
               compile={"loss": "categorical_crossentropy", "metrics": [
                   metrics.F1Score(average="macro", name="f1"),
                   metrics.MeanIoU(3, sparse_y_true=False, sparse_y_pred=False, name="iou"),
                   metrics.TopKCategoricalAccuracy(2, name="top2"),
                   metrics.CategoricalCrossentropy(name="cross")]})


@case("metrics/regression", wide=True)
def _(keras: Any) -> Run:
    metrics = keras.metrics
    return Run(dense(keras), **regression(), compile={"metrics": [
        metrics.RootMeanSquaredError(name="rmse"), metrics.R2Score(name="r2"),
        metrics.CosineSimilarity(name="cosine"), metrics.LogCoshError(name="logcosh")]})


@case("metrics/weighted")
def _(keras: Any) -> Run:
    metrics = keras.metrics
    return Run(dense(keras, 1, "sigmoid"), **binary(), weights=row_weights(), compile={
        "loss": "binary_crossentropy", "metrics": ["accuracy"], "weighted_metrics": [
            "accuracy", metrics.AUC(num_thresholds=20, name="auc"),
            metrics.Precision(thresholds=0.5, name="precision")]})


@case("metrics/own, with state")
def _(keras: Any) -> Run:
    class Largest(keras.metrics.Metric):
        """Counts rows, and sums their squares, by hand."""

        def __init__(self) -> None:
            super().__init__(name="own")
            self.rows = self.add_weight(name="rows", shape=(), initializer="zeros")
            self.squares = self.add_weight(name="squares", shape=(), initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.rows.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))
            self.squares.assign_add(tf.reduce_sum(tf.square(y_pred)))

        def result(self) -> Any:
            return self.squares / self.rows

    return Run(dense(keras), **regression(), compile={"metrics": [Largest()]})


@case("metrics/validation_split", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras, activation="softmax"), **labelled(),
               compile={**LABELS, "metrics": ["accuracy"]}, fit={"validation_split": 0.4})


@case("metrics/validation_data")
def _(keras: Any) -> Run:
    other = labelled(13)
    return Run(dense(keras, activation="softmax"), **labelled(),
               compile={**LABELS, "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]},
               fit={"validation_data": (other["x"], other["y"], row_weights(13)),
                    "validation_batch_size": 5})


# Optimizers.


def _optimizer(name: str, make_optimizer: Callable[[Any], Any], **options: Any) -> None:
    @case(f"optimizers/{name}", **options)
    def make(keras: Any) -> Run:
        return Run(dense(keras), **regression(), compile={"optimizer": make_optimizer(keras)})


_optimizer("SGD with momentum", lambda keras: sgd(keras, nesterov=True))
_optimizer("Adam", adam)
_optimizer("Adam, amsgrad", lambda keras: adam(keras, amsgrad=True), wide=True)
_optimizer("AdamW", lambda keras: keras.optimizers.AdamW(0.02, weight_decay=0.05), wide=True)
_optimizer("RMSprop", lambda keras: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
           wide=True)
_optimizer("Adagrad", lambda keras: keras.optimizers.Adagrad(0.05), wide=True)
_optimizer("Adadelta", lambda keras: keras.optimizers.Adadelta(1.0), wide=True)
_optimizer("Adamax", lambda keras: keras.optimizers.Adamax(0.02), wide=True)
_optimizer("Nadam", lambda keras: keras.optimizers.Nadam(0.02), wide=True)
_optimizer("Adafactor", lambda keras: keras.optimizers.Adafactor(0.02))
_optimizer("Ftrl", lambda keras: keras.optimizers.Ftrl(
    0.05, l1_regularization_strength=0.001, l2_regularization_strength=0.01), wide=True)
_optimizer("Lion", lambda keras: keras.optimizers.Lion(0.01), wide=True)
_optimizer("Lamb", lambda keras: keras.optimizers.Lamb(0.02), keras=(KERAS_3,),
           reason="tf_keras has no Lamb", wide=True)
_optimizer("Muon", lambda keras: keras.optimizers.Muon(0.02), keras=(KERAS_3,),
           reason="tf_keras has no Muon")
_optimizer("legacy SGD", lambda keras: keras.optimizers.legacy.SGD(0.1, momentum=0.9, clipnorm=0.3),
           keras=(TF_KERAS,), reason="Keras 3 has no legacy optimizers", wide=True)
_optimizer("legacy Adam", lambda keras: keras.optimizers.legacy.Adam(0.02, global_clipnorm=0.3),
           keras=(TF_KERAS,), reason="Keras 3 has no legacy optimizers")
_optimizer("clipnorm", lambda keras: sgd(keras, clipnorm=0.2))
_optimizer("clipvalue", lambda keras: sgd(keras, clipvalue=0.05), wide=True)
_optimizer("global_clipnorm", lambda keras: adam(keras, global_clipnorm=0.2))
_optimizer("weight decay", lambda keras: sgd(keras, weight_decay=0.03), wide=True)
_optimizer("EMA with overwriting", lambda keras: sgd(
    keras, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3))
_optimizer("EMA", lambda keras: adam(keras, use_ema=True, ema_momentum=0.8), wide=True)
_optimizer("a learning rate schedule", lambda keras: sgd(
    keras, keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5)))
for _steps in (3, 4):
    _optimizer(f"gradient_accumulation_steps={_steps}",
               lambda keras, steps=_steps: adam(keras, gradient_accumulation_steps=steps),
               keras=(KERAS_3,), reason="tf_keras does not accumulate gradients", wide=_steps == 3)
_optimizer("gradient accumulation, clipping, decay and EMA", lambda keras: sgd(
    keras, gradient_accumulation_steps=2, global_clipnorm=0.3, weight_decay=0.02, use_ema=True,
    ema_overwrite_frequency=2), keras=(KERAS_3,), reason="tf_keras does not accumulate gradients")


def _loss_scaled(keras: Any, inner: Any, scale: float = 1024.0) -> Any:
    optimizers = keras.optimizers if is_keras_3(keras) else keras.mixed_precision
    options = {"dynamic_growth_steps": 4, "initial_scale": scale}
    return optimizers.LossScaleOptimizer(inner, **options)


_optimizer("LossScaleOptimizer", lambda keras: _loss_scaled(keras, adam(keras)))


@case("optimizers/LossScaleOptimizer, a row overflows")
def _(keras: Any) -> Run:
    data = regression(32)
    # One row of the second batch: a finite loss whose scaled gradient, 3e39, is not. (At 3e38, a
    # tenth below the limit, the order of additions decides.)
    data["y"][9] = 1e18
    optimizer = _loss_scaled(keras, sgd(keras), scale=2.0**75)

    def seen(model: Any) -> dict[str, Any]:
        scale = getattr(optimizer, "dynamic_scale", None)
        scale = optimizer.loss_scale if scale is None else scale
        return {"log2 of the scale": np.log2(np.array(scale, "float64")),
                "iterations": np.array(optimizer.iterations)}

    return Run(dense(keras), **data, compile={"optimizer": optimizer}, fit={"epochs": 1}, seen=seen)


@case("optimizers/constraints")
def _(keras: Any) -> Run:
    constraints = keras.constraints
    return Run(dense(keras, kernel_constraint=constraints.MaxNorm(0.5),
                     bias_constraint=constraints.NonNeg()), **regression())


@case("optimizers/a frozen layer")
def _(keras: Any) -> Run:
    model = dense(keras)
    model.layers[0].trainable = False
    return Run(model, **regression(), compile={"optimizer": adam(keras)})


@case("optimizers/a gradient that is None")
def _(keras: Any) -> Run:
    class Partly(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = keras.layers.Dense(3), keras.layers.Dense(4)
            self.used.build((None, 5))
            self.unused.build((None, 5))

        def call(self, x: Any) -> Any:
            return self.used(x)

    return Run(Partly(), **regression())


def _used_twice(keras: Any) -> Any:
    x = keras.Input((5,))
    shared = keras.layers.Dense(5, activation="tanh")
    return keras.Model(x, keras.layers.Dense(3)(shared(shared(x))))


@case("optimizers/a variable used twice")
def _(keras: Any) -> Run:
    return Run(_used_twice(keras), **regression(), compile={"optimizer": sgd(keras)})


# One element's gradient is so near zero here that Adam, which divides by its size, makes 1.5e-5 of
# float32's rounding; in float64 nothing is left of it.
@case("optimizers/a variable used twice, Adam", wide=True, policy="float64", bound=1e-12)
def _(keras: Any) -> Run:
    data = {name: values.astype("float64") for name, values in regression().items()}
    return Run(_used_twice(keras), **data, compile={"optimizer": adam(keras)})


@case("optimizers/sparse gradients, SGD", wide=True)
def _(keras: Any) -> Run:
    return Run(_bag(keras), **_bags(), compile={"optimizer": sgd(keras)})


@case("optimizers/sparse gradients, Adam and clipping")
def _(keras: Any) -> Run:
    return Run(_bag(keras), **_bags(), compile={"optimizer": adam(keras, global_clipnorm=0.1)})


@case("optimizers/sparse gradients, Adagrad and weights", wide=True)
def _(keras: Any) -> Run:
    return Run(_bag(keras), **_bags(), weights=row_weights(),
               compile={"optimizer": keras.optimizers.Adagrad(0.1)})


@case("optimizers/sparse gradients, a table used twice")
def _(keras: Any) -> Run:
    a, b = keras.Input((4,), dtype="int32"), keras.Input((4,), dtype="int32")
    table = keras.layers.Embedding(9, 3)
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(table(part)) for part in (a, b)])
    data = _bags()
    return Run(keras.Model([a, b], keras.layers.Dense(1)(joined)), [data["x"], data["x"][::-1]],
               data["y"], compile={"optimizer": sgd(keras)})


@case("optimizers/sparse gradients, accumulated", keras=(KERAS_3,),
      reason="tf_keras does not accumulate gradients")
def _(keras: Any) -> Run:
    return Run(_bag(keras), **_bags(),
               compile={"optimizer": adam(keras, gradient_accumulation_steps=2)})


@case("optimizers/sparse inputs, Adam")
def _(keras: Any) -> Run:
    x = keras.Input((9,), sparse=True)
    data = numbers(ROWS, 9, seed=7)
    rows = tf.sparse.from_dense(np.where(data > 0.5, data, 0.))
    y = numbers(ROWS, 1, seed=8)
    return Run(keras.Model(x, keras.layers.Dense(1)(x)),
               tf.data.Dataset.from_tensor_slices((rows, y)).batch(8),
               compile={"optimizer": adam(keras)}, fit={"batch_size": None})


def _bag(keras: Any) -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(9, 3),
                             layers.GlobalAveragePooling1D(), layers.Dense(1)])


def _bags() -> dict[str, Any]:
    """Few ids, so that each batch repeats them within and across towers; some never come."""
    return {"x": np.random.RandomState(7).randint(0, 6, (ROWS, 4)), "y": numbers(ROWS, 1, seed=8)}


# Models.


@case("models/conv")
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, activation="tanh", padding="same"),
                          layers.AveragePooling2D(2), layers.Conv2D(3, 2, activation="tanh")),
               **images(), compile=LABELS)


@case("models/depthwise", wide=True)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.DepthwiseConv2D(3, activation="tanh"),
                          layers.SeparableConv2D(3, 2, activation="tanh")),
               **images(), compile={**LABELS, "optimizer": adam(keras)})


@case("models/LSTM", wide=True)
def _(keras: Any) -> Run:
    return Run(classifier(keras, keras.layers.LSTM(4), shape=(4, 3)), numbers(ROWS, 4, 3),
               images()["y"], compile={**LABELS, "optimizer": adam(keras)})


@case("models/GRU, bidirectional")
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Bidirectional(layers.GRU(3, return_sequences=True)),
                          shape=(4, 3)), numbers(ROWS, 4, 3), images()["y"], compile=LABELS)


@case("models/attention", wide=True)
def _(keras: Any) -> Run:
    layers = keras.layers
    x = keras.Input((4, 6))
    attended = layers.MultiHeadAttention(2, 3, use_bias=False)(x, x)
    y = layers.LayerNormalization()(layers.Add()([x, attended]))
    y = layers.Dense(3, activation="softmax")(layers.Flatten()(y))
    return Run(keras.Model(x, y), numbers(ROWS, 4, 6), images()["y"], compile=LABELS)


@case("models/GroupNormalization", wide=True)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False),
                          layers.GroupNormalization(2), layers.Activation("tanh")),
               **images(), compile={**LABELS, "optimizer": adam(keras)})


@case("models/BatchNormalization, synchronized")
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False),
                          layers.BatchNormalization(synchronized=True), layers.Activation("tanh")),
               **images(), compile=LABELS, fit={"validation_split": 0.2})


@case("models/BatchNormalization, synchronized, with a mask")
def _(keras: Any) -> Run:
    return Run(tagger(keras, keras.layers.BatchNormalization(synchronized=True)), **words(),
               compile=LABELS)


@case("models/BatchNormalization, synchronized, batches of one row", wide=True)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False),
                          layers.BatchNormalization(synchronized=True), layers.Activation("tanh")),
               **images(4), compile=LABELS, fit={"batch_size": 1})


@case("models/BatchNormalization, frozen")
def _(keras: Any) -> Run:
    layers = keras.layers
    model = classifier(keras, layers.Conv2D(4, 3), layers.BatchNormalization(),
                       layers.Activation("tanh"))
    model.layers[1].trainable = False
    return Run(model, **images(), compile=LABELS)


# Losses and metrics of all rows.


def _nearest(y: Any, outputs: Any) -> tf.Tensor:
    """In-batch negatives: a row's two halves are to be nearer to each other than to other rows'."""
    del y
    one, other = tf.split(tf.cast(outputs, tf.float32), 2, axis=-1)
    products = tf.matmul(tf.math.l2_normalize(one, -1), tf.math.l2_normalize(other, -1),
                         transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(one)[0]),
                                                          3. * products)


def _rank(y: Any, outputs: Any) -> tf.Tensor:
    """How many of the batch's rows have a larger first output."""
    del y
    first = outputs[:, 0]
    return tf.reduce_sum(tf.cast(first[tf.newaxis] > first[:, tf.newaxis], tf.float32), 1)


def _two_towers(keras: Any) -> Any:
    query, item = keras.Input((5,)), keras.Input((5,))
    outputs = [dense(keras, 4, "tanh")(query), dense(keras, 4, "tanh")(item)]
    return keras.Model([query, item], keras.layers.Concatenate()(outputs))


@case("whole/two-tower retrieval, weights, a metric that ranks")
def _(keras: Any) -> Run:
    data = regression(ROWS + 2)
    return Run(_two_towers(keras), [data["x"], data["x"][::-1].copy()], data["y"],
               weights=row_weights(ROWS + 2), fit={"validation_split": 0.2},
               compile={"loss": WholeBatch(_nearest), "metrics": [WholeBatch(_rank)]})


@case("whole/a sum, several outputs, eagerly")
def _(keras: Any) -> Run:
    class Spread(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return tf.reduce_sum(tf.square(y_pred[:, tf.newaxis] - y_pred / 2), [1, 2]) / 50

    return Run(_two_outputs(keras), **_two_targets(),
               compile={"loss": [WholeBatch(Spread(reduction="sum")), "mse"],
                        "loss_weights": [0.3, 1.], "run_eagerly": True})


@case("whole/a mask, a loss that reads a weight")
def _(keras: Any) -> Run:
    model = tagger(keras)

    def loss(y: Any, outputs: Any) -> tf.Tensor:
        weight = tf.reduce_mean(tf.square(tf.convert_to_tensor(model.trainable_weights[-1])))
        rows = keras.losses.sparse_categorical_crossentropy(y, outputs)
        return rows * (1 + weight) + tf.reduce_mean(tf.square(outputs))

    return Run(model, **words(), compile={"loss": WholeBatch(loss)})


def _coupled(name: str, make: Callable[[Any], Any], **options: Any) -> None:
    @case(f"whole/{name}", keras=(KERAS_3,), reason="tf_keras has no such loss", **options)
    def _(keras: Any) -> Run:
        data = labelled()
        if name != "Circle":
            data["y"] = np.eye(3, dtype="float32")[data["y"]]
        return Run(keras.Sequential([keras.Input((5,)), dense(keras, 3, "sigmoid")]), **data,
                   compile={"loss": make(keras)})


_coupled("Dice", lambda keras: "dice")
_coupled("Tversky", lambda keras: keras.losses.Tversky(), wide=True)
_coupled("Circle", lambda keras: keras.losses.Circle(gamma=2.))


# Batch norm over the whole batch, whatever the layers say.
WHOLE = {"strategy": {"synchronize_batch_norm": True}}


@case("norms/convolution and dense", **WHOLE)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False),
                          layers.BatchNormalization(momentum=0.6), layers.Activation("elu"),
                          layers.Flatten(), layers.Dense(4), layers.Activation("tanh"),
                          layers.BatchNormalization(scale=False)),
               **images(ROWS + 2), compile=LABELS, fit={"validation_split": 0.2})


@case("norms/a mask", **WHOLE)
def _(keras: Any) -> Run:
    return Run(tagger(keras, keras.layers.BatchNormalization()), **words(), compile=LABELS)


@case("norms/nested, another axis, renorm", **WHOLE)
def _(keras: Any) -> Run:
    layers = keras.layers
    inner = keras.Sequential([keras.Input((6, 6, 2)), layers.BatchNormalization(axis=1),
                              layers.Conv2D(4, 3, use_bias=False), layers.Reshape([16, 4]),
                              layers.BatchNormalization(renorm=True, renorm_clipping={})])
    return Run(classifier(keras, inner), **images(), compile=LABELS)


@case("norms/mixed_float16", policy="mixed_float16", bound=2e-2,
      reason="float16: sums over fewer rows round otherwise", **WHOLE)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(),
                          layers.Activation("elu")), **images(), compile=LABELS)


@case("norms/float64, batches of one row", policy="float64", keras=(KERAS_3,),
      reason="tf_keras' fused kernel has no float64", **WHOLE)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(),
                          layers.Activation("elu")), **images(), compile=LABELS,
               fit={"batch_size": 6})


@case("models/nested")
def _(keras: Any) -> Run:
    layers = keras.layers
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(4, activation="tanh"),
                              dense_block(keras)])
    return Run(keras.Sequential([keras.Input((5,)), inner, layers.Dense(3)]), **regression())


def dense_block(keras: Any) -> Any:
    """A model to nest."""
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, activation="tanh")])


@case("models/subclassed, built by fit")
def _(keras: Any) -> Run:
    class Residual(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(5, activation="tanh")
            self.last = keras.layers.Dense(3)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.last(self.first(x) + x)

    return Run(Residual(), **regression(), compile={"optimizer": adam(keras)})


@case("models/several inputs")
def _(keras: Any) -> Run:
    a, b = keras.Input((5,), name="a"), keras.Input((3,), name="b")
    layers = keras.layers
    y = layers.Dense(1)(layers.Concatenate()([layers.Dense(4, activation="tanh")(a), b]))
    data = regression()
    return Run(keras.Model({"a": a, "b": b}, y), {"a": data["x"], "b": data["y"]},
               numbers(ROWS, 1, seed=3))


def _own_step(keras: Any, step: Callable[[Any, Any], dict[str, Any]]) -> Any:
    class Own(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            return step(self, data)

    x = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh")(x)
    return Own(x, keras.layers.Dense(3)(hidden))


@case("models/a layer that counts rows in a summed variable")
def _(keras: Any) -> Run:
    summed = "sum" if is_keras_3(keras) else tf.VariableAggregation.SUM

    class Counting(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.rows, self.left = (self.add_weight(
                name=name, shape=(), initializer="zeros", trainable=False, aggregation=summed)
                for name in ("rows", "left"))

        def call(self, x: Any, training: Any = None) -> Any:
            if training:
                self.rows.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
                self.left.assign_sub(tf.cast(tf.shape(x)[0], tf.float32))
            return x

    return Run(keras.Sequential([keras.Input((5,)), Counting(), keras.layers.Dense(3)]),
               **regression())


@case("models/own train_step, Keras' loss")
def _(keras: Any) -> Run:
    def step(model: Any, data: Any) -> dict[str, Any]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            loss = model.compute_loss(x, y, y_pred, weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        for metric in model.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in model.metrics}

    return Run(_own_step(keras, step), **regression(), compile={"metrics": ["mae"]},
               weights=row_weights())


@case("models/own train_step, a loss object", wide=True)
def _(keras: Any) -> Run:
    loss_object = keras.losses.MeanSquaredError()
    tracker = keras.metrics.Mean(name="own_loss")

    def step(model: Any, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True)) if is_keras_3(keras) \
                else model.compiled_loss(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        tracker.update_state(loss)
        return {"own_loss": tracker.result()}

    model = _own_step(keras, step)
    return Run(model, **regression(), compile={"loss": loss_object})


def _scaled(loss: Any) -> Any:
    """What one writes in a step of one's own; without a strategy there is nothing to scale."""
    scale = getattr(tf.distribute.get_strategy(), "scale_loss", None)
    return loss if scale is None else scale(loss)


def _apply(model: Any, tape: Any, loss: Any) -> None:
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))


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


@case("models/own train_step, scale_loss, eagerly")
def _(keras: Any) -> Run:
    return Run(_variational(keras), numbers(ROWS, 5), numbers(ROWS, 2, seed=1), compile={
        "loss": None, "run_eagerly": True})


def _own_loss_step(name: str, loss_of: Callable[..., Any], **options: Any) -> None:
    """A step with a loss of its own, tracked with the rows as weights, changed and as it is."""
    @case(f"models/own train_step, {name}", **options)
    def make(keras: Any) -> Run:
        trackers = [keras.metrics.Mean(name=name) for name in ("plain", "weighted", "changed")]

        def step(model: Any, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = loss_of(keras, model, y, model(x, training=True))
            _apply(model, tape, loss)
            trackers[0].update_state(loss)
            trackers[1].update_state(loss, sample_weight=tf.shape(x)[0])
            trackers[2].update_state(2.0 * loss + tf.reduce_mean(y))
            return {tracker.name: tracker.result() for tracker in trackers}

        return Run(_own_step(keras, step), **regression())


def _per_row(y: Any, y_pred: Any) -> Any:
    return tf.reduce_mean(tf.square(y_pred - y), axis=-1)


def _penalty(model: Any) -> Any:
    return 0.01 * tf.nn.l2_loss(tf.convert_to_tensor(model.trainable_variables[0]))


_own_loss_step("compute_average_loss", lambda keras, model, y, y_pred: (
    tf.nn.compute_average_loss(_per_row(y, y_pred))
    + tf.nn.scale_regularization_loss(_penalty(model))), wide=True)
_own_loss_step("compute_average_loss, a batch size", lambda keras, model, y, y_pred: (
    tf.nn.compute_average_loss(_per_row(y, y_pred), global_batch_size=8)), wide=True)
_own_loss_step("a sum over the global batch", lambda keras, model, y, y_pred: (
    tf.reduce_sum(_per_row(y, y_pred)) * (1. / 8)))
_own_loss_step("a loss object and a scaled term", lambda keras, model, y, y_pred: (
    keras.losses.MeanSquaredError()(y, y_pred) + _scaled(0.1 * tf.reduce_mean(tf.abs(y_pred)))
    + _scaled(_penalty(model))),
    keras=(KERAS_3,), reason="tf_keras refuses a loss object's mean under a strategy")
_own_loss_step("a summed loss object", lambda keras, model, y, y_pred: (
    keras.losses.MeanSquaredError(reduction="sum")(y, y_pred) / 8))


def _changed_by_hand(name: str, change: Callable[[Any, list[Any]], list[Any]],
                     **options: Any) -> None:
    """A step that does something of its own with the gradients before they are applied."""
    @case(f"models/own train_step, gradients {name}", **options)
    def make(keras: Any) -> Run:
        def step(model: Any, data: Any) -> dict[str, Any]:
            x, y = data
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
            gradients = change(model, tape.gradient(loss, model.trainable_variables))
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            for metric in model.metrics:
                metric.update_state(loss)
            return {metric.name: metric.result() for metric in model.metrics}

        return Run(_own_step(keras, step), **regression(), compile={"optimizer": sgd(keras)})


def _running(model: Any, gradients: list[Any]) -> list[Any]:
    if not hasattr(model, "running"):
        with tf.init_scope():
            model.running = [tf.Variable(tf.zeros(each.shape), trainable=False)
                             for each in gradients]
    for held, gradient in zip(model.running, gradients):
        held.assign(0.5 * held + gradient)
    return [tf.identity(held) for held in model.running]


_changed_by_hand("clipped by hand", lambda model, gradients: (
    tf.clip_by_global_norm(gradients, 0.1)[0]))
_changed_by_hand("decayed by hand", lambda model, gradients: [
    gradient + 0.1 * tf.convert_to_tensor(weight)
    for gradient, weight in zip(gradients, model.trainable_variables)], wide=True)
_changed_by_hand("summed by hand", _running, wide=True)


def _decorated(keras: Any, eagerly: bool = False) -> Run:
    """``call``, the loss and an update of moving averages in functions, a branch and a loop."""

    class Decorated(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = keras.layers.Dense(4, activation="tanh")
            self.norm = keras.layers.LayerNormalization()
            self.last = keras.layers.Dense(3)
            self.mean = tf.Variable(tf.zeros([5]), trainable=False)
            self.target = tf.Variable(8.0, trainable=False)

        @tf.function
        def call(self, x: Any, training: Any = None) -> Any:
            return self.last(self.norm(self.hidden(x)))

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
            # Eagerly, nothing tells that what a function returned is a part of the batch's loss.
            return {"own_loss": 0.0 * loss if eagerly else loss}

    model = Decorated()
    model(np.zeros([1, 5], "float32"))
    data = regression()
    return Run(model, **data, compile={"run_eagerly": eagerly},
               seen=lambda model: {"moved": [model.mean.numpy(), model.target.numpy()]})


@case("models/functions and control flow in a step")
def _(keras: Any) -> Run:
    return _decorated(keras)


@case("models/functions and control flow in a step, eagerly", wide=True)
def _(keras: Any) -> Run:
    return _decorated(keras, eagerly=True)


@case("models/own test_step and predict_step")
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


@case("models/own train_step, two optimizers")
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
            self.second = second
            # Under any strategy Keras 3 would build it for all variables, on one device for ours.
            self.optimizer.build(self.a.trainable_variables)
            self.second.build(self.b.trainable_variables)

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


# How fit is called.


@case("fit/steps_per_execution=4, a partial last batch")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"steps_per_execution": 4, "metrics": ["mae"]},
               fit={"validation_split": 0.3, "batch_size": 4})


@case("fit/steps_per_execution=3, predict", wide=True)
def _(keras: Any) -> Run:
    data = regression()

    def seen(model: Any) -> dict[str, Any]:
        return {"predict": model.predict(data["x"], batch_size=3, verbose=0)}

    return Run(dense(keras), **data, compile={"steps_per_execution": 3}, seen=seen)


@case("fit/steps_per_execution=4, gradient accumulation and Adam", keras=(KERAS_3,),
      reason="tf_keras does not accumulate gradients")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(33), compile={
        "steps_per_execution": 4, "optimizer": adam(keras, gradient_accumulation_steps=3)})


@case("fit/run_eagerly")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), weights=row_weights(), compile={
        "run_eagerly": True, "metrics": ["mae"], "optimizer": adam(keras, clipnorm=0.1)})


@case("fit/run_eagerly, synchronized batch normalization")
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False),
                          layers.BatchNormalization(synchronized=True), layers.Activation("tanh")),
               **images(), compile={**LABELS, "run_eagerly": True}, fit={"epochs": 1})


@case("fit/resumed with initial_epoch", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"optimizer": adam(keras)},
               fits=({"epochs": 1}, {"initial_epoch": 1, "epochs": 3}))


@case("fit/several calls")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"metrics": ["mae"]},
               fits=({"epochs": 1}, {"epochs": 1, "batch_size": 5}, {"epochs": 1, "batch_size": 1}))


@case("fit/learning rate changed between epochs")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), callbacks=lambda: [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.3)],
        fit={"epochs": 3})


@case("fit/ReduceLROnPlateau and EarlyStopping")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), callbacks=lambda: [
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.2, patience=0, min_delta=0.05),
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.02,
                                      restore_best_weights=True)],
        fit={"epochs": 5, "validation_split": 0.3})


# Data types.


@case("dtypes/float64", policy="float64", bound=1e-12)
def _(keras: Any) -> Run:
    layers = keras.layers
    data = images()
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False),
                          layers.BatchNormalization(synchronized=True), layers.Activation("tanh")),
               data["x"].astype("float64"), data["y"],
               compile={**LABELS, "optimizer": adam(keras, clipnorm=0.1), "metrics": ["accuracy"]},
               weights=row_weights().astype("float64"))


@case("dtypes/mixed_bfloat16", policy="mixed_bfloat16", bound=2e-2,
      reason="bfloat16 has 8 bits: sums of a batch in another order round to another neighbour")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"metrics": ["mae"]})


@case("dtypes/mixed_float16", policy="mixed_float16", bound=5e-3,
      reason="float16 has 11 bits: sums of a batch in another order round to another neighbour")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"metrics": ["mae"]})
