"""Measures Keras 3 on JAX, on one device or by ``keras.distribution.DataParallel`` on several.

Goes in: a case and how many devices.  Comes out: a JSON file, as :mod:`measure` writes it.

It runs in an environment of its own, which has no TensorFlow; ``make bench-jax`` makes it.
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
    """What is missing to measure with ``python``, an interpreter's path; "" if nothing is."""
    if pathlib.Path(python).exists():
        return ""
    return f"there is no {python}; `make bench-jax` makes .venv-jax"


def command(python: str, case: str, devices: int, seconds: float, small: bool,
            output: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """What to run, and with which environment variables, to have :func:`measure`'s figures written.

    Args:
      python: the interpreter of an environment with Keras 3 and JAX.
      case: the name of a case.
      devices: how many JAX is to make of the CPU.
      seconds: how long to measure the steady step.
      small: whether to make small models.
      output: the JSON file to write.
    """
    line = [python, "-m", "benchmarks.jax_peer", case, str(devices), str(output),
            f"--seconds={seconds}", *(["--small"] if small else [])]
    return line, {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS":
                  f"--xla_force_host_platform_device_count={devices}"}


def measure(keras: Any, case: cases.Case, devices: int, seconds: float,
            small: bool = False) -> dict[str, Any]:
    """Trains ``case`` with ``fit`` until the time is up; see :func:`measure.measure`.

    Args:
      keras: Keras 3 on JAX.
      case: what to train.
      devices: on how many.
      seconds: how long, after the first steps.
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
    # XLA is the only way in which JAX compiles a step.
    model = cases.compiled(case, keras, small, xla=True)
    timed = clock.timed(keras, model, cases.batches(case), seconds)
    sizes = [int(np.prod(weight.shape)) * np.dtype(weight.dtype).itemsize
             for weight in model.trainable_variables]
    return {**timed, "gpu_peak_mb": 0.0, "parameter_bytes": sum(sizes),
            "largest_bytes": max(sizes), "state_bytes": {}, "traffic": None}


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=list(cases.CASES))
    parser.add_argument("devices", type=int)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--small", action="store_true")
    told = parser.parse_args()
    try:
        import keras  # it looks for its backend when it is imported

        found = measure(keras, cases.CASES[told.case], told.devices, told.seconds, told.small)
    except Exception as error:  # the parent shows it in the table
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    told.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
