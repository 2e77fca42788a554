"""The value of a traced tensor while its step is partitioned, and how it is redistributed.

Goes in: a tensor's spec and the nodes that make it.  Comes out: the same value with another spec,
by further nodes: a sum of parts, a concatenation of slices, or a slice of the whole tensor.  Each
node is made once, and only if something uses it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.rules import scaling
from towerstrategy.sharding.spec import (
    MEAN,
    PER_TOWER,
    REPLICATED,
    ROW,
    SUM,
    ListOf,
    Partial,
    Position,
    Replicated,
    Row,
    Sharded,
    Size,
    Spec,
    Total,
    has_known_rows,
    in_one_piece,
)
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.traffic import MANY_ROWS

_TOO_MANY = 2**31  # rows; no tensor has so many
_REDUCTIONS = {"max": "Maximum", "min": "Minimum", "and": "LogicalAnd", "or": "LogicalOr"}


class Value:
    """A tensor of the traced step.

    Args:
      towers: the towers.
      spec: its spec.
      shape: its static shape, with all rows.
      whole: the whole tensor, or makes it; None if it is made of the parts.
      part: makes a tower's part; None if each tower takes the whole tensor.
      device: where the whole tensor is made.
      constant: makes the tensor on a tower of the given towers, which is then not sent it.

    Attributes:
      read: gives the output of an operation that reads this resource, in a loop that is not given
        it but its values; None if operations take the resource itself.
    """

    read: Callable[[Any], Value] | None = None

    def __init__(self, towers: Towers, spec: Spec, shape: tf.TensorShape,
                 whole: Ref | Callable[[], Ref] | None = None,
                 part: Callable[[int], Ref] | None = None, device: str = "",
                 constant: Callable[[int, Towers], Ref] | None = None) -> None:
        self.spec, self.shape, self.device, self.constant = spec, shape, device, constant
        self.towers = towers
        self._make_part = part
        self._whole = whole
        if isinstance(whole, Ref):
            towers.builder.note_shape(whole, shape)
        self._parts: dict[int, Ref] = {}
        self._others: dict[Any, Value] = {}

    @property
    def stage(self) -> int | None:
        """The stage in which it is made; None if unknown."""
        known = self.towers.stage is not None or not self.device
        return self.towers.stage if known else self.towers.stage_on(self.device)

    @property
    def size(self) -> int:
        """About how many entries it has; 0 if its rank is unknown."""
        return math.prod(MANY_ROWS if size is None else size for size in self.shape) \
            if self.shape.rank is not None else 0

    def whole(self) -> Ref:
        """The whole tensor."""
        if not isinstance(self._whole, Ref):
            self._whole = self._merged() if self._whole is None else self._whole()
            self.towers.builder.note_shape(self._whole, self.shape)
        return self._whole

    def part(self, tower: int) -> Ref:
        """A tower's part; the whole tensor if there are no parts."""
        if self.constant is not None:
            return self.constant(tower, self.towers)
        if self._make_part is None:
            return self.whole()
        if tower not in self._parts:
            part = self._parts[tower] = self._make_part(tower)
            if isinstance(self.spec, Partial) or self.spec == PER_TOWER:
                self.towers.builder.note_shape(part, self.shape)
        return self._parts[tower]

    def on(self, device: str) -> Ref:
        """The whole tensor for an operation on ``device``; a tower there makes constants itself."""
        repeated = self.constant is not None and device in self.towers.devices
        return self.part(self.towers.devices.index(device)) if repeated else self.whole()

    def other(self, key: Any, make: Callable[[], Value]) -> Value:
        """Another form of the tensor, which is made once for all operations that need it."""
        if key not in self._others:
            self._others[key] = make()
        return self._others[key]

    def at(self, towers: Towers) -> Value:
        """The same tensor for the stage of these towers: another value if it is replicated."""
        if towers.stage == self.towers.stage or not isinstance(self.spec, Replicated):
            return self
        other = self.other(towers.stage, lambda: Value(
            towers, self.spec, self.shape, self.whole, None, self.device, self.constant))
        other.read = self.read
        return other

    def of_one(self, tower: int, alone: Towers, spec: Spec, device: str) -> Value:
        """A tower's part, as a tensor of this tower by itself."""
        whole = self.whole if isinstance(spec, Size) else functools.partial(self.part, tower)
        return Value(alone, spec.given if isinstance(spec, Sharded) else spec, self.shape,
                     whole, lambda _: self.part(tower), device)

    def parts(self) -> list[Ref]:
        """Each tower's part."""
        return [self.part(tower) for tower in range(len(self.towers))]

    def as_spec(self, wanted: Spec, has_rows: bool = False) -> Value:
        """The same tensor with another spec; ``joined.can_become`` says which ones are possible.

        ``has_rows``: it is known to have all rows, if these are to be sharded.
        """
        if wanted is self.spec or wanted == self.spec:
            return self
        return self.other(wanted, lambda: self._redistributed(wanted, has_rows))

    def _redistributed(self, wanted: Spec, has_rows: bool) -> Value:
        towers = self.towers
        if isinstance(self.spec, Position) and wanted == ROW:
            return Value(towers, wanted, self.shape, None, functools.partial(
                self._row_number, self.spec))
        if isinstance(wanted, ListOf) and not wanted.rows and isinstance(self.spec, ListOf) \
                and self.spec.rows:  # each tower has the whole list
            return self.as_spec(REPLICATED).as_spec(wanted)
        if isinstance(wanted, (ListOf, Row)) or isinstance(self.spec, Total):
            return Value(towers, wanted, self.shape, None, self.part)
        if isinstance(wanted, Sharded):
            if isinstance(self.spec, Sharded) and wanted.given in (self.spec, self.spec.uncounted):
                return Value(towers, wanted.given, self.shape, self.whole, self.part, self.device)
            return self._cut(wanted, has_rows)
        if isinstance(wanted, Partial):
            return Value(towers, wanted, self.shape, self.whole, self._first_or_zeros)
        if isinstance(wanted, Size):
            return Value(towers, wanted, self.shape, self.whole, functools.partial(
                self._own_size, wanted))
        return Value(towers, wanted, self.shape, self.whole, None, self.device,
                     None if isinstance(self.spec, (Size, ListOf)) else self.constant)

    def or_zeros(self, wanted: Spec, tensor: tf.Tensor) -> Value:
        """The same tensor; if it is zero and wanted as a sum, each tower makes its own part."""
        towers, build, shape = self.towers, self.towers.builder, self.shape
        if wanted != SUM or not isinstance(self.spec, Replicated) \
                or not shape.is_fully_defined() or not scaling.is_zero(tensor):
            return self
        return Value(towers, SUM, shape, self.whole, lambda tower: towers.on(
            tower, "Fill", build.constant(shape.as_list(), tf.int32, towers.devices[tower]),
            build.constant(0, tensor.dtype, towers.devices[tower])))

    def as_constant(self, entries: Sequence[int], dtype: tf.DType) -> Value:
        """The same tensor, with a constant in place of each tower's part."""
        towers = self.towers
        return Value(towers, self.spec, self.shape, self.whole, lambda tower: (
            towers.builder.constant(entries, dtype, towers.devices[tower])))

    def _row_number(self, at: Position, tower: int) -> Ref:
        """The number among all rows of the row at a position, which counts the tower's."""
        assert at.rows is not None
        part = self.part(tower)
        return self.towers.on(tower, "AddV2", part,
                              self.towers.start(at.rows, part.dtype, tower))

    def _own_size(self, size: Size, tower: int) -> Ref:
        """A tower's part of a shape of all rows.

        If the batch has other rows, it fits a tower's rows as little as the whole one fits all.
        """
        towers, host, whole = self.towers, self.towers.on_host, self.whole()
        own = towers.size(size, whole.dtype, tower)
        if size.known is not None and None not in size.known:
            return own if not self.shape.rank else towers.shape(tower, own, size.at, size.known)
        other = host("Sub", towers.entry(whole, size.at), towers.size(size, whole.dtype))
        return towers.with_entry(whole, size.at, host("AddV2", own, other))

    def _first_or_zeros(self, tower: int) -> Ref:
        """The part of a replicated tensor as a partial sum: the first tower has all of it."""
        if self.towers.first + tower == 0:
            return self.whole()
        return self.towers.on(tower, "ZerosLike", self.whole())

    def _merged(self) -> Ref:
        """The whole tensor: the sum, concatenation or other reduction of the towers' parts."""
        towers, parts = self.towers, self.parts()
        if isinstance(self.spec, Size) and (towers.replicas > 1 or towers.is_alone):
            return self._total_size(parts, self.spec)
        if towers.replicas == 1 or self.spec == PER_TOWER:
            return parts[0]
        device, whole = self.device or towers.merge, parts[0]
        if isinstance(self.spec, Sharded):
            if not in_one_piece(self.spec):
                return self._merged_pieces(self.spec, device)
            towers.crossings["gather"] += 1
            if len(parts) > 1:
                axis = towers.builder.constant(self.spec.dim, tf.int32, device)
                whole = towers.builder.make("ConcatV2", [*parts, axis], device, "merge/ConcatV2",
                                            N=len(parts))
            shape = opened(self.shape, self.spec.dim)
            return towers.across.cross("gather", whole, device, shape, self.spec.dim)
        assert isinstance(self.spec, Partial), self.spec
        towers.crossings["reduce"] += 1
        if self.spec == MEAN:
            parts = [towers.on(tower, "MulNoNan", part, towers.on_host(
                "DivNoNan", towers.count(tower, part.dtype), towers.total(part.dtype)))
                for tower, part in enumerate(parts)]
        if self.spec in (MEAN, SUM):
            return towers.add_up(parts, device, self.shape)
        for part in parts[1:]:
            whole = towers.builder.make(_REDUCTIONS[self.spec.reduction], [whole, part], device,
                                        "merge/Reduce")
        return towers.across.cross(self.spec.reduction, whole, device, self.shape)

    def _merged_pieces(self, spec: Sharded, device: str) -> Ref:
        """The whole tensor of several pieces: one by one, each in the order of the towers."""
        towers, build = self.towers, self.towers.builder
        split = [self._split(spec, tower) for tower in range(len(towers))]
        shape = opened(self.shape, spec.dim)

        def whole(number: int, piece: Sharded) -> Ref:
            return Value(towers, piece, shape, None,
                         lambda tower: split[tower]._replace(output=number), device).whole()

        wholes = [whole(*each) for each in enumerate(spec.pieces)]
        axis = build.constant(spec.dim, tf.int32, device)
        return build.make("ConcatV2", [*wholes, axis], device, "merge/ConcatV2", N=len(wholes))

    def _split(self, spec: Sharded, tower: int) -> Ref:
        """The slices of a tower's part of all pieces: the outputs of one node."""
        towers, part, count = self.towers, self.part(tower), len(spec.pieces)
        axis = towers.builder.constant(spec.dim, tf.int32, towers.devices[tower])
        if len({*spec.pieces}) == 1:
            return towers.on(tower, "Split", axis, part, num_split=count)
        sizes = [towers.size(piece, tf.int64, tower) for piece in spec.examples.pieces]
        if spec.times != 1:
            times = self._times(spec, tower)
            sizes = [towers.on_host("Mul", size, times) for size in sizes]
        return towers.on(tower, "SplitV", part, towers.on_host("Pack", *sizes, axis=0), axis,
                         num_split=count)

    def _times(self, spec: Sharded, tower: int | None = None) -> Ref:
        """How many positions each example has, in a tower's part; for None, in the whole tensor."""
        towers = self.towers
        return towers.number(spec.times) if spec.times is not None else towers.on_host(
            "FloorDiv", self.size_along(spec.dim, tower), towers.on_host(
                "Maximum", towers.size(spec.examples, tf.int64, tower), towers.number(1)))

    def _total_size(self, parts: Sequence[Ref], spec: Size) -> Ref:
        """The whole batch's size: one entry is the sum over the towers; other entries agree."""
        towers, dtype = self.towers, parts[0].dtype
        total = towers.add_up(parts, towers.host, self.shape) \
            if not towers.is_alone or not has_known_rows(spec) else towers.size(spec, dtype)
        return total if self.shape.rank == 0 else towers.with_entry(parts[0], spec.at, total)

    def _cut(self, wanted: Sharded, has_rows: bool) -> Value:
        """The whole tensor as a sharded one: each tower takes its slice."""
        towers, rank = self.towers, self.shape.rank
        assert rank is not None, "cut of unknown rank"
        if wanted.broadcast and self.shape[wanted.dim] == 1:
            return Value(towers, wanted, self.shape, self.whole)
        if wanted.start and self.shape[wanted.dim] == 0:
            return Value(towers, wanted.given, self.shape, self.whole, self.part)
        towers.crossings["cut"] += 1

        def part(tower: int) -> Ref:
            if towers.replicas == 1 and not towers.is_alone:
                return self.whole()
            slices = [towers.on(tower, "Slice", self.whole(),
                                towers.vector(tower, begin, wanted.dim, rank, 0),
                                towers.vector(tower, size, wanted.dim, rank, -1), Index=tf.int64)
                      for begin, size in self._slices_of(wanted, tower, has_rows)]
            return slices[0] if len(slices) == 1 else towers.on(
                tower, "ConcatV2", *slices, towers.builder.constant(
                    wanted.dim, tf.int32, towers.devices[tower]), N=len(slices))

        return Value(towers, wanted.given, self.shape, self.whole, part)

    def _slices_of(self, wanted: Sharded, tower: int, has_rows: bool) -> list[tuple[Ref, Ref]]:
        """The first position and the number of positions of a tower's slice of each piece.

        The last tower's last one ends where the tensor ends: if there are too many rows, its
        consumers fail, as on one device, or the slice does, as one row would broadcast.  (Not size
        -1: TensorFlow rewrites a slice of constant size for XLA, to an operation on the host.)
        """
        towers, host = self.towers, self.towers.on_host
        rows = functools.partial(self.size_along, wanted.dim)
        slices: list[tuple[Ref, Ref]] = []
        pieces = wanted.examples.pieces
        unknown = wanted.start and wanted.times is None  # it may start with any number of rows
        times = None if unknown or wanted.times == 1 else self._times(wanted)
        for piece in pieces:
            begin, size = (make(piece, tf.int64, tower) for make in (towers.start, towers.size))
            for earlier in pieces[:len(slices)]:
                begin = host("AddV2", begin, towers.size(earlier, tf.int64))
            if times is not None:
                begin, size = (host("Mul", number, times) for number in (begin, size))
            if wanted.start:
                begin = host("Minimum", begin, rows())
                size = host("Minimum", size, host("Sub", rows(), begin))
            if towers.is_alone and not wanted.start:  # does not know which tower is the last one
                all_rows = host("Mul", towers.size(piece, tf.int64), self._times(wanted))
                size = host("AddV2", size, host("Sub", rows(), all_rows))
            if wanted.broadcast and self.shape[wanted.dim] is None:  # the first slice has one row
                is_one = host("Equal", rows(), towers.number(1))
                one_row = (rows(), towers.number(0)) if slices else (towers.number(0), rows())
                begin, size = (host("SelectV2", is_one, *each)
                               for each in zip(one_row, (begin, size)))
            slices.append((begin, size))
        if not has_rows and towers.first + tower == towers.replicas - 1 and not towers.is_alone:
            rest = host("Sub", rows(), begin)
            slices[-1] = begin, host("AddV2", size, towers.times(
                host("Sub", rest, size), _TOO_MANY)) if wanted.broadcast else rest
        return slices

    def size_along(self, dim: int, tower: int | None = None, dtype: tf.DType = tf.int64) -> Ref:
        """The size of a tower's part along a dimension; for None, of the whole tensor."""
        towers, spec = self.towers, self.spec
        if isinstance(spec, Sharded) and spec.dim == dim:
            if has_known_rows(spec):
                return towers.size(spec, dtype, tower)
            size = towers.add_up([self.size_along(dim, each) for each in range(len(towers))],
                                 towers.host) if tower is None else towers.entry(
                towers.on(tower, "Shape", self.part(tower), out_type=tf.int64), dim)
        elif self.shape[dim] is not None:
            size = towers.number(self.shape[dim])
        else:
            make, device, whole = towers.builder.make, self.device or towers.host, self.whole()
            if towers.is_alone:  # in a loop: Grappler takes it to have one shape in all iterations
                whole = make("PlaceholderWithDefault", [whole], device, shape=self.shape)
            size = towers.entry(make("Shape", [whole], device, out_type=tf.int64), dim)
        return size if dtype == tf.int64 else towers.on_host("Cast", size, DstT=dtype)


class Lazily:
    """The outputs of ``make``, which runs once per tower, when one of them is first needed."""

    def __init__(self, make: Callable[..., list[Any]]) -> None:
        self._make = make
        self._made: dict[Any, list[Any]] = {}

    def __call__(self, *key: Any) -> list[Any]:
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def output(self, index: int) -> Callable[..., Ref]:
        return lambda *key: self(*key)[index]


def opened(shape: tf.TensorShape, along: int) -> tf.TensorShape:
    """A static shape in which the size of one dimension is unknown."""
    return shape if shape.rank is None else tf.TensorShape(
        [None if dim == along else size for dim, size in enumerate(shape)])


def captured(towers: Towers, outer: Any, shape: tf.TensorShape) -> Value:
    """The value of an outer tensor that a traced graph has captured."""
    build = towers.builder
    return Value(towers, REPLICATED, shape, build.take(build.graph.capture(outer)),
                 device=getattr(outer, "device", "") or "")
