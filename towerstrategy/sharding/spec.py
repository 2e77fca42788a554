"""Specs: how a tensor of a step written for one device is laid out on the towers.

Goes in: nothing.  Comes out: the specs that :mod:`propagate` gives to tensors, and that the rules
in :mod:`rules` take and return.

A step is traced once, with all rows of the global batch.  Each of its tensors has one of the specs:

* :class:`Replicated`: the tensor is made once and is the same for all towers;
* :class:`Sharded`: each tower has a slice along one dimension; the slices, concatenated in the
  order of the towers, are the whole tensor;
* :class:`Partial`: each tower has a tensor of the whole shape; the whole tensor is their sum
  (maximum, minimum, logical and, logical or; mean weighted by the towers' numbers of rows);
* :class:`Size`: an integer or a vector of integers that has an entry that counts rows.  It has two
  values: the whole batch's and each tower's.  Arithmetic uses the batch's value; the shape of a
  sharded tensor uses the tower's;
* :class:`ListOf`: each tower has a ``TensorList`` of its own.

Each tower runs the iterations of a loop over the rows for its own rows.  In such a loop, a
:class:`Row` and its subclasses are tensors that differ from row to row.

In a function given to ``strategy.run``, tensors are replicated or :class:`PerTower`.
"""

from __future__ import annotations

import collections
import dataclasses
import fractions
import math
from collections.abc import Mapping, Sequence
from typing import Any, Union


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """Positions that a mask chooses from a batch, as in ``tf.boolean_mask``; one for each mask.

    Attributes:
      times: the number of positions per example from which the mask chooses; None if unknown.
      batch: the name of the batch.
    """

    times: int | None
    batch: str = ""


@dataclasses.dataclass(frozen=True)
class Concatenated:
    """Examples of several tensors, concatenated as in ``tf.concat([labeled, others], 0)``.

    A tower has its slices of all of them, concatenated.  So the slices of each of them are in the
    order of the towers, not those of the whole tensor.

    Attributes:
      parts: the group of each, as in :class:`Sharded`, and its positions per example; no part is
        concatenated itself, and all are the same :class:`Chosen` examples if one is.
    """

    parts: tuple[tuple[str | Chosen, int], ...]


Group = Union[str, Chosen, Concatenated]


@dataclasses.dataclass(frozen=True)
class Replicated:
    """The tensor is made once and is the same for all towers."""


