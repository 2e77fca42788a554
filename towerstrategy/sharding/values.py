"""What stands for a traced tensor while its step is partitioned, and how it is redistributed.

Goes in: a tensor's spec and the nodes that make it.  Comes out: the same value as another spec, by
the nodes that this takes: a sum of parts, a concatenation of slices, a slice of the whole.  Each is
made once and only if something asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.builder import Builder, Ref
from towerstrategy.sharding.spec import ListOf, Partial, Sharded, Size, Spec

_REDUCTIONS = {"max": "Maximum", "min": "Minimum", "and": "LogicalAnd", "or": "LogicalOr"}


class Towers:
    """The towers that a step is partitioned over, and their rows of the batch.

    Args:
      builder: where nodes are collected.
      devices: the towers' devices.
      merge: the device for what is made once.
      scopes: the name scope of each tower's nodes, with a "/" behind it.
      counts: gives each tower's number of rows, int64 scalars.
    """

    def __init__(self, builder: Builder, devices: Sequence[str], merge: str,
                 scopes: Sequence[str], counts: Callable[[int], Ref]) -> None:
        self.builder, self.devices, self.merge = builder, devices, merge
        self.scopes = scopes
        self._counts = counts
        self._known: dict[Any, Ref] = {}
        self.crossings: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.devices)

    def note(self, kind: str) -> None:
        """Counts a redistribution."""
        self.crossings[kind] = self.crossings.get(kind, 0) + 1

    def count(self, tower: int, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows a tower has."""
        return self._once(("count", tower, dtype), lambda: self._as(self._counts(tower), dtype))

    def total(self, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows the batch has."""
        return self._once(("total", dtype), lambda: self.add_up(
            [self.count(tower, dtype) for tower in range(len(self))], self.merge))

    def offset(self, tower: int, dtype: tf.DType = tf.int64) -> Ref:
        """How many rows the towers before this one have."""
        if tower == 0:
            return self.builder.constant(0, dtype, self.merge)
        return self._once(("offset", tower, dtype), lambda: self.builder.make(
            "AddV2", [self.offset(tower - 1, dtype), self.count(tower - 1, dtype)], self.merge))

    def add_up(self, parts: Sequence[Ref], device: str) -> Ref:
        """The sum of some values."""
        if len(parts) == 1:
            return parts[0]
        return self.builder.make("AddN", parts, device, "merge/AddN")

    def _as(self, ref: Ref, dtype: tf.DType) -> Ref:
        if ref.dtype == dtype:
            return ref
        return self.builder.make("Cast", [ref], self.merge, DstT=dtype)

    def _once(self, key: Any, make: Callable[[], Ref]) -> Ref:
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
    """

    def __init__(self, towers: Towers, spec: Spec, shape: tf.TensorShape,
                 whole: Callable[[], Ref] | None = None,
                 part: Callable[[int], Ref] | None = None, device: str = "",
                 constant: bool = False) -> None:
        self.spec, self.shape, self.device, self.constant = spec, shape, device, constant
        self._towers = towers
        self._make_whole, self._make_part = whole, part
        self._whole: Ref | None = None
        self._parts: dict[int, Ref] = {}
        self._others: dict[Any, Value] = {}

    def whole(self) -> Ref:
        """The whole tensor."""
        if self._whole is None:
            make = self._make_whole
            self._whole = self._gathered() if make is None else make()
        return self._whole

    def part(self, tower: int) -> Ref:
        """What a tower has of it: its part, or the whole where there are none."""
        if self._make_part is None:
            return self.whole()
        if tower not in self._parts:
            self._parts[tower] = self._make_part(tower)
        return self._parts[tower]

    def parts(self) -> list[Ref]:
        """What each tower has of it."""
        return [self.part(tower) for tower in range(len(self._towers))]

    def as_spec(self, wanted: Spec) -> Value:
        """The same tensor as another spec, see ``propagate.can_become``."""
        if wanted == self.spec:
            return self
        if wanted not in self._others:
            self._others[wanted] = self._redistributed(wanted)
        return self._others[wanted]

    def _redistributed(self, wanted: Spec) -> Value:
        towers = self._towers
        if isinstance(wanted, Sharded):
            if isinstance(self.spec, Sharded) and self.spec == Sharded(
                    wanted.dim, wanted.times, wanted.group):
                return self
            return self._cut(wanted)
        if isinstance(wanted, Partial):
            return Value(towers, wanted, self.shape, self.whole, self._first_or_zeros)
        if isinstance(wanted, ListOf):
            return Value(towers, wanted, self.shape, None, self.part)
        return Value(towers, wanted, self.shape, self.whole,
                     self.part if self.constant or isinstance(self.spec, Size) else None,
                     self.device, self.constant) if not isinstance(
                         self.spec, (Size, ListOf)) else Value(
                             towers, wanted, self.shape, self.whole, None, self.device)

    def _first_or_zeros(self, tower: int) -> Ref:
        if tower == 0:
            return self.whole()
        return self._towers.builder.make("ZerosLike", [self.whole()], self._towers.devices[tower])

    def _gathered(self) -> Ref:
        """The whole tensor, from the towers' parts."""
        towers, parts = self._towers, self.parts()
        if len(parts) == 1:
            return parts[0]
        device = towers.merge
        if isinstance(self.spec, Sharded):
            towers.note("gather")
            axis = towers.builder.constant(self.spec.dim, tf.int32, device)
            return towers.builder.make("ConcatV2", [*parts, axis], device, "merge/ConcatV2",
                                       N=len(parts))
        assert isinstance(self.spec, Partial), self.spec
        towers.note("reduce")
        if self.spec.reduction == "sum":
            return towers.add_up(parts, device)
        whole = parts[0]
        for part in parts[1:]:
            whole = towers.builder.make(_REDUCTIONS[self.spec.reduction], [whole, part], device,
                                        "merge/Reduce")
        return whole

    def _cut(self, wanted: Sharded) -> Value:
        """Each tower's slice of the whole tensor."""
        towers, rank = self._towers, self.shape.rank
        assert rank is not None, "cut of unknown rank"
        if wanted.broadcast and self.shape[wanted.dim] == 1:
            return Value(towers, wanted, self.shape, self.whole)
        towers.note("cut")

        def part(tower: int) -> Ref:
            build, device = towers.builder, towers.devices[tower]
            whole = self.whole()
            if len(towers) == 1:
                return whole
            begin, size = towers.offset(tower), towers.count(tower)
            if wanted.times != 1 or wanted.broadcast and self.shape[wanted.dim] is None:
                rows = self._rows_in(wanted.dim)
                times = build.make("FloorDiv", [rows, towers.total()], towers.merge)
                begin = build.make("Mul", [begin, times], towers.merge)
                size = build.make("Mul", [size, times], towers.merge)
                if wanted.broadcast and self.shape[wanted.dim] is None:
                    one = build.constant(1, tf.int64, towers.merge)
                    is_one = build.make("Equal", [rows, one], towers.merge)
                    zero = build.constant(0, tf.int64, towers.merge)
                    begin = build.make("SelectV2", [is_one, zero, begin], towers.merge)
                    size = build.make("SelectV2", [is_one, one, size], towers.merge)
            return build.make("Slice", [
                whole, self._vector(begin, wanted.dim, 0), self._vector(size, wanted.dim, -1)],
                device, f"{towers.scopes[tower]}cut", Index=tf.int64)

        return Value(towers, wanted, self.shape, self.whole, part)

    def _rows_in(self, dim: int) -> Ref:
        build, device = self._towers.builder, self._towers.merge
        if self.shape[dim] is not None:
            return build.constant(self.shape[dim], tf.int64, device)
        shape = build.make("Shape", [self.whole()], device, out_type=tf.int64)
        return build.make("GatherV2", [shape, build.constant(dim, tf.int64, device),
                                       build.constant(0, tf.int32, device)], device)

    def _vector(self, number: Ref, dim: int, other: int) -> Ref:
        build, device = self._towers.builder, self._towers.merge
        rest = build.constant(other, tf.int64, device)
        numbers = [number if index == dim else rest for index in range(self.shape.rank)]
        return build.make("Pack", numbers, device, axis=0)
