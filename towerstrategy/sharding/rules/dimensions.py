"""One mechanism for most rules: names for dimensions, as in an einsum.

Goes in: an op, the specs of its inputs, and the names of the dimensions of its inputs and outputs.
Comes out: its plan.  Dimensions of one name have the same positions in the same order: if one of
them is sharded, all are.  An output without this name depends on all rows: it is partial, or the op
runs once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Sequence
from typing import Any

from towerstrategy.sharding.rules.registry import Op, Plan
from towerstrategy.sharding.spec import REPLICATED, ListOf, Sharded, Spec

DIMS = string.ascii_lowercase  # names for the dimensions of a tensor of any rank
MIXED = "_"  # the name of a dimension whose positions depend on each other: it cannot be sharded
Names = Sequence[Any]  # letters, or any other names; a number names a dimension that broadcasts


def is_plain(spec: Spec) -> bool:
    """Whether a tensor of this spec can be made whole without an all-gather."""
    return not isinstance(spec, (Sharded, ListOf))


def but(axes: Sequence[int] | None, rank: int | None, put: str = MIXED) -> str | None:
    """The names of all dimensions but ``axes``, which are named ``put``; None if unknown."""
    if axes is None or rank is None:
        return None
    excluded = {axis % max(rank, 1) for axis in axes}
    return "".join(put if dim in excluded else DIMS[dim] for dim in range(rank))


def by_names(op: Op, specs: Sequence[Spec], inputs: Sequence[Names | None],
             outputs: Sequence[Names | None], parts: Spec | None = None, gathers: bool = False,
             padded: bool | str = False) -> Plan | None:
    """The plan of an op, from the names of its dimensions; None if it has to run once.

    Args:
      op: the operation.
      specs: the specs of its inputs.
      inputs: the names of each input's first dimensions; further dimensions cannot be sharded.
        None, as for further inputs: the input is the same for all towers.
      outputs: the names of each output's dimensions, None if unknown; one entry counts for all.
      parts: the spec of an output that depends on all rows; None: then the op runs once.
      gathers: whether, if inputs have rows in dimensions of several names, the input with the most
        entries (the first one, if unknown) stays sharded and the others are gathered.
      padded: see :class:`Plan`.
    """
    input_names = [*inputs, *[None] * (len(specs) - len(inputs))]
    sharded = [index for index, spec in enumerate(specs) if not is_plain(spec)]
    named = [index for index in sharded if _row_name(input_names[index], specs[index]) != MIXED]
    if not named or len(named) < len(sharded) and not gathers:
        return None
    entries = {index: _entries(op, index) for index in named} if len(named) > 1 else {}
    main = named[0] if not entries or None in entries.values() else max(
        named, key=lambda index: (entries[index], getattr(specs[index], "times", 0) or 0))
    spec, name = specs[main], _row_name(input_names[main], specs[main])
    assert isinstance(spec, Sharded)
    takes: list[Spec] = []
    for index, (names, each) in enumerate(zip(input_names, specs)):
        dim = None if names is None or name not in names else names.index(name)
        if isinstance(each, Sharded) and each.dim == dim and each.group == spec.group:
            takes.append(each)
            if isinstance(name, int) and each.times != spec.times:
                if None not in (each.times, spec.times):
                    return None
                spec = spec.uncounted
        elif isinstance(each, Sharded) and (not gathers or isinstance(name, int)
                                            and each.dim == dim):  # one of them may have one row
            return None
        elif dim is None or isinstance(name, int) and op.rank(index) is not None \
                and op.inputs[index].shape[dim] == 1:
            takes.append(REPLICATED)
        else:
            takes.append(dataclasses.replace(spec, dim=dim, broadcast=isinstance(name, int)))
    gives = [None if names is None else spec.at(names.index(name)) if name in names else parts
             for names in (outputs if len(outputs) > 1 else [*outputs] * len(op.outputs))]
    known = [each for each in gives if each is not None]
    return Plan(takes, known, padded=padded) if len(known) == len(gives) else None


def by_equation(op: Op, specs: Sequence[Spec], equation: str, parts: Spec | None = None,
                gathers: bool = False) -> Plan | None:
    """Like :func:`by_names`, with names as in an einsum: "...mk,...kn->...mn".

    The dimensions of "..." broadcast; further dimensions of the outputs need no names.
    """
    names = _names_in(equation, tuple(tensor.shape.rank for tensor in op.inputs))
    return None if names is None else by_names(op, specs, *names, parts, gathers)


@functools.cache
def _names_in(equation: str, ranks: Sequence[int | None]) -> tuple[list[Names], list[Names]] | None:
    """The names of inputs of these ranks and of the outputs; "..." is numbers, the last one -1.

    None if the op adds up what is broadcast, or takes a diagonal.
    """
    *terms, out = equation.replace("->", ",").split(",")
    dots: list[Any] = [rank and rank - len(term) + len("...") if "..." in term else 0
                       for term, rank in zip(terms, ranks)]
    if None in dots or any(dots) and "..." not in out:
        return None
    names: list[Names] = [
        [*before, *range(-count, 0), *after]
        for term, count in zip([*terms, out], [*dots, max(dots)])
        for before, _, after in [term.partition("...")]]
    letters = [[name for name in each if name != MIXED] for each in names]
    return None if any(len({*each}) < len(each) for each in letters) else (names[:-1], names[-1:])


def once_and_cut(op: Op, specs: Sequence[Spec], spec: Sharded) -> Plan | None:
    """The plan of an op that runs once, with all rows, and whose outputs are cut as ``spec`` says.

    So the ops behind it are sharded again. For one number an example that does not pay.
    """
    if op.out_rank() in (None, 1):
        return None
    return Plan([REPLICATED] * len(specs), [spec] * len(op.outputs), once=True)


def _row_name(names: Names | None, spec: Spec) -> Any:
    """The name of the dimension that has the rows."""
    inside = names is not None and isinstance(spec, Sharded) and spec.dim < len(names)
    return names[spec.dim] if inside else MIXED  # type: ignore[index, union-attr]


def _entries(op: Op, index: int) -> int | None:
    """How many entries an example of an input has; None if more than one dimension is open."""
    shape = op.inputs[index].shape
    known = shape.rank is not None and shape.as_list().count(None) < 2
    return math.prod(size or 1 for size in shape) if known else None