@dataclasses.dataclass(frozen=True)
class Axes(Replicated):
    """The axes over which the gradient of a broadcast is summed (``BroadcastGradientArgs``).

    Attributes:
      reduced: for each dimension of the broadcast shape whether it is one of the axes; None if
        static shapes do not tell.
    """

    reduced: tuple[bool | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes(Replicated):
    """A vector of numbers of rows: ``each`` is what a scalar with one of them would have."""

    each: tuple[Size, ...]


@dataclasses.dataclass(frozen=True)
class Variance(Replicated):
    """The variance of all rows, in place of the reserved output of a normalization kernel."""


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Each tower has a slice along ``dim``; the slices in the towers' order are the whole tensor.

    Attributes:
      dim: the sharded dimension, counted from 0.
      times: the number of consecutive positions per example in that dimension; None if unknown.
      group: the examples: empty for the batch's; the name of another batch of the step, of another
        size; :class:`Chosen` ones; or those of several tensors, :class:`Concatenated`.
      broadcast: only in ``Plan.takes``: a dimension of size 1 is not sliced.
      start: only in ``Plan.takes`` of a loop, for a variable of which no iteration reads what it
        starts with: its rows may be more or fewer than the examples'.
    """

    dim: int
    times: int | None = 1
    group: Group = ""
    broadcast: bool = False
    start: bool = False

    @property
    def given(self) -> Sharded:
        """The spec of a tensor that is given to an op that takes this spec."""
        return dataclasses.replace(self, broadcast=False, start=False) \
            if self.broadcast or self.start else self

    @property
    def uncounted(self) -> Sharded:
        """The same examples, each with an unknown number of positions."""
        return dataclasses.replace(self, times=None)

    @property
    def examples(self) -> Sharded:
        """The same examples, with one position each."""
        return dataclasses.replace(self, times=1)

    @property
    def size(self) -> Size:
        """The size along ``dim``, in a shape."""
        return Size(self.dim, self.times, self.group)

    def at(self, dim: int) -> Sharded:
        """The same examples along another dimension."""
        return self if dim == self.dim else dataclasses.replace(self, dim=dim)

    @property
    def pieces(self) -> tuple[Sharded, ...]:
        """The spec of each of the tensors that are concatenated along ``dim``, in their order."""
        return tuple(Sharded(self.dim, None if self.times is None else number * self.times, group)
                     for group, number in parts_of(self))

    def repeated(self, count: fractions.Fraction) -> Sharded | None:
        """The spec of so many of these tensors, concatenated; None if that would cut a piece."""
        parts = parts_of(self) * count.numerator
        length, rest = divmod(len(parts), count.denominator)
        if not length or rest or parts[:length] * count.denominator != parts:
            return None
        return dataclasses.replace(self, group=_group(parts[:length]))


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each tower has a part with the whole shape; the reduction of all parts is the whole tensor.

    Attributes:
      reduction: "sum", "max", "min", "and" (all), "or" (any) or "mean".
    """

    reduction: str = "sum"


@dataclasses.dataclass(frozen=True)
class Size:
    """Integers that describe shapes, with a value for the whole batch and one for each tower.

    Attributes:
      at: the index of the entry that counts rows (0 for a scalar). The towers' entries there add up
        to the batch's; all other entries are the same on all towers.
      times, group: as in :class:`Sharded`.
      known: the static entries of a tensor's shape, None for unknown ones; None if not a shape.
    """

    at: int = 0
    times: int | None = 1
    group: Group = ""
    known: tuple[int | None, ...] | None = None

    def moved(self, at: int) -> Size:
        """The same number of rows at another index of another tensor."""
        return Size(at, self.times, self.group)

    def shards(self, dim: int) -> Sharded:
        """The spec of a tensor whose dimension ``dim`` has this size."""
        return Sharded(dim, self.times, self.group)


@dataclasses.dataclass(frozen=True)
class ListOf:
    """Each tower has its own ``TensorList``, or optional, in which a branch keeps a tensor.

    Attributes:
      element: the spec of its entries; None if it has none or they are unknown.
      rows: how many rows there are, if the entries are the rows: the towers' lists, joined, are the
        whole list.  None if all lists have as many entries as the whole one.
      backwards: whether the last row's entry is the first.
      variable: in a loop over the rows: the variable that it is, or is in the next iteration; None
        if it is none, or comes of others.
      ahead: in such a loop: whether it has only the entries of the rows that, in its order, come
        before the iteration's (0), and of that row (1); None if it has those of all rows.
      zeros: in such a loop: whether all entries are zeros, but that of the iteration's row.
    """

    element: Spec | None = None
    rows: Size | None = None
    backwards: bool = False
    variable: int | None = None
    ahead: int | None = None
    zeros: bool = False


@dataclasses.dataclass(frozen=True)
class ByBranch:
    """The element of lists or optionals in which branches keep tensors of different specs.

    Attributes:
      condition: the identity of the branches' condition.
      specs: the spec in each branch; None for no entry.
    """

    condition: Any
    specs: tuple[Spec | None, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """In a loop over the rows: a tensor that differs from iteration to iteration.

    A tower has what one device has in the iteration of the same row, but for the subclasses.
    """


@dataclasses.dataclass(frozen=True)
class Position(Row):
    """The number of the row, or of the one after it (``ahead`` 1); a tower counts its own rows.

    Attributes:
      rows: how many rows there are; None while that is unknown.
      backwards: whether it is that of the iteration only, in a loop that goes from the last row to
        the first one.
    """

    rows: Size | None = None
    ahead: int = 0
    backwards: bool = False


@dataclasses.dataclass(frozen=True)
class MoreRows(Row):
    """Whether ``rows`` has a row at the position."""

    rows: Size


@dataclasses.dataclass(frozen=True)
class Index(Row):
    """A vector of which the first entry is a :class:`Position`, with the same attributes."""

    rows: Size | None
    ahead: int


@dataclasses.dataclass(frozen=True)
class InRow(Row):
    """A tensor like one with spec ``shards`` that is zero in all rows but the iteration's."""

    shards: Sharded


@dataclasses.dataclass(frozen=True)
class Total(Row):
    """A loop variable that is only added to; a tower has the sum over its rows.

    Attributes:
      variable: its index.
      shards: if each iteration adds to its own row of a tensor: the tensor's spec.
    """

    variable: int
    shards: Sharded | None = None


@dataclasses.dataclass(frozen=True)
class PerTower:
    """Each tower has its own tensor and there is no whole one: in ``strategy.run``."""


def concatenated(specs: Sequence[Spec]) -> Sharded | None:
    """The spec of tensors of these specs, concatenated along the rows; None if it has none."""
    sharded = [spec for spec in specs if isinstance(spec, Sharded)]
    pieces = [piece for spec in sharded for piece in spec.pieces]
    times = [piece.times or 0 for piece in pieces]
    if len(sharded) < len(specs) or len({piece.dim for piece in pieces}) != 1 or not all(times) \
            or len({*pieces}) > 1 and not all(map(can_be_cut, pieces)):
        return None
    common = math.gcd(*times)
    return Sharded(pieces[0].dim, common, _group([
        (group, number // common) for piece, number in zip(pieces, times)
        for group, _ in parts_of(piece)]))


def _group(parts: Sequence[tuple[str | Chosen, int]]) -> Group:
    """The group of examples that have these parts."""
    return Concatenated(tuple(parts)) if len(parts) > 1 else parts[0][0]


def parts_of(spec: Sharded | Size) -> tuple[tuple[str | Chosen, int], ...]:
    """The groups that are concatenated, and the positions of each per example and ``times``."""
    return spec.group.parts if isinstance(spec.group, Concatenated) else ((spec.group, 1),)


def positions(specs: Sequence[Sharded | Size]) -> Mapping[Group, int]:
    """How many positions specs with known ``times`` have for each example of each batch."""
    numbers: collections.Counter[Group] = collections.Counter()
    for spec in specs:
        for group, number in parts_of(spec):
            numbers[group] += number * (spec.times or 0)
    return numbers


def of_batch(spec: Sharded | Size) -> bool:
    """Whether a tower's positions are those of its rows of the batch, once."""
    return not spec.group


def in_one_piece(spec: Sharded | Size) -> bool:
    """Whether a tower's positions are consecutive ones of the whole tensor's."""
    return not isinstance(spec.group, Concatenated)


def can_be_cut(spec: Sharded | Size) -> bool:
    """Whether the towers' numbers of examples are known without a tensor that has them."""
    group = spec.group.parts[0][0] if isinstance(spec.group, Concatenated) else spec.group
    return not isinstance(group, Chosen)


def has_known_rows(spec: Sharded | Size) -> bool:
    """Whether numbers of rows tell the size along the sharded dimension, or the size's entry."""
    return spec.times is not None and can_be_cut(spec)


Spec = Union[Replicated, Sharded, Partial, Size, ListOf, ByBranch, PerTower, Row]
PARTED = (Sharded, Partial, ListOf, PerTower, Row)  # functions take the towers' parts alone
REPLICATED = Replicated()
SUM = Partial("sum")
MEAN = Partial("mean")
PER_TOWER = PerTower()
ROW = Row()
