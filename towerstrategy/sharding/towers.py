"""The towers that a step is partitioned over, and how many rows of the batch each of them has.

Goes in: devices, and the numbers of rows.  Comes out: :class:`Towers`: nodes on a tower or on the
host; numbers of rows of a tower, of those before it, of the batch; sums over the towers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from towerstrategy.placement import peers
from towerstrategy.sharding import relays
from towerstrategy.sharding.across import Across
from towerstrategy.sharding.builder import Builder, Ref

_Made = TypeVar("_Made", bound=Callable[..., Ref])


def once(make: _Made) -> _Made:
    """A method of :class:`Towers` that makes its node when it is first asked for."""

    @functools.wraps(make)
    def known(self: Any, *args: Any) -> Ref:
        key = (make, *args)
        if key not in self.known:
            self.known[key] = make(self, *args)
        return self.known[key]

    return known  # type: ignore[return-value]


class Towers:
    """The towers that a step is partitioned over, and their rows of the batch.

    Args:
      builder: where nodes are collected.
      rows: for each tower the devices of its stages, one as a rule.
      merge: the device for what is made once.
      host: the CPU that numbers of rows are kept on; kernels take shapes from there.
      scopes: the name scope of each tower's nodes, with a "/" behind it.
      counts: gives each tower's number of rows, int64 scalars; asked for None those of the towers
        of all workers, a vector, or None where they are not known.
      on_cpu: whether the towers are CPUs, which make their shapes themselves.
      draws_rows: whether a tower draws its rows of what one device draws, not numbers of its own.
      across: what crosses the workers, of whom each has towers of its own; None: all are here.
      spare: the device for what is made once, large and for no variable; "" for ``merge``.

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
        self.near = {} if on_cpu else relays.near(rows)
        self.ways = relays.ways(self.near, peers.reached() if self.near else {})
        self._counts = counts
        self.known: dict[Any, Ref] = {}
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

    def note(self, kind: str) -> None:
        """Counts a redistribution."""
        self.crossings[kind] = self.crossings.get(kind, 0) + 1

    @once
    def count(self, tower: int, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows a tower has."""
        if dtype != tf.int64:
            return self.on_host("Cast", self.count(tower), DstT=dtype)
        count = self._counts(tower)
        assert count is not None
        return count

    @once
    def counts(self) -> Ref:
        """How many rows each tower of all workers has."""
        known = self._counts(None)
        return known if known is not None else self._of_all(
            [self.count(tower) for tower in range(len(self))], self.first, self.replicas)

    def _of_all(self, own: Sequence[Ref], first: int, count: int) -> Ref:
        """A vector of so many numbers of all workers, in which this one's begin at ``first``."""
        around = self.number([[first, count - first - len(own)]], tf.int32)
        placed = self.on_host("PadV2", self.on_host("Pack", *own, axis=0), around,
                              self.number(0, own[0].dtype))
        return self.across.cross("sum", placed, self.host, tf.TensorShape([count]))

    @once
    def total(self, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows the batch has."""
        if self.across.workers is not None:
            return self._first_of(self.counts(), self.replicas, dtype)
        return self.add_up([self.count(tower, dtype) for tower in range(len(self))], self.host)

    def share(self, tower: int, dtype: tf.DType) -> Ref:
        """A tower's rows over those of the batch; 0 of no rows at all."""
        return self.on_host("DivNoNan", self.count(tower, dtype), self.total(dtype))

    @once
    def earlier(self, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows the workers before this one have."""
        if self.across.workers is None:
            return self.number(0, dtype)
        return self._first_of(self.counts(), self.first, dtype)

    def of_earlier(self, number: Ref, dtype: tf.DType) -> Ref:
        """The sum of such a number of each worker before this one."""
        workers = self.across.workers
        if workers is None:
            return self.number(0, dtype)
        return self._first_of(self._of_all([number], workers.index, workers.count), workers.index,
                              dtype)

    def _first_of(self, vector: Ref, number: int, dtype: tf.DType) -> Ref:
        """The sum of the first entries of a vector."""
        begin, size = self.number([0], tf.int32), self.number([number], tf.int32)
        total = self.on_host("Sum", self.on_host("Slice", vector, begin, size), begin)
        return total if total.dtype == dtype else self.on_host("Cast", total, DstT=dtype)

    @once
    def offset(self, tower: int, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows the towers before this one have."""
        if tower == 0:
            return self.earlier(dtype)
        return self.on_host("AddV2", self.offset(tower - 1, dtype), self.count(tower - 1, dtype))

    @once
    def missing(self, tower: int) -> Ref:
        """1 for a tower without rows, else 0; an int32 scalar."""
        return self.on_host("Cast", self.on_host("Equal", self.count(tower), self.number(0)),
                            DstT=tf.int32)

    def shapes_on(self, tower: int) -> str:
        """Where a tower's shapes are made: on the tower if it is a CPU, else on the host."""
        return self.devices[tower] if self.on_cpu else self.host

    def packed_on(self, tower: int, dtype: tf.DType) -> str:
        """Where numbers become a shape for a tower.

        GPUs' kernels keep int32 in the host's memory. What the host has made itself TensorFlow's
        layout optimizer takes to a GPU and back, to permute it.
        """
        return self.devices[tower] if dtype == tf.int32 else self.shapes_on(tower)

    @once
    def vector(self, tower: int, number: Ref, at: int, length: int, other: int) -> Ref:
        """A vector with ``number`` in one place and ``other`` in all others, for a tower."""
        device = self.packed_on(tower, number.dtype)
        rest = self.builder.constant(other, number.dtype, device)
        return self.builder.make("Pack", [number if place == at else rest
                                          for place in range(length)], device,
                                 f"{self.scopes[tower]}Pack", axis=0)

    def add_up(self, parts: Sequence[Ref], device: str,
               shape: tf.TensorShape | None = None) -> Ref:
        """The sum over the towers of all workers, of the values of those that are here."""
        return self.across.cross("sum", self.add_up_here(parts, device, shape), device, shape)

    def add_up_here(self, parts: Sequence[Ref], device: str, shape: tf.TensorShape | None = None,
                    dtype: tf.DType | None = None) -> Ref:
        """The sum over the towers that are here; of halves as ``dtype``, if that is said."""
        total = self._added(relays.summed(self.builder, self.near, parts, device, shape), device)
        dtype = dtype or parts[0].dtype
        return total if total.dtype == dtype else self.builder.make(
            "Cast", [total], device, DstT=dtype)

    def _added(self, parts: Sequence[Ref], device: str) -> Ref:
        if len(parts) == len(self.devices):  # micro-batches: first those of a device
            here: dict[str, list[Ref]] = {}
            for part, own in zip(parts, self.devices):
                here.setdefault(own, []).append(part)
            parts = [self._one_by_one(those, own) for own, those in here.items()]
        if len(parts) == 1:
            return parts[0]
        if parts[0].dtype in (tf.float16, tf.bfloat16):  # cross as such, and are rounded once
            parts = [self.builder.make("Cast", [part], device, DstT=tf.float32) for part in parts]
        return self.builder.make("AddN", parts, device, "merge/AddN")

    def _one_by_one(self, parts: Sequence[Ref], device: str) -> Ref:
        """A sum that holds no two of its parts for long."""
        total = parts[0]
        for part in parts[1:]:
            total = self.builder.make("AddV2", [total, part], device, "merge/AddV2")
        return total
