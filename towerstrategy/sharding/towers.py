"""The towers that a step is partitioned over, and the number of rows that each of them has.

Goes in: devices, and the towers' numbers of rows.  Comes out: :class:`Towers`, which makes nodes on
a tower or on the host: for the rows of a tower, of all towers before it and of the batch, and for
sums over the towers.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from towerstrategy.sharding import transfers
from towerstrategy.sharding.across import Across
from towerstrategy.sharding.builder import Builder, Ref
from towerstrategy.sharding.spec import Sharded, Size, can_be_cut, parts_of

MOST_TO_EXCHANGE = 8  # towers: the copies grow with the square

_Method = TypeVar("_Method", bound=Callable[..., Ref])


def cached(make: _Method) -> _Method:
    """Decorates a method of :class:`Towers`, which then makes its node at the first call only."""

    @functools.wraps(make)
    def made_once(self: Any, *args: Any) -> Ref:
        key = (make, *args)
        if key not in self.cache:
            self.cache[key] = make(self, *args)
        return self.cache[key]

    return made_once  # type: ignore[return-value]


class Towers:
    """The towers that a step is partitioned over, and their rows of the batch.

    Args:
      builder: collects the nodes.
      stage_devices: for each tower the device of each stage; one device without stages.
      merge: the merge device.
      host: the CPU that holds the numbers of rows; kernels take shapes from its memory.
      scopes: the name scope of each tower's nodes, with a "/" at the end.
      counts: returns a tower's number of rows of a batch, by name, an integer scalar, if it can of
        the given dtype; for "each" instead of a tower the numbers of all workers' towers, an int64
        vector, or None if they are unknown; for a tower by itself also "total", the batch's number
        of rows, and "earlier", that of the rows before its own.
      on_cpu: whether the towers are CPUs, which make their shapes themselves.
      draws_rows: whether a tower draws its rows of one device's random numbers, or its own numbers.
      across: the values that cross workers, each of which has towers; None with one worker.
      spare: the device for large tensors that are made once and for no variable; "" for ``merge``.
      number: of a tower by itself: its number among all towers.

    Attributes:
      stage: the stage of all nodes that are made here; None if unknown.
      devices: the towers' devices of that stage; of the first stage if it is unknown.
      crossings: how often tensors are redistributed, by kind.
    """

    stage: int | None = None

    def __init__(self, builder: Builder, stage_devices: Sequence[Sequence[str]], merge: str,
                 host: str, scopes: Sequence[str],
                 counts: Callable[[int | str, tf.DType, str], Any],
                 on_cpu: bool = False, draws_rows: bool = True,
                 across: Across | None = None, spare: str = "",
                 number: int | None = None) -> None:
        self.spare, self.is_alone = spare, number is not None
        self.across = across or Across(None, builder.graph, builder, builder.take)
        workers = self.across.workers
        self.first = number or (workers.first if workers else 0)
        self.replicas = len(stage_devices) if workers is None else workers.replicas
        self.builder, self.merge, self.host = builder, merge, host
        self.stage_devices, self.devices = stage_devices, [row[0] for row in stage_devices]
        self.scopes, self.on_cpu, self.draws_rows = scopes, on_cpu, draws_rows
        self.places = {} if on_cpu else transfers.places_of(stage_devices)
        self._counts = counts
        self.cache: dict[Any, Ref] = {}
        self.crossings: collections.Counter[str] = collections.Counter()
        self._stages: dict[int | None, Towers] = {}

    def __len__(self) -> int:
        return len(self.devices)

    def at(self, stage: int | None) -> Towers:
        """The same towers with the devices of this stage."""
        if stage not in self._stages:
            towers = self._stages[stage] = copy.copy(self)
            towers.stage = stage
            towers.devices = [row[stage or 0] for row in self.stage_devices]
        return self._stages[stage]

    def alone(self, tower: int) -> Towers:
        """A tower by itself, which knows how many rows the batch has, and those before its own."""
        make: dict[Any, Any] = {
            0: functools.partial(self.count, tower), "total": self.total,
            "earlier": functools.partial(self.offset, tower)}
        return Towers(self.builder, [self.stage_devices[tower]], self.devices[tower], self.host,
                      [self.scopes[tower]], lambda name, *key: make[name](*key), self.on_cpu,
                      self.draws_rows, number=self.first + tower).at(self.stage)

    def brought(self, ref: Ref, device: str) -> Ref:
        """A tensor for a loop, made on the device (if not "") where its iterations use it.

        TensorFlow places what goes around in a loop with the node that makes the input, and else
        sends it in each iteration.  Resources and strings stay where they are.
        """
        if ref.dtype in (tf.resource, tf.string) or device in ("", self.builder.device(ref)):
            return ref
        scope = self.scopes[0] if self.is_alone else "merge/"
        return self.builder.make("Identity", [ref], device, f"{scope}Identity")

    def stage_on(self, device: str) -> int | None:
        """The stage, of any tower, that is on ``device``; None without stages."""
        return next((stage for row in self.stage_devices if len(row) > 1
                     for stage, name in enumerate(row) if name == device), None)

    def on(self, tower: int, type: str, *inputs: Ref, **attrs: Any) -> Ref:
        """The first output of a new operation on a tower, named in its scope."""
        return self.builder.make(type, inputs, self.devices[tower], f"{self.scopes[tower]}{type}",
                                 **attrs)

    def on_host(self, type: str, *inputs: Ref, **attrs: Any) -> Ref:
        """The first output of a new operation on the host."""
        return self.builder.make(type, inputs, self.host, **attrs)

    def number(self, value: Any, dtype: tf.DType = tf.int64) -> Ref:
        """A constant on the host."""
        return self.builder.constant(value, dtype, self.host)

    @cached
    def count(self, tower: int, dtype: tf.DType = tf.int64, batch: str = "") -> Ref:
        """A tower's number of rows of a batch."""
        count: Ref = self._counts(tower, dtype, batch)
        if count.dtype == dtype:
            return count
        return self.on_host("Cast", self.count(tower, tf.int64, batch), DstT=dtype)

    @cached
    def counts(self, dtype: tf.DType = tf.int64, batch: str = "") -> Ref:
        """The number of rows of each tower of all workers, a vector."""
        return self._counts("each", dtype, batch) or self.of_all_workers(
            [self.count(tower, dtype, batch) for tower in range(len(self))])

    def of_all_workers(self, numbers: Sequence[Ref]) -> Ref:
        """A vector with a number for each tower of all workers; ``numbers`` are these towers'."""
        paddings = self.number([[self.first, self.replicas - self.first - len(self)]], tf.int32)
        padded = self.on_host("PadV2", self.on_host("Pack", *numbers, axis=0), paddings,
                              self.number(0, numbers[0].dtype))
        return self.across.cross("sum", padded, self.host, tf.TensorShape([self.replicas]))

    @cached
    def total(self, dtype: tf.DType = tf.int64, batch: str = "") -> Ref:
        """A batch's number of rows."""
        if self.is_alone:
            return self._counts("total", dtype, batch)
        if self.across.workers is not None:
            return self._sum_of_first(self.counts(tf.int64, batch), self.replicas, dtype)
        return self.add_up([self.count(tower, dtype, batch) for tower in range(len(self))],
                           self.host)

    def size(self, spec: Sharded | Size, dtype: tf.DType, tower: int | None = None) -> Ref:
        """How many positions the examples have, on a tower; for None, on all towers."""
        assert spec.times is not None and can_be_cut(spec)
        counts = [self.times(self.total(dtype, batch) if tower is None
                             else self.count(tower, dtype, batch), number * spec.times)
                  for batch, number in parts_of(spec) if isinstance(batch, str)]
        return functools.reduce(functools.partial(self.on_host, "AddV2"), counts)

    def start(self, spec: Sharded | Size, dtype: tf.DType, tower: int) -> Ref:
        """A tower's first position in a tensor of one piece, of a batch's examples."""
        assert isinstance(spec.group, str) and spec.times is not None
        return self.times(self.offset(tower, dtype, spec.group), spec.times)

    def times(self, number: Ref, factor: int) -> Ref:
        """A number on the host times a constant."""
        return number if factor == 1 else self.on_host(
            "Mul", number, self.number(factor, number.dtype))

    @cached
    def earlier(self, dtype: tf.DType = tf.int64, batch: str = "") -> Ref:
        """The number of rows before the first of these towers: of all workers before this one."""
        if self.is_alone:
            return self._counts("earlier", dtype, batch)
        if self.across.workers is None:
            return self.number(0, dtype)
        return self._sum_of_first(self.counts(tf.int64, batch), self.first, dtype)

    def _sum_of_first(self, vector: Ref, count: int, dtype: tf.DType) -> Ref:
        """The sum of the first ``count`` entries of a vector."""
        begin, size = self.number([0], tf.int32), self.number([count], tf.int32)
        total = self.on_host("Sum", self.on_host("Slice", vector, begin, size), begin)
        return total if total.dtype == dtype else self.on_host("Cast", total, DstT=dtype)

    @cached
    def offset(self, tower: int, dtype: tf.DType = tf.int64, batch: str = "") -> Ref:
        """The number of rows of all towers before this one."""
        if tower == 0:
            return self.earlier(dtype, batch)
        return self.on_host("AddV2", self.offset(tower - 1, dtype, batch),
                            self.count(tower - 1, dtype, batch))

    @cached
    def padding_rows(self, rows: Ref) -> Ref:
        """1 for a tower without rows, which gets a row of padding, else 0; an int32 scalar."""
        return self.on_host("Cast", self.on_host("Equal", rows, self.number(0)), DstT=tf.int32)

    @property
    def exchange(self) -> bool:
        """Whether towers send small tensors to each other, rather than to one that merges them."""
        return not self.on_cpu and self.across.workers is None and len(self) <= MOST_TO_EXCHANGE

    def shapes_on(self, tower: int, dtype: tf.DType | None = None) -> str:
        """The device that makes a tower's shapes, or packs numbers of this dtype into them.

        It is the tower if it is a CPU, else the host.  int32 is packed on the tower: GPU kernels
        keep it in the host's memory, while TensorFlow's layout optimizer takes shapes that the host
        made to the GPU and back, to permute them.
        """
        return self.devices[tower] if self.on_cpu or dtype == tf.int32 else self.host

    @cached
    def vector(self, tower: int, number: Ref, at: int, length: int, other: int) -> Ref:
        """A vector for a tower: ``number`` at index ``at``, ``other`` at all other indices."""
        return self.shape(tower, number, at, [other] * length)

    def shape(self, tower: int, rows: Ref, at: int, sizes: Sequence[Any]) -> Ref:
        """A tower's shape: ``rows`` at index ``at``, else ``sizes``."""
        device = self.shapes_on(tower, rows.dtype)
        return self.builder.make("Pack", [
            rows if place == at else self.builder.constant(int(size), rows.dtype, device)
            for place, size in enumerate(sizes)], device, f"{self.scopes[tower]}Pack", axis=0)

    def entry(self, vector: Ref, at: int) -> Ref:
        """Entry ``at`` of a vector, on the host."""
        return self.on_host("GatherV2", vector, self.number(at, tf.int32),
                            self.number(0, tf.int32))

    def with_entry(self, vector: Ref, at: int, other: Ref) -> Ref:
        """``vector`` with entry ``at`` of ``other``, a vector or a scalar, on the host."""
        zero, one, place = (self.number(number, tf.int32) for number in (0, 1, at))
        index = self.on_host("Range", zero, self.on_host("Size", vector), one)
        return self.on_host("SelectV2", self.on_host("Equal", index, place), other, vector)

    def add_up(self, parts: Sequence[Ref], device: str,
               shape: tf.TensorShape | None = None) -> Ref:
        """The sum over the towers of all workers; ``parts`` are those of this worker's towers."""
        return self.across.cross("sum", self.add_up_here(parts, device, shape), device, shape)

    def add_up_here(self, parts: Sequence[Ref], device: str, shape: tf.TensorShape | None = None,
                    dtype: tf.DType | None = None) -> Ref:
        """The sum over this worker's towers, cast to ``dtype`` if given."""
        dtype = dtype or parts[0].dtype
        parts = transfers.summed_in_halves(self.builder, self.places, parts, device, shape)
        if len(parts) == len(self.devices):  # add up the micro-batches of a device there, in turn
            by_device: dict[str, Ref] = {}
            for part, source in zip(parts, self.devices):
                by_device[source] = part if source not in by_device else self.builder.make(
                    "AddV2", [by_device[source], part], source, "merge/AddV2")
            parts = list(by_device.values())
        if len(parts) > 1:
            if parts[0].dtype in (tf.float16, tf.bfloat16):  # only the sum is rounded
                parts = [self.builder.make("Cast", [part], device, DstT=tf.float32)
                         for part in parts]
            parts = [self.builder.make("AddN", parts, device, "merge/AddN")]
        return parts[0] if parts[0].dtype == dtype else self.builder.make(
            "Cast", parts, device, DstT=dtype)

    def rewire(self) -> None:
        """Packs and relays tensors among the nodes that the builder has collected.

        With micro-batches or stages nothing is packed, as these must begin before others end;
        tensors that cross machines are packed by :mod:`across`.
        """
        if (self.across.workers is None and len(set(self.devices)) == len(self.stage_devices)
                and max(map(len, self.stage_devices)) == 1):
            transfers.pack(self.builder)
        transfers.relay_tensors(self.builder, self.places)
