"""Steps on up to eight GPUs, simulated: which merge device for which links?

Goes in: models, numbers of GPUs, machines.  Comes out: for each merge device, and for
MirroredStrategy, the step, its efficiency against one GPU, the busiest link and the memory of each
device; and how far the simulation is from published figures.

    TF_CPP_MIN_LOG_LEVEL=3 python -m benchmarks gpus     # 20 minutes or so on two cores
    python -m benchmarks gpus --gpus_cases=mlp --gpus_towers=1,8

The step is traced on logical CPU devices (:mod:`on_gpus`), costed by TensorFlow (:mod:`flat`), sent
over links (:mod:`links`) and put in order (:mod:`schedule`).  TensorFlow's costs are those of a GPU
that reaches its peaks; they are multiplied by what makes one GPU's ResNet-50 what was published.

Each step is there with XLA (:mod:`fusion`) and without.  What all is measured by is one GPU's with
XLA, as Keras 3 runs it by itself.  Of towers XLA compiles what they mark for it
(``jit_compile=True``).  MirroredStrategy is the step of one GPU with a ring in it (:mod:`ring`):
the best that it can do, and with XLA better than that, as Keras 3 does not compile it.

What the model leaves out: the input; Python; what concurrent kernels and copies take from each
other; other contention for the host's memory; any variation between steps.  A CPU operation has all
cores and the whole memory bandwidth to itself, and no two run at once.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

import towerstrategy
from benchmarks import flat, fusion, gpus_chart, links, memory, on_gpus, ring, schedule, table
from towerstrategy.batch import sub_batches

MERGES = ("cpu", "GPU:0", "balanced")
# `balanced`, with batch norm of each tower's own rows: where a model has any.
OWN = "balanced, own statistics"
MIRRORED, ONE = "MirroredStrategy", "one GPU"


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
      what: in words.
      build: makes it, uncompiled.
      shape, dtype: of a row of its input.
      rows: how many a GPU gets.
      optimizer: its name.
      normalizes: whether it has batch norm.
    """

    what: str
    build: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: str
    rows: int
    optimizer: str = "adam"
    normalizes: bool = False


def _resnet() -> Any:
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


def _mlp() -> Any:
    return keras.Sequential([
        keras.Input([1024]),
        *(keras.layers.Dense(width, activation="relu") for width in (3072, 3072, 2048)),
        keras.layers.Dense(1000)])


