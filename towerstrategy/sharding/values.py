"""What stands for a traced tensor while its step is partitioned, and how it is redistributed.

Goes in: a tensor's spec and the nodes that make it.  Comes out: the same value as another spec, by
the nodes that this takes: a sum of parts, a concatenation of slices, a slice of the whole.  Each is
made once and only if something asks for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding import blocks, means, relays
from towerstrategy.sharding.across import Across
from towerstrategy.sharding.builder import Builder, Ref
from towerstrategy.sharding.spec import MEAN, SUM, ListOf, Partial, Replicated, Sharded, Size, Spec

_REDUCTIONS = {"max": "Maximum", "min": "Minimum", "and": "LogicalAnd", "or": "LogicalOr"}


class Towers:
    """The towers that a step is partitioned over, and their rows of the batch.

    Args:
      builder: where nodes are collected.
      rows: for each tower the devices of its stages, one as a rule.
      merge: the device for what is made once; if not "", ``spare`` for what is large.
      host: the CPU that numbers of rows are kept on; kernels take shapes from there.
      scopes: the name scope of each tower's nodes, with a "/" behind it.
      counts: gives each tower's number of rows, int64 scalars; asked for None those of the towers
        of all workers, a vector, or None where they are not known.
      on_cpu: whether the towers are CPUs, which make their shapes themselves.
      draws_rows: whether a tower draws its rows of what one device draws, not numbers of its own.
      across: what crosses the workers, of whom each has towers of its own; None: all are here.

    Attributes:
      stage: the stage in which all is done that is made here; None where it is not known.
      devices: the towers' devices for it; those of the first stage where it is not known.
    """

    stage: int | None = None

    def __init__(self, builder: Builder, rows: Sequence[Sequence[str]], merge: str, host: str,
                 scopes: Sequence[str], counts: Callable[[int | None], Ref | None],
                 on_cpu: bool = False, draws_rows: bool = True,
                 across: Across | None = None, spare: str = "") -> None:
        self.spare = spare
        self.across = across or Across(None, builder.graph, builder, builder.take)
        workers = self.across.workers
        self.first = 0 if workers is None else workers.first
        self.replicas = len(rows) if workers is None else workers.replicas
        self.builder, self.rows, self.merge, self.host = builder, rows, merge, host
        self.devices = [row[0] for row in rows]
        self.scopes, self.on_cpu, self.draws_rows = scopes, on_cpu, draws_rows
        self.halves = () if on_cpu else relays.halves(rows)
        self._counts = counts
        self._known: dict[Any, Ref] = {}
        self.crossings: dict[str, int] = {}
        self._stages: dict[int | None, Towers] = {}

    def __len__(self) -> int:
        return len(self.devices)

    def at(self, stage: int | None) -> Towers:
        """The same towers, where they do what is of that stage."""
        if stage not in self._stages:
            there = self._stages[stage] = copy.copy(self)
            there.stage = stage
            there.devices = [row[stage or 0] for row in self.rows]
        return self._stages[stage]

    def stage_on(self, device: str) -> int | None:
        """The stage, of whichever tower, that is on ``device``; None where there are no stages."""
        return next((stage for row in self.rows if len(row) > 1
                     for stage, name in enumerate(row) if name == device), None)

    def note(self, kind: str) -> None:
        """Counts a redistribution."""
        self.crossings[kind] = self.crossings.get(kind, 0) + 1

    def count(self, tower: int, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows a tower has."""
        def make() -> Ref:
            count = self._counts(tower)
            assert count is not None
            return self._as(count, dtype)

        return self.once(("count", tower, dtype), make)

    def counts(self) -> Ref:
        """How many rows each tower of all workers has."""
        def make() -> Ref:
            known = self._counts(None)
            if known is not None:
                return known
            own = self.builder.make("Pack", [self.count(tower) for tower in range(len(self))],
                                    self.host, axis=0)
            after = self.replicas - self.first - len(self)
            around = self.builder.constant([[self.first, after]], tf.int32, self.host)
            zero = self.builder.constant(0, tf.int64, self.host)
            placed = self.builder.make("PadV2", [own, around, zero], self.host)
            return self.across.cross("sum", placed, self.host, tf.TensorShape([self.replicas]))

        return self.once("counts", make)

    def total(self, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows the batch has."""
        def make() -> Ref:
            if self.across.workers is not None:
                return self._as(self._first_of(self.counts(), self.replicas), dtype)
            return self.add_up([self.count(tower, dtype) for tower in range(len(self))], self.host)

        return self.once(("total", dtype), make)

    def earlier(self, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows the workers before this one have."""
        if self.across.workers is None:
            return self.builder.constant(0, dtype, self.host)
        counts = self.counts()  # asked for on all workers, as this may cross
        return self.once(("earlier", dtype), lambda: self._as(
            self._first_of(counts, self.first), dtype))

    def of_earlier(self, number: Ref) -> Ref:
        """The sum of such a number of each worker before this one."""
        workers, build = self.across.workers, self.builder
        if workers is None:
            return build.constant(0, number.dtype, self.host)
        alone = build.make("Pack", [number], self.host, axis=0)
        around = build.constant([[workers.index, workers.count - 1 - workers.index]], tf.int32,
                                self.host)
        zero = build.constant(0, number.dtype, self.host)
        placed = build.make("PadV2", [alone, around, zero], self.host)
        numbers = self.across.cross("sum", placed, self.host, tf.TensorShape([workers.count]))
        return self._first_of(numbers, workers.index)

    def _first_of(self, vector: Ref, number: int) -> Ref:
        """The sum of the first entries of a vector."""
        build = self.builder
        begin, size = (build.constant([place], tf.int32, self.host) for place in (0, number))
        return build.make("Sum", [build.make("Slice", [vector, begin, size], self.host),
                                  build.constant([0], tf.int32, self.host)], self.host)

    def offset(self, tower: int, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows the towers before this one have."""
        if tower == 0:
            return self.earlier(dtype)
        return self.once(("offset", tower, dtype), lambda: self.builder.make(
            "AddV2", [self.offset(tower - 1, dtype), self.count(tower - 1, dtype)], self.host))

    def missing(self, tower: int) -> Ref:
        """1 for a tower without rows, else 0; an int32 scalar."""
        return self.once(("missing", tower), lambda: self.builder.make("Cast", [
            self.builder.make("Equal", [self.count(tower), self.builder.constant(
                0, tf.int64, self.host)], self.host)], self.host, DstT=tf.int32))

    def shapes_on(self, tower: int) -> str:
        """Where a tower's shapes are made: on the tower if it is a CPU, else on the host."""
        return self.devices[tower] if self.on_cpu else self.host

    def vector(self, tower: int, number: Ref, at: int, length: int, other: int) -> Ref:
        """A vector with ``number`` in one place and ``other`` in all others, for a tower."""
        def make() -> Ref:
            device = self.shapes_on(tower)
            rest = self.builder.constant(other, number.dtype, device)
            return self.builder.make("Pack", [number if place == at else rest
                                              for place in range(length)], device,
                                     f"{self.scopes[tower]}Pack", axis=0)

        return self.once(("vector", tower, number, at, length, other), make)

    def add_up(self, parts: Sequence[Ref], device: str,
               shape: tf.TensorShape | None = None) -> Ref:
        """The sum over the towers of all workers, of the values of those that are here."""
        parts = relays.summed(self.builder, self.halves, parts, device, shape)
        return self.across.cross("sum", self._added(parts, device), device, shape)

    def _added(self, parts: Sequence[Ref], device: str) -> Ref:
        here = dict.fromkeys(self.devices)
        if len(parts) == len(self.devices) > len(here):  # micro-batches: first those of a device
            parts = [self._one_by_one([part for part, at in zip(parts, self.devices)
                                       if at == own], own) for own in here]
        if len(parts) == 1:
            return parts[0]
        dtype = parts[0].dtype
        if dtype in (tf.float16, tf.bfloat16):  # cross as such, and are rounded once
            wide = [self.builder.make("Cast", [part], device, DstT=tf.float32) for part in parts]
            total = self.builder.make("AddN", wide, device, "merge/AddN")
            return self.builder.make("Cast", [total], device, DstT=dtype)
        return self.builder.make("AddN", parts, device, "merge/AddN")

    def _one_by_one(self, parts: Sequence[Ref], device: str) -> Ref:
        """A sum that holds no two of its parts for long."""
        total = parts[0]
        for part in parts[1:]:
            total = self.builder.make("AddV2", [total, part], device, "merge/AddV2")
        return total

    def _as(self, ref: Ref, dtype: tf.DType) -> Ref:
        same = ref.dtype == dtype
        return ref if same else self.builder.make("Cast", [ref], self.host, DstT=dtype)

    def once(self, key: Any, make: Callable[[], Ref]) -> Ref:
        """What ``make`` makes when ``key`` is asked for first."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


class Value:
    """A tensor of the traced step.

    Args:
      towers: the towers.
      spec: what the tensor is.
      shape: its static shape, with all rows.
      whole: makes the whole tensor; None where only the parts are there.
      part: makes a tower's part of it; None where it is the whole.
      device: where the whole tensor is made.
      constant: makes it on a tower, of such towers; None where a tower is sent it.
    """

    def __init__(self, towers: Towers, spec: Spec, shape: tf.TensorShape,
                 whole: Callable[[], Ref] | None = None,
                 part: Callable[[int], Ref] | None = None, device: str = "",
                 constant: Callable[[int, Towers], Ref] | None = None) -> None:
        self.spec, self.shape, self.device, self.constant = spec, shape, device, constant
        self.towers = towers
        self._make_whole, self._make_part = whole, part
        self._whole: Ref | None = None
        self._parts: dict[int, Ref] = {}
        self._others: dict[Any, Value] = {}

    @property
    def stage(self) -> int | None:
        """The stage in which it is made; None where it is not known."""
        stage = self.towers.stage
        return self.towers.stage_on(self.device) if stage is None and self.device else stage

    @property
    def size(self) -> int:
        """How many entries it has, so far as that is known."""
        return self.shape.num_elements() or 0

    def whole(self) -> Ref:
        """The whole tensor."""
        if self._whole is None:
            make = self._make_whole
            self._whole = self._gathered() if make is None else make()
            self.towers.builder.note_shape(self._whole, self.shape)
        return self._whole

    def part(self, tower: int) -> Ref:
        """What a tower has of it: its part, or the whole where there are none."""
        if self.constant is not None:
            return self.constant(tower, self.towers)
        if self._make_part is None:
            return self.whole()
        if tower not in self._parts:
            made = self._parts[tower] = self._make_part(tower)
            if isinstance(self.spec, Partial):
                self.towers.builder.note_shape(made, self.shape)
        return self._parts[tower]

    def on(self, device: str) -> Ref:
        """The whole tensor, for what is done on ``device``; a tower there has constants already."""
        here = self.constant is not None and device in self.towers.devices
        return self.part(self.towers.devices.index(device)) if here else self.whole()

    def at(self, towers: Towers) -> Value:
        """The same tensor where these towers use it, if it is of no stage of theirs."""
        if towers.stage == self.towers.stage or not isinstance(self.spec, Replicated):
            return self
        if towers.stage not in self._others:
            self._others[towers.stage] = Value(towers, self.spec, self.shape, self.whole, None,
                                               self.device, self.constant)
        return self._others[towers.stage]

    def parts(self) -> list[Ref]:
        """What each tower has of it."""
        return [self.part(tower) for tower in range(len(self.towers))]

    def as_spec(self, wanted: Spec) -> Value:
        """The same tensor as another spec, see ``propagate.can_become``."""
        if wanted == self.spec:
            return self
        if wanted not in self._others:
            self._others[wanted] = self._redistributed(wanted)
        return self._others[wanted]

    def _redistributed(self, wanted: Spec) -> Value:
        towers = self.towers
        if isinstance(wanted, Sharded):
            if isinstance(self.spec, Sharded) and self.spec == Sharded(
                    wanted.dim, wanted.times, wanted.group):
                return self
            return self._cut(wanted)
        if isinstance(wanted, Partial):
            return Value(towers, wanted, self.shape, self.whole, self._first_or_zeros)
        if isinstance(wanted, ListOf):
            return Value(towers, wanted, self.shape, None, self.part)
        return Value(towers, wanted, self.shape, self.whole, None, self.device,
                     None if isinstance(self.spec, (Size, ListOf)) else self.constant)

    def padded(self) -> Value:
        """With a row of zeros for each tower that has none."""
        if "padded" not in self._others:
            self._others["padded"] = self._padded()
        return self._others["padded"]

    def _padded(self) -> Value:
        spec, towers = self.spec, self.towers
        if isinstance(spec, Sharded) and self.shape.rank is not None:
            return Value(towers, spec, self.shape, self.whole, self._padded_part)
        if isinstance(spec, Size):
            length, at = self.shape.num_elements(), spec.at
            return Value(towers, spec, self.shape, self.whole, lambda tower: towers.builder.make(
                "Maximum", [self.part(tower), towers.builder.constant(
                    [int(place == at) for place in range(length)], self.part(tower).dtype,
                    towers.devices[tower])], towers.devices[tower],
                f"{towers.scopes[tower]}Maximum"))
        return self

    def _padded_part(self, tower: int) -> Ref:
        assert isinstance(self.spec, Sharded)
        towers, dim, rank, part = self.towers, self.spec.dim, self.shape.rank, self.part(tower)
        build, device = towers.builder, towers.devices[tower]
        after = towers.vector(tower, self._missing(tower), dim, rank, 0)
        host = towers.shapes_on(tower)
        paddings = towers.once(("paddings", after), lambda: build.make(
            "Pack", [build.constant([0] * rank, tf.int32, host), after], host,
            f"{towers.scopes[tower]}Pack", axis=1))
        # Not Pad, which oneDNN fuses with a convolution that gives no rows a wrong shape.
        zero = build.constant(0, part.dtype, device)
        return build.make("PadV2", [part, paddings, zero], device, f"{towers.scopes[tower]}Pad")

    def without_padding(self, like: Value) -> Value:
        """The inverse of :meth:`padded`, where ``like`` tells which towers have no rows."""
        spec, towers, rank = self.spec, self.towers, self.shape.rank
        if not isinstance(spec, Sharded) or rank is None:
            return self

        def part(tower: int) -> Ref:
            build, device = towers.builder, towers.devices[tower]
            missing = like._missing(tower)
            rows = towers.once(("kept", missing), lambda: build.make(
                "Sub", [missing, build.constant(1, tf.int32, towers.host)], towers.host))
            begin = build.constant([0] * rank, tf.int32, device)
            return build.make("Slice", [self.part(tower), begin, towers.vector(
                tower, rows, spec.dim, rank, -1)], device, f"{towers.scopes[tower]}Slice")

        return Value(towers, spec, self.shape, None, part)

    def _missing(self, tower: int) -> Ref:
        assert isinstance(self.spec, Sharded)
        towers = self.towers
        if not self.spec.group:
            return towers.missing(tower)
        device = towers.devices[tower]

        def make(type: str, *inputs: Ref, **attrs: Any) -> Ref:
            return towers.builder.make(type, inputs, device, f"{towers.scopes[tower]}{type}",
                                       **attrs)

        none = towers.builder.constant(0, tf.int32, device)
        dim = towers.builder.constant(self.spec.dim, tf.int32, device)
        rows = make("GatherV2", make("Shape", self.part(tower)), dim, none)
        return make("Cast", make("Equal", rows, none), DstT=tf.int32)

    def _first_or_zeros(self, tower: int) -> Ref:
        if self.towers.first + tower == 0:
            return self.whole()
        return self.towers.builder.make("ZerosLike", [self.whole()], self.towers.devices[tower],
                                        f"{self.towers.scopes[tower]}ZerosLike")

    def _gathered(self) -> Ref:
        """The whole tensor, from the towers' parts."""
        towers, parts = self.towers, self.parts()
        if towers.replicas == 1:
            return parts[0]
        device, whole = self.device or towers.merge, parts[0]
        if isinstance(self.spec, Size):
            return self._total(parts, self.spec.at)
        if isinstance(self.spec, Sharded):
            if self.spec.blocks > 1:
                return blocks.gathered(self, self.spec, device)
            towers.note("gather")
            if len(parts) > 1:
                axis = towers.builder.constant(self.spec.dim, tf.int32, device)
                whole = towers.builder.make("ConcatV2", [*parts, axis], device, "merge/ConcatV2",
                                            N=len(parts))
            shape = blocks.opened(self.shape, self.spec.dim)
            return towers.across.cross("gather", whole, device, shape, self.spec.dim)
        assert isinstance(self.spec, Partial), self.spec
        towers.note("reduce")
        if self.spec == MEAN:
            parts = means.parts(towers, parts)
        if self.spec in (MEAN, SUM):
            return towers.add_up(parts, device, self.shape)
        for part in parts[1:]:
            whole = towers.builder.make(_REDUCTIONS[self.spec.reduction], [whole, part], device,
                                        "merge/Reduce")
        return towers.across.cross(self.spec.reduction, whole, device, self.shape)

    def _total(self, parts: Sequence[Ref], at: int) -> Ref:
        """A size of the whole batch: the towers' rows add up, all else is alike."""
        build, device = self.towers.builder, self.towers.host
        total = self.towers.add_up(parts, device, self.shape)
        if self.shape.rank == 0:
            return total
        index = build.make("Range", [build.constant(0, tf.int32, device),
                                     build.make("Size", [parts[0]], device),
                                     build.constant(1, tf.int32, device)], device)
        here = build.make("Equal", [index, build.constant(at, tf.int32, device)], device)
        return build.make("SelectV2", [here, total, parts[0]], device)

    def _cut(self, wanted: Sharded) -> Value:
        """Each tower's slice of the whole tensor."""
        towers, rank = self.towers, self.shape.rank
        assert rank is not None, "cut of unknown rank"
        if wanted.broadcast and self.shape[wanted.dim] == 1:
            return Value(towers, wanted, self.shape, self.whole)
        towers.note("cut")
        if wanted.blocks > 1:
            return Value(towers, wanted, self.shape, self.whole,
                         lambda tower: blocks.cut(self, wanted, tower))

        def part(tower: int) -> Ref:
            build, device = towers.builder, towers.devices[tower]
            whole = self.whole()
            if towers.replicas == 1:
                return whole
            begin, size = towers.offset(tower), towers.count(tower)
            if wanted.times != 1 or wanted.broadcast and self.shape[wanted.dim] is None:
                rows = self.rows_in(wanted.dim)
                times = build.make("FloorDiv", [rows, towers.total()], towers.host)
                begin = build.make("Mul", [begin, times], towers.host)
                size = build.make("Mul", [size, times], towers.host)
                if wanted.broadcast and self.shape[wanted.dim] is None:
                    none = build.constant(0, tf.int64, towers.host)
                    fewer = build.make("Equal", [times, none], towers.host)  # one, for all rows
                    one = build.constant(1, tf.int64, towers.host)
                    size = build.make("SelectV2", [fewer, one, size], towers.host)
            return build.make("Slice", [
                whole, towers.vector(tower, begin, wanted.dim, rank, 0),
                towers.vector(tower, size, wanted.dim, rank, -1)], device,
                f"{towers.scopes[tower]}cut", Index=tf.int64)

        return Value(towers, wanted, self.shape, self.whole, part)

    def rows_in(self, dim: int) -> Ref:
        """How many positions it has along a dimension."""
        build, device = self.towers.builder, self.towers.host
        if self.shape[dim] is not None:
            return build.constant(self.shape[dim], tf.int64, device)
        shape = build.make("Shape", [self.whole()], self.device or device, out_type=tf.int64)
        return build.make("GatherV2", [shape, build.constant(dim, tf.int64, device),
                                       build.constant(0, tf.int32, device)], device)
