"""Measures one model with one setup of :mod:`benchmarks.one_gpu`.

Goes in: a cell and options as JSON; the end of the standard input is the signal to begin.
Comes out: a JSON file with the figures, or the ``error`` if it failed.

The input pipeline is not measured: two small batches are cached.  Words are sent as they are.  For
images, and for the features of the MLP, a row is one number, which multiplies a constant picture on
the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import traceback
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towerstrategy
from benchmarks import clock, gpus, one_gpu, one_gpu_constants

_BATCHES = 2
_LATER_STEPS = 3  # whose peak memory is measured separately
_HALF = 0.45  # the part of the GPU's memory for each half; CUDA and its libraries need the rest


class Pictures(keras.layers.Layer):
    """Multiplies a constant picture by the number of each row.

    Args:
      shape: the shape of the picture.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._picture = np.random.default_rng(1).standard_normal((1, *shape)).astype("float32")

    def call(self, numbers: Any) -> Any:
        return numbers * keras.ops.cast(self._picture, numbers.dtype)


def make_model(case: gpus.Case) -> Any:
    """Makes the model, uncompiled; in place of float inputs, it takes one number per row."""
    if case.dtype != "float32":
        return case.build()
    numbers = keras.Input([1] * len(case.shape))
    return keras.Model(numbers, case.build()(Pictures(case.shape)(numbers)))


def small_case(case: gpus.Case) -> gpus.Case:
    """A case with a small model of the same kind, to try the benchmark itself."""
    layers, shape = keras.layers, tuple(min(size, 16) for size in case.shape)

    def build() -> Any:
        inputs = keras.Input(shape, dtype=case.dtype)
        x = layers.Embedding(100, 8)(inputs) if case.dtype == "int32" else inputs
        if case.has_batch_norm:
            x = layers.BatchNormalization()(layers.Conv2D(8, 3)(x))
        return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))

    return dataclasses.replace(case, build=build, shape=shape, rows=8)


