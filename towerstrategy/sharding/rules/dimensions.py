"""One mechanism for most rules: names of dimensions, as an einsum has them.

Goes in: an operation, the specs of its inputs, and what the dimensions of its inputs and outputs
are called.  Comes out: its plan.  Where a name stands there are the same positions, in one order:
rows in a dimension of that name are in all dimensions of that name.  An output without such a
dimension is made of all rows: it is partial, or the operation is done once.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import REPLICATED, ListOf, Sharded, Spec

DIMS = string.ascii_lowercase  # names of a tensor's dimensions, however many these are
MIXED = "_"  # of one along which positions depend on each other
Names = Sequence[Any]  # letters, or other names; a number is that of a dimension that broadcasts


def is_plain(spec: Spec) -> bool:
    """Whether a tensor of this spec can be had whole without anything being gathered."""
    return not isinstance(spec, (Sharded, ListOf))


def one_sharded(specs: Sequence[Spec]) -> Sharded | None:
    """The spec of all those that are sharded; None where there are none, or several."""
    found = {spec for spec in specs if isinstance(spec, Sharded)}
    return found.pop() if len(found) == 1 else None


def but(axes: Sequence[int] | None, rank: int | None, put: str = MIXED) -> str | None:
    """Names of so many dimensions, with ``put`` for these; None where either is unknown."""
    if axes is None or rank is None:
        return None
    named = {axis % max(rank, 1) for axis in axes}
    return "".join(put if dim in named else DIMS[dim] for dim in range(rank))


def by_names(op: Op, specs: Sequence[Spec], inputs: Sequence[Names | None],
             outputs: Sequence[Names | None], parts: Spec | None = None, gathers: bool = False,
             padded: bool = False) -> Plan | None:
    """The plan of an operation, by the names of dimensions.

    Args:
      op: the operation.
      specs: the specs of its inputs.
      inputs: the names of each input's first dimensions; along others nothing is done in parts.
        None, and further inputs: the same for all towers.
      outputs: likewise; None where they are not known. One stands for all.
      parts: what outputs are in which there are no rows; None where there have to be some.
      gathers: whether of rows against other rows one side stays sharded, that with more entries
        (the first, where nobody knows), and the other is gathered.
      padded: see :class:`Plan`.
    """
    given = [*inputs, *[None] * (len(specs) - len(inputs))]
    rows = [index for index, spec in enumerate(specs) if not is_plain(spec)]
    named = [index for index in rows if _name(given[index], specs[index]) != MIXED]
    if not named or len(named) < len(rows) and not gathers \
            or len(rows) > 1 and any(isinstance(spec, ListOf) for spec in specs):
        return None
    entries = {index: _entries(op, index) for index in named}
    first = named[0] if len(named) == 1 or None in entries.values() else max(
        named, key=lambda index: (entries[index], getattr(specs[index], "times", 0) or 0))
    spec, name = specs[first], _name(given[first], specs[first])
    assert isinstance(spec, Sharded)
    takes: list[Spec] = []
    for index, (own, each) in enumerate(zip(given, specs)):
        at = None if own is None or name not in own else own.index(name)
        if isinstance(each, Sharded) and each.dim == at and each.goes_with(spec):
            takes.append(each)
        elif isinstance(each, Sharded) and not gathers:
            return None
        elif at is None or isinstance(name, int) and op.rank(index) is not None \
                and op.inputs[index].shape[at] == 1:
            takes.append(REPLICATED)
        else:
            takes.append(Sharded(at, spec.times, spec.group, isinstance(name, int)))
    gives = [None if own is None else spec.at(own.index(name)) if name in own else parts
             for own in (outputs if len(outputs) > 1 else [*outputs] * len(op.outputs))]
    known = [each for each in gives if each is not None]
    return Plan(takes, known, padded=padded) if len(known) == len(gives) else None


def of_all_rows(op: Op, specs: Sequence[Spec], spec: Sharded) -> Plan | None:
    """The plan of an operation of all rows: done once, and what comes out is cut as ``spec``.

    So what is made of it is the towers' again. Numbers, one an example, are not worth that.
    """
    if op.out_rank() in (None, 1) or spec.one_block:
        return None
    return Plan([REPLICATED] * len(specs), [spec] * len(op.outputs), once=True)


def _name(names: Names | None, spec: Spec) -> Any:
    """That of the rows' dimension."""
    inside = names is not None and isinstance(spec, Sharded) and spec.dim < len(names)
    return names[spec.dim] if inside else MIXED  # type: ignore[index, union-attr]


def _entries(op: Op, index: int) -> int | None:
    """How many entries an example of an input has, if one dimension is open at most."""
    shape = op.inputs[index].shape
    known = shape.rank is not None and shape.as_list().count(None) < 2
    return math.prod(size or 1 for size in shape) if known else None
