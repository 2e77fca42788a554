"""Measures the cost of partitioning a step beside that of tracing it, and counts its operations.

Goes in: cases and numbers of towers.  Comes out: a line for each: the CPU seconds of each part of
the work, the operations, and the tensors and bytes that cross.  No step runs, so large models take
no longer than their trace.

The counts do not depend on the machine.  ``guard`` compares them with those in ``guard.json``,
which ``--record`` writes for the installed versions of TensorFlow and Keras.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

import towerstrategy
from benchmarks import cases, gpus, table, traffic
from towerstrategy.batch import sub_batches
from towerstrategy.sharding import builder, partition, propagate, step as step_lib, towers

# A part of the work -> the functions that do it.
_PARTS: dict[str, list[tuple[Any, str]]] = {
    "trace": [(step_lib, "_traced")], "propagate": [(propagate, "propagate")],
    "emit": [(partition.Partition, "run")],
    "function": [(towers.Towers, "rewire"), (builder.Builder, "call_all")]}
GUARD = pathlib.Path(__file__).with_name("guard.json")
GUARDED = ("mlp", "embedding", "conv", "deep", "input")
GUARDED_TOWERS = 4
_TOLERANCE = 1.02  # of a count over the recorded one


def _efficient_net() -> Any:
    return keras.applications.EfficientNetB0(weights=None, classifier_activation=None)


_Build = Callable[[], Any]
LARGE: dict[str, tuple[_Build, tuple[int, ...], str]] = {
    "resnet50": (gpus.CASES["resnet50"].build, (224, 224, 3), "float32"),
    "transformer": (gpus.CASES["transformer"].build, (128,), "int32"),
    "efficientnet": (_efficient_net, (224, 224, 3), "float32"),
}


@dataclasses.dataclass(frozen=True)
class PartitionedStep:
    """The costs and counts of a partitioned training step.

    Attributes:
      seconds: CPU seconds, by part of the work.
      traced: the number of operations of one device's step.
      operations: the number of operations of the partitioned step.
      calls: the number of calls of Python functions in partitioning, without the trace; 0 if they
        were not counted.
      crossings: the number of tensors that cross devices.
      crossing_bytes: their bytes, with one row per tower in unknown dimensions.
    """

    seconds: dict[str, float]
    traced: int
    operations: int
    calls: int
    crossings: int
    crossing_bytes: int

    @property
    def over_trace(self) -> float:
        """The CPU time of partitioning over that of the trace."""
        return sum(self.seconds.values()) / self.seconds["trace"] - 1

    def counts(self) -> dict[str, int]:
        return {"operations": self.operations, "calls": self.calls, "crossings": self.crossings,
                "crossing_bytes": self.crossing_bytes}


def model_of(name: str) -> tuple[_Build, tuple[int, ...], str]:
    """The function that builds a case's model, and the shape and dtype of a row of its input."""
    if name in LARGE:
        return LARGE[name]
    case = cases.CASES[name]
    rows = case.draw_inputs(cases.generator(), 1)
    return lambda: case.build(keras, False), rows.shape[1:], rows.dtype.name


def partitioned(name: str, devices: Sequence[str], count_calls: bool = False) -> PartitionedStep:
    """Traces and partitions a training step of a case, for an unknown number of rows."""
    build, shape, dtype = model_of(name)
    keras.backend.clear_session()
    strategy = towerstrategy.TowerStrategy(list(devices))
    with strategy.scope():
        model = build()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    batch = [sub_batches.SubBatchesSpec(*[spec] * len(devices)) for spec in (
        tf.TensorSpec([None, *shape], dtype), tf.TensorSpec([None], tf.int32))]

    def step(x: Any, y: Any) -> Any:
        with strategy.extended.step():
            return strategy.run(model.train_step, args=((x, y),))

    seconds: dict[str, float] = {}
    graphs: list[Any] = []
    calls = [0]
    with _profiled(seconds, graphs, calls if count_calls else None):
        tf.function(step, autograph=False).get_concrete_function(*batch)
    strategy.extended.keep_graphs = True  # traffic.count needs Python graphs
    function = tf.function(step, autograph=False).get_concrete_function(*batch)
    crossing = traffic.count(function, len(devices))
    return PartitionedStep(
        seconds, len(graphs[0].get_operations()), len(function.graph.get_operations()),
        calls[0], len(crossing.crossings), sum(crossing.sent.values()))


