"""What a GPU and its host need for small and large things: the numbers of :mod:`links`, measured.

Goes in: the host's device and the GPU (on a machine without one two CPU devices show that it runs).
Comes out: figures by name, as :func:`benchmarks.one_gpu.constants` puts them beside links' own.

All is measured within ``tf.function``, as a step does it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_LARGE, _COPIES = 2**26, 8  # bytes, and how many such tensors cross in a step
_CHAIN, _HOPS = 1000, 100
_NORMALIZED = (256, 112, 112, 64)  # ResNet-50's largest, of 256 rows
_PASSES = 8  # forward x, x -> y; backward x, dy, x, dy -> dx
_SECONDS = 1.0


def measured(host: str, gpu: str, quick: bool) -> dict[str, float | str]:
    """All figures; in the place of one that cannot be had, why.

    Args:
      host, gpu: names of devices.
      quick: with small tensors.
    """
    large = 2**12 if quick else _LARGE
    moved = _COPIES * large / 1e9
    groups: list[Callable[[], dict[str, float]]] = [
        lambda: {"to the GPU, GB/s": moved / _seconds(_copies(host, gpu, large))[0]},
        lambda: {"to the host, GB/s": moved / _seconds(_copies(gpu, host, large))[0]},
        lambda: {"4 bytes there and back, us": 1e6 * _seconds(_hops(host, gpu))[0] / _HOPS},
        lambda: dict(zip(("an operation on the GPU, us", "the host, to start one, us"),
                         _chain(gpu))),
        lambda: {"an operation on the CPU, us": _chain(host)[0]},
        lambda: _peaks(gpu, quick),
        lambda: _normalized(gpu, (4, 8, 8, 16) if quick else _NORMALIZED),
    ]
    found: dict[str, float | str] = {}
    for number, group in enumerate(groups):
        try:
            found.update(group())
        except Exception as error:  # the others can still be had
            found[f"group {number} failed"] = f"{type(error).__name__}: {error}"[:300]
    return found


def _seconds(step: Callable[[], tf.Tensor]) -> tuple[float, float]:
    """A call of ``step``: until its result is known, and until it returns.  Medians."""
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


def _copies(source: str, target: str, size: int) -> Any:
    """Sends variables of ``size`` bytes, as weights are sent to a tower."""
    with tf.device(source):
        weights = [tf.Variable(tf.random.uniform([size // 4])) for _ in range(_COPIES)]

    def step() -> tf.Tensor:
        with tf.device(source):
            values = [weight.read_value() for weight in weights]
        with tf.device(target):
            return tf.add_n([tf.slice(value, [0], [1]) for value in values])

    return _function(step)


def _hops(host: str, gpu: str) -> Any:
    """A number goes there and back, again and again."""
    with tf.device(host):
        begin = tf.Variable(0.5)

    def step() -> tf.Tensor:
        with tf.device(host):
            number = begin.read_value()
        for _ in range(_HOPS):
            for device in (gpu, host):
                with tf.device(device):
                    number = tf.sin(number)
        return number

    return _function(step)


def _chain(device: str) -> tuple[float, float]:
    """Microseconds an operation of a chain of tiny ones: until it is done, and until started."""
    with tf.device(device):
        begin = tf.Variable([0.5])

    def step() -> tf.Tensor:
        with tf.device(device):
            number = begin.read_value()
            for _ in range(_CHAIN):
                number = tf.sin(number)
            return number

    done, started = _seconds(_function(step))
    return 1e6 * done / _CHAIN, 1e6 * started / _CHAIN


def _peaks(gpu: str, quick: bool) -> dict[str, float]:
    """What the device's memory and its products reach."""
    size, times = (64, 2) if quick else (8192, 10)
    with tf.device(gpu):
        matrix = tf.Variable(tf.random.uniform([size, size]) / size)

    def over(operation: Callable[[tf.Tensor], tf.Tensor]) -> float:
        def step() -> tf.Tensor:
            with tf.device(gpu):
                value = matrix.read_value()
                for _ in range(times):
                    value = operation(value)
                return value[0, 0]

        return _seconds(_function(step))[0] / times

    return {"GPU memory, GB/s": 2 * 4 * size**2 / 1e9 / over(tf.sin),
            "matrix product, TFLOP/s": 2 * size**3 / 1e12 / over(lambda value: value @ value)}


def _normalized(gpu: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of a batch norm with its gradient: the library's kernels, and Keras'."""
    with tf.device(gpu):
        x = tf.random.normal(shape)
        layer = keras.layers.BatchNormalization()
        layer.build(shape)
        scale, offset = layer.gamma.value, layer.beta.value

    def fused() -> tf.Tensor:
        return tf.compat.v1.nn.fused_batch_norm(x, scale, offset, epsilon=1e-3)[0]

    def step_of(forward: Callable[[], tf.Tensor]) -> Callable[[], Any]:
        def step() -> Any:
            with tf.device(gpu), tf.GradientTape() as tape:
                tape.watch(x)
                y = forward()
            with tf.device(gpu):
                return tape.gradient(y, [scale, x, offset], x)

        return step

    def milliseconds(forward: Callable[[], tf.Tensor], compiled: bool = False) -> float:
        step = _function(step_of(forward), compiled)

        def called() -> tf.Tensor:
            with tf.device(gpu):  # XLA takes variables of the function's own device
                return step()[0]

        return 1e3 * _seconds(called)[0]

    own = lambda: layer(x, training=True)  # noqa: E731
    least = _PASSES * 4 * np.prod(shape)
    found = {"batch norm, fused kernel, ms": milliseconds(fused),
             "batch norm, Keras, ms": milliseconds(own),
             "batch norm, Keras with XLA, ms": milliseconds(own, True)}
    return {**found, "GB that a batch norm moves at least": float(least / 1e9)}
