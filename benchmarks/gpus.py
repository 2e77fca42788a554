"""Simulates steps on up to eight GPUs: which merge device is best for which links?

Goes in: models, numbers of GPUs, machines.  Comes out: for each merge device, and for
MirroredStrategy, the step time, its efficiency against one GPU, the busiest link and the memory of
each device; and the error of the simulation against published figures.

    TF_CPP_MIN_LOG_LEVEL=3 python -m benchmarks gpus     # 20 minutes or so on two cores
    python -m benchmarks gpus --gpus_cases=mlp --gpus_towers=1,8

The step is traced on logical CPU devices (:mod:`on_gpus`).  TensorFlow gives the costs of its
operations (:mod:`flat`), :mod:`links` the links that its tensors cross, and :mod:`schedule` the
order.  TensorFlow's costs assume a GPU at its peaks; we multiply them by the factor that gives the
published speed of ResNet-50 on one GPU.

Each step is simulated with XLA (:mod:`fusion`) and without.  The reference is one GPU with XLA, the
default of Keras 3.  On towers, XLA compiles the operations that are marked for it
(``jit_compile=True``).  MirroredStrategy is the step of one GPU with a ring all-reduce
(:mod:`ring`).  This is its lower bound; with XLA it is even less, as Keras 3 does not compile it.

Not modelled: the input; Python; the slowdown of kernels by copies at the same time; other
contention for the host's memory; variation between steps.  A CPU operation has all cores and the
whole memory bandwidth to itself, and no two run at once.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

import towerstrategy
from benchmarks import flat, fusion, gpus_chart, links, memory, on_gpus, ring, schedule, table
from towerstrategy.batch import sub_batches

MERGES = ("cpu", "GPU:0", "balanced")
# `balanced`, with batch norm over each tower's rows; only for models with batch norm.
OWN_STATISTICS = "balanced, own statistics"
MIRRORED, ONE = "MirroredStrategy", "one GPU"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to simulate.

    Attributes:
      title: a few words about the model.
      build: makes the model, uncompiled.
      shape, dtype: the shape and dtype of a row of its input.
      rows: the rows that each GPU gets.
      optimizer: the name of the optimizer.
      has_batch_norm: whether the model has batch norm.
    """

    title: str
    build: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: str
    rows: int
    optimizer: str = "adam"
    has_batch_norm: bool = False


def _resnet() -> Any:
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


def _mlp() -> Any:
    return keras.Sequential([
        keras.Input([1024]),
        *(keras.layers.Dense(width, activation="relu") for width in (3072, 3072, 2048)),
        keras.layers.Dense(1000)])


def _transformer() -> Any:
    """A transformer of the size of BERT-base: 12 layers of width 768 with 12 heads."""
    layers = keras.layers
    words = keras.Input([128], dtype="int32")
    x = layers.LayerNormalization()(layers.Embedding(30_522, 768)(words))
    for _ in range(12):
        attended = layers.MultiHeadAttention(12, 64)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        inner = layers.Dense(768)(layers.Dense(3072, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, inner]))
    return keras.Model(words, layers.Dense(1000)(layers.GlobalAveragePooling1D()(x)))


def _embedding() -> Any:
    return keras.Sequential([
        keras.Input([32], dtype="int32"), keras.layers.Embedding(1_000_000, 64),
        keras.layers.Flatten(), keras.layers.Dense(1024, activation="relu"),
        keras.layers.Dense(1000)])