def _transformer() -> Any:
    """The size of BERT-base: 12 layers of width 768 with 12 heads, a vocabulary of 30,522."""
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
    "resnet50": Case("ResNet-50", _resnet, (224, 224, 3), "float32", 256, normalizes=True),
    "mlp": Case("an MLP of 20 M weights", _mlp, (1024,), "float32", 256),
    "transformer": Case("a transformer of BERT-base's size", _transformer, (128,), "int32", 32),
    "embedding": Case("a 1,000,000 x 64 embedding", _embedding, (32,), "int32", 2048),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """One simulated step.

    Attributes:
      case, machine, gpus, merge: what and where; ``merge`` may be :data:`MIRRORED` or :data:`ONE`.
      xla: whether XLA compiles it.
      step_ms: how long.
      efficiency: the step of one GPU with XLA over it.
      link: the link that is held longest, and ``link_share`` of the step.
      gpu_peak, cpu_peak: bytes that the step makes on the fullest GPU and on the CPU; 0 with XLA.
      gpu_state, cpu_state: bytes of weights and optimizer there.
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
    """A published speedup beside the simulated one."""

    what: str
    published: float
    simulated: float

    @property
    def apart(self) -> float:
        return abs(self.simulated / self.published - 1)


@dataclasses.dataclass(frozen=True)
class Step:
    """A traced step: its operations, and the bytes of weights and optimizer by device."""

    operations: list[flat.Operation]
    state: dict[str, int]


def traced(case: Case, count: int, merge: str, rows: int | None = None,
           reached: Mapping[int, frozenset[int]] | None = None) -> Step:
    """Traces a step of ``case`` on ``count`` GPUs; of MirroredStrategy, on the first one.

    ``reached`` is as for :func:`on_gpus.tracing`.
    """
    rows = case.rows if rows is None else rows
    strategy = None
    if count > 1 and merge != MIRRORED:
        device = {"GPU:0": on_gpus.towers(1)[0], OWN: "balanced"}.get(merge, merge)
        strategy = towerstrategy.TowerStrategy(on_gpus.towers(count), device,
                                               synchronize_batch_norm=merge != OWN)
        strategy.extended.keep_graphs = True
    first = tf.device(on_gpus.towers(1)[0])
    x = tf.TensorSpec([rows, *case.shape], case.dtype)
    y = tf.TensorSpec([rows], tf.int32)
    keras.backend.clear_session()
    with on_gpus.tracing(reached, cudnn=True):
        with first if strategy is None else strategy.scope():
            model = case.build()
            model.compile(case.optimizer,
                          keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                          jit_compile=False)
            model.optimizer.build(model.trainable_variables)
            if merge == MIRRORED:
                ring.put(model.optimizer, count)
            whole = tf.TensorSpec([rows * count, *case.shape], case.dtype)
            model._symbolic_build(data_batch=(whole, tf.TensorSpec([rows * count], tf.int32)))
        if strategy is None:
            def step(x: Any, y: Any) -> Any:
                with first:
                    return model.train_step((x, y))
        else:
            def step(x: Any, y: Any) -> Any:
                with strategy.extended.step(compiles=True):  # as Keras' own steps are run
                    return strategy.run(model.train_step, args=((x, y),))
            x, y = (sub_batches.SubBatchesSpec(*[spec] * count) for spec in (x, y))
        function = tf.function(step, autograph=False).get_concrete_function(x, y)
    gpus = [f"GPU:{number}" for number in range(1 if strategy is None else count)]
    operations = flat.flatten(function, gpus)
    return Step(ring.on_the_ring(operations), _state(model))


def _state(model: Any) -> dict[str, int]:
    held: dict[str, int] = {}
    for variable in [*model.variables, *model.optimizer.variables]:
        device = on_gpus.name(variable.value.device)
        size = variable.value.dtype.size * variable.value.shape.num_elements()
        held[device] = held.get(device, 0) + size
    return held


class Simulation:
    """Simulates steps, and keeps what one GPU takes.

    Args:
      say: takes a line of progress.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._factors: dict[str, float] = {}
        self._costs: dict[str, flat.Costs] = {}

    def case(self, name: str, case: Case, counts: Sequence[int], machines: Sequence[str],
             rows: int | None = None, merges: Sequence[str] = MERGES) -> Iterator[Result]:
        """All merge devices of a case, on all machines, as they come."""
        alone = self._traced(name, case, 1, ONE, rows)
        ones: dict[str, Result] = {}
        for machine in machines:
            ones[machine] = self._run(name, machine, 1, ONE, alone, True, None)
            yield ones[machine]
            yield self._run(name, machine, 1, ONE, alone, False, ones[machine])
        for count in counts:
            if count == 1:
                continue
            for merge in (*merges, *[OWN] * case.normalizes, MIRRORED):
                plain = self._traced(name, case, count, merge, rows)
                for machine in machines:
                    reached = links.MACHINES[machine].reached if merge != MIRRORED else {}
                    step = self._traced(name, case, count, merge, rows, reached) if reached \
                        else plain
                    for xla in (True, False):
                        yield self._run(name, machine, count, merge, step, xla, ones[machine])

    def _traced(self, name: str, case: Case, count: int, merge: str, rows: int | None,
                reached: Mapping[int, frozenset[int]] | None = None) -> Step:
        start = time.process_time()
        step = traced(case, count, merge, rows, reached)
        gc.collect()
        self._say(f"{name} R={count} {merge}: {len(step.operations):,} operations "
                  f"[{time.process_time() - start:.0f} s of CPU]")
        return step

    def _run(self, name: str, machine: str, count: int, merge: str, step: Step, xla: bool,
             one: Result | None) -> Result:
        where = links.MACHINES[machine]
        operations, line = self._line(step, where, count, xla, self.factor(where.gpu))
        peak = {} if xla else memory.peaks(operations, line)
        gpus = [f"GPU:{number}" for number in range(count)]
        return Result(
            name, machine, count, merge, xla, 1e3 * line.seconds,
            1.0 if one is None else one.step_ms / (1e3 * line.seconds), line.busiest,
            line.link_seconds.get(line.busiest, 0.0) / line.seconds,
            max(peak.get(device, 0) for device in gpus), peak.get(on_gpus.HOST, 0),
            max(step.state.get(device, 0) for device in gpus), step.state.get(on_gpus.HOST, 0))

    def _line(self, step: Step, machine: links.Machine, count: int, xla: bool, factor: float
              ) -> tuple[list[flat.Operation], schedule.Timeline]:
        costs = self._costs.setdefault(machine.gpu, flat.Costs(machine))
        operations, seconds = step.operations, costs.of(step.operations)
        if xla and any(each.compiled for each in operations):
            operations, seconds = fusion.clusters(operations, seconds, machine, factor)
        elif xla:
            operations, seconds = fusion.kernels(operations, seconds, machine, everything=True)
        seconds = seconds | ring.seconds(operations, machine, count)
        return operations, schedule.run(operations, seconds, machine, factor)

    def factor(self, gpu: str) -> float:
        """How many times TensorFlow's costs one GPU of that name takes."""
        if gpu not in self._factors:
            given = links.GPUS[gpu]
            machine = next(each for each in links.MACHINES.values() if each.gpu == gpu)
            case = dataclasses.replace(CASES["resnet50"], optimizer="sgd")  # as published
            step = self._traced("resnet50", case, 1, f"to calibrate {gpu}", given.rows)
            _, line = self._line(step, machine, 1, given.compiled, 1.0)
            self._factors[gpu] = given.rows / given.rows_per_second / line.seconds
            self._say(f"{gpu}: {self._factors[gpu]:.2f} times TensorFlow's costs")
        return self._factors[gpu]

    @property
    def factors(self) -> dict[str, float]:
        return dict(self._factors)


