"""Is training on the towers the same as on one device?

Goes in: the towers' devices.  Comes out: for three small networks, in each Keras that is installed,
the largest difference between what one device and what the towers got, of weights, optimizer
variables, losses and predictions.
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


class Job(NamedTuple):
    """One training to compare: which Keras, which network, where the towers merge."""

    keras: str
    network: str
    merge_device: str

    def __str__(self) -> str:
        return f"{self.keras}, {self.network}, merge device {self.merge_device}"


class Result(NamedTuple):
    """What came out: the difference of each kind, or the error that came instead.

    ``alone`` says that it came on one device, so nothing is known of the towers.
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
        """For JSON, which knows no infinity: there null says that a NaN or a shape differs."""
        finite = {kind: value if np.isfinite(value) else None
                  for kind, value in self.differences.items()}
        return {**self._asdict(), "job": self.job._asdict(), "differences": finite,
                "holds": self.holds}


def _convolutions(keras: Any) -> Any:
    layers = keras.layers
    # No clipping, and not Adam: either would hide gradients that are all too large or too small.
    return keras.Sequential([
        keras.Input([8, 8, 3]), layers.Conv2D(6, 3, activation="relu"),
        layers.BatchNormalization(synchronized=True), layers.Conv2D(4, 3, activation="tanh"),
        layers.Flatten(), layers.Dense(10)]), keras.optimizers.SGD(0.05, momentum=0.9)


def _sequences(keras: Any) -> Any:
    layers = keras.layers
    words = keras.Input([7], dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(words)
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(
        2, 4, use_bias=False)(x, x)]))  # Adam would make weights of a gradient that is rounding
    return keras.Model(words, layers.Dense(10)(layers.LSTM(8)(x))), keras.optimizers.Adam(0.02)


def _halves(keras: Any) -> Any:
    layers, half = keras.layers, "mixed_float16"
    scaling = keras.optimizers if hasattr(keras.optimizers, "LossScaleOptimizer") \
        else keras.mixed_precision
    # 128 times: what overflows on one device need not on towers, which add up in float32.
    return keras.Sequential([
        keras.Input([8, 8, 3]), layers.Conv2D(6, 3, activation="tanh", dtype=half),
        layers.Flatten(dtype=half), layers.Dense(10, dtype=half),
        layers.Activation("linear", dtype="float32")]), scaling.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), initial_scale=128)


# What is trained: a Keras -> a model and its optimizer.
NETWORKS = {"convolutions": _convolutions, "sequences": _sequences, HALVES: _halves}


def jobs(devices: Sequence[str]) -> list[Job]:
    """What to compare: with one Keras every merge device, with the other one a network each."""
    found = [Job(keras, *which) for keras in KERASES if importlib.util.find_spec(keras)
             for which in (("convolutions", "balanced"), ("sequences", "cpu"),
                           (HALVES, "balanced"))]
    return [found[0]._replace(merge_device=merge) for merge in ("cpu", devices[0])] + found


def compare(job: Job, devices: Sequence[str]) -> Result:
    """Trains one device, and towers on ``devices``; an error is a result."""
    bound = HALF_BOUND if job.network == HALVES else BOUNDS[devices[0][:3]]
    # TensorFloat-32's 10 bits would hide a fault of a thousandth.
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    wanted: dict[str, list[np.ndarray]] | None = None
    try:
        wanted = _alone(job.keras, job.network, devices[0])
        got = _train(job.keras, job.network, TowerStrategy(list(devices), job.merge_device).scope())
        return Result(job, bound, {kind: _difference(got[kind], wanted[kind],
                                                     _FLOORS.get(kind, _FLOOR)) for kind in wanted})
    except Exception as error:  # whatever it is, the report is to hold it
        return Result(job, bound, {}, f"{type(error).__name__}: {error}", wanted is None)
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


@functools.cache
def _alone(keras: str, network: str, device: str) -> dict[str, list[np.ndarray]]:
    return _train(keras, network, tf.device(device))


def _train(which: str, network: str, scope: Any) -> dict[str, list[np.ndarray]]:
    keras = importlib.import_module(which)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=[_ROWS, 8, 8, 3]).astype("float32")
    if network == "sequences":  # one to seven words, then zeros: what a mask hides is at the end
        x = np.where(np.arange(7) < random.integers(1, 8, [_ROWS, 1]),
                     random.integers(1, 20, [_ROWS, 7]), 0).astype("int32")
    y = random.integers(0, 10, _ROWS)
    weights = random.uniform(0.5, 2.0, _ROWS).astype("float32")
    with scope:
        model, optimizer = NETWORKS[network](keras)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if not tf.distribute.has_strategy():
            model.jit_compile = False  # XLA would draw other numbers
        history = model.fit(x, y, batch_size=_BATCH, epochs=_EPOCHS, sample_weight=weights,
                            shuffle=False, verbose=0)
        predictions = model.predict(x, batch_size=_BATCH, verbose=0)
    slots = state.optimizer_variables(model.optimizer)
    return {kind: list(map(np.array, values)) for kind, values in {
        "weights": model.get_weights(), "optimizer": slots,
        "losses": [history.history["loss"]], "predictions": [predictions]}.items()}


def _difference(got: list[np.ndarray], wanted: list[np.ndarray], floor: float) -> float:
    """The largest of ``max|a - b| / max(max|b|, floor)``; infinite for a NaN or another shape."""
    if [value.shape for value in got] != [value.shape for value in wanted]:
        return float("inf")
    apart = [np.max(np.abs(a - b), initial=0.) / max(np.max(np.abs(b), initial=0.), floor)
             for a, b in zip(got, wanted)]
    return float(np.max(np.nan_to_num(apart, nan=np.inf, posinf=np.inf), initial=0.))
