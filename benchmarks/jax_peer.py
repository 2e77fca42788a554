"""Measures Keras 3 on JAX: on one device, or on several with ``keras.distribution.DataParallel``.

Goes in: a case and a number of devices.  Comes out: a JSON file with the figures of :mod:`measure`.

It runs in an environment of its own, without TensorFlow, which ``make bench-jax`` makes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import traceback
from typing import Any

import numpy as np

from benchmarks import cases, clock


def missing(python: str) -> str:
    """A message if there is no interpreter ``python`` to measure with; else ""."""
    if pathlib.Path(python).exists():
        return ""
    return f"there is no {python}; `make bench-jax` makes .venv-jax"


def command(python: str, case: str, devices: int, seconds: float, small: bool,
            output: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """The command that writes the figures of :func:`measure`, and its environment variables.

    Args:
      python: the interpreter of an environment with Keras 3 and JAX.
      case: the name of a case.
      devices: the number of JAX's CPU devices.
      seconds: how long to measure the step time.
      small: whether to make small models.
      output: the JSON file to write.
    """
    line = [python, "-m", "benchmarks.jax_peer", case, str(devices), str(output),
            f"--seconds={seconds}", *(["--small"] if small else [])]
    return line, {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS":
                  f"--xla_force_host_platform_device_count={devices}"}


def measure(keras: Any, case: cases.Case, devices: int, seconds: float,
            small: bool = False) -> dict[str, Any]:
    """Trains ``case`` with ``fit`` for some seconds; returns the figures of :mod:`measure`.

    Args:
      keras: Keras 3 on JAX.
      case: the model to train.
      devices: the number of devices.
      seconds: how long to train after the warm-up steps.
      small: whether to make a small model.

    Raises:
      ValueError: JAX has another number of devices.
    """
    names = keras.distribution.list_devices()
    if len(names) != devices:
        raise ValueError(f"JAX has {len(names)} devices, but {devices} were asked for: set "
                         f"XLA_FLAGS=--xla_force_host_platform_device_count={devices}.")
    if devices > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=names))
    # JAX compiles steps only with XLA.
    model = cases.compiled(case, keras, small, xla=True)
    times = clock.measure_steps(keras, model, cases.batches(case), seconds)
    sizes = [int(np.prod(weight.shape)) * np.dtype(weight.dtype).itemsize
             for weight in model.trainable_variables]
    return {**times, "gpu_peak_mb": 0.0, "parameter_bytes": sum(sizes),
            "largest_bytes": max(sizes), "state_bytes": {}, "traffic": None}


def main() -> None:
    """Measures a case and writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=list(cases.CASES))
    parser.add_argument("devices", type=int)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    try:
        import keras  # not before: importing it loads the backend

        figures = measure(keras, cases.CASES[arguments.case], arguments.devices,
                          arguments.seconds, arguments.small)
    except Exception as error:  # the parent shows it in the table
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    arguments.output.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
