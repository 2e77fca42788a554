"""Trains a case without a strategy and on towers, and compares the results.

Goes in: a :class:`cases.Case`, a Keras module, towers and a merge device.  Comes out: a
:class:`Difference`, the largest relative difference of each kind of result.

The difference of two arrays is ``max|a - b| / max(max|b|, floor)``, where b is one device's.  It is
relative to the largest entry of the array, be it a weight, an optimizer slot or a log.  The floor
is 1e-3 for weights, in which terms of a size around 0.1 may cancel to less, and 1e-6 for all
others.  Different shapes or names, and any NaN, are an infinite difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import towerstrategy
from tests import dtypes

from . import cases, draw_cases, loss_cases, optimizer_cases, step_cases  # noqa: F401

FLOOR = 1e-6
WEIGHT_FLOOR = 1e-3
MERGES = ("cpu", "tower 0", "balanced")
SEED = 7

# The calls after ``fit``, by the group of the case; not all, as each needs traces of its own.
AFTER = {"batches": ("predict",), "losses": ("evaluate",),
         "weights": ("evaluate", "on batch"), "metrics": ("evaluate",), "models": ("predict",),
         "dtypes": ("evaluate", "predict"), "sweep": ("evaluate", "predict")}


@dataclasses.dataclass(frozen=True)
class Towers:
    """The number of towers, their merge device (one of :data:`MERGES`) and the strategy's options.

    With several stages ``merge`` is not used: gradients are merged where the weights are.
    """

    count: int
    merge: str = "cpu"
    shares: tuple[float, ...] | None = None
    micro_batches: int = 1
    stages: int = 1

    def strategy(self, **options: Any) -> towerstrategy.TowerStrategy:
        """The strategy on logical CPU devices; no tower is on the merge device ``cpu``."""
        if self.stages > 1:
            rows = [[f"CPU:{tower * self.stages + stage}" for stage in range(self.stages)]
                    for tower in range(self.count)]
            return towerstrategy.TowerStrategy(rows, shares=self.shares,
                                               micro_batches=self.micro_batches, **options)
        first = 1 if self.merge == "cpu" and self.count < 8 else 0
        devices = [f"CPU:{first + number}" for number in range(self.count)]
        merge = devices[0] if self.merge == "tower 0" else self.merge
        return towerstrategy.TowerStrategy(devices, merge, shares=self.shares,
                                           micro_batches=self.micro_batches, **options)

    def __str__(self) -> str:
        shares = f" shares={list(self.shares)}" if self.shares else ""
        parts = f" micro_batches={self.micro_batches}" * (self.micro_batches > 1)
        where = f"stages={self.stages}" if self.stages > 1 else f"merge={self.merge}"
        return f"R={self.count} {where}{shares}{parts}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest relative difference of each kind of result, by its name."""

    by_kind: Mapping[str, float]

    @property
    def worst(self) -> float:
        return max(self.by_kind.values())

    def __str__(self) -> str:
        return ", ".join(f"{kind} {value:.1e}" for kind, value in sorted(
            self.by_kind.items(), key=lambda item: -item[1]))


# With the last ones, half of the towers get no rows of a batch of eight rows or less.
UNEQUAL_TOWERS = [Towers(2, "cpu", (3, 1)), Towers(3, "tower 0", (1, 2, 5)),
                  Towers(4, "balanced", (1, .001, 1, .001))]
IN_PARTS = [Towers(1, "tower 0", micro_batches=4), Towers(2, "cpu", micro_batches=2)]
STAGED = [Towers(1, stages=2), Towers(1, stages=3, micro_batches=4),
          Towers(2, stages=2, micro_batches=2)]
ALL_TOWERS = [*(Towers(count, merge) for count in (1, 2, 3, 4, 5, 8) for merge in MERGES),
              *UNEQUAL_TOWERS, *IN_PARTS, *STAGED]
