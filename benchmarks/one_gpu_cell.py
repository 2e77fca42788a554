"""One strategy on one model, in a process of its own; see :mod:`benchmarks.one_gpu`.

Goes in: a cell and options, as JSON, and a line on the standard input when it is its turn.  Comes
out: a JSON file with the figures, or with the ``error`` that came instead.

The input is not measured: two batches are kept ready, and they are small.  Words are sent as they
are; of images (and of the MLP's features) a row is a number, by which one picture on the device is
multiplied, the same for all.
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
_LATER = 3  # steps, for which memory is looked at again
_OF_A_HALF = 0.45  # of the GPU's memory: the rest is CUDA's, and its libraries'


class Pictures(keras.layers.Layer):
    """A picture times each row's number.

    Args:
      shape: the picture's.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._picture = np.random.default_rng(1).standard_normal((1, *shape)).astype("float32")

    def call(self, numbers: Any) -> Any:
        return numbers * keras.ops.cast(self._picture, numbers.dtype)


def model_of(case: gpus.Case) -> Any:
    """The case's model, uncompiled; what has float inputs takes a number a row."""
    if case.dtype != "float32":
        return case.build()
    numbers = keras.Input([1] * len(case.shape))
    return keras.Model(numbers, case.build()(Pictures(case.shape)(numbers)))


def small(case: gpus.Case) -> gpus.Case:
    """A case of the same kind, to try the benchmark itself."""
    layers, shape = keras.layers, tuple(min(size, 16) for size in case.shape)

    def build() -> Any:
        inputs = keras.Input(shape, dtype=case.dtype)
        x = layers.Embedding(100, 8)(inputs) if case.dtype == "int32" else inputs
        if case.has_batch_norm:
            x = layers.BatchNormalization()(layers.Conv2D(8, 3)(x))
        return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))

    return dataclasses.replace(case, build=build, shape=shape, rows=8)


def dataset(case: gpus.Case, model: Any) -> tf.data.Dataset:
    """Endless batches for ``model``, which are ready; their number of rows is open, as users'."""
    draws, count = np.random.default_rng(0), case.rows * _BATCHES
    if case.dtype == "float32":
        x = draws.uniform(0.5, 1.5, (count, *[1] * len(case.shape))).astype("float32")
    else:
        words = next(layer.input_dim for layer in model.layers if hasattr(layer, "input_dim"))
        x = draws.integers(0, words, (count, *case.shape)).astype(case.dtype)
    y = draws.integers(0, model.output_shape[-1], count).astype("int32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(case.rows)
    return batches.cache().repeat().prefetch(tf.data.AUTOTUNE)


def devices(who: one_gpu.Who, options: one_gpu.Options) -> list[str]:
    """The device, or its halves.  Call it before TensorFlow starts.

    Raises:
      ValueError: a GPU is asked for and there is none, or nobody knows how much memory it has.
    """
    found = tf.config.list_physical_devices("GPU")
    if options.device == "gpu" and not found:
        raise ValueError("--device=gpu, but TensorFlow finds no GPU.")
    if options.device == "cpu" or not found:
        tf.config.set_visible_devices([], "GPU")
        return towerstrategy.split_cpu(2 if who.halves else 1)
    tf.config.set_visible_devices(found[:1], "GPU")
    if not who.halves:
        return ["GPU:0"]
    limit = int(_OF_A_HALF * (options.memory or _memory()))
    half = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
    tf.config.set_logical_device_configuration(found[0], [half, half])
    return ["GPU:0", "GPU:1"]


def _memory() -> int:
    """MB of the first GPU."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True).stdout
        return int(text.split()[0])
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise ValueError("nvidia-smi does not say how much memory the GPU has: give "
                         "--one_gpu_memory, in MB.") from error


def strategy_of(who: one_gpu.Who, names: list[str]) -> Any:
    """A strategy on the devices ``names``; None for none."""
    if who.kind == "none":
        return None
    if who.kind == "tower":
        return towerstrategy.TowerStrategy(names, who.merge)
    across = getattr(tf.distribute, who.merge)() if who.merge else None
    return tf.distribute.MirroredStrategy(names, across)


def measure(cell: one_gpu.Cell, options: one_gpu.Options) -> dict[str, Any]:
    """Trains with ``fit``.

    Returns:
      What :func:`clock.timed` does, ``rows_per_second``, ``gpu`` (its name), and of the GPU's
      memory, summed over its halves, ``gpu_peak_mb`` and ``gpu_step_peak_mb`` (in later steps,
      behind all tries of XLA and cuDNN); 0 on a CPU.
    """
    who, case = one_gpu.WHO[cell.who], gpus.CASES[cell.case]
    case = small(case) if options.quick else case
    case = dataclasses.replace(case, rows=options.rows or case.rows)
    strategy = strategy_of(who, devices(who, options))
    keras.config.set_dtype_policy(cell.policy)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = model_of(case)
        model.compile(case.optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      jit_compile=False if who.plain else "auto")
    batches = dataset(case, model)
    found = clock.timed(keras, model, batches, options.seconds)
    peak = _peak()
    for device in _logical():
        tf.config.experimental.reset_memory_stats(device)
    model.fit(batches, steps_per_epoch=_LATER, shuffle=False, verbose=0)
    return {**found, "rows_per_second": 1e3 * case.rows / found["step_ms"], "gpu": gpu(),
            "gpu_peak_mb": peak, "gpu_step_peak_mb": _peak()}


def gpu() -> str | None:
    """The name of the GPU; None for none."""
    visible = tf.config.get_visible_devices("GPU")
    return tf.config.experimental.get_device_details(visible[0]).get("device_name") \
        if visible else None


def _logical() -> list[str]:
    return [device.name.split("device:")[-1] for device in tf.config.list_logical_devices("GPU")]


def _peak() -> float:
    return sum(tf.config.experimental.get_memory_info(device)["peak"]
               for device in _logical()) / 2**20


def _constants(options: one_gpu.Options) -> dict[str, Any]:
    far = devices(one_gpu.Who("none", halves=options.device == "cpu"), options)[-1]
    if far == "CPU:0":  # no GPU, as it turned out
        raise ValueError("There is no GPU: --device=cpu tries it on CPU devices.")
    return {"constants": one_gpu_constants.measured("CPU:0", far, options.quick), "gpu": gpu()}


def _short(error: Exception) -> str:
    """The type, and of a message that TensorFlow spreads over a page its begin and its end."""
    lines = [text.strip() for text in str(error).splitlines() if text.strip()] or ["no message"]
    return f"{type(error).__name__}: {' ... '.join(dict.fromkeys([lines[0], *lines[-2:]]))}"[:600]


def main(argv: list[str]) -> None:
    """Measures and writes the file ``argv[2]``."""
    cell, options = json.loads(argv[1])
    cell, options = one_gpu.Cell(**cell), one_gpu.Options(**options)
    sys.stdin.readline()  # until then another process may have the GPU
    try:
        result = _constants(options) if cell.case == one_gpu.CONSTANTS else measure(cell, options)
    except Exception as error:  # the parent shows it in the table
        traceback.print_exc()
        result = {"error": _short(error)}
    pathlib.Path(argv[2]).write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)  # to end iterators and TensorFlow takes seconds


if __name__ == "__main__":
    main(sys.argv)