def dataset(case: gpus.Case, model: Any) -> tf.data.Dataset:
    """Endless, cached batches for ``model``, with an unknown number of rows, as users have them."""
    random, count = np.random.default_rng(0), case.rows * _BATCHES
    if case.dtype == "float32":
        x = random.uniform(0.5, 1.5, (count, *[1] * len(case.shape))).astype("float32")
    else:
        words = next(layer.input_dim for layer in model.layers if hasattr(layer, "input_dim"))
        x = random.integers(0, words, (count, *case.shape)).astype(case.dtype)
    y = random.integers(0, model.output_shape[-1], count).astype("int32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(case.rows)
    return batches.cache().repeat().prefetch(tf.data.AUTOTUNE)


def devices(setup: one_gpu.Setup, options: one_gpu.Options) -> list[str]:
    """The device, or its halves.  Call it before TensorFlow initializes its devices.

    Raises:
      ValueError: there is no GPU for ``--device=gpu``, or the memory of the GPU is unknown.
    """
    physical = tf.config.list_physical_devices("GPU")
    if options.device == "gpu" and not physical:
        raise ValueError("--device=gpu, but TensorFlow finds no GPU.")
    if options.device == "cpu" or not physical:
        tf.config.set_visible_devices([], "GPU")
        return towerstrategy.split_cpu(2 if setup.halves else 1)
    tf.config.set_visible_devices(physical[:1], "GPU")
    if not setup.halves:
        return ["GPU:0"]
    limit = int(_HALF * (options.memory or _gpu_memory_mb()))
    half = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
    tf.config.set_logical_device_configuration(physical[0], [half, half])
    return ["GPU:0", "GPU:1"]


def _gpu_memory_mb() -> int:
    """The memory of the first GPU in MB, from ``nvidia-smi``."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True).stdout
        return int(text.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise ValueError("nvidia-smi does not say how much memory the GPU has: give "
                         "--one_gpu_memory, in MB.") from error


def make_strategy(setup: one_gpu.Setup, names: list[str]) -> Any:
    """Makes the strategy on the devices ``names``; None for the kind ``"none"``."""
    if setup.kind == "none":
        return None
    if setup.kind == "tower":
        return towerstrategy.TowerStrategy(names, setup.merge)
    cross_device_ops = getattr(tf.distribute, setup.merge)() if setup.merge else None
    return tf.distribute.MirroredStrategy(names, cross_device_ops)


def measure(cell: one_gpu.Cell, options: one_gpu.Options) -> dict[str, Any]:
    """Trains a cell with ``fit``.

    Returns:
      The figures of :func:`clock.measure_steps`; ``rows_per_second``; ``gpu`` (its name);
      ``gpu_peak_mb`` (peak memory, summed over the halves) and ``gpu_step_peak_mb`` (that of later
      steps, when XLA and cuDNN do not try algorithms any more), 0 on a CPU.
    """
    setup, case = one_gpu.SETUPS[cell.who], gpus.CASES[cell.case]
    case = small_case(case) if options.quick else case
    case = dataclasses.replace(case, rows=options.rows or case.rows)
    strategy = make_strategy(setup, devices(setup, options))
    keras.config.set_dtype_policy(cell.policy)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make_model(case)
        model.compile(case.optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      jit_compile=False if setup.plain else "auto")
    batches = dataset(case, model)
    figures = clock.measure_steps(keras, model, batches, options.seconds)
    peak = _peak_mb()
    for device in _logical_gpus():
        tf.config.experimental.reset_memory_stats(device)
    model.fit(batches, steps_per_epoch=_LATER_STEPS, shuffle=False, verbose=0)
    return {**figures, "rows_per_second": 1e3 * case.rows / figures["step_ms"], "gpu": gpu_name(),
            "gpu_peak_mb": peak, "gpu_step_peak_mb": _peak_mb()}


def gpu_name() -> str | None:
    """The name of the GPU; None if there is none."""
    visible = tf.config.get_visible_devices("GPU")
    return tf.config.experimental.get_device_details(visible[0]).get("device_name") \
        if visible else None


def _logical_gpus() -> list[str]:
    return [device.name.split("device:")[-1] for device in tf.config.list_logical_devices("GPU")]


def _peak_mb() -> float:
    """The peak memory of the GPU, summed over its halves."""
    return sum(tf.config.experimental.get_memory_info(device)["peak"]
               for device in _logical_gpus()) / 2**20


def _constants(options: one_gpu.Options) -> dict[str, Any]:
    """The constants of the GPU, or with ``--device=cpu`` of the second CPU device."""
    device = devices(one_gpu.Setup("none", halves=options.device == "cpu"), options)[-1]
    if device == "CPU:0":  # --device=auto, but there is no GPU
        raise ValueError("There is no GPU: --device=cpu tries it on CPU devices.")
    return {"constants": one_gpu_constants.measure("CPU:0", device, options.quick),
            "gpu": gpu_name()}


def _short_message(error: Exception) -> str:
    """The error's type, and the first and the last lines of its message, which may be a page."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()] or ["no message"]
    return f"{type(error).__name__}: {' ... '.join(dict.fromkeys([lines[0], *lines[-2:]]))}"[:600]


def main(argv: list[str]) -> None:
    """Measures the cell ``argv[1]`` and writes the file ``argv[2]``."""
    cell, options = json.loads(argv[1])
    cell, options = one_gpu.Cell(**cell), one_gpu.Options(**options)
    sys.stdin.readline()  # waits until the other process does not use the GPU any more
    try:
        result = _constants(options) if cell.case == one_gpu.CONSTANTS else measure(cell, options)
    except Exception as error:  # the parent shows it in the table
        traceback.print_exc()
        result = {"error": _short_message(error)}
    pathlib.Path(argv[2]).write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)  # TensorFlow would need seconds to end its iterators


if __name__ == "__main__":
    main(sys.argv)
