"""Rules for ops that move entries: reshapes, transposes, slices, concatenations, padding.

Goes in: an op and the specs of its inputs.  Comes out: its plan.
"""

from __future__ import annotations

import dataclasses
import fractions
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules import blocks, reshapes, shapes
from towerstrategy.sharding.rules.dimensions import DIMS, MIXED, but, by_names, is_plain
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, Rule, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    ListOf,
    Partial,
    Sharded,
    Size,
    Spec,
    concatenated,
    in_one_piece,
)


def _view(*types: str, data: slice = slice(1), light: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule for ops that move entries; it need not handle partial data and sizes.

    Partial data stays partial.  Numbers of rows are looked for in the outputs.

    Args:
      types: the op types.
      data: the inputs whose entries are moved.
      light: see :func:`registry.rule`.
    """

    def decorator(function: Rule) -> Rule:
        def view(op: Op, specs: Sequence[Spec]) -> Plan | None:
            moved = specs[data]
            if isinstance(moved[0], Partial) and len(set(moved)) == 1:
                takes: list[Spec] = [REPLICATED] * len(specs)
                takes[data] = moved
                return Plan(takes, [moved[0]] * len(op.outputs), passes=_is_identity(op))
            if any(isinstance(spec, Size) for spec in moved) and all(map(is_plain, specs)):
                return shapes.computed_sizes(op, specs)
            return function(op, specs)

        return rule(*types, light=light, moves=True)(view)

    return decorator


@_view("Reshape", light=True)
def reshape(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return reshapes.reshape(op, *specs)


def _is_identity(op: Op) -> bool:
    """Whether a transpose or a reshape is known to return its input as it is."""
    if op.type == "Transpose":
        order = entries_of(op.inputs[1])
        return order is not None and list(order) == list(range(len(order)))
    return op.type == "Reshape" and reshapes.is_identity(op)


def _with_new(axis: int, rank: int | None) -> str | None:
    """The names of an output's dimensions, of which dimension ``axis`` is new."""
    return None if rank is None else f"{DIMS[:axis % rank]}{MIXED}{DIMS[axis % rank:rank - 1]}"


@_view("ExpandDims", light=True)
def expand_dims(op: Op, specs: Sequence[Spec]) -> Plan | None:
    axes = op.axes(1, op.out_rank())  # a number, or a vector of one
    return None if axes is None else by_names(
        op, specs, [DIMS], [_with_new(axes[0], op.out_rank())])


@_view("Squeeze", light=True)
def squeeze(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """With explicit axes only: else a tower that has one row would squeeze the rows' dimension."""
    axes = op.attr("squeeze_dims")
    return by_names(op, specs, [but(axes, op.rank(0))], [but(axes, op.rank(0), "")]) \
        if axes else None


@_view("Transpose", "ConjugateTranspose", light=True)
def transpose(op: Op, specs: Sequence[Spec]) -> Plan | None:
    order = entries_of(op.inputs[1])
    if order is None or None in order:
        return None
    plan = by_names(op, specs, [DIMS], [[DIMS[dim] for dim in order]])
    return plan and dataclasses.replace(plan, passes=_is_identity(op))


@_view("ConcatV2", data=slice(-1))
def concat(op: Op, specs: Sequence[Spec]) -> Plan | None:
    names = but(op.axes(len(specs) - 1, op.out_rank()), op.out_rank())
    joined = concatenated(specs[:-1])
    if names is None or joined is None or names[joined.dim] != MIXED:
        return by_names(op, specs, [names] * (len(specs) - 1), [names])
    return Plan(specs, [joined])


@_view("Pack", data=slice(None))
def pack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return by_names(op, specs, [DIMS] * len(specs), [_with_new(op.attr("axis"), op.out_rank())])


@_view("Unpack")
def unpack(op: Op, specs: Sequence[Spec]) -> Plan | None:
    axes, rank = [op.attr("axis")], op.rank(0)
    return by_names(op, specs, [but(axes, rank)], [but(axes, rank, "")])


@_view("SplitV")
def split_at(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec, names = specs[0], but(op.axes(2, op.rank(0)), op.rank(0))
    if isinstance(spec, Sharded) and names is not None and names[spec.dim] == MIXED:
        return blocks.split_at(op, spec, specs[1])
    return by_names(op, specs, [names], [names])


@_view("Split", data=slice(1, 2))
def split(op: Op, specs: Sequence[Spec]) -> Plan | None:
    names, spec = but(op.axes(0, op.rank(1)), op.rank(1)), specs[1]
    if names is None or not isinstance(spec, Sharded) or names[spec.dim] != MIXED:
        return by_names(op, specs, [None, names], [names])
    part = spec.repeated(fractions.Fraction(1, len(op.outputs)))
    return Plan([REPLICATED, spec], [part] * len(op.outputs)) if part else None


@_view("StridedSlice")
def strided_slice(op: Op, specs: Sequence[Spec]) -> Plan | None:
    spec = specs[0]
    if not isinstance(spec, Sharded):
        return None
    dim = dim_after_slice(op, spec.dim, op.rank(0))
    if dim is not None:
        return Plan([spec, REPLICATED, REPLICATED, REPLICATED], [spec.at(dim)])
    return blocks.strided_slice(op, spec, specs) or _first_rows(op, spec)


def _first_rows(op: Op, spec: Sharded) -> Plan | None:
    """Plan of a slice that ends at a known row n: it is made from each tower's first n rows."""
    begin, end, steps = (op.value(index) for index in (1, 2, 3))
    if begin is None or end is None or steps is None or len(begin) <= spec.dim or not op.rank(0) \
            or not in_one_piece(spec) or op.attr("ellipsis_mask") or op.attr("new_axis_mask"):
        return None
    at_begin, at_end, one = (op.attr(f"{name}_mask") >> spec.dim & 1
                             for name in ("begin", "end", "shrink_axis"))
    last = min(begin[spec.dim] + 1 if one else end[spec.dim], tf.int32.max)
    if steps[spec.dim] < 1 or last <= 0 or at_end and not one \
            or begin[spec.dim] < 0 and not at_begin:
        return None
    def make(m: Any) -> list[Any]:
        row_dim = np.eye(spec.dim + 1, dtype=int)[spec.dim]
        limits = [m.constant(numbers, tf.int32, EACH)
                  for numbers in (0 * row_dim, last * row_dim, 0 * row_dim + 1)]
        mask = (1 << spec.dim) - 1  # the dimensions in front are whole
        parts = m.make("StridedSlice", [m.parts(0), *limits], EACH, begin_mask=mask, end_mask=mask)
        rows = m.gathered(parts, spec, op.inputs[0].shape)
        return [m.copy([rows, *[m.whole(index) for index in (1, 2, 3)]], None) * len(parts)]

    return Plan([spec, REPLICATED, REPLICATED, REPLICATED], [REPLICATED], make)


def dim_after_slice(op: Op, dim: int, rank: int | None) -> int | None:
    """The output dimension that a strided slice makes of ``dim``; None unless it is taken whole."""
    count = op.inputs[1].shape[0] if op.rank(1) == 1 else None
    if rank is None or count is None:
        return None
    masks = {name: op.attr(f"{name}_mask")
             for name in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")}
    steps = op.value(3)
    index: list[Any] = []  # the slice as numpy writes it; what is not taken whole has one entry
    for at in range(count):
        at_mask = {name for name, mask in masks.items() if mask >> at & 1}
        whole = {"begin", "end"} <= at_mask and steps is not None and steps[at] == 1
        index.append(... if "ellipsis" in at_mask else None if "new_axis" in at_mask
                     else 0 if "shrink_axis" in at_mask else slice(None) if whole else slice(1))
    marked = np.empty([2 if each == dim else 1 for each in range(rank)])[tuple(index)]
    return marked.shape.index(2) if 2 in marked.shape else None


@rule("StridedSliceGrad")
def strided_slice_grad(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size, gradient = specs[0], specs[4]
    if not isinstance(size, Size) or not isinstance(gradient, Sharded) \
            or op.inputs[0].shape.rank != 1:
        return None
    if dim_after_slice(op, size.at, op.inputs[0].shape[0]) == gradient.dim:
        if gradient != size.shards(gradient.dim):
            return None
        return Plan([size, REPLICATED, REPLICATED, REPLICATED, gradient], [size.shards(size.at)])
    plan = blocks.strided_slice(op, size.shards(size.at), specs[:-1])
    if plan is None or plan.gives != [gradient]:
        return None
    return Plan([size, *plan.takes[1:], gradient], [size.shards(size.at)])


@_view("Slice")
def slice_(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return blocks.slice_(op, specs[0], specs) if isinstance(specs[0], Sharded) else None


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(op: Op, specs: Sequence[Spec]) -> Plan | None:
    if isinstance(specs[0], Size):
        return shapes.computed_sizes(op, specs)
    padding = entries_of(op.inputs[1])
    if padding is None:
        return None
    if isinstance(specs[1], Size) and specs[1].times == 0:
        padding.flat[specs[1].at] = 0
    names = but([dim for dim, both in enumerate(padding) if any(size != 0 for size in both)],
                len(padding))
    return by_names(op, specs, [names], [names], padded=op.type.startswith("Mirror"))


@rule("Fill")
def fill(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size, value = specs
    if not isinstance(size, Size) or not is_plain(value):
        return None
    return Plan([size, REPLICATED], [size.shards(size.at)])


@rule("BroadcastTo", light=True)
def broadcast_to(op: Op, specs: Sequence[Spec]) -> Plan | None:
    value, size = specs
    rank, out = op.rank(0), op.out_rank()
    if not isinstance(size, Size) or rank is None or out is None or isinstance(value, ListOf):
        return None
    dim, result = size.at - (out - rank), size.shards(size.at)
    if isinstance(value, Sharded):
        return Plan([value, size], [result]) if value == result.at(dim) else None
    same = dim < 0 or op.inputs[0].shape[dim] == 1  # for all rows
    wanted = REPLICATED if same else dataclasses.replace(result, dim=dim, broadcast=True)
    return Plan([wanted, size], [result])


@rule("Tile", light=True)
def tile(op: Op, specs: Sequence[Spec]) -> Plan | None:
    value, multiples = specs
    if isinstance(value, Sharded):
        known = op.value(1)
        if known is None:
            sizes = shapes.static_sizes(op, 1, multiples)
            if isinstance(multiples, Size) or sizes is None or sizes[value.dim] != 1:
                return None
        elif int(known[value.dim]) != 1:
            joined = concatenated([value] * int(known[value.dim]))
            return Plan([value, REPLICATED], [joined]) if joined else None
        return Plan([value, REPLICATED], [value])
    if isinstance(multiples, Size) and is_plain(value) and multiples.times is not None \
            and op.rank(0) is not None and op.inputs[0].shape[multiples.at] == 1:
        return Plan([REPLICATED, multiples], [multiples.shards(multiples.at)])
    return None


@rule("OneHot", light=True)
def one_hot(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return by_names(op, specs, [DIMS], [_with_new(op.attr("axis"), op.out_rank())])
