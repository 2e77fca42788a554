"""Public classes of a Keras version -> cases of the harness.

Goes in: a Keras module, which is searched for its layers, losses and metrics, and the tables of
:mod:`sweep_tables`.  Comes out: an :class:`Item` for each class; ``Item.case`` trains it in a tiny
model.  A loss has four: all its reductions, an output of the model for each, and no reduction, both
with and without sample weights.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from . import cases, runner, sweep_tables as tables

_TABLES: dict[str, Mapping[str, Any]] = {
    "layers": tables.LAYERS, "losses": tables.LOSSES, "metrics": tables.METRICS}
GROUPS = tuple(_TABLES)
# In batches of 4 they are 4, 4 and 1: on three towers 2, 1 and 1 rows, and 1, 0 and 0.
ROWS = 9
FIT = {"batch_size": 4, "epochs": 2}


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing to compare: its name, the group and class it is about, and a loss' settings."""

    name: str
    group: str
    cls: type[Any]
    reductions: tuple[str, ...] = ()
    weighted: bool = False

    @property
    def key(self) -> str:
        """What it is called in the tables of its group."""
        return self.name.partition(".")[2].partition(" / ")[0]

    @property
    def policy(self) -> str:
        return "float64" if f"{self.group}.{self.key}" in tables.FLOAT64 else "float32"

    @property
    def targets(self) -> tables.Targets:
        """What a loss or a metric is given."""
        return _targets({"losses": tables.LOSSES, "metrics": tables.METRICS}[self.group], self.key)

    @property
    def model(self) -> tuple[Any, ...]:
        """Items with the same can be trained in one model, side by side."""
        if self.group == "layers":
            return self.group, self.policy
        return self.group, self.targets.data, self.reductions, self.weighted, self.policy


def case_of(*together: Item) -> cases.Case:
    """The harness' case for an item, or for several that can be in one model."""
    policy = together[0].policy
    make = {"layers": _layer_run, "losses": _loss_run, "metrics": _metric_run}[together[0].group]
    return cases.Case(f"sweep/{together[0].name}", lambda keras: make(keras, *together),
                      policy=policy, bound=1e-9 if policy == "float64" else 1e-5)


def items(keras: Any) -> list[Item]:
    """Everything that is to be compared, less what cannot be trained."""
    found = []
    for group in GROUPS:
        for name, cls in classes(keras, group).items():
            if f"{group}.{name}" not in tables.CANNOT:
                found += _items_of(keras, group, name, cls)
    return found


def _items_of(keras: Any, group: str, name: str, cls: type[Any]) -> Iterator[Item]:
    keys = [name, *(key for key in _TABLES[group] if key.startswith(f"{name} "))]
    for key in keys:
        if group != "losses":
            yield Item(f"{group}.{key}", group, cls)
            continue
        reduced = tuple(one for one in reductions(keras) if one != "none")
        # Apart, as a vector beside numbers would make what is trained a sum of both for each row.
        for what, heads in (("reduced", reduced), ("not reduced", ("none",))):
            for weighted in (False, True):
                end = ", weighted" if weighted else ""
                yield Item(f"losses.{key} / {what}{end}", group, cls, heads, weighted)


def unknown(keras: Any) -> list[str]:
    """Names in the tables that no class of ``keras`` or of the other Keras version has."""
    other = runner.keras_module({cases.KERAS_3: cases.TF_KERAS,
                                 cases.TF_KERAS: cases.KERAS_3}[keras.__name__])
    known = {f"{group}.{name}" for module in (keras, other) for group in GROUPS
             for name in classes(module, group)}
    named = [*tables.CANNOT, *tables.FLOAT64, *(name for _, name in tables.DIFFERS)]
    for group, table in _TABLES.items():
        named += [f"{group}.{key}" for key in table]
    return [f"{name!r} is in a table of the sweep, and no such class is in either Keras version"
            for name in named if name.split()[0] not in known]


def classes(keras: Any, group: str) -> dict[str, type[Any]]:
    """The public classes of ``keras.layers``, ``losses`` or ``metrics``, each by one name."""
    base = {"layers": keras.layers.Layer, "losses": keras.losses.Loss,
            "metrics": keras.metrics.Metric}[group]
    found: dict[type[Any], str] = {}
    for module in _modules(getattr(keras, group)):
        for name in sorted(dir(module)):
            value = getattr(module, name)
            if not inspect.isclass(value) or not issubclass(value, base) or name.startswith("_"):
                continue
            # Of several names the class' own, as its aliases say nothing.
            found[value] = value.__name__ if name == value.__name__ else found.get(value, name)
    return {name: cls for cls, name in sorted(found.items(), key=lambda item: item[1])}