# What was measured, of ResNet-50 on eight GPUs: the sources of links.GPUS. P100s: merged on the
# CPU, SGD; the others: Horovod's ring.
_PUBLISHED = (("P100 PCIe 3", "cpu", "sgd", 7.92), ("V100 NVLink", MIRRORED, "sgd", 7.69),
              ("A100 NVLink", MIRRORED, "sgd", 7.70))


def checks(simulation: Simulation) -> list[Check]:
    """The simulation beside published figures."""
    found = []
    for machine, merge, optimizer, published in _PUBLISHED:
        case = dataclasses.replace(CASES["resnet50"], optimizer=optimizer)
        given = links.GPUS[links.MACHINES[machine].gpu]
        merges = [merge] if merge in MERGES else []
        steps = {each.merge: each.step_ms for each in simulation.case(
            "resnet50", case, [8], [machine], given.rows, merges) if each.xla == given.compiled}
        found.append(Check(f"ResNet-50, {given.rows} rows a GPU, 8 x {machine}, {merge}", published,
                           8 * steps[ONE] / steps[merge]))
    return found


def shown(results: Sequence[Result], checked: Sequence[Check]) -> str:
    """Both as tables."""
    rows = [[each.case, each.machine, str(each.gpus), each.merge, "yes" if each.xla else "no",
             f"{each.step_ms:,.2f}", f"{each.efficiency:.3f}", each.link or "-",
             f"{each.link_share:.2f}",
             *(f"{size / 1e6:,.0f}" for size in (
                 each.gpu_peak, each.gpu_state, each.cpu_peak, each.cpu_state))]
            for each in results]
    header = ("case", "machine", "R", "merge device", "XLA", "step ms", "of linear", "busiest link",
              "its share", "GPU peak MB", "GPU state MB", "CPU peak MB", "CPU state MB")
    text = table.columns(header, rows)
    if checked:
        text += "\n\n" + table.columns(("published", "speedup", "simulated", "apart"), [
            [each.what, f"{each.published:.2f}", f"{each.simulated:.2f}", f"{each.apart:.3f}"]
            for each in checked])
    return text


def _write(path: pathlib.Path, results: Sequence[Result], checked: Sequence[Check],
           factors: dict[str, float]) -> None:
    """Writes what there is so far, so that a broken run is not lost."""
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
    print(f"\n{shown(results, checked)}")
    gpus_chart.draw(out / "gpus.png", results)
    print(f"\n{out / 'gpus.json'}\n{out / 'gpus.png'}")
