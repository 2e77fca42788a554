"""The rule for reshapes: the dimension that has the rows afterwards, and each tower's shape.

Goes in: a reshape and the specs of its inputs.  Comes out: its plan.  ``before`` and ``after`` are
the sizes of its input and of its output, so far as they are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towerstrategy.sharding.rules import shapes
from towerstrategy.sharding.rules.entries import (
    ONE,
    Quotient,
    dimensions_in,
    quotient,
    sizes_of,
)
from towerstrategy.sharding.rules.registry import EACH, HOST, Op, Plan
from towerstrategy.sharding.spec import (
    REPLICATED,
    Sharded,
    Size,
    Spec,
    has_known_rows,
    positions,
)


def reshape(op: Op, spec: Spec, target: Spec) -> Plan | None:
    """The plan of a reshape of a tensor of this spec; ``target`` is the spec of the new shape."""
    if not isinstance(spec, Sharded):
        return None
    requested = shapes.static_sizes(op, 1, REPLICATED)
    after = _sizes_after(op, requested, target)
    if after is None:
        return None
    before: list[Any] | None = sizes_of(op.inputs[0])
    for at, dim in enumerate(dimensions_in(op.inputs[1], op.inputs[0]) if before else ()):
        if dim not in (None, spec.dim) and after[at] is None:
            before[dim] = after[at] = f"size of {dim}"  # type: ignore[index]
    result = _spec_after(before, after, spec, target)
    if result is None:
        return None
    if before is not None and before[spec.dim] is None and after[result.dim] is not None:
        return Plan([spec, result.size], [result])  # the target has all rows
    inferred = _inferred_sizes(spec, result, before, after, requested)
    sizes = [-1 if at == result.dim else inferred.get(at, size) for at, size in enumerate(after)]
    plan = Plan([spec, target], [result],
                passes=result == spec and _are_equal(before, after, spec.dim))
    if all(isinstance(size, int) and size for size in sizes):
        plan.sizes = sizes
    elif plan.passes:
        return plan
    elif not isinstance(target, Size):
        return plan if requested is not None and requested[result.dim] == -1 else _with_size(
            plan, op, result.dim, -1)
    elif inferred:
        # TensorFlow infers a size of -1 from the sizes that are not 0. On a tower without rows that
        # is wrong where sizes move between the rows' dimension and others, here or in a reshape
        # before: Grappler joins them. So the size is put in.
        (dim, size), = inferred.items()
        return _with_size(plan, op, dim, size)
    return plan


def _inferred_sizes(spec: Sharded, result: Sharded, before: Sequence[Any] | None,
                    after: Sequence[Any], requested: Sequence[Any] | None) -> dict[int, int | None]:
    """The dimension with -1 in the target shape, if not the rows', and its size if it is known."""
    inferred = [at for at, size in enumerate(requested or ()) if size == -1 and at != result.dim]
    example = [spec.times, len(spec.pieces), *(
        size for at, size in enumerate(before or [None]) if at != spec.dim)]
    others = [size for at, size in enumerate(after) if at not in (*inferred, result.dim)]
    rest = quotient(example, [result.times, len(result.pieces), *others])
    return dict.fromkeys(inferred, int(rest.known) if rest is not None and not rest.times else None)


def _are_equal(before: Sequence[Any] | None, after: Sequence[Any] | None, rows: int = -1) -> bool:
    """Whether all sizes are known and equal; dimension ``rows`` does not count."""
    if before is None or after is None or len(before) != len(after):
        return False
    return all(at == rows or size is not None and size == other
               for at, (size, other) in enumerate(zip(before, after)))


def is_identity(op: Op) -> bool:
    """Whether a reshape is known to return its input as it is."""
    return _are_equal(sizes_of(op.inputs[0]),
                      _sizes_after(op, shapes.static_sizes(op, 1, REPLICATED)))


def _spec_after(before: Sequence[Any] | None, after: Sequence[Any], spec: Sharded,
                target: Spec) -> Sharded | None:
    """The spec of the output; None if its rows are in no dimension.

    The sizes in front of the rows stay in front, or repeat the rows, in pieces, or are made from
    such.  The sizes behind the rows stay behind, or are merged with the rows, or split off them.
    """
    if isinstance(target, Size) and spec.group == target.group and spec.dim == target.at == 0:
        return dataclasses.replace(spec, times=target.times)
    if before is None:
        return None
    for at in [target.at] if isinstance(target, Size) else range(len(after)):
        front = quotient(before[:spec.dim], after[:at])
        behind = quotient([spec.times, *before[spec.dim + 1:]], after[at + 1:])
        result = _spec_in(at, spec, front, behind)
        if isinstance(target, Size):
            same_times = behind is not None and not behind.times and behind.known == target.times
            if spec.group == target.group and (front == ONE or same_times):
                # All else is in front of the rows, as before, or behind them.
                return dataclasses.replace(spec, dim=at, times=target.times)
            if result is not None and result.times \
                    and positions([result]) == positions([target]):
                return result
        elif result is not None and (after[at] is None or isinstance(after[at], int) and (
                before[spec.dim] is not None or has_known_rows(result))):
            return result
    return None


def _spec_in(at: int, spec: Sharded, front: Quotient | None, behind: Quotient | None
             ) -> Sharded | None:
    """The spec of the output with the rows in dimension ``at``; None if it would cut rows.

    ``front`` is the sizes in front of the rows before, over the sizes in front of ``at`` after;
    ``behind`` is the positions of an example and the sizes behind before, over those behind after.
    """
    if front is None or behind is None or front.times:
        return None
    if behind.known.denominator > 1 or behind.times and front != ONE:
        return None
    return dataclasses.replace(spec, dim=at, times=None if behind.times else int(
        behind.known)).repeated(front.known)


def _sizes_after(op: Op, requested: Sequence[Any] | None, target: Spec = REPLICATED
                 ) -> list[Any] | None:
    """The sizes of the output, None for unknown ones; None if its rank is unknown."""
    rank = op.outputs[0].shape.rank
    if rank is None:
        known = target.known if isinstance(target, Size) else None
        return None if known is None else list(known)
    static = op.outputs[0].shape.as_list()
    if requested is None or len(requested) != rank:
        return static
    return [size if size is not None else wanted if wanted is None or wanted >= 0 else None
            for size, wanted in zip(static, requested)]


def _with_size(plan: Plan, op: Op, dim: int, size: int | None) -> Plan:
    """``plan``, where each tower's target shape gets ``size`` in dimension ``dim``.

    None is the size that TensorFlow infers for the whole batch.
    """
    dtype = op.inputs[1].dtype

    def inferred(m: Any) -> Any:
        zero, one = (m.constant(number, tf.int32, HOST) for number in (0, 1))
        entries, others = (
            m.make("Prod", [m.make("Cast", [shape], HOST, DstT=tf.int64), zero], HOST)
            for shape in (m.shape(0, dtype), m.whole(1)))
        others = m.make("Maximum", [m.make("Neg", [others], HOST), m.make(
            "Cast", [one], HOST, DstT=tf.int64)], HOST)
        return m.make("Cast", [m.make("FloorDiv", [entries, others], HOST)], HOST, DstT=dtype)

    def make(m: Any) -> Any:
        return m.copy([m.parts(0), m.with_entry(1, dim, inferred(
            m) if size is None else m.constant(size, dtype, EACH))], EACH)

    return dataclasses.replace(plan, make=make, alone=0)
