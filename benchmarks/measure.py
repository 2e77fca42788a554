"""Measures one strategy on one case.  Each job of ``python -m benchmarks`` is such a process.

Goes in: flags.  Comes out: a JSON file with the figures, or the ``error`` if the training failed.

    python -m benchmarks.measure --case=mlp --strategy=tower --towers=4 --output=out/one.json
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import traceback
from typing import Any

import numpy as np
import tensorflow as tf
from absl import app, flags

from benchmarks import cases, clock, strategies, traffic
from towerstrategy.extras.check import speed

_CASE = flags.DEFINE_enum("case", None, list(cases.CASES), "the model to train", required=True)
_STRATEGY = flags.DEFINE_enum("strategy", None, list(strategies.STRATEGIES), "the strategy",
                              required=True)
_TOWERS = flags.DEFINE_integer("towers", 4, "the number of towers", lower_bound=1)
_MERGE = flags.DEFINE_string("merge_device", None, "TowerStrategy's merge device")
_DEVICE = flags.DEFINE_enum("device", "cpu", ["cpu", "gpu"], "the towers' devices")
_SECONDS = flags.DEFINE_float("seconds", 6, "seconds for which to measure the step time")
_SMALL = flags.DEFINE_bool("small", False, "small models, to try the benchmark itself")
_TRAFFIC = flags.DEFINE_bool("traffic", False, "count the bytes that cross devices, too")
_OUTPUT = flags.DEFINE_string("output", None, "the JSON file to write", required=True)


def measure(keras: Any, case: cases.Case, strategy: tf.distribute.Strategy, seconds: float,
            small: bool = False, with_traffic: bool = False,
            xla: bool = False) -> dict[str, Any]:
    """Trains ``case`` with ``fit`` for some seconds.

    Args:
      keras: ``keras`` or ``tf_keras``.
      case: the model to train.
      strategy: the strategy.
      seconds: how long to train after the warm-up steps.
      small: whether to make a small model.
      with_traffic: whether to count the bytes that cross devices, which traces the step once more.
      xla: the value of ``jit_compile``.

    Returns:
      The figures of :func:`clock.measure_steps`; ``gpu_peak_mb`` (the sum over GPUs);
      ``parameter_bytes``; ``largest_bytes`` (of the largest parameter); ``state_bytes`` (of weights
      and optimizer slots, by device); ``traffic`` (None without ``with_traffic``).
    """
    with strategy.scope():
        model = cases.compiled(case, keras, small, xla)
    result = {
        **clock.measure_steps(keras, model, cases.dataset(case), seconds),
        "gpu_peak_mb": _gpu_peak() / 2**20,
        "parameter_bytes": sum(_size(variable) for variable in model.trainable_variables),
        "largest_bytes": max(_size(variable) for variable in model.trainable_variables),
        "state_bytes": speed.state_bytes(model),
        "traffic": None,
    }
    if with_traffic:
        result["traffic"] = step_traffic(model, case, strategy).as_dict()
    return result


def step_traffic(model: Any, case: cases.Case,
                 strategy: tf.distribute.Strategy) -> traffic.Traffic:
    """The bytes that cross devices in a training step of ``model`` on a batch of known shape."""
    batches = iter(strategy.experimental_distribute_dataset(
        cases.dataset(case, drop_remainder=True)))
    strategy.extended.keep_graphs = True  # for a TowerStrategy: traffic.count needs Python graphs
    step = tf.function(lambda batches: strategy.run(model.train_step, args=(next(batches),)),
                       autograph=False)
    replicas = strategy.num_replicas_in_sync
    # As in `fit` with a TowerStrategy; without this context it would be a custom training loop.
    with getattr(strategy.extended, "step", contextlib.nullcontext)():
        traced = step.get_concrete_function(batches)
    return traffic.count(traced, replicas, unknown_dimension=case.batch // replicas,
                         arguments=batches)


def _size(variable: Any) -> int:
    return int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size


def _gpu_peak() -> int:
    """The peak memory of each GPU in bytes, summed over the GPUs."""
    return sum(tf.config.experimental.get_memory_info(device.name.split("device:")[-1])["peak"]
               for device in tf.config.list_logical_devices("GPU"))


def main(argv: list[str]) -> None:
    """Measures the strategy and writes the file."""
    del argv
    case = cases.CASES[_CASE.value]
    try:
        xla = _STRATEGY.value in strategies.XLA
        alone = strategies.XLA.get(_STRATEGY.value, _STRATEGY.value) == "none"
        devices = strategies.devices(_DEVICE.value, 1 if alone else _TOWERS.value)
        strategy = strategies.STRATEGIES[_STRATEGY.value](devices, _MERGE.value)
        result = measure(tf.keras, case, strategy, _SECONDS.value, _SMALL.value,
                         _TRAFFIC.value and not xla, xla)
    except Exception as error:  # the parent shows it in the table
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
    pathlib.Path(_OUTPUT.value).write_text(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
