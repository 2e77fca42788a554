"""How fast is a training step, and what does it hold?

Goes in: the towers' devices.  Comes out: step time, rows a second and memory of one device, of
MirroredStrategy and of TowerStrategy with each merge device.

Each tower gets the rows that the one device gets: as many times the rows a second as there are
towers is all that there is to gain.  Towers that share one physical device are compared with that
device on all their rows: there is nothing to gain.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.placement import devices as devices_lib
from towerstrategy.strategy import TowerStrategy

ONE_DEVICE, MIRRORED = "one device", "MirroredStrategy"
NO_XLA = ", no XLA"  # behind a way's name; else as Keras does by itself: XLA on GPUs

_WARM_UP = 3
_LEAST, _MOST = 5, 500  # steps that are measured


@dataclasses.dataclass(frozen=True)
class Size:
    """The network that is measured: a first convolution and more, then two dense layers.

    On GPUs it has 16 million weights and a step takes 17 GFLOP a row: 1,000 floating point
    operations a weight, as in a ResNet-50 at 224 x 224 pixels.
    """

    pixels: int
    filters: int
    convolutions: int
    dense: int
    rows: int


SIZES = {"GPU": Size(pixels=28, filters=256, convolutions=6, dense=3072, rows=64),
         "CPU": Size(pixels=8, filters=16, convolutions=2, dense=256, rows=16)}


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of one way to train, or the error that came instead.

    Attributes:
      way: ``"one device"``, ``"MirroredStrategy"``, or TowerStrategy's merge device; and what of
        XLA, where it is not Keras' default.
      devices: how many devices it trains on.
      rows: rows of its global batch.
      step_ms: the median step.
      first_step_s: from ``fit`` to the end of the first step: tracing, mostly.
      peak_bytes: the most that each GPU held at a time; empty on the CPU.
      state_bytes: weights and optimizer by device, every copy counted.
      xla: whether XLA compiled the step, or what the towers do in it.
      error: why there is no figure.
    """

    way: str
    devices: int
    rows: int
    step_ms: float = 0.0
    first_step_s: float = 0.0
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    state_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    xla: bool = False
    error: str | None = None

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.step_ms * 1e3 if self.step_ms else 0.0


def ways(devices: Sequence[str]) -> list[str]:
    """What to measure, in order."""
    merges = ["cpu"] if len(devices) == 1 else ["cpu", "balanced", devices[0]]
    without = [ONE_DEVICE + NO_XLA, merges[:2][-1] + NO_XLA] if "GPU" in devices[0] else []
    return [ONE_DEVICE, *merges, *without, *[MIRRORED] * (len(devices) > 1)]


def measure(way: str, devices: Sequence[str], one_physical: bool, seconds: float) -> Result:
    """Trains for ``seconds`` after the first steps; an error is a result."""
    size = SIZES[devices[0][:3]]
    used = devices[:1] if way.startswith(ONE_DEVICE) else devices
    result = Result(way, len(used), size.rows * len(devices if one_physical else used))
    try:
        return _measured(result, used, size, seconds)
    except Exception as error:  # one way that fails must not take the others with it
        return dataclasses.replace(result, error=f"{type(error).__name__}: {error}")
    finally:
        gc.collect()


def _measured(result: Result, devices: Sequence[str], size: Size, seconds: float) -> Result:
    keras = tf.keras
    keras.backend.clear_session()
    for device in _gpus():
        tf.config.experimental.reset_memory_stats(device)
    clock = _clock(keras, seconds)
    scope: Any = tf.device(devices[0])
    way = result.way.removesuffix(NO_XLA)
    if way == MIRRORED:
        scope = tf.distribute.MirroredStrategy(list(devices)).scope()
    elif way != ONE_DEVICE:
        scope = TowerStrategy(list(devices), way).scope()
    with scope:
        model = _network(keras, size)
        if result.way != way:
            model.jit_compile = False
        result = dataclasses.replace(result, xla=bool(model.jit_compile))
        start = time.perf_counter()
        model.fit(_batches(size, result.rows), steps_per_epoch=_WARM_UP + _MOST, verbose=0,
                  callbacks=[clock], shuffle=False)
    steps = np.diff(clock.ends[_WARM_UP - 1:])
    return dataclasses.replace(
        result, step_ms=1e3 * statistics.median(steps), first_step_s=clock.ends[0] - start,
        peak_bytes={device: int(tf.config.experimental.get_memory_info(device)["peak"])
                    for device in _gpus()},
        state_bytes=state_bytes(model))


def _network(keras: Any, size: Size) -> Any:
    layers = keras.layers
    model = keras.Sequential([
        keras.Input([size.pixels, size.pixels, 3]),
        *(layers.Conv2D(size.filters, 3, padding="same", activation="relu")
          for _ in range(size.convolutions + 1)),
        layers.MaxPooling2D(size.pixels // 2), layers.Flatten(),
        *(layers.Dense(size.dense, activation="relu") for _ in range(2)), layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _batches(size: Size, rows: int) -> tf.data.Dataset:
    """One batch again and again: the input pipeline is not what is measured."""
    random = np.random.default_rng(0)
    x = random.normal(size=[rows, size.pixels, size.pixels, 3]).astype("float32")
    y = random.integers(0, 10, rows)
    return tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(tf.data.AUTOTUNE)


def _clock(keras: Any, seconds: float) -> Any:
    """A callback that notes when steps end, and ends the training when it has seen enough."""

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # the step has ended when it is known
            self.ends.append(time.perf_counter())
            if batch >= _WARM_UP + _LEAST and self.ends[-1] - self.ends[_WARM_UP - 1] > seconds:
                self.model.stop_training = True

    return Clock()


def state_bytes(model: Any) -> dict[str, int]:
    """Bytes of weights and optimizer by device, every copy of a mirrored variable counted."""
    held: dict[str, int] = {}
    slots = model.optimizer.variables
    for variable in [*model.variables, *(slots() if callable(slots) else slots)]:
        one = getattr(variable, "value", variable)
        one = variable if callable(one) else one
        for part in getattr(one, "values", None) or (one,):
            device = devices_lib.short_name(part.device)
            held[device] = held.get(device, 0) + int(np.prod(part.shape)) * part.dtype.size
    return dict(sorted(held.items()))


def _gpus() -> list[str]:
    return [devices_lib.short_name(device.name)
            for device in tf.config.list_logical_devices("GPU")]