CASES = {
    "resnet50": Case("ResNet-50", _resnet, (224, 224, 3), "float32", 256, has_batch_norm=True),
    "mlp": Case("an MLP of 20 M weights", _mlp, (1024,), "float32", 256),
    "transformer": Case("a transformer of BERT-base's size", _transformer, (128,), "int32", 32),
    "embedding": Case("a 1,000,000 x 64 embedding", _embedding, (32,), "int32", 2048),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """One simulated step.

    Attributes:
      case, machine: names of :data:`CASES` and of :data:`links.MACHINES`.
      gpus: the number of GPUs.
      merge: the merge device, or :data:`MIRRORED` or :data:`ONE`.
      xla: whether XLA compiles the step.
      step_ms: the step time.
      efficiency: the step time of one GPU with XLA over this step time.
      link, link_share: the busiest link, and the part of the step in which it is busy.
      gpu_peak, cpu_peak: the peak of bytes that the step allocates on a GPU, the maximum over GPUs,
        and on the CPU; 0 with XLA.
      gpu_state, cpu_state: bytes of weights and optimizer slots there.
    """

    case: str
    machine: str
    gpus: int
    merge: str
    xla: bool
    step_ms: float
    efficiency: float
    link: str = ""
    link_share: float = 0.0
    gpu_peak: int = 0
    cpu_peak: int = 0
    gpu_state: int = 0
    cpu_state: int = 0


@dataclasses.dataclass(frozen=True)
class Check:
    """A published speedup and the simulated one."""

    what: str
    published: float
    simulated: float

    @property
    def apart(self) -> float:
        return abs(self.simulated / self.published - 1)


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced step: its operations, and the bytes of weights and optimizer slots by device."""

    operations: list[flat.Operation]
    state: dict[str, int]


def traced(case: Case, count: int, merge: str, rows: int | None = None) -> Step:
    """Traces a step of ``case`` on ``count`` GPUs; for MirroredStrategy, on the first one.

    ``merge`` is as in :class:`Result`.
    """
    rows = case.rows if rows is None else rows
    strategy = None
    if count > 1 and merge != MIRRORED:
        device = {"GPU:0": on_gpus.towers(1)[0], OWN_STATISTICS: "balanced"}.get(merge, merge)
        strategy = towerstrategy.TowerStrategy(on_gpus.towers(count), device,
                                               synchronize_batch_norm=merge != OWN_STATISTICS)
        strategy.extended.keep_graphs = True
    first = tf.device(on_gpus.towers(1)[0])
    x = tf.TensorSpec([rows, *case.shape], case.dtype)
    y = tf.TensorSpec([rows], tf.int32)
    keras.backend.clear_session()
    with on_gpus.tracing(cudnn=True):
        with first if strategy is None else strategy.scope():
            model = case.build()
            model.compile(case.optimizer,
                          keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                          jit_compile=False)
            model.optimizer.build(model.trainable_variables)
            if merge == MIRRORED:
                ring.add_collectives(model.optimizer, count)
            global_x = tf.TensorSpec([rows * count, *case.shape], case.dtype)
            model._symbolic_build(data_batch=(global_x, tf.TensorSpec([rows * count], tf.int32)))
        if strategy is None:
            def step(x: Any, y: Any) -> Any:
                with first:
                    return model.train_step((x, y))
        else:
            def step(x: Any, y: Any) -> Any:
                with strategy.extended.step(compiles=True):  # as in `fit`
                    return strategy.run(model.train_step, args=((x, y),))
            x, y = (sub_batches.SubBatchesSpec(*[spec] * count) for spec in (x, y))
        function = tf.function(step, autograph=False).get_concrete_function(x, y)
    gpus = [f"GPU:{number}" for number in range(1 if strategy is None else count)]
    operations = flat.flatten(function, gpus)
    return Step(ring.with_links(operations), _state_bytes(model))


def _state_bytes(model: Any) -> dict[str, int]:
    """The bytes of weights and optimizer slots, by device."""
    sizes: dict[str, int] = {}
    for variable in [*model.variables, *model.optimizer.variables]:
        device = on_gpus.name(variable.value.device)
        size = variable.value.dtype.size * variable.value.shape.num_elements()
        sizes[device] = sizes.get(device, 0) + size
    return sizes


class Simulation:
    """Simulates steps; keeps the costs and the factor of each kind of GPU.

    Args:
      log: is called with each line of progress.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._factors: dict[str, float] = {}
        self._costs: dict[str, flat.Costs] = {}

    def case(self, name: str, case: Case, counts: Sequence[int], machines: Sequence[str],
             rows: int | None = None, merges: Sequence[str] = MERGES) -> Iterator[Result]:
        """Simulates a case on each machine, with each merge device and MirroredStrategy."""
        step = self._traced(name, case, 1, ONE, rows)
        one_gpu: dict[str, Result] = {}
        for machine in machines:
            one_gpu[machine] = self._run(name, machine, 1, ONE, step, True, None)
            yield one_gpu[machine]
            yield self._run(name, machine, 1, ONE, step, False, one_gpu[machine])
        for count in counts:
            if count == 1:
                continue
            for merge in (*merges, *[OWN_STATISTICS] * case.has_batch_norm, MIRRORED):
                step = self._traced(name, case, count, merge, rows)
                for machine in machines:
                    for xla in (True, False):
                        yield self._run(name, machine, count, merge, step, xla, one_gpu[machine])

    def _traced(self, name: str, case: Case, count: int, merge: str, rows: int | None) -> Step:
        start = time.process_time()
        step = traced(case, count, merge, rows)
        gc.collect()
        self._log(f"{name} R={count} {merge}: {len(step.operations):,} operations "
                  f"[{time.process_time() - start:.0f} s of CPU]")
        return step

    def _run(self, name: str, machine: str, count: int, merge: str, step: Step, xla: bool,
             one_gpu: Result | None) -> Result:
        server = links.MACHINES[machine]
        operations, timeline = self._timeline(step, server, count, xla, self.factor(server.gpu))
        peak = {} if xla else memory.peaks(operations, timeline)
        gpus = [f"GPU:{number}" for number in range(count)]
        return Result(
            name, machine, count, merge, xla, 1e3 * timeline.seconds,
            1.0 if one_gpu is None else one_gpu.step_ms / (1e3 * timeline.seconds),
            timeline.busiest, timeline.link_seconds.get(timeline.busiest, 0.0) / timeline.seconds,
            max(peak.get(device, 0) for device in gpus), peak.get(on_gpus.HOST, 0),
            max(step.state.get(device, 0) for device in gpus), step.state.get(on_gpus.HOST, 0))

    def _timeline(self, step: Step, machine: links.Machine, count: int, xla: bool, factor: float
                  ) -> tuple[list[flat.Operation], schedule.Timeline]:
        """The operations that run, after XLA's fusion, and their schedule."""
        costs = self._costs.setdefault(machine.gpu, flat.Costs(machine))
        operations, seconds = step.operations, costs.seconds(step.operations)
        if xla and any(each.xla_scope for each in operations):
            operations, seconds = fusion.clusters(operations, seconds, machine, factor)
        elif xla:
            operations, seconds = fusion.kernels(operations, seconds, machine, compile_all=True)
        seconds = seconds | ring.seconds(operations, machine, count)
        timeline = schedule.run(operations, seconds, machine, factor)
        if xla and not any(each.starting for each in operations):
            timeline.seconds += links.COMPILED  # all of it is one compiled function
        return operations, timeline

    def factor(self, gpu: str) -> float:
        """The published step time of ResNet-50 on one such GPU over the simulated one."""
        if gpu not in self._factors:
            published = links.GPUS[gpu]
            machine = next(each for each in links.MACHINES.values() if each.gpu == gpu)
            case = dataclasses.replace(CASES["resnet50"], optimizer="sgd")  # as published
            step = self._traced("resnet50", case, 1, f"to calibrate {gpu}", published.rows)
            _, timeline = self._timeline(step, machine, 1, published.xla, 1.0)
            self._factors[gpu] = published.rows / published.rows_per_second / timeline.seconds
            self._log(f"{gpu}: {self._factors[gpu]:.2f} times TensorFlow's costs")
        return self._factors[gpu]

    @property
    def factors(self) -> dict[str, float]:
        return dict(self._factors)


# Measured speedups of ResNet-50 on eight GPUs, from the sources of links.GPUS.  P100: gradients
# merged on the CPU, SGD; the others: the ring of Horovod.
_PUBLISHED = (("P100 PCIe 3", "cpu", "sgd", 7.92), ("V100 NVLink", MIRRORED, "sgd", 7.69),
              ("A100 NVLink", MIRRORED, "sgd", 7.70))


def checks(simulation: Simulation) -> list[Check]:
    """The simulated speedups that can be compared with published ones."""
    compared = []
    for machine, merge, optimizer, speedup in _PUBLISHED:
        case = dataclasses.replace(CASES["resnet50"], optimizer=optimizer)
        gpu = links.GPUS[links.MACHINES[machine].gpu]
        merges = [merge] if merge in MERGES else []
        steps = {each.merge: each.step_ms for each in simulation.case(
            "resnet50", case, [8], [machine], gpu.rows, merges) if each.xla == gpu.xla}
        compared.append(Check(f"ResNet-50, {gpu.rows} rows per GPU, 8 x {machine}, {merge}",
                              speedup, 8 * steps[ONE] / steps[merge]))
    return compared


def format_tables(results: Sequence[Result], checked: Sequence[Check]) -> str:
    """The table of results, and that of checks, if there are any."""
    rows = [[each.case, each.machine, str(each.gpus), each.merge, "yes" if each.xla else "no",
             f"{each.step_ms:,.2f}", f"{each.efficiency:.3f}", each.link or "-",
             f"{each.link_share:.2f}",
             *(f"{size / 1e6:,.0f}" for size in (
                 each.gpu_peak, each.gpu_state, each.cpu_peak, each.cpu_state))]
            for each in results]
    header = ("case", "machine", "R", "merge device", "XLA", "step ms", "efficiency",
              "busiest link", "busy", "GPU peak MB", "GPU state MB", "CPU peak MB", "CPU state MB")
    text = table.columns(header, rows)
    if checked:
        text += "\n\n" + table.columns(("published", "speedup", "simulated", "error"), [
            [each.what, f"{each.published:.2f}", f"{each.simulated:.2f}", f"{each.apart:.3f}"]
            for each in checked])
    return text


def _write(path: pathlib.Path, results: Sequence[Result], checked: Sequence[Check],
           factors: dict[str, float]) -> None:
    """Writes all results so far, so that they are kept if the run is interrupted."""
    path.write_text(json.dumps({
        "results": [dataclasses.asdict(each) for each in results],
        "checks": [{**dataclasses.asdict(each), "apart": each.apart} for each in checked],
        "factors": factors}, indent=1))


def main(names: Sequence[str], counts: Sequence[int], machines: Sequence[str], check: bool,
         out: pathlib.Path) -> None:
    """Simulates, prints and writes ``gpus.json`` and ``gpus.png``."""
    towerstrategy.split_cpu(1 + max([*counts, 8 if check else 1]))
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    simulation = Simulation(lambda text: print(f"[{time.perf_counter() - start:.0f} s] {text}",
                                               flush=True))
    checked = checks(simulation) if check else []
    results: list[Result] = []
    for name in names:
        for result in simulation.case(name, CASES[name], counts, machines):
            results.append(result)
            _write(out / "gpus.json", results, checked, simulation.factors)
    print(f"\n{format_tables(results, checked)}")
    gpus_chart.draw(out / "gpus.png", results)
    print(f"\n{out / 'gpus.json'}\n{out / 'gpus.png'}")
