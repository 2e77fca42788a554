"""Is training on the towers the same as on one device?

Goes in: the towers' devices.  Comes out: the largest differences of weights, optimizer variables,
losses and predictions between one device and the towers, for three small networks and each
installed Keras.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy._keras import state
from towerstrategy.strategy import TowerStrategy

KERASES = ("keras", "tf_keras")
# The largest difference by rounding.  On a CPU it is 1e-6 or less.  On a GPU, cuDNN takes other
# algorithms, which round differently, for other numbers of rows.  If one row of these batches has
# a wrong share, the difference is more than 1e-2.
BOUNDS = {"CPU": 1e-5, "GPU": 1e-4}
# The same for float16, which has eleven bits; on a CPU it is 3e-3.
HALVES, HALF_BOUND = "halves", 1e-2
_FLOORS = {"weights": 1e-3}
_FLOOR = 1e-6
# Batches of 10 rows.  The last one has 2 rows, which is less than the towers of most machines.
_ROWS, _BATCH, _EPOCHS = 32, 10, 2


class Job(NamedTuple):
    """A training to compare: its Keras, network and merge device."""

    keras: str
    network: str
    merge_device: str

    def __str__(self) -> str:
        return f"{self.keras}, {self.network}, merge device {self.merge_device}"


class Result(NamedTuple):
    """The result of a job: the differences by kind, or an error.

    ``alone`` says that the error occurred on one device, so nothing is known of the towers.
    """

    job: Job
    bound: float
    differences: dict[str, float]
    error: str | None = None
    alone: bool = False

    @property
    def largest(self) -> float:
        return max(self.differences.values(), default=float("inf"))

    @property
    def holds(self) -> bool:
        return self.error is None and self.largest <= self.bound

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON, where null stands for infinity: a NaN or a shape differs."""
        finite = {kind: value if np.isfinite(value) else None
                  for kind, value in self.differences.items()}
        return {**self._asdict(), "job": self.job._asdict(), "differences": finite,
                "holds": self.holds}


def _convolutions(keras: Any) -> Any:
    layers = keras.layers
    # Neither clipping nor Adam: they would hide gradients that are all wrong by one factor.
    return keras.Sequential([
        keras.Input([8, 8, 3]), layers.Conv2D(6, 3, activation="relu"),
        layers.BatchNormalization(synchronized=True), layers.Conv2D(4, 3, activation="tanh"),
        layers.Flatten(), layers.Dense(10)]), keras.optimizers.SGD(0.05, momentum=0.9)


def _sequences(keras: Any) -> Any:
    layers = keras.layers
    words = keras.Input([7], dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(words)
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(
        2, 4, use_bias=False)(x, x)]))  # the bias's gradient is rounding, which Adam scales up
    return keras.Model(words, layers.Dense(10)(layers.LSTM(8)(x))), keras.optimizers.Adam(0.02)


def _halves(keras: Any) -> Any:
    layers, half = keras.layers, "mixed_float16"
    scaling = keras.optimizers if hasattr(keras.optimizers, "LossScaleOptimizer") \
        else keras.mixed_precision
    # Scaled by only 128: more may overflow on one device, but not on towers, which sum in float32.
    return keras.Sequential([
        keras.Input([8, 8, 3]), layers.Conv2D(6, 3, activation="tanh", dtype=half),
        layers.Flatten(dtype=half), layers.Dense(10, dtype=half),
        layers.Activation("linear", dtype="float32")]), scaling.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=128)


# Functions that take a Keras and return a model and its optimizer.
NETWORKS = {"convolutions": _convolutions, "sequences": _sequences, HALVES: _halves}


def jobs(devices: Sequence[str]) -> list[Job]:
    """The jobs: each network with each Keras, and the first one with every merge device."""
    networks = [Job(keras, *rest) for keras in KERASES if importlib.util.find_spec(keras)
                for rest in (("convolutions", "balanced"), ("sequences", "cpu"),
                             (HALVES, "balanced"))]
    return [networks[0]._replace(merge_device=merge) for merge in ("cpu", devices[0])] + networks


def compare(job: Job, devices: Sequence[str]) -> Result:
    """Trains on one device and on towers, and compares; an error is a result, too."""
    bound = HALF_BOUND if job.network == HALVES else BOUNDS[devices[0][:3]]
    # TensorFloat-32's 10 bits would hide an error of a thousandth.
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    expected: dict[str, list[np.ndarray]] | None = None
    try:
        expected = _alone(job.keras, job.network, devices[0])
        got = _train(job.keras, job.network, TowerStrategy(list(devices), job.merge_device).scope())
        return Result(job, bound, {kind: _difference(
            got[kind], values, _FLOORS.get(kind, _FLOOR)) for kind, values in expected.items()})
    except Exception as error:  # of any kind: the report must contain it
        return Result(job, bound, {}, f"{type(error).__name__}: {error}", expected is None)
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


@functools.cache
def _alone(keras: str, network: str, device: str) -> dict[str, list[np.ndarray]]:
    return _train(keras, network, tf.device(device))


def _train(package: str, network: str, scope: Any) -> dict[str, list[np.ndarray]]:
    keras = importlib.import_module(package)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=[_ROWS, 8, 8, 3]).astype("float32")
    if network == "sequences":  # one to seven words, then zeros, which the mask hides
        x = np.where(np.arange(7) < random.integers(1, 8, [_ROWS, 1]),
                     random.integers(1, 20, [_ROWS, 7]), 0).astype("int32")
    y = random.integers(0, 10, _ROWS)
    weights = random.uniform(0.5, 2.0, _ROWS).astype("float32")
    with scope:
        model, optimizer = NETWORKS[network](keras)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if not tf.distribute.has_strategy():
            model.jit_compile = False  # XLA draws other random numbers
        history = model.fit(x, y, batch_size=_BATCH, epochs=_EPOCHS, sample_weight=weights,
                            shuffle=False, verbose=0)
        predictions = model.predict(x, batch_size=_BATCH, verbose=0)
    slots = state.optimizer_variables(model.optimizer)
    return {kind: list(map(np.array, values)) for kind, values in {
        "weights": model.get_weights(), "optimizer": slots,
        "losses": [history.history["loss"]], "predictions": [predictions]}.items()}


def _difference(got: list[np.ndarray], expected: list[np.ndarray], floor: float) -> float:
    """The largest of ``max|a - b| / max(max|b|, floor)``; infinite for a NaN or another shape."""
    if [value.shape for value in got] != [value.shape for value in expected]:
        return float("inf")
    differences = [np.max(np.abs(a - b), initial=0.) / max(np.max(np.abs(b), initial=0.), floor)
                   for a, b in zip(got, expected)]
    return float(np.max(np.nan_to_num(differences, nan=np.inf, posinf=np.inf), initial=0.))
