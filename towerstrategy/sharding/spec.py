"""What a tensor of a step written for one device is on the towers.

Goes in: nothing.  Comes out: the specs that :mod:`propagate` gives to tensors, and in which the
rules of :mod:`rules` are written.

A step is traced once, with all rows of the global batch.  Each of its tensors is one of:

* :class:`Replicated`: made once, from what is the same for all towers;
* :class:`Sharded`: each tower has its own slice along one dimension, and the slices in the order of
  the towers are the whole tensor;
* :class:`Partial`: each tower has a tensor of the whole shape, and the whole tensor is their sum
  (maximum, minimum, conjunction, disjunction; a mean in which a tower counts by its rows);
* :class:`Size`: an integer, or a vector of integers, some of whose entries count rows.  It is known
  twice: for the whole batch, and for each tower.  Arithmetic takes the whole batch's, a tensor that
  is sharded is shaped by the tower's;
* :class:`ListOf`: a ``TensorList`` of which each tower has its own.

In a function given to ``strategy.run``, tensors are replicated or :class:`PerTower`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Union


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Several tensors of a group behind each other, as of ``tf.concat([view, other_view], 0)``.

    A tower has its slice of each block, block by block; so it is each block's slices, not the
    tensor's, that are in the order of the towers.
    """

    count: int
    of: Group = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen:
    """Some positions of the batch's examples, as of ``tf.boolean_mask``; one for each mask.

    Attributes:
      times: among how many positions of each example they are chosen; None if unknown.
    """

    times: int | None


Group = Union[str, Chosen]


class _Grouped:
    """What counts, or is, positions of the examples of a group."""

    group: Group | Blocks

    @property
    def blocks(self) -> int:
        """How many tensors of the group are behind each other."""
        return self.group.count if isinstance(self.group, Blocks) else 1

    @property
    def one_block(self) -> Group:
        """The group of each of them."""
        return self.group.of if isinstance(self.group, Blocks) else self.group

    def some(self, count: int) -> Group | Blocks:
        """The group of so many of them."""
        return self.one_block if count == 1 else Blocks(count, self.one_block)


@dataclasses.dataclass(frozen=True)
class Replicated:
    """The same for all towers, made once."""


@dataclasses.dataclass(frozen=True)
class Axes(Replicated):
    """The axes over which a broadcast is summed again, so far as static shapes tell.

    Attributes:
      reduced: for each dimension of the broadcast shape whether it is among the axes; None where
        that is known when the step runs only.
    """

    reduced: tuple[bool | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes(Replicated):
    """Several numbers of rows, each like :class:`Size` ``each``."""

    each: Size


@dataclasses.dataclass(frozen=True)
class Variance(Replicated):
    """The variance of all rows, in place of what a kernel of normalization keeps of it."""


@dataclasses.dataclass(frozen=True)
class Sharded(_Grouped):
    """Each tower has its slice along ``dim``; all slices in the towers' order are the tensor.

    Attributes:
      dim: the dimension, counted from the first.
      times: how many consecutive positions an example of the batch has there; None if unknown.
      group: which examples. Empty: those of the batch. Else those of another batch of the same
        step, of another size, or :class:`Chosen` ones, or :class:`Blocks` of these: two tensors
        go together if their groups are the same.
      broadcast: in a wish for an input only: a dimension of size 1 is left as it is.
    """

    dim: int
    times: int | None = 1
    group: Group | Blocks = ""
    broadcast: bool = False

    def at(self, dim: int) -> Sharded:
        """The same examples along another dimension."""
        return self if dim == self.dim else dataclasses.replace(self, dim=dim)

    def goes_with(self, other: Sharded) -> bool:
        """Whether each tower has the same positions of both, where they are of one size."""
        return self.group == other.group


@dataclasses.dataclass(frozen=True)
class Partial:
    """Each tower has a part of the whole shape; ``reduction`` of the parts is the tensor.

    Attributes:
      reduction: "sum", "max", "min", "and" (all), "or" (any) or "mean".
    """

    reduction: str = "sum"


@dataclasses.dataclass(frozen=True)
class Size(_Grouped):
    """Integers that say shapes, known for the whole batch and for each tower.

    Attributes:
      at: the entry that counts rows (0 for a scalar). The towers' numbers there add up to the
        batch's; all other entries are alike.
      times, group: as those of :class:`Sharded`.
      known: the entries that are known beforehand, for the shape of a tensor; else None.
    """

    at: int = 0
    times: int | None = 1
    group: Group | Blocks = ""
    known: tuple[int | None, ...] | None = None

    def moved(self, at: int) -> Size:
        """The same number of rows in another entry of something else."""
        return Size(at, self.times, self.group)

    def shards(self, dim: int) -> Sharded:
        """What is shaped by this, along ``dim``."""
        return Sharded(dim, self.times, self.group)


@dataclasses.dataclass(frozen=True)
class ListOf:
    """A ``TensorList`` of each tower's own; ``element`` is what its entries are (None: unknown)."""

    element: Spec | None = None


@dataclasses.dataclass(frozen=True)
class OptionalOf(ListOf):
    """An optional of each tower's own, in which a branch keeps something for its gradient.

    Attributes:
      by_branch: where branches keep something else each: what stands for their condition, and what
        each of them keeps.
    """

    by_branch: tuple[Any, tuple[Spec | None, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class PerTower:
    """Each tower has its own, of which no whole is made: in ``strategy.run``."""


Spec = Union[Replicated, Sharded, Partial, Size, ListOf, PerTower]
REPLICATED = Replicated()
SUM = Partial("sum")
MEAN = Partial("mean")
PER_TOWER = PerTower()
