"""Measures step time and peak memory of a training, with any strategy and backend.

Goes in: a compiled model and endless batches.  Comes out: times and peak memory.
"""

from __future__ import annotations

import pathlib
import resource
import statistics
import time
from typing import Any

import numpy as np

_WARM_UP, _MIN_STEPS, _MAX_STEPS = 5, 10, 2000
_ENDLESS = 10**6


def measure_steps(keras: Any, model: Any, batches: Any, seconds: float) -> dict[str, Any]:
    """Trains ``model`` with ``fit`` for some seconds.

    Args:
      keras: the Keras of the model.
      model: a compiled model.
      batches: endless batches.
      seconds: how long to train after the warm-up steps.

    Returns:
      ``first_step_s`` (from the call of ``fit`` to the end of the first step, with building and
      tracing), ``step_ms`` (the median step time), ``steps`` and ``peak_mb`` (resident memory of
      the process).
    """
    clock = _clock(keras, seconds)
    start = time.perf_counter()
    model.fit(batches, steps_per_epoch=_ENDLESS, shuffle=False, verbose=0, callbacks=[clock])
    steady = np.diff(clock.ends)[_WARM_UP:]
    return {
        "first_step_s": clock.ends[0] - start,
        "step_ms": 1e3 * statistics.median(steady),
        "steps": len(steady),
        "peak_mb": peak_mb(),
    }


def peak_mb() -> float:
    """The peak of this process's resident memory."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # ru_maxrss starts at the parent's value
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _clock(keras: Any, seconds: float) -> Any:
    """A callback that records when steps end, and stops the training after ``seconds``."""

    class Clock(keras.callbacks.Callback):
        ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # waits for the end of the step, as a progress bar does
            self.ends.append(time.perf_counter())
            steps = batch + 1 - _WARM_UP
            spent = self.ends[-1] - self.ends[min(batch, _WARM_UP)]
            if steps > _MAX_STEPS or (steps > _MIN_STEPS and spent > seconds):
                self.model.stop_training = True

    return Clock()
