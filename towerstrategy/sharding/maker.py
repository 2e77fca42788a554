"""The interface by which a rule makes an operation's nodes itself.

Goes in: an operation and its inputs, redistributed to the specs that the rule takes.  Comes out:
nodes on the towers, on the host or on the merge device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding import homes
from towerstrategy.sharding.builder import Ref
from towerstrategy.sharding.rules.entries import sizes_of
from towerstrategy.sharding.rules.registry import EACH, HOST, Op
from towerstrategy.sharding.spec import REPLICATED, Sharded, Size, has_known_rows
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Value, opened


class Maker:
    """Makes nodes for one operation: on a tower, on the host (HOST), once (None), or on EACH tower.

    A list has one tensor per tower; an operation on lists runs on each tower and returns a list.

    Attributes:
      op: the operation.
      inputs: its inputs, with the specs that the rule takes.
      towers: the towers, with their numbers of rows: ``size(spec, dtype, tower)`` and
        ``start(spec, dtype, tower)``.
      home: the device of nodes that are made once.
    """

    def __init__(self, op: Op, inputs: Sequence[Value], towers: Towers, home: str = "") -> None:
        self.op, self.inputs, self.towers = op, inputs, towers
        self.home = home or towers.merge

    def part(self, index: int, tower: int) -> Ref:
        """A tower's part of an input."""
        return self.inputs[index].part(tower)

    def whole(self, index: int) -> Ref:
        """The whole tensor of an input."""
        return self.inputs[index].whole()

    def parts(self, index: int) -> list[Ref]:
        """Each tower's part of an input."""
        return self.inputs[index].parts()

    def copy(self, inputs: Sequence[Any], tower: int | None, attributes: bytes = b"") -> list[Any]:
        """The outputs of a copy of the operation with other inputs, and other attributes if any."""
        if tower == EACH:
            return [list(output) for output in zip(*self.each(
                lambda tower: self.copy(_of_tower(inputs, tower), tower, attributes)))]
        return self.towers.builder.copy(self.op, inputs, self._device(tower), self._scope(tower),
                                        attributes=attributes)[0]

    def make(self, kind: str, inputs: Sequence[Any], tower: int | None, **attrs: Any) -> Any:
        """The first output of a new operation of another type, named after this operation."""
        if tower == EACH or list in map(type, inputs):
            return self.each(lambda each: self.make(
                kind, _of_tower(inputs, each), each if tower == EACH else tower, **attrs))
        return self.towers.builder.make(kind, inputs, self._device(tower),
                                        f"{self._scope(tower)}{self.op.name}/{kind}", **attrs)

    def constant(self, value: Any, dtype: tf.DType, tower: int | None) -> Any:
        """A constant."""
        if tower == EACH:
            return self.each(lambda tower: self.constant(value, dtype, tower))
        return self.towers.builder.constant(value, dtype, self._device(tower))

    def each(self, make: Callable[[int], Any]) -> list[Any]:
        """The result of ``make`` for each tower."""
        return [make(tower) for tower in range(len(self.towers))]

    def rows(self, index: int, dtype: tf.DType) -> Ref:
        """The whole size of an input along its sharded dimension."""
        spec = self.inputs[index].spec
        assert isinstance(spec, Sharded)
        return self.inputs[index].size_along(spec.dim, dtype=dtype)

    def positions(self, index: int) -> list[Ref]:
        """Each tower's positions in a sharded input along its sharded dimension, int64 vectors."""
        spec, (zero, one) = self.inputs[index].spec, map(self.towers.number, (0, 1))
        assert isinstance(spec, Sharded)
        whole = self.towers.on_host("Range", zero, self.rows(index, tf.int64), one)
        return Value(self.towers, REPLICATED, tf.TensorShape([None]), whole).as_spec(
            spec.at(0)).parts()

    def gathered(self, parts: list[Ref], spec: Sharded, shape: tf.TensorShape) -> Ref:
        """The whole tensor of these parts; ``shape`` may have another size along the rows."""
        return Value(self.towers, spec, opened(shape, spec.dim), None, parts.__getitem__,
                     self.home).whole()

    def shares(self, index: int, dtype: tf.DType) -> list[Ref]:
        """Each tower's number of rows of an input over the whole's; NaN if this has no rows."""
        value, spec = self.inputs[index], self.inputs[index].spec
        assert isinstance(spec, Sharded)
        rows = self.each(lambda tower: value.size_along(spec.dim, tower, dtype))
        shares: list[Ref] = self.make("RealDiv", [rows, self.rows(index, dtype)], HOST)
        return shares

    def offsets(self, index: int, dtype: tf.DType) -> list[Ref]:
        """The number of rows before each tower's own that a size input counts."""
        value, spec, towers = self.inputs[index], self.inputs[index].spec, self.towers
        assert isinstance(spec, Size)
        if has_known_rows(spec):
            return self.each(lambda tower: towers.start(spec, dtype, tower))
        sizes = value.parts() if value.shape.rank == 0 else self.entries(self.make(  # or unknown
            "Reshape", [value.parts(), self.constant([-1], tf.int32, HOST)], HOST), spec.at)
        before = self.make("Cumsum", [towers.of_all_workers(sizes), towers.number(0, tf.int32)],
                           HOST, exclusive=True)
        offsets = self.each(lambda tower: towers.entry(before, towers.first + tower))
        return offsets if sizes[0].dtype == dtype else self.make(
            "Cast", [offsets], HOST, DstT=dtype)

    def shape(self, index: int, dtype: tf.DType) -> Ref:
        """The shape of the whole tensor of a sharded input."""
        value, spec = self.inputs[index], self.inputs[index].spec
        assert isinstance(spec, Sharded)
        rows, static = self.rows(index, dtype), value.shape
        if static.rank is not None and None not in [
                size for dim, size in enumerate(static) if dim != spec.dim]:
            return self.make("Pack", [rows if dim == spec.dim else self.constant(size, dtype, HOST)
                                      for dim, size in enumerate(static)], HOST, axis=0)
        return self.towers.with_entry(self.own_shape(index, 0, dtype), spec.dim, rows)

    def own_shape(self, index: int, tower: int, dtype: tf.DType) -> Ref:
        """The shape of a tower's part of an input.

        It is made of the host's numbers of rows if these suffice: then it does not wait for the
        tensor, and an XLA cluster need not return it from the GPU.
        """
        towers, spec = self.towers, self.inputs[index].spec
        sizes = sizes_of(self.op.inputs[index])
        dim = spec.dim if isinstance(spec, Sharded) else None
        if sizes is None or None in [size for at, size in enumerate(sizes) if at != dim] \
                or isinstance(spec, Sharded) and not has_known_rows(spec):
            return self.make("Shape", [self.part(index, tower)], tower, out_type=dtype)
        if not isinstance(spec, Sharded):
            return towers.builder.constant(sizes, dtype, towers.shapes_on(tower, dtype))
        return towers.shape(tower, towers.size(spec, dtype, tower), spec.dim, sizes)

    def entries(self, vectors: list[Ref], index: int) -> list[Ref]:
        """Each tower's entry ``index`` of its vector."""
        return [self.towers.entry(vector, index) for vector in vectors]

    def with_entry(self, index: int, at: int, entries: Any) -> Any:
        """Each tower's part of input ``index``, the output's shape, with another entry ``at``."""
        mask = self.constant(np.arange(self.op.out_rank()) == at, tf.bool, EACH)
        return self.make("SelectV2", [mask, entries, self.parts(index)], EACH)

    def _device(self, tower: int | None) -> str:
        if tower == HOST:
            return self.towers.host
        return self.home if tower is None else self.towers.devices[tower]

    def _scope(self, tower: int | None) -> str:
        return homes.ONCE if tower is None or tower == HOST else self.towers.scopes[tower]


def _of_tower(inputs: Sequence[Any], tower: int) -> list[Ref]:
    """A tower's inputs: its entry of each list."""
    return [value[tower] if isinstance(value, list) else value for value in inputs]
