"""Runs one worker of a cluster of :mod:`benchmarks.machines`.

Goes in: flags.  Comes out: a file ``INDEX.json`` in the folder, with the figures, or the ``error``
if the worker failed.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import time
import traceback
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

import towerstrategy
from benchmarks import cases, clock, machines

_CASE = flags.DEFINE_enum("case", None, list(cases.CASES), "the model to train", required=True)
_STRATEGY = flags.DEFINE_enum("strategy", None, machines.STRATEGIES, "the strategy", required=True)
_TOWERS = flags.DEFINE_integer("towers", 2, "the number of towers of this worker", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 30, "the number of steps to measure", lower_bound=2)
_ADDRESSES = flags.DEFINE_list("addresses", None, "the addresses of all workers", required=True)
_INDEX = flags.DEFINE_integer("index", None, "the index of this worker", required=True)
_SMALL = flags.DEFINE_bool("small", False, "small models, to try the benchmark itself")
_FOLDER = flags.DEFINE_string("folder", None, "the folder for the figures", required=True)

_WARM_UP = 5  # steps


def make_strategy(name: str, towers: int, addresses: list[str], index: int) -> Any:
    """Makes the strategy of this worker, on logical CPU devices."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": addresses}), task_type="worker", task_id=index,
        num_accelerators={"GPU": 0}, rpc_layer="grpc")
    tf.config.set_visible_devices([], "GPU")
    devices = towerstrategy.split_cpu(towers)
    if name == "tower":
        return towerstrategy.TowerStrategy(devices, cluster_resolver=resolver)
    from tensorflow.python.distribute import collective_all_reduce_strategy as upstream

    # MultiWorkerMirroredStrategy uses only one CPU device of a worker.
    upstream.CollectiveAllReduceExtended._initialize_local_devices = (
        lambda self, resolver, worker: (  # noqa: ARG005
            tuple(f"{worker}/device:CPU:{tower}" for tower in range(towers)), "CPU"))
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)


def received_bytes() -> int:
    """The bytes that the loopback device of this network namespace has received."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    raise RuntimeError("/proc/net/dev has no loopback device")


def measure(strategy: Any, case: cases.Case, steps: int, small: bool) -> dict[str, Any]:
    """Trains ``case`` with ``fit`` for ``steps`` steps after the warm-up; returns the figures."""
    keras = tf.keras
    with strategy.scope():
        model = cases.compiled(case, keras, small)
    ends: list[float] = []
    received: list[int] = []
    cpu: list[float] = []

    class Clock(keras.callbacks.Callback):

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            float(logs["loss"])  # waits for the end of the step
            ends.append(time.perf_counter())
            cpu.append(time.process_time())
            received.append(received_bytes())

    start, start_cpu = time.perf_counter(), time.process_time()
    model.fit(cases.dataset(case), steps_per_epoch=_WARM_UP + steps, shuffle=False, verbose=0,
              callbacks=[Clock()])
    return {
        "first_step_s": ends[0] - start,
        "first_cpu_s": cpu[0] - start_cpu,
        "step_ms": 1e3 * statistics.median(np.diff(ends)[_WARM_UP - 1:]),
        "cpu_ms": 1e3 * (cpu[-1] - cpu[_WARM_UP - 1]) / steps,
        "peak_mb": clock.peak_mb(),
        "between_mb": (received[-1] - received[_WARM_UP - 1]) / steps / 1e6,
    }


def main(argv: list[str]) -> None:
    """Measures and writes the file of this worker."""
    del argv
    try:
        strategy = make_strategy(_STRATEGY.value, _TOWERS.value, _ADDRESSES.value, _INDEX.value)
        figures = measure(strategy, cases.CASES[_CASE.value], _STEPS.value, _SMALL.value)
    except Exception as error:  # the parent shows it in the table
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    (pathlib.Path(_FOLDER.value) / f"{_INDEX.value}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    app.run(main)