# ``make test`` and ``make test-all`` run each case on one of these, in turn.
CORE_TOWERS = [Towers(3, "cpu"), Towers(4, "tower 0"), Towers(3, "balanced"), Towers(4, "cpu"),
               Towers(1, "cpu"), Towers(4, "balanced"), Towers(3, "tower 0"), *UNEQUAL_TOWERS,
               *IN_PARTS]


# The errors for models that cannot be cut into stages automatically.
UNCUT = re.compile("cannot be cut into the|layer.s. for them")


def core() -> list[tuple[cases.Case, str, Towers]]:
    """Every case, wide ones last, each in one Keras version and on one of the towers, in turn."""
    # The order of the versions changes from round to round, so that each runs on all towers.
    ordered = sorted(cases.CASES.values(), key=lambda case: case.wide)
    return [(case, case.keras[(number + number // len(CORE_TOWERS)) % len(case.keras)],
             CORE_TOWERS[number % len(CORE_TOWERS)]) for number, case in enumerate(ordered)]


def keras_module(name: str) -> Any:
    """``keras`` or ``tf_keras``."""
    return importlib.import_module(name)


def compare(case: cases.Case, keras: Any, towers: Towers, jit_compile: bool = False) -> Difference:
    """Trains ``case`` on one device (once per process) and on ``towers``; returns the difference.

    With ``jit_compile``, one device still trains without XLA, with which it would draw other random
    numbers.  But a single tower on the default device is compiled as a whole, as one device is: it
    is compared with one device with XLA.
    """
    strategy = towers.strategy(**case.strategy)
    compiled_alike = jit_compile and strategy.extended.placement.compiles
    wanted = _single(case.name, keras.__name__, compiled_alike)
    return differences(train(case, keras, strategy, jit_compile), wanted)


def differences(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> Difference:
    """The differences of the results of two trainings."""
    return Difference({
        kind: difference(got[kind], wanted[kind], WEIGHT_FLOOR if "weights" in kind else FLOOR)
        for kind in wanted})


@functools.cache
def _single(case_name: str, keras_name: str, jit_compile: bool = False) -> dict[str, Any]:
    """The results of training on one device; checks that the weights have moved."""
    case = cases.CASES[case_name]
    results = train(case, keras_module(keras_name), None, jit_compile)
    if case.moves:
        moved = difference(results["weights"], results["initial weights"])
        if moved < 1e-3:
            raise AssertionError(f"{case.name} trains nothing: its weights moved by {moved}")
    return results


def clear_cache() -> None:
    """Drops the results of one device that :func:`compare` keeps."""
    _single.cache_clear()


def train(case: cases.Case, keras: Any,
          strategy: tf.distribute.Strategy | None, jit_compile: bool = False) -> dict[str, Any]:
    """Trains ``case`` from a fixed seed.

    Returns:
      Nests of arrays: ``initial weights``, ``weights``, ``optimizer`` (its variables), ``epoch
      logs`` (also of validation), ``batch logs`` (from ``on_train_batch_end``), the results of the
      run's ``seen``, and those of the calls in :data:`AFTER`: ``evaluate``, ``predict``, ``on
      batch`` (``test_on_batch``, ``train_on_batch``, ``predict_on_batch``, then the weights).
    """
    # Keras 3 would call gc.collect(), which takes half a second in this process.
    keras.backend.clear_session(*[False] * cases.is_keras_3(keras))
    keras.utils.set_random_seed(SEED)
    with dtypes.policy(keras, case.policy):
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            run = case.make(keras)
            optimizer = {"optimizer": cases.sgd(keras), "loss": "mse"}
            xla = {"jit_compile": jit_compile and not run.compile.get("run_eagerly")}
            run.model.compile(**{**optimizer, **xla, **run.compile})
        if not cases.is_keras_3(keras):
            _update_without_xla(run.model.optimizer)
        return _results(keras, run, AFTER.get(case.name.split("/")[0], ()))


def _update_without_xla(optimizer: Any) -> None:
    """On a GPU tf_keras has XLA compile updates, and Nadam, which counts its traces, is another."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if getattr(each, "jit_compile", False):
            each.jit_compile = False


def _results(keras: Any, run: cases.Run, after: Sequence[str]) -> dict[str, Any]:
    model, batch_logs, epochs = run.model, _batch_logs(keras), []
    results: dict[str, Any] = {"initial weights": _arrays(model.get_weights())}
    labels = {} if run.y is None else {"y": run.y}
    weights = {} if run.weights is None else {"sample_weight": run.weights}
    for fit in run.fits:
        arguments = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0,
                     **run.fit, **fit, **labels, **weights}
        history = model.fit(run.x, callbacks=[batch_logs, *run.callbacks()], **arguments)
        epochs.append(_without_time(history.history))
    results["weights"] = _arrays(model.get_weights())
    if not results["initial weights"]:
        results["initial weights"] = [np.zeros_like(array) for array in results["weights"]]
    results["optimizer"] = _arrays(_variables(model.optimizer))
    results["epoch logs"], results["batch logs"] = epochs, batch_logs.logs
    results.update(run.seen(model))
    size = run.fit.get("batch_size", 8)
    finite = {} if run.fit.get("steps_per_epoch") is None else {"steps": 3}
    if "evaluate" in after:
        results["evaluate"] = model.evaluate(run.x, batch_size=size, return_dict=True, verbose=0,
                                             **labels, **weights, **finite)
    if "predict" in after:
        results["predict"] = model.predict(_features(run.x), batch_size=size, verbose=0, **finite)
    if "on batch" in after and run.y is not None:
        results["on batch"] = _on_batch(run, labels, weights)
    return results


def _on_batch(run: cases.Run, labels: Any, weights: Any) -> list[Any]:
    """The results of the ``*_on_batch`` methods with the first 7 rows."""
    x, labels, weights = tf.nest.map_structure(lambda array: array[:7], (run.x, labels, weights))
    model = run.model
    return [model.test_on_batch(x, **labels, **weights, return_dict=True),
            model.train_on_batch(x, **labels, **weights, return_dict=True),
            model.predict_on_batch(x), _arrays(model.get_weights())]


def difference(got: Any, wanted: Any, floor: float = FLOOR) -> float:
    """The largest relative difference of two nests of arrays."""
    try:
        tf.nest.assert_same_structure(got, wanted)
    except (TypeError, ValueError):
        return float("inf")
    return max((_relative(np.asarray(a), np.asarray(b), floor)
                for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(wanted))), default=0.0)


def _relative(got: np.ndarray, wanted: np.ndarray, floor: float) -> float:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    if got.size == 0 or np.array_equal(got, wanted):
        return 0.0
    if wanted.dtype.kind not in "fiu" and wanted.dtype.name != "bfloat16":
        return float("inf")
    got, wanted = got.astype("float64"), wanted.astype("float64")
    if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
        return float("inf")
    return float(np.max(np.abs(got - wanted)) / max(np.max(np.abs(wanted)), floor))


def _arrays(values: Any) -> list[np.ndarray]:
    return [np.array(value) for value in values]


def _variables(optimizer: Any) -> list[Any]:
    """The optimizer's variables: a property, or a method in older versions of Keras."""
    variables = optimizer.variables
    is_method = callable(variables) and not isinstance(variables, list)
    return list(variables() if is_method else variables)


def _features(x: Any) -> Any:
    return x.map(lambda features, *_: features) if isinstance(x, tf.data.Dataset) else x


def _without_time(logs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [np.asarray(value, "float64") for value in values]
            for name, values in logs.items()}


def _batch_logs(keras: Any) -> Any:
    class BatchLogs(keras.callbacks.Callback):
        """Keeps the logs of ``on_train_batch_end``."""

        def __init__(self) -> None:
            super().__init__()
            self.logs: list[dict[str, np.ndarray]] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.logs.append({name: np.asarray(value, "float64")
                              for name, value in (logs or {}).items()})

    return BatchLogs()
