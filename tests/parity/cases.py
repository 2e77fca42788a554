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
      wide: whether `make test` leaves it to `make test-all`, as a relative of others.
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


def two_outputs(keras: Any) -> Any:
    """Outputs ``a`` and ``b``."""
    x = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh")(x)
    return keras.Model(x, {"a": keras.layers.Dense(3, name="a")(hidden),
                           "b": keras.layers.Dense(1, name="b")(hidden)})


def two_targets() -> dict[str, Any]:
    """Data for them."""
    data = regression()
    return {"x": data["x"], "y": {"a": data["y"], "b": data["y"][:, :1] ** 2}}



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
_batches("a single row", 17, 8, wide=True)
_batches("a size that R does not divide", 21, 7, wide=True)
_batches("a dataset smaller than one batch", 5, 16, wide=True)
_batches("batches of one row", 4, 1, wide=True)


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


@case("batches/a generator", wide=True)
def _(keras: Any) -> Run:
    data = regression()

    class Batches(keras.utils.Sequence):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            rows = slice(8 * index, 8 * index + 8)
            return data["x"][rows], data["y"][rows]

    return Run(dense(keras), Batches(), fit={"batch_size": None})


@case("batches/shuffled", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), fit={"shuffle": True})


@case("batches/steps_per_epoch", wide=True)
def _(keras: Any) -> Run:
    data = regression()
    endless = tf.data.Dataset.from_tensor_slices((data["x"], data["y"])).batch(8).repeat()
    return Run(dense(keras), endless,
               fit={"batch_size": None, "steps_per_epoch": 4, "validation_data": (
                   data["x"], data["y"]), "validation_batch_size": 7})


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


@case("weights/temporal, with a mask", wide=True)
def _(keras: Any) -> Run:
    weights = np.random.RandomState(6).uniform(0, 2, (ROWS, 5)).astype("float32")
    return Run(tagger(keras), **words(), weights=weights,
               compile={**LABELS, "weighted_metrics": ["accuracy"]})


@case("weights/one an output", wide=True)
def _(keras: Any) -> Run:
    return Run(two_outputs(keras), **two_targets(),
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


@case("metrics/classes", wide=True)
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


@case("metrics/weighted", wide=True)
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


@case("metrics/own, of all that was predicted")
def _(keras: Any) -> Run:
    class UpperHalf(keras.metrics.Metric):
        """Keeps each prediction, in a variable of an open length."""

        def __init__(self) -> None:
            super().__init__(name="own")
            self.kept = tf.Variable(tf.zeros([0]), shape=[None], trainable=False)

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.kept.assign(tf.concat([self.kept, tf.reshape(y_pred, [-1])], 0))

        def result(self) -> Any:
            ordered = tf.sort(tf.abs(tf.convert_to_tensor(self.kept)))
            return tf.reduce_mean(ordered[tf.size(ordered) // 2:])

        def reset_state(self) -> None:
            self.kept.assign(tf.zeros([0]))

    return Run(dense(keras), **regression(), compile={"metrics": [UpperHalf()]})


@case("metrics/validation_split", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras, activation="softmax"), **labelled(),
               compile={**LABELS, "metrics": ["accuracy"]}, fit={"validation_split": 0.4})


@case("metrics/validation_data", wide=True)
def _(keras: Any) -> Run:
    other = labelled(13)
    return Run(dense(keras, activation="softmax"), **labelled(),
               compile={**LABELS, "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]},
               fit={"validation_data": (other["x"], other["y"], row_weights(13)),
                    "validation_batch_size": 5})


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
                          layers.SeparableConv2D(4, 2, activation="tanh"),
                          layers.Conv2D(4, 2, groups=2)),  # which XLA compiles on CPUs
               **images(), compile={**LABELS, "optimizer": adam(keras)})


@case("models/LSTM", wide=True)
def _(keras: Any) -> Run:
    return Run(classifier(keras, keras.layers.LSTM(4), shape=(4, 3)), numbers(ROWS, 4, 3),
               images()["y"], compile={**LABELS, "optimizer": adam(keras)})


@case("models/GRU, bidirectional", wide=True)
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


@case("models/BatchNormalization, synchronized, batches of one row", wide=True)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False),
                          layers.BatchNormalization(synchronized=True), layers.Activation("tanh")),
               **images(4), compile=LABELS, fit={"batch_size": 1})


@case("models/BatchNormalization, frozen", wide=True)
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


@case("whole/two-tower retrieval, weights, a metric that ranks", wide=True)
def _(keras: Any) -> Run:
    data = regression(ROWS + 2)
    return Run(_two_towers(keras), [data["x"], data["x"][::-1].copy()], data["y"],
               weights=row_weights(ROWS + 2), fit={"validation_split": 0.2},
               compile={"loss": WholeBatch(_nearest), "metrics": [WholeBatch(_rank)]})