def _modules(module: Any) -> Iterator[Any]:
    yield module
    for name in dir(module):
        value = getattr(module, name)
        if inspect.ismodule(value) and name == "experimental":
            yield from _modules(value)


def reductions(keras: Any) -> tuple[str, ...]:
    """The reductions that a loss of this Keras version takes."""
    if not cases.is_keras_3(keras):
        return tuple(keras.losses.Reduction.all())
    return ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", "none")


def _made(cls: type[Any], arguments: tables.Arguments, keras: Any, **more: Any) -> Any:
    """An instance, with values of our own for what it asks for."""
    given = dict(arguments(keras) if callable(arguments) else arguments)
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        required = parameter.default is parameter.empty
        if name in tables.ALWAYS:
            given.setdefault(name, tables.ALWAYS[name])
        elif required and name in tables.PARAMETERS:
            given.setdefault(name, tables.PARAMETERS[name])
    return cls(**given, **more)


# Layers.


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a model: the shape of a row, dtype and the rows; whether a layer comes first."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    rows: Callable[[tuple[int, ...], int], Any] = lambda shape, seed: cases.numbers(
        ROWS, *shape, seed=seed)
    learned: bool = True


def _ids(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.RandomState(seed).randint(0, 11, (ROWS, *shape)).astype("int32")


def _colours(shape: tuple[int, ...], seed: int) -> Any:
    return np.random.RandomState(seed).uniform(0, 255, (ROWS, *shape)).astype("float32")


def _words(shape: tuple[int, ...], seed: int) -> Any:
    return tf.constant(np.random.RandomState(seed).choice(
        [*tables.WORDS, "unknown"], (ROWS, *shape)).astype(str))


def _sentences(shape: tuple[int, ...], seed: int) -> Any:
    return tf.strings.reduce_join(_words((*shape, 5), seed), -1, separator=" ")


INPUTS = {
    "features": Input((6,)), "raw features": Input((6,), learned=False),
    "steps": Input((6, 4)), "images": Input((6, 6, 2)), "volumes": Input((4, 4, 4, 2)),
    "films": Input((3, 4, 4, 2)), "films of volumes": Input((2, 3, 3, 3, 2)),
    "sounds": Input((64,), learned=False), "sounds of a channel": Input((64, 1), learned=False),
    "rgb": Input((6, 6, 3), rows=_colours, learned=False),
    "ids": Input((5,), "int32", _ids, False), "pairs of ids": Input((1,), "int32", _ids, False),
    "words": Input((2,), "string", _words, False),
    "sentences": Input((1,), "string", _sentences, False)}


def _data_of(name: str) -> str:
    if name.startswith("Random"):
        return "rgb"
    rank = name.removesuffix("Transpose")[-2:]
    return {"1D": "steps", "2D": "images", "3D": "volumes"}.get(rank, "features")


def _layer_run(keras: Any, *together: Item) -> cases.Run:
    """Each layer between inputs and an output of its own."""
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for number, item in enumerate(together):
        use = tables.LAYERS.get(item.key, tables.Layer())
        given = INPUTS[use.data or _data_of(item.key.split()[0])]
        names = [f"in_{number}_{part}" for part in range(2 if use.given in ("list", "two") else 1)]
        own = {name: keras.Input(given.shape, dtype=given.dtype, name=name) for name in names}
        outputs[f"out_{number}"] = _head(keras, _called(keras, item, use, given, own), number)
        inputs.update(own)
        rows.update((name, given.rows(given.shape, seed)) for seed, name in enumerate(names))
    return cases.Run(keras.Model(inputs, outputs), rows, dict.fromkeys(outputs, cases.numbers(
        ROWS, 2, seed=9)), fit=FIT, compile={"optimizer": cases.sgd(keras, 0.05),
                                             "loss": dict.fromkeys(outputs, "mse")})


def _called(keras: Any, item: Item, use: tables.Layer, given: Input,
            inputs: dict[str, Any]) -> Any:
    layer = use.wrap(keras, _made(item.cls, use.arguments, keras))
    parts = [_learned(keras, given, one) for one in inputs.values()]
    if use.given == "named":
        result = layer({"numbers": parts[0]})
    else:
        result = layer(*parts) if use.given in ("one", "two") else layer(parts)
    return result if use.after is None else use.after(keras)(result)


def _learned(keras: Any, given: Input, tensor: Any) -> Any:
    if not given.learned:
        return tensor
    return keras.layers.Dense(given.shape[-1], activation="tanh")(tensor)


def _head(keras: Any, tensor: Any, number: int) -> Any:
    """Two numbers of whatever a layer gives."""
    layers = keras.layers

    class Numbers(layers.Layer):
        """Sparse tensors, whole numbers and large numbers -> floats of a size to train on."""

        def call(self, x: Any) -> Any:
            x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
            return tf.tanh(0.1 * tf.cast(x, self.compute_dtype))

    tensor = tf.nest.flatten(tensor)[0]
    tensor = Numbers()(tensor)
    if None in tensor.shape[1:]:
        tensor = layers.GlobalAveragePooling2D()(tensor)
    if len(tensor.shape) > 2:
        tensor = layers.Flatten()(tensor)
    return layers.Dense(2, name=f"out_{number}")(tensor)


# Losses and metrics.


def _one_hot(classes_: int = 3) -> Any:
    return np.eye(classes_, dtype="float32")[_labels(classes_)]


def _labels(classes_: int = 3, *shape: int) -> Any:
    return np.random.RandomState(2).randint(0, classes_, (ROWS, *shape))


def _transcripts() -> Any:
    return np.random.RandomState(2).randint(1, 4, (ROWS, 3)).astype("int32")


# Targets, and the shape and the activation of the predictions.
TARGETS: dict[str, tuple[Callable[[], Any], tuple[int, ...], str | None]] = {
    "numbers": (lambda: cases.numbers(ROWS, 3, seed=1), (3,), None),
    "rounded": (lambda: np.ones((ROWS, 3), "float32"), (3,), "relu6"),
    "positive": (lambda: 0.2 + np.abs(cases.numbers(ROWS, 3, seed=1)), (3,), "softplus"),
    "signs": (lambda: np.sign(cases.numbers(ROWS, 3, seed=1)), (3,), "tanh"),
    "yes or no": (lambda: _labels(2, 1).astype("float32"), (1,), "sigmoid"),
    "one hot": (_one_hot, (3,), "softmax"),
    "labels": (_labels, (3,), "softmax"),
    "masks": (lambda: _labels(2, 2, 3).astype("float32"), (2, 3), "sigmoid"),
    "identities": (_labels, (4,), "tanh"),
    "transcripts": (_transcripts, (6, 5), None)}


def _targets(table: dict[str, tables.Targets], key: str) -> tables.Targets:
    if key in table:
        return table[key]
    fitting = (data for start, data in sorted(tables.TARGETS.items(), key=lambda item: -len(
        item[0])) if key.startswith(start))
    return tables.Targets(next(fitting, "numbers"))


def _heads(keras: Any, data: str, names: Sequence[str]) -> dict[str, Any]:
    """A model with an output of each name, all for the same kind of targets."""
    targets, shape, activation = TARGETS[data]
    layers = keras.layers
    x = keras.Input((5,))
    outputs = {}
    for name in names:
        y = layers.Dense(6, activation="tanh")(x)
        y = layers.Reshape(shape)(layers.Dense(int(np.prod(shape)))(y))
        outputs[name] = layers.Activation(activation or "linear", name=name)(y)
    return {"model": keras.Model(x, outputs), "x": cases.numbers(ROWS, 5),
            "y": dict.fromkeys(names, targets()), "fit": FIT}


def _weights() -> Any:
    return np.random.RandomState(5).uniform(0.2, 2.0, ROWS).astype("float32")


def _loss_run(keras: Any, *together: Item) -> cases.Run:
    losses = {f"{item.key}_{reduction}".replace(" ", "_"): _made(
        item.cls, item.targets.arguments, keras, reduction=reduction)
        for item in together for reduction in item.reductions}
    weights = dict.fromkeys(losses, _weights()) if together[0].weighted else None
    heads = _heads(keras, together[0].targets.data, list(losses))
    return cases.Run(**heads, weights=weights, compile={
        "loss": losses, "optimizer": cases.sgd(keras, 0.01)})


def _metric_run(keras: Any, *together: Item) -> cases.Run:
    weighable = [item for item in together if item.targets.unweighted_in != keras.__name__]
    plain, weighted = ([_made(_of_predictions(item.cls), item.targets.arguments, keras,
                              name=f"{item.key}{end}".replace(" ", "_")) for item in of]
                       for of, end in ((together, ""), (weighable, "_weighted")))
    heads = _heads(keras, together[0].targets.data, ["y"])
    return cases.Run(**heads, weights={"y": _weights()}, compile={
        "loss": {"y": _sum_of_squares}, "metrics": {"y": plain},
        "weighted_metrics": {"y": weighted}})


def _of_predictions(metric: type[Any]) -> type[Any]:
    """``metric``, where it is one of values, as a metric of the predictions."""
    if "y_pred" in inspect.signature(metric.update_state).parameters:
        return metric

    class OfPredictions(metric):
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return super().update_state(y_pred, sample_weight=sample_weight)

    return OfPredictions


def _sum_of_squares(y_true: Any, y_pred: Any) -> Any:
    """A loss for any target: it is the metric that is looked at."""
    rows = tf.shape(y_pred)[0]
    return tf.reduce_mean(tf.square(tf.reshape(y_pred, [rows, -1]) - 0.3), -1)
