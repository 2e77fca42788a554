"""How fast is a train step, how much memory does it take, and which merge device is the best?

Goes in: the towers' devices.  Comes out: step time, rows a second and memory of one device, of
MirroredStrategy and of TowerStrategy with each merge device; and advice: see docs/check.md.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy._keras import state
from towerstrategy.placement import homes as homes_lib, names
from towerstrategy.strategy import TowerStrategy

ONE_DEVICE, MIRRORED = "one device", "MirroredStrategy"
NO_XLA = ", no XLA"  # added to the name of a way; without it, Keras' default: XLA on GPUs

_WARM_UP = 3
_LEAST, _MOST = 5, 500  # limits of the number of measured steps
# Of the merge devices this close to the fastest, the first wins: it takes the least GPU memory.
_AS_FAST = 0.97
# Towers pay if they train this many times the rows a second of one device.
_PAYS = 1.1


class Size(NamedTuple):
    """The size of the measured network: ``convolutions`` after a first one, then two dense layers.

    On GPUs it has 16 million weights, and a step takes 17 GFLOP per row.  That is 1,000 floating
    point operations per weight, as in a ResNet-50 with images of 224 x 224 pixels.
    """

    pixels: int
    filters: int
    convolutions: int
    dense: int
    rows: int


SIZES = {"GPU": Size(pixels=28, filters=256, convolutions=6, dense=3072, rows=64),
         "CPU": Size(pixels=8, filters=16, convolutions=2, dense=256, rows=16)}


@dataclasses.dataclass
class Result:
    """The measurements of one way to train, or an error."""

    way: str  # ONE_DEVICE, MIRRORED or a merge device; NO_XLA may follow
    devices: int
    rows: int  # of a global batch
    step_ms: float = 0.0  # the median step
    first_step_s: float = 0.0  # from ``fit`` to the end of the first step: mostly tracing
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)  # of each GPU
    state_bytes: dict[str, int] = dataclasses.field(default_factory=dict)  # counting every copy
    xla: bool = False  # whether XLA compiled the step, or the towers' parts of it
    error: str | None = None

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.step_ms * 1e3 if self.step_ms else 0.0


def ways(devices: Sequence[str]) -> list[str]:
    """The ways to train that are measured, in order."""
    merges = ["cpu"] if len(devices) == 1 else ["cpu", "balanced", devices[0]]
    without = [ONE_DEVICE + NO_XLA, merges[:2][-1] + NO_XLA] if "GPU" in devices[0] else []
    return [ONE_DEVICE, *merges, *without, *[MIRRORED] * (len(devices) > 1)]


def measure(way: str, devices: Sequence[str], one_physical: bool, seconds: float) -> Result:
    """Trains for ``seconds`` after the first steps; an error is a result, too."""
    size = SIZES[devices[0][:3]]
    used = list(devices[:1] if way.startswith(ONE_DEVICE) else devices)
    result = Result(way, len(used), size.rows * len(devices if one_physical else used))
    try:
        _train(result, used, size, seconds)
    except Exception as error:  # of any kind: the other ways are measured all the same
        result.error = f"{type(error).__name__}: {error}"
    gc.collect()
    return result


def _train(result: Result, devices: list[str], size: Size, seconds: float) -> None:
    """Trains and sets the measurements in ``result``."""
    tf.keras.backend.clear_session()
    gpus = [names.short_name(device.name)
            for device in tf.config.list_logical_devices("GPU")]
    for device in gpus:
        tf.config.experimental.reset_memory_stats(device)
    way = result.way.removesuffix(NO_XLA)
    ends: list[float] = []

    def note(step: int, logs: Any) -> None:
        float(logs["loss"])  # waits for the end of the step
        ends.append(time.perf_counter())
        if step >= _WARM_UP + _LEAST and ends[-1] - ends[_WARM_UP - 1] > seconds:
            model.stop_training = True

    with (tf.device(devices[0]) if way == ONE_DEVICE else
          tf.distribute.MirroredStrategy(devices).scope() if way == MIRRORED else
          TowerStrategy(devices, way).scope()):
        model = _network(tf.keras, size)
        if result.way != way:
            model.jit_compile = False
        result.xla = bool(model.jit_compile)
        start = time.perf_counter()
        model.fit(_batches(size, result.rows), steps_per_epoch=_WARM_UP + _MOST, verbose=0,
                  callbacks=[tf.keras.callbacks.LambdaCallback(on_train_batch_end=note)],
                  shuffle=False)
    result.step_ms = 1e3 * statistics.median(np.diff(ends[_WARM_UP - 1:]))
    result.first_step_s = ends[0] - start
    result.peak_bytes = {device: int(tf.config.experimental.get_memory_info(device)["peak"])
                         for device in gpus}
    result.state_bytes = state_bytes(model)


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
    """A dataset that repeats one batch, so that the input pipeline takes no time."""
    random = np.random.default_rng(0)
    x = random.normal(size=[rows, size.pixels, size.pixels, 3]).astype("float32")
    y = random.integers(0, 10, rows)
    return tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(tf.data.AUTOTUNE)


def state_bytes(model: Any) -> dict[str, int]:
    """The bytes of weights and optimizer on each device, counting all copies of a variable."""
    sizes = Counter[str]()
    for variable in [*model.variables, *state.optimizer_variables(model.optimizer)]:
        tf_variable = variable if callable(variable.value) else variable.value
        for copy in getattr(tf_variable, "values", None) or (tf_variable,):
            sizes[names.short_name(copy.device)] += homes_lib.size_of(copy)
    return dict(sorted(sizes.items()))


def advice(results: Sequence[Result], one_physical: bool, on_gpus: bool) -> str:
    """Which merge device to use, and whether towers pay; unknown if they share ``one_physical``."""
    by_way = {result.way: result for result in results
              if result.error is None and not result.way.endswith(NO_XLA)}
    alone, mirrored = by_way.pop(ONE_DEVICE, None), by_way.pop(MIRRORED, None)
    if not by_way:
        return "Nothing was measured on towers, so there is nothing to advise."
    fastest = max(result.rows_per_second for result in by_way.values())
    best = next(each for each in by_way.values() if each.rows_per_second >= _AS_FAST * fastest)
    use = f'Use merge_device="{best.way}"'
    if alone is None:
        return f"{use}; one device was not measured, so whether towers pay is not known."
    times = best.rows_per_second / alone.rows_per_second
    measured = (f"{best.devices} tower{'s' if best.devices > 1 else ''} train {times:.2f} times "
                f"the rows a second of one device{' with XLA' * alone.xla}"
                + ("" if mirrored is None else ", "
                f"MirroredStrategy {mirrored.rows_per_second / alone.rows_per_second:.2f} times"))
    if one_physical or best.devices == 1:
        why = (f"the towers are parts of one {'GPU' if on_gpus else 'CPU'}, whose time they share"
               if best.devices > 1 else "there is one tower")
        more = ("; the gain is in how operations use that device, not from a second one"
                if times > 1 else "")
        return (f"{use}. This says nothing of several devices, as {why}: {measured} with the same "
                f"batch{more}.")
    if times < _PAYS:
        return (f"{use}, but the towers do not pay for a network of this kind: {measured}; give "
                "each tower more rows, or see the rates between devices above.")
    return f"{use}: the towers pay, {measured} ({times / best.devices:.0%} of linear)."