def _coupled(name: str, make: Callable[[Any], Any], **options: Any) -> None:
    @case(f"whole/{name}", keras=(KERAS_3,), reason="tf_keras has no such loss", **options)
    def _(keras: Any) -> Run:
        data = labelled()
        if name != "Circle":
            data["y"] = np.eye(3, dtype="float32")[data["y"]]
        return Run(keras.Sequential([keras.Input((5,)), dense(keras, 3, "sigmoid")]), **data,
                   compile={"loss": make(keras)})


_coupled("Dice", lambda keras: "dice", wide=True)
_coupled("Tversky", lambda keras: keras.losses.Tversky(), wide=True)
_coupled("Circle", lambda keras: keras.losses.Circle(gamma=2.), wide=True)


# Batch norm over the whole batch, whatever the layers say.
WHOLE = {"strategy": {"synchronize_batch_norm": True}}


@case("norms/convolution and dense", wide=True, **WHOLE)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False),
                          layers.BatchNormalization(momentum=0.6), layers.Activation("elu"),
                          layers.Flatten(), layers.Dense(4), layers.Activation("tanh"),
                          layers.BatchNormalization(scale=False)),
               **images(ROWS + 2), compile=LABELS, fit={"validation_split": 0.2})


@case("norms/a mask", wide=True, **WHOLE)
def _(keras: Any) -> Run:
    return Run(tagger(keras, keras.layers.BatchNormalization()), **words(), compile=LABELS)


@case("norms/nested, another axis, renorm", wide=True, **WHOLE)
def _(keras: Any) -> Run:
    layers = keras.layers
    inner = keras.Sequential([keras.Input((6, 6, 2)), layers.BatchNormalization(axis=1),
                              layers.Conv2D(4, 3, use_bias=False), layers.Reshape([16, 4]),
                              layers.BatchNormalization(renorm=True, renorm_clipping={})])
    return Run(classifier(keras, inner), **images(), compile=LABELS)


@case("norms/mixed_float16", wide=True, policy="mixed_float16", bound=2e-2,
      reason="float16: sums over fewer rows round otherwise", **WHOLE)
def _(keras: Any) -> Run:
    layers = keras.layers
    return Run(classifier(keras, layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(),
                          layers.Activation("elu")), **images(), compile=LABELS)


@case("models/nested", wide=True)
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


@case("models/several inputs", wide=True)
def _(keras: Any) -> Run:
    a, b = keras.Input((5,), name="a"), keras.Input((3,), name="b")
    layers = keras.layers
    y = layers.Dense(1)(layers.Concatenate()([layers.Dense(4, activation="tanh")(a), b]))
    data = regression()
    return Run(keras.Model({"a": a, "b": b}, y), {"a": data["x"], "b": data["y"]},
               numbers(ROWS, 1, seed=3))


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


@case("models/positions", wide=True)
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
               **words(), compile={**LABELS, "optimizer": adam(keras)})


# How fit is called.


@case("fit/steps_per_execution=4, a partial last batch", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"steps_per_execution": 4, "metrics": ["mae"]},
               fit={"validation_split": 0.3, "batch_size": 4})


@case("fit/steps_per_execution=3, predict", wide=True)
def _(keras: Any) -> Run:
    data = regression()

    def seen(model: Any) -> dict[str, Any]:
        return {"predict": model.predict(data["x"], batch_size=3, verbose=0)}

    return Run(dense(keras), **data, compile={"steps_per_execution": 3}, seen=seen)


@case("fit/steps_per_execution=4, gradient accumulation and Adam", wide=True, keras=(KERAS_3,),
      reason="tf_keras does not accumulate gradients")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(33), compile={
        "steps_per_execution": 4, "optimizer": adam(keras, gradient_accumulation_steps=3)})


@case("fit/run_eagerly")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), weights=row_weights(), compile={
        "run_eagerly": True, "metrics": ["mae"], "optimizer": adam(keras, clipnorm=0.1)})


@case("fit/resumed with initial_epoch", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"optimizer": adam(keras)},
               fits=({"epochs": 1}, {"initial_epoch": 1, "epochs": 3}))


@case("fit/several calls", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"metrics": ["mae"]},
               fits=({"epochs": 1}, {"epochs": 1, "batch_size": 5}, {"epochs": 1, "batch_size": 1}))


@case("fit/learning rate changed between epochs", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), callbacks=lambda: [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.3)],
        fit={"epochs": 3})


@case("fit/ReduceLROnPlateau and EarlyStopping", wide=True)
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), callbacks=lambda: [
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.2, patience=0, min_delta=0.05),
        keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.02,
                                      restore_best_weights=True)],
        fit={"epochs": 5, "validation_split": 0.3})


# Data types.


@case("dtypes/float64", wide=True, policy="float64", bound=1e-12)
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


@case("dtypes/mixed_float16", wide=True, policy="mixed_float16", bound=5e-3,
      reason="float16 has 11 bits: sums of a batch in another order round to another neighbour")
def _(keras: Any) -> Run:
    return Run(dense(keras), **regression(), compile={"metrics": ["mae"]})
