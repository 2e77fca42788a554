"""What partitioning a step costs beside tracing it, and what the partitioned step is made of.

Goes in: cases and numbers of towers.  Comes out: a line for each: seconds of CPU by part,
operations, tensors and bytes that cross.  Nothing runs: a large model takes as long as its trace.

The counts do not drift with the machine.  ``guard`` compares them with the recorded ones
(``guard.json``, made by ``--record``, for the versions of TensorFlow and Keras that it names).
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
from towerstrategy.sharding import builder, packing, partition, propagate, step as step_lib

# What takes the time: a part's name -> the functions that do it.
_PARTS: dict[str, list[tuple[Any, str]]] = {
    "trace": [(step_lib, "_traced")], "propagate": [(propagate, "propagate")],
    "emit": [(partition.Partition, "run")],
    "function": [(packing, "finish"), (builder.Builder, "call_all")]}
GUARD = pathlib.Path(__file__).with_name("guard.json")
GUARDED = ("mlp", "embedding", "conv", "deep", "input")
GUARDED_TOWERS = 4
_SLACK = 1.02


def _efficient_net() -> Any:
    return keras.applications.EfficientNetB0(weights=None, classifier_activation=None)


_Build = Callable[[], Any]
LARGE: dict[str, tuple[_Build, tuple[int, ...], str]] = {
    "resnet50": (gpus.CASES["resnet50"].build, (224, 224, 3), "float32"),
    "transformer": (gpus.CASES["transformer"].build, (128,), "int32"),
    "efficientnet": (_efficient_net, (224, 224, 3), "float32"),
}


@dataclasses.dataclass(frozen=True)
class Made:
    """A partitioned training step.

    Attributes:
      seconds: of CPU, by part.
      traced: operations of one device's step.
      operations: those of the partitioned one.
      calls: Python's calls of functions while it is partitioned, without the trace; 0 where they
        were not counted.
      crossings: tensors that cross.
      crossing_bytes: their bytes, a dimension that is not known being one row a tower.
    """

    seconds: dict[str, float]
    traced: int
    operations: int
    calls: int
    crossings: int
    crossing_bytes: int

    @property
    def share(self) -> float:
        """What partitioning takes, over the trace."""
        return sum(self.seconds.values()) / self.seconds["trace"] - 1

    def counts(self) -> dict[str, int]:
        return {"operations": self.operations, "calls": self.calls, "crossings": self.crossings,
                "crossing_bytes": self.crossing_bytes}


def build_of(name: str) -> tuple[_Build, tuple[int, ...], str]:
    """How to make a case's model, and the shape and dtype of a row of its input."""
    if name in LARGE:
        return LARGE[name]
    case = cases.CASES[name]
    rows = case.rows(cases.random(), 1)
    return lambda: case.build(keras, False), rows.shape[1:], rows.dtype.name


def made(name: str, devices: Sequence[str], count_calls: bool = False) -> Made:
    """Traces and partitions a training step of a case, for open numbers of rows."""
    build, shape, dtype = build_of(name)
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
    with _watched(seconds, graphs, calls if count_calls else None):
        tf.function(step, autograph=False).get_concrete_function(*batch)
    strategy.extended.keep_graphs = True  # what is counted is counted in Python
    function = tf.function(step, autograph=False).get_concrete_function(*batch)
    found = traffic.count(function, len(devices))
    return Made(seconds, len(graphs[0].get_operations()), len(function.graph.get_operations()),
                calls[0], len(found.crossings), sum(found.sent.values()))


@contextlib.contextmanager
def _watched(seconds: dict[str, float], graphs: list[Any],
             calls: list[int] | None) -> Iterator[None]:
    """Within, notes what each part takes, the graphs that are traced, and calls outside of these.
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
                graphs.append(result[0])
            return result

        return run

    with contextlib.ExitStack() as stack:
        for name, parts in _PARTS.items():
            for owner, attribute in parts:
                stack.enter_context(mock.patch.object(
                    owner, attribute, timed(name, getattr(owner, attribute))))
        yield


def told(found: dict[tuple[str, int], Made]) -> str:
    """The table."""
    header = ("case", "R", "operations traced", "made", "cross", "MB", *_PARTS,
              "partition / trace")
    return table.columns(header, [
        [name, str(count), f"{mine.traced:,}", f"{mine.operations:,}", f"{mine.crossings:,}",
         f"{mine.crossing_bytes / 1e6:,.2f}",
         *(f"{mine.seconds[part]:.2f}" for part in _PARTS), f"{mine.share:.2f}"]
        for (name, count), mine in found.items()])


def main(names: Sequence[str], counts: Sequence[int]) -> None:
    """Measures and prints."""
    devices = towerstrategy.split_cpu(max(counts))
    found: dict[tuple[str, int], Made] = {}
    for name in names:
        for count in counts:
            found[name, count] = made(name, devices[:count])
            print(f"{name} R={count}: {sum(found[name, count].seconds.values()):.1f} s", flush=True)
    print(f"\n{told(found)}")


def versions() -> dict[str, str]:
    """Those that the counts depend on."""
    return {package: importlib.metadata.version(package) for package in ("tensorflow", "keras")}


def guarded(devices: Sequence[str]) -> dict[str, dict[str, int]]:
    """The counts of the guarded cases."""
    return {name: made(name, devices, count_calls=True).counts() for name in GUARDED}


def worse(found: dict[str, dict[str, int]],
          recorded: dict[str, dict[str, int]]) -> list[tuple[str, str, int, int]]:
    """Case, count, what it is and what it was, for each that is higher than what was recorded."""
    return [(name, what, value, recorded[name][what]) for name, counts in found.items()
            for what, value in counts.items() if value > recorded[name][what] * _SLACK]


def guard(record: bool) -> int:
    """Compares with what was recorded, or records; gives the exit status."""
    found = guarded(towerstrategy.split_cpu(GUARDED_TOWERS))
    if record:
        GUARD.write_text(json.dumps({"versions": versions(), "counts": found}, indent=1) + "\n")
    kept = json.loads(GUARD.read_text())
    if kept["versions"] != versions():
        print(f"recorded with {kept['versions']}, but these are {versions()}: not compared")
        return 0
    print(table.columns(("case", "count", "recorded", "now"), [
        [name, what, f"{kept['counts'][name][what]:,}", f"{value:,}"]
        for name, counts in found.items() for what, value in counts.items()]))
    higher = worse(found, kept["counts"])
    for name, what, now, before in higher:
        print(f"{name}: {what} {before:,} -> {now:,}")
    return 1 if higher else 0
