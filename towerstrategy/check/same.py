"""Is training on the towers the same as on one device?

Goes in: the towers' devices.  Comes out: for three small networks, in each Keras that is installed,
the largest difference between what one device and what the towers got.

Difference: ``max|a - b| / max(max|b|, floor)`` of each array, where b is the single device's; the
largest of weights, optimizer variables, losses and predictions counts.  A NaN, or another shape, is
an infinite difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.strategy import TowerStrategy

KERASES = ("keras", "tf_keras")
# The largest difference that is rounding.  A CPU gets 1e-6 and less.  On a GPU cuDNN takes other
# algorithms for other numbers of rows, each with its own rounding.  A wrong share of one row of
# these batches makes more than 1e-2.
BOUNDS = {"CPU": 1e-5, "GPU": 1e-4}
# Float16 has eleven bits; a CPU gets 3e-3.
HALVES, HALF_BOUND = "halves", 1e-2
_FLOORS = {"weights": 1e-3}
_FLOOR = 1e-6
# Batches of 10 rows, the last of 2: fewer than most machines have towers.
_ROWS, _BATCH, _EPOCHS = 32, 10, 2


@dataclasses.dataclass(frozen=True)
class Job:
    """One training to compare: which Keras, which network, where the towers merge."""

    keras: str
    network: str
    merge_device: str

    def __str__(self) -> str:
        return f"{self.keras}, {self.network}, merge device {self.merge_device}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out: the difference of each kind, or the error that came instead."""

    job: Job
    bound: float
    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def largest(self) -> float:
        return max(self.differences.values(), default=float("inf"))

    @property
    def holds(self) -> bool:
        return self.error is None and self.largest <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which knows no infinity: there null says that a NaN or a shape differs."""
        finite = {kind: value if np.isfinite(value) else None
                  for kind, value in self.differences.items()}
        return {**dataclasses.asdict(self), "differences": finite, "holds": self.holds}


def _convolutions(keras: Any) -> Any:
    layers = keras.layers
    model = keras.Sequential([
        keras.Input([8, 8, 3]), layers.Conv2D(6, 3, activation="relu"),
        layers.BatchNormalization(synchronized=True), layers.Conv2D(4, 3, activation="tanh"),
        layers.Flatten(), layers.Dense(10)])
    # No clipping, and not Adam: either would hide gradients that are all too large or too small.
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _sequences(keras: Any) -> Any:
    layers = keras.layers
    words = keras.Input([7], dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(words)
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(
        2, 4, use_bias=False)(x, x)]))  # Adam would make weights of a gradient that is rounding
    model = keras.Model(words, layers.Dense(10)(layers.LSTM(8)(x)))
    model.compile(keras.optimizers.Adam(0.02),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _halves(keras: Any) -> Any:
    layers, half = keras.layers, "mixed_float16"
    model = keras.Sequential([
        keras.Input([8, 8, 3]), layers.Conv2D(6, 3, activation="tanh", dtype=half),
        layers.Flatten(dtype=half), layers.Dense(10, dtype=half),
        layers.Activation("linear", dtype="float32")])
    scaling = keras.optimizers if hasattr(keras.optimizers, "LossScaleOptimizer") \
        else keras.mixed_precision
    # 128 times: what overflows on one device need not on towers, which add up in float32.
    model.compile(scaling.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9),
                                             initial_scale=128),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _images(random: np.random.Generator) -> np.ndarray:
    return random.normal(size=[_ROWS, 8, 8, 3]).astype("float32")


def _words(random: np.random.Generator) -> np.ndarray:
    """Rows of one to seven words, then zeros: what a mask hides stands at the end."""
    words = random.integers(1, 20, [_ROWS, 7])
    return np.where(np.arange(7) < random.integers(1, 8, [_ROWS, 1]), words, 0).astype("int32")


# What is trained: makes a compiled model of a Keras, and inputs of a generator.
NETWORKS: dict[str, tuple[Callable[[Any], Any], Callable[[np.random.Generator], np.ndarray]]] = {
    "convolutions": (_convolutions, _images), "sequences": (_sequences, _words),
    HALVES: (_halves, _images)}


def jobs(devices: Sequence[str]) -> list[Job]:
    """What to compare: with one Keras every merge device, with the other one a network each."""
    found: list[Job] = []
    for keras in KERASES:
        if importlib.util.find_spec(keras) is None:
            continue
        merges = {"convolutions": ["balanced"], "sequences": ["cpu"], HALVES: ["balanced"]}
        if not found:
            merges["convolutions"] = ["cpu", devices[0], "balanced"]
        found += [Job(keras, network, merge) for network in NETWORKS for merge in merges[network]]
    return found


class Comparison:
    """Trains each network on one device once, and compares what towers on ``devices`` get."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = list(devices)
        self._alone: dict[tuple[str, str], dict[str, list[np.ndarray]]] = {}

    def run(self, job: Job) -> Result:
        """Compares; an error is a result."""
        bound, network = BOUNDS[self._devices[0][:3]], (job.keras, job.network)
        bound = HALF_BOUND if job.network == HALVES else bound
        try:
            with _exact_products():
                if network not in self._alone:
                    self._alone[network] = _train(job, tf.device(self._devices[0]))
                wanted = self._alone[network]
                got = _train(job, TowerStrategy(self._devices, job.merge_device).scope())
        except Exception as error:  # whatever it is, the report is to hold it
            return Result(job, bound, error=f"{type(error).__name__}: {error}")
        return Result(job, bound, {kind: _difference(got[kind], wanted[kind],
                                                     _FLOORS.get(kind, _FLOOR)) for kind in wanted})


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Without TensorFloat-32, whose 10 bits would hide a fault of a thousandth."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _train(job: Job, scope: Any) -> dict[str, list[np.ndarray]]:
    keras, (build, inputs) = importlib.import_module(job.keras), NETWORKS[job.network]
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x, y = inputs(random), random.integers(0, 10, _ROWS)
    weights = random.uniform(0.5, 2.0, _ROWS).astype("float32")
    with scope:
        model = build(keras)
        if not tf.distribute.has_strategy():
            model.jit_compile = False  # XLA would draw other numbers
        history = model.fit(x, y, batch_size=_BATCH, epochs=_EPOCHS, sample_weight=weights,
                            shuffle=False, verbose=0)
        predictions = model.predict(x, batch_size=_BATCH, verbose=0)
    slots = model.optimizer.variables
    return {
        "weights": [np.array(value) for value in model.get_weights()],
        "optimizer": [np.array(value) for value in (slots() if callable(slots) else slots)],
        "losses": [np.array(history.history["loss"])],
        "predictions": [np.array(predictions)]}


def _difference(got: list[np.ndarray], wanted: list[np.ndarray], floor: float) -> float:
    if [value.shape for value in got] != [value.shape for value in wanted]:
        return float("inf")
    return max((_relative(a.astype("float64"), b.astype("float64"), floor)
                for a, b in zip(got, wanted)), default=0.0)


def _relative(got: np.ndarray, wanted: np.ndarray, floor: float) -> float:
    if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
        return float("inf")
    apart = np.max(np.abs(got - wanted), initial=0.0)
    return float(apart / max(np.max(np.abs(wanted), initial=0.0), floor))