@contextlib.contextmanager
def _profiled(seconds: dict[str, float], graphs: list[Any],
              calls: list[int] | None) -> Iterator[None]:
    """A context that adds CPU ``seconds`` by part, the traced ``graphs``, and the number of calls.

    It counts the calls of Python functions outside of the trace in ``calls[0]``.
    """
    def count(frame: Any, event: str, argument: Any) -> None:
        del frame, argument
        if calls is not None and event == "call":
            calls[0] += 1

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if calls is not None and name != "trace":
                sys.setprofile(count)
            start = time.thread_time()
            try:
                result = function(*args, **kwargs)
            finally:
                sys.setprofile(None)
                seconds[name] = seconds.get(name, 0) + time.thread_time() - start
            if name == "trace":
                graphs.append(result)
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name, parts in _PARTS.items():
            for owner, attribute in parts:
                stack.enter_context(mock.patch.object(
                    owner, attribute, timed(name, getattr(owner, attribute))))
        yield


def format_table(steps: dict[tuple[str, int], PartitionedStep]) -> str:
    """The table of steps by case and number of towers."""
    header = ("case", "R", "operations traced", "partitioned", "tensors crossing", "MB crossing",
              *(f"{part}, CPU s" for part in _PARTS), "partition / trace")
    return table.columns(header, [
        [name, str(count), f"{step.traced:,}", f"{step.operations:,}", f"{step.crossings:,}",
         f"{step.crossing_bytes / 1e6:,.2f}",
         *(f"{step.seconds[part]:.2f}" for part in _PARTS), f"{step.over_trace:.2f}"]
        for (name, count), step in steps.items()])


def main(names: Sequence[str], counts: Sequence[int]) -> None:
    """Partitions the cases for each number of towers, and prints the table."""
    devices = towerstrategy.split_cpu(max(counts))
    steps: dict[tuple[str, int], PartitionedStep] = {}
    for name in names:
        for count in counts:
            steps[name, count] = partitioned(name, devices[:count])
            print(f"{name} R={count}: {sum(steps[name, count].seconds.values()):.1f} s", flush=True)
    print(f"\n{format_table(steps)}")


def versions() -> dict[str, str]:
    """The versions of the packages that the counts depend on."""
    return {package: importlib.metadata.version(package) for package in ("tensorflow", "keras")}


def guarded_counts(devices: Sequence[str]) -> dict[str, dict[str, int]]:
    """The counts of the guarded cases."""
    return {name: partitioned(name, devices, count_calls=True).counts() for name in GUARDED}


def increased(counts: dict[str, dict[str, int]],
              recorded: dict[str, dict[str, int]]) -> list[tuple[str, str, int, int]]:
    """Case, name, value and recorded value of each count that is higher than recorded."""
    return [(case, name, value, recorded[case][name]) for case, of_case in counts.items()
            for name, value in of_case.items() if value > recorded[case][name] * _TOLERANCE]


def guard(record: bool) -> int:
    """Compares the counts with the recorded ones, or records them; returns the exit status."""
    counts = guarded_counts(towerstrategy.split_cpu(GUARDED_TOWERS))
    if record:
        GUARD.write_text(json.dumps({"versions": versions(), "counts": counts}, indent=1) + "\n")
    recorded = json.loads(GUARD.read_text())
    if recorded["versions"] != versions():
        print(f"recorded with {recorded['versions']}, but installed are {versions()}: not compared")
        return 0
    print(table.columns(("case", "count", "recorded", "now"), [
        [case, name, f"{recorded['counts'][case][name]:,}", f"{value:,}"]
        for case, of_case in counts.items() for name, value in of_case.items()]))
    higher = increased(counts, recorded["counts"])
    for case, name, now, before in higher:
        print(f"{case}: {name} {before:,} -> {now:,}")
    return 1 if higher else 0
