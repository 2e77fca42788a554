"""Measures the constants of the simulation (:mod:`links`) on a GPU and its host.

Goes in: the host's device and the GPU; two CPU devices try the benchmark itself.  Comes out:
figures by name, for :func:`benchmarks.one_gpu.format_constants`.

All is measured in a ``tf.function``, as in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_LARGE, _COPIES = 2**26, 8  # bytes of a tensor, and number of tensors that cross in a step
_CHAIN, _ROUND_TRIPS = 1000, 100  # operations and round trips in a step
_BATCH_NORM_SHAPE = (256, 112, 112, 64)  # the largest of ResNet-50, for 256 rows
_PASSES = 8  # seconds memory: forward x, x -> y; backward x, dy, x, dy -> dx
_SECONDS = 1.0  # the least time to measure a figure


def measure(host: str, gpu: str, quick: bool) -> dict[str, float | str]:
    """All figures by name, and the messages of those that failed.

    Args:
      host, gpu: names of devices.
      quick: whether to use small tensors.
    """
    large = 2**12 if quick else _LARGE
    moved = _COPIES * large / 1e9
    groups: list[Callable[[], dict[str, float]]] = [
        lambda: {"to the GPU, GB/s": moved / _call_seconds(_copy_step(host, gpu, large))[0]},
        lambda: {"to the host, GB/s": moved / _call_seconds(_copy_step(gpu, host, large))[0]},
        lambda: {"4 bytes there and back, us":
                     1e6 * _call_seconds(_round_trips(host, gpu))[0] / _ROUND_TRIPS},
        lambda: dict(zip(("an operation on the GPU, us", "the host, to start one, us"),
                         _chain_times(gpu))),
        lambda: {"an operation on the CPU, us": _chain_times(host)[0]},
        lambda: _peak_rates(gpu, quick),
        lambda: _batch_norm_times(gpu, (4, 8, 8, 16) if quick else _BATCH_NORM_SHAPE),
    ]
    figures: dict[str, float | str] = {}
    for number, group in enumerate(groups):
        try:
            figures.update(group())
        except Exception as error:  # the other figures can still be measured
            figures[f"group {number} failed"] = f"{type(error).__name__}: {error}"[:300]
    return figures


def _call_seconds(step: Callable[[], tf.Tensor]) -> tuple[float, float]:
    """The median seconds of a call of ``step`` until its result is there, and until it returns."""
    for _ in range(3):
        step().numpy()
    ends, returns = [], []
    while sum(ends) < _SECONDS or len(ends) < 5:
        start = time.perf_counter()
        result = step()
        returns.append(time.perf_counter() - start)
        result.numpy()
        ends.append(time.perf_counter() - start)
    return statistics.median(ends), statistics.median(returns)


def _function(step: Callable[[], Any], compiled: bool = False) -> Any:
    return tf.function(step, autograph=False, jit_compile=compiled)


def _copy_step(source: str, target: str, size: int) -> Any:
    """A step that sends variables of ``size`` bytes, as weights are sent to a tower."""
    with tf.device(source):
        weights = [tf.Variable(tf.random.uniform([size // 4])) for _ in range(_COPIES)]

    def step() -> tf.Tensor:
        with tf.device(source):
            values = [weight.read_value() for weight in weights]
        with tf.device(target):
            return tf.add_n([tf.slice(value, [0], [1]) for value in values])

    return _function(step)


def _round_trips(host: str, gpu: str) -> Any:
    """A step that sends a number to the GPU and back, :data:`_ROUND_TRIPS` times."""
    with tf.device(host):
        begin = tf.Variable(0.5)

    def step() -> tf.Tensor:
        with tf.device(host):
            number = begin.read_value()
        for _ in range(_ROUND_TRIPS):
            for device in (gpu, host):
                with tf.device(device):
                    number = tf.sin(number)
        return number

    return _function(step)


def _chain_times(device: str) -> tuple[float, float]:
    """Microseconds per operation of a chain of small ones: to run it, and for the host to start it.
    """
    with tf.device(device):
        begin = tf.Variable([0.5])

    def step() -> tf.Tensor:
        with tf.device(device):
            number = begin.read_value()
            for _ in range(_CHAIN):
                number = tf.sin(number)
            return number

    done, started = _call_seconds(_function(step))
    return 1e6 * done / _CHAIN, 1e6 * started / _CHAIN


def _peak_rates(gpu: str, quick: bool) -> dict[str, float]:
    """The memory bandwidth and the rate of matrix products that the device reaches."""
    size, times = (64, 2) if quick else (8192, 10)
    with tf.device(gpu):
        matrix = tf.Variable(tf.random.uniform([size, size]) / size)

    def seconds(operation: Callable[[tf.Tensor], tf.Tensor]) -> float:
        def step() -> tf.Tensor:
            with tf.device(gpu):
                value = matrix.read_value()
                for _ in range(times):
                    value = operation(value)
                return value[0, 0]

        return _call_seconds(_function(step))[0] / times

    return {"GPU memory, GB/s": 2 * 4 * size**2 / 1e9 / seconds(tf.sin),
            "matrix product, TFLOP/s": 2 * size**3 / 1e12 / seconds(lambda value: value @ value)}


def _batch_norm_times(gpu: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of a batch norm with its gradient, by TensorFlow's fused kernel and by Keras."""
    with tf.device(gpu):
        x = tf.random.normal(shape)
        layer = keras.layers.BatchNormalization()
        layer.build(shape)
        scale, offset = layer.gamma.value, layer.beta.value

    def fused() -> tf.Tensor:
        return tf.compat.v1.nn.fused_batch_norm(x, scale, offset, epsilon=1e-3)[0]

    def make_step(forward: Callable[[], tf.Tensor]) -> Callable[[], Any]:
        def step() -> Any:
            with tf.device(gpu), tf.GradientTape() as tape:
                tape.watch(x)
                y = forward()
            with tf.device(gpu):
                return tape.gradient(y, [scale, x, offset], x)

        return step

    def milliseconds(forward: Callable[[], tf.Tensor], compiled: bool = False) -> float:
        step = _function(make_step(forward), compiled)

        def call() -> tf.Tensor:
            with tf.device(gpu):  # an XLA function needs its variables on its own device
                return step()[0]

        return 1e3 * _call_seconds(call)[0]

    by_keras = lambda: layer(x, training=True)  # noqa: E731
    accessed = _PASSES * 4 * np.prod(shape)
    return {"batch norm, fused kernel, ms": milliseconds(fused),
            "batch norm, Keras, ms": milliseconds(by_keras),
            "batch norm, Keras with XLA, ms": milliseconds(by_keras, True),
            "GB that a batch norm moves at least": float(accessed / 1e9)}
