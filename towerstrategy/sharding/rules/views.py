"""Rules for ops that move entries: reshapes, transposes, slices, concatenations, padding.

Goes in: an op and the specs of its inputs.  Comes out: its plan.  Batches that are concatenated
along the rows, such as two views, or real and generated images, are pieces of a tensor.  A tower
concatenates its own rows, and slices them where a piece ends.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy.sharding.rules import reshapes, shapes
from towerstrategy.sharding.rules.dimensions import DIMS, MIXED, but, by_names, is_plain
from towerstrategy.sharding.rules.entries import entries_of
from towerstrategy.sharding.rules.registry import EACH, Op, Plan, Rule, rule
from towerstrategy.sharding.spec import (
    REPLICATED,
    ListOf,
    Partial,
    Sharded,
    Size,
    Sizes,
    Spec,
    concatenated,
    has_known_rows,
    in_one_piece,
    positions,
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
        return _split_at_pieces(op, spec, specs[1])
    return by_names(op, specs, [names], [names])


def _split_at_pieces(op: Op, spec: Sharded, sizes: Spec) -> Plan | None:
    """Plan of a split into parts of these sizes, if each is one of several pieces."""
    pieces, gives = spec.pieces, []
    for size in sizes.each if isinstance(sizes, Sizes) else ():
        count = _pieces_in(op, pieces, 1, size.moved(spec.dim))
        part = concatenated(pieces[:count]) if count else None
        if part is None:
            return None
        gives.append(part)
        pieces = pieces[count:]
    if not gives or pieces or not all(map(has_known_rows, gives)):
        return None

    def make(m: Any) -> Any:
        dtype = op.inputs[1].dtype
        return m.copy([m.parts(0), m.each(lambda tower: m.towers.on_host("Pack", *(
            m.towers.size(part, dtype, tower) for part in gives), axis=0)), m.whole(2)], EACH)

    return Plan([spec, REPLICATED, REPLICATED], gives, make=make, alone=0)


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
    return _strided_slice(op, spec, op.rank(0), specs) or _first_rows(op, spec)


def _strided_slice(op: Op, spec: Sharded, rank: int | None, specs: Sequence[Spec]) -> Plan | None:
    """Plan of a strided slice, of all rows or of whole pieces, of a tensor of this rank."""
    after = _dim_after_slice(op, spec.dim, rank)
    if after is not None:
        return Plan([spec, REPLICATED, REPLICATED, REPLICATED], [spec.at(after)])
    steps, dim, pieces = entries_of(op.inputs[3]), spec.dim, spec.pieces
    masks = any(op.attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis"))
    if steps is None or masks or len(steps) <= dim or steps[dim] != 1:
        return None
    begin = 0 if op.attr("begin_mask") >> dim & 1 else _pieces_in(op, pieces, 1, specs[1])
    end = len(pieces) if op.attr("end_mask") >> dim & 1 else _pieces_in(op, pieces, 2, specs[2])
    return _between(spec, begin, end, specs)


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


def _dim_after_slice(op: Op, dim: int, rank: int | None) -> int | None:
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
    size, gradient, rank = specs[0], specs[4], op.inputs[0].shape.num_elements()
    if not isinstance(gradient, Sharded) or rank is None:
        return None
    if not isinstance(size, Size):  # of all rows, which the gradient has
        dim = next((dim for dim in range(rank) if _dim_after_slice(
            op, dim, rank) == gradient.dim), None)
        return None if dim is None else Plan(
            [gradient.at(dim).size, *[REPLICATED] * 3, gradient], [gradient.at(dim)])
    spec = size.shards(size.at)
    plan = _strided_slice(op, spec, rank, specs[:-1])
    return Plan([size, *plan.takes[1:], gradient], [spec]) \
        if plan is not None and plan.gives == [gradient] else None


@_view("Slice")
def slice_(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """A slice of whole pieces: the gradient of a concatenation."""
    spec = specs[0]
    if not isinstance(spec, Sharded):
        return None
    pieces, sizes = spec.pieces, shapes.static_sizes(op, 2, specs[2])
    begin = _pieces_in(op, pieces, 1, specs[1])
    if begin is None:
        return None
    if sizes is not None and sizes[spec.dim] == -1:
        return _between(spec, begin, len(pieces), specs)
    if sizes is not None and None is not sizes[spec.dim] == op.inputs[0].shape[spec.dim]:
        return Plan([spec, REPLICATED, spec.size], [spec])  # begins at 0, or fails
    count = _pieces_in(op, pieces[begin:], 2, specs[2])
    return None if count is None else _between(spec, begin, begin + count, specs)


def _between(spec: Sharded, begin: int | None, end: int | None,
             specs: Sequence[Spec]) -> Plan | None:
    """Plan of a slice of the pieces ``begin`` to ``end``."""
    if begin is None or end is None or not 0 <= begin < end <= len(spec.pieces):
        return None
    taken = concatenated(spec.pieces[begin:end])
    takes = [each if isinstance(each, Size) and each.at == spec.dim else REPLICATED
             for each in specs[1:]]  # a number of rows for another dimension means all rows
    return Plan([spec, *takes], [taken]) if taken else None


def _pieces_in(op: Op, pieces: Sequence[Sharded], index: int, limit: Spec) -> int | None:
    """How many of the first pieces a size, input ``index``, counts; None if it ends within one."""
    if not pieces:
        return None
    if not isinstance(limit, Size):
        entries = entries_of(op.inputs[index])
        return 0 if entries is not None and entries[pieces[0].dim] == 0 else None
    if limit.at != pieces[0].dim or not limit.times or not pieces[0].times:
        return None
    counted = positions([limit])
    return next((count for count in range(len(pieces) + 1)
                 if positions(pieces[:count]) == counted), None)


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


@rule("Fill", light=True, size=0)
def fill(op: Op, specs: Sequence[Spec]) -> Plan | None:
    size, value = specs
    if not isinstance(size, Size) or not is_plain(value):
        return None
    return Plan([size, REPLICATED], [size.shards(size.at)])


@rule("BroadcastTo", light=True, size=1)
def broadcast_to(op: Op, specs: Sequence[Spec]) -> Plan | None:
    value, size = specs
    rank, out = op.rank(0), op.out_rank()
    if rank is None or out is None or isinstance(value, ListOf):
        return None
    if isinstance(value, Sharded) and not isinstance(size, Size):
        result = value.at(value.dim + out - rank)
        same = None is not op.inputs[0].shape[value.dim] == op.outputs[0].shape[result.dim]
        return Plan([value, result.size], [result]) if same else None
    if not isinstance(size, Size):
        return None
    dim, result = size.at - (out - rank), size.shards(size.at)
    if isinstance(value, Sharded):
        return Plan([value, size], [result]) if value == result.at(dim) else None
    same = dim < 0 or op.inputs[0].shape[dim] == 1  # for all rows
    wanted = REPLICATED if same else dataclasses.replace(result, dim=dim, broadcast=True)
    return Plan([wanted, size], [result])


@rule("Tile", light=True, size=1)
def tile(op: Op, specs: Sequence[Spec]) -> Plan | None:
    value, multiples = specs
    if isinstance(value, Sharded):
        counts = entries_of(op.inputs[1])
        count = None if counts is None else counts[value.dim]
        tiled = value if count == 1 else concatenated([value] * (count or 0))
        return Plan([value, REPLICATED], [tiled]) if tiled else None
    if isinstance(multiples, Size) and is_plain(value) and multiples.times is not None \
            and op.rank(0) is not None and op.inputs[0].shape[multiples.at]:
        times = multiples.times * op.inputs[0].shape[multiples.at]  # each example repeats it
        return Plan([REPLICATED, multiples], [
            dataclasses.replace(multiples, times=times).shards(multiples.at)])
    return None


@rule("OneHot", light=True)
def one_hot(op: Op, specs: Sequence[Spec]) -> Plan | None:
    return by_names(op, specs, [DIMS], [_with_new(op.attr("axis"), op.out_rank())])


@rule("SpaceToBatchND", "BatchToSpaceND")
def space_to_batch(op: Op, specs: Sequence[Spec]) -> Plan | None:
    """For a dilated convolution: the output has one block for each position in a space block."""
    spec, block_shape = specs[0], op.value(1)
    if not isinstance(spec, Sharded) or spec.dim or not spec.times or block_shape is None:
        return None
    count = fractions.Fraction(math.prod(map(int, block_shape)))
    result = spec.repeated(count if op.type == "SpaceToBatchND" else 1 / count)
    return Plan([spec, REPLICATED, REPLICATED], [result]) if result else None
