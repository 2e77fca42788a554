"""How long the steps of a training take: for every strategy and backend alike.

Goes in: a compiled model and its endless batches.  Comes out: seconds and memory.
"""

from __future__ import annotations

import pathlib
import resource
import statistics
import time
from typing import Any

import numpy as np

_WARM_UP, _LEAST, _MOST = 5, 10, 2000  # steps
_ENDLESS = 10**6


def timed(keras: Any, model: Any, batches: Any, seconds: float) -> dict[str, Any]:
    """Trains ``model`` with ``fit`` until the time is up.

    Args:
      keras: the model's Keras.
      model: what to train.
      batches: on what; they never end.
      seconds: how long, after the first steps.

    Returns:
      ``first_step_s`` (from the call of ``fit`` to the end of its first step: building, tracing and
      running it), ``step_ms`` (the median), ``steps`` and ``peak_mb`` (resident, of the process).
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
    """The most memory that this process has had, resident."""
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # ru_maxrss starts with what the parent had
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _clock(keras: Any, seconds: float) -> Any:
    """A callback that notes when steps end and stops the training when it has seen enough."""

    class Clock(keras.callbacks.Callback):
        ends: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            float(logs["loss"])  # as a progress bar does; the step has ended when it is known
            self.ends.append(time.perf_counter())
            steps = batch + 1 - _WARM_UP
            spent = self.ends[-1] - self.ends[min(batch, _WARM_UP)]
            if steps > _MOST or (steps > _LEAST and spent > seconds):
                self.model.stop_training = True

    return Clock()
