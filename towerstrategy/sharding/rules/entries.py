"""Shapes and the entries of shapes, so far as they are known without running anything.

Goes in: a tensor.  Comes out: :func:`entries_of`, what is in a small tensor of integers, None for
entries that are known when the step runs only; :func:`sizes_of`, a tensor's static shape.  Of an
operation on shapes: :func:`outputs_of`, where entries are behind it, whatever these are.
TensorFlow knows some of that (``tf.get_static_value(..., partial=True)``), but not through slices,
products and gathers, and forgets static shapes where one is computed from another.
"""

from __future__ import annotations

import fractions
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.elementwise import AS_IT_IS, BINARY, UNARY

Entries = np.ndarray  # of objects: ints, None, or what else stands for a number


class _Open(NamedTuple):
    """A size that is known when the step runs only: that of a tensor along a dimension."""

    tensor: str
    dim: int


_DEPTH, _LARGEST = 12, 64
_INTEGER = (int, np.integer)
# An operation's type and the number of an output -> the input that has its shape.
_SHAPED_AS = {("FusedBatchNormV3", 0): 0, ("FusedBatchNormGradV3", 0): 1, ("Softmax", 0): 0,
              ("LogSoftmax", 0): 0, ("SparseSoftmaxCrossEntropyWithLogits", 1): 0}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda x, y: x + y, "AddV2": lambda x, y: x + y, "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y, "Maximum": max, "Minimum": min,
    "FloorDiv": lambda x, y: x // y if y else None, "FloorMod": lambda x, y: x % y if y else None}


def entries_of(tensor: tf.Tensor) -> Entries | None:
    """An array of ints and None of the tensor's shape; None where that is not known or is large."""
    found = _entries(tensor, _DEPTH)
    return None if found is None else _array([
        None if isinstance(entry, _Open) else entry for entry in found.flat], found.shape)


def dimensions_in(shape: tf.Tensor, tensor: tf.Tensor) -> list[int | None]:
    """For each entry of a shape the dimension of ``tensor`` of which it is the open size."""
    found = _entries(shape, _DEPTH)
    return [] if found is None else [
        entry.dim if isinstance(entry, _Open) and entry.tensor == tensor.name else None
        for entry in found.flat]


def outputs_of(operation: tf.Operation, inputs: Sequence[Entries | None]) -> list[Entries | None]:
    """The entries of an operation's outputs, its inputs having these; None where not known.

    Of an output of unknown length the first ones, so far as they are known.
    """
    asked, make = _MADE.get(operation.type, ("-", None))
    given: list[Any] = []
    for each, how in zip(inputs, asked.ljust(len(inputs), asked[-1])):
        given.append(_known(each) if how == "k" else each)
        if how != "-" and given[-1] is None:
            make = None
    found = None if make is None else make(operation, *given)
    made = found if isinstance(found, list) else [found] * len(operation.outputs)
    return [each if each is not None and tensor.shape.is_compatible_with(each.shape) else None
            for each, tensor in zip(made, operation.outputs)]


def sizes_of(tensor: tf.Tensor) -> list[int | None] | None:
    """A tensor's static shape; None if its rank is unknown."""
    return _sizes(tensor, _DEPTH)


def _sizes(tensor: tf.Tensor, depth: int) -> list[int | None] | None:
    if tensor.shape.rank is None:
        return None
    own: list[int | None] = list(tensor.shape.as_list())
    found: Sequence[Any] | Entries | None = None
    if own.count(None) < 2 or not depth:  # rows are open, all else is known
        return own
    if tensor.op.type == "Reshape":
        found = _reshaped_to(tensor.op, depth - 1)
    elif tensor.op.type in ("BroadcastTo", "Slice"):
        found = _entries(tensor.op.inputs[-1], depth - 1)
    elif tensor.op.type == "Transpose":
        before, order = _sizes(tensor.op.inputs[0], depth - 1), _tf.constant_value(
            tensor.op.inputs[1])
        found = None if before is None or order is None else [before[at] for at in order]
    elif (tensor.op.type, tensor.value_index) in _SHAPED_AS:
        found = _sizes(tensor.op.inputs[_SHAPED_AS[tensor.op.type, tensor.value_index]], depth - 1)
    elif tensor.op.type in UNARY:
        found = _sizes(tensor.op.inputs[0], depth - 1)
    elif tensor.op.type in (*BINARY, "SoftmaxCrossEntropyWithLogits"):
        found = _broadcast([_sizes(value, depth - 1) for value in tensor.op.inputs])
    if found is None or len(found) != len(own):
        return own
    return [int(other) if size is None and isinstance(other, _INTEGER) and other >= 0 else size
            for size, other in zip(own, found)]


class Quotient(NamedTuple):
    """A product of sizes over another: a number, times sizes that are not known."""

    known: fractions.Fraction
    times: tuple[Any, ...] = ()


ONE = Quotient(fractions.Fraction(1))


def quotient(sizes: Sequence[Any], divisors: Sequence[Any]) -> Quotient | None:
    """The product of ``sizes`` over that of ``divisors``; None where it is not known.

    Sizes are numbers, None, or what stands for the same size wherever it is.
    """
    times, known = [], fractions.Fraction(1)
    for size in sizes:
        if isinstance(size, _INTEGER):
            known *= int(size)
        else:
            times.append(size)
    for size in divisors:
        if isinstance(size, _INTEGER) and size > 0:
            known /= int(size)
        elif size is not None and size in times:
            times.remove(size)
        else:
            return None
    return Quotient(known, tuple(times))


def _reshaped_to(operation: tf.Operation, depth: int) -> list[Any] | None:
    """The sizes that a reshape asks for, and what is left over where it asks for -1."""
    tensor, shape = operation.inputs
    asked, sizes = _entries(shape, depth), _sizes(tensor, depth)
    if asked is None or sizes is None:
        return None
    over = quotient([_Open(tensor.name, dim) if size is None else size
                     for dim, size in enumerate(sizes)], [size for size in asked if size != -1])
    return list(asked) if over is None or over.times else [
        int(over.known) if size == -1 else size for size in asked]


def _broadcast(shapes: Sequence[Sequence[int | None] | None]) -> list[int | None] | None:
    """What shapes are broadcast to: a size is known where one is above 1, or all are known."""
    if any(shape is None for shape in shapes):
        return None
    rank = max(len(shape) for shape in shapes if shape is not None)
    filled: list[list[int | None]] = [[*[1] * (rank - len(shape)), *shape] for shape in shapes
                                      if shape is not None]
    together = zip(*filled)
    return [next((size for size in sizes if size is not None and size > 1),
                 None if None in sizes else min(sizes)) for sizes in map(list, together)]


def _entries(tensor: tf.Tensor, depth: int) -> Entries | None:
    known = tensor.shape.is_fully_defined()
    if not tensor.dtype.is_integer or not known and tensor.shape.rank != 1 \
            or known and tensor.shape.num_elements() > _LARGEST:
        return None
    operation, found = tensor.op, None
    if depth and operation.type in ("Shape", "ShapeN"):
        of = operation.inputs[tensor.value_index]
        sizes = _sizes(of, depth - 1) or ()
        found = None if of.shape.rank is None else _array(
            (_Open(of.name, dim) if size is None else size for dim, size in enumerate(sizes)),
            [len(sizes)])
    elif depth and operation.type in _MADE:
        inputs = [_entries(each, depth - 1) for each in operation.inputs]
        found = outputs_of(operation, inputs)[tensor.value_index]
    if found is None or not tensor.shape.is_compatible_with(found.shape):
        value = _tf.constant_value(tensor)
        if value is None and not known:
            return None
        found = np.full(tensor.shape.as_list(), None, object) if value is None \
            else np.asarray(value).astype(object)
    return found


def _array(entries: Iterable[Any], shape: Any) -> Entries:
    made = np.empty(shape, object)
    for at, entry in enumerate(entries):
        made.flat[at] = entry
    return made


def _known(entries: Entries | None) -> Any:
    """Entries as integers; None unless all are known."""
    if entries is None or not all(isinstance(entry, _INTEGER) for entry in entries.flat):
        return None
    return np.asarray(entries).astype(np.int64)


def _reshaped(operation: tf.Operation, entries: Entries, *_: Any) -> Entries | None:
    shape = operation.outputs[0].shape
    return entries.reshape(shape) if shape.is_fully_defined() else None


def _concat(operation: tf.Operation, *inputs: Any) -> Entries | None:
    where = _known(inputs[-1])
    first = list(itertools.takewhile(lambda part: part is not None, inputs[:-1]))
    return np.concatenate(first, int(where)) if first and where is not None else None


def _slice(operation: tf.Operation, entries: Entries, begin: Any, size: Any) -> Entries:
    return entries[tuple(slice(start, None if count < 0 else start + count)
                         for start, count in zip(begin, size))]


def _strided_slice(operation: tf.Operation, entries: Entries, *limits: Any) -> Entries | None:
    masks = {name: operation.get_attr(f"{name}_mask") for name in
             ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    if entries.ndim != 1 or len(limits[0]) != 1 or masks["ellipsis"] or masks["new_axis"]:
        return None
    begin, end, step = (int(limit[0]) for limit in limits)
    if masks["shrink_axis"]:
        return _array([entries[begin]], [])
    return entries[slice(None if masks["begin"] else begin, None if masks["end"] else end, step)]


def _gather(operation: tf.Operation, entries: Entries, places: Any, _: Any) -> Entries | None:
    plain = entries.ndim == 1 and not operation.get_attr("batch_dims")
    return _array(entries[places.ravel()], places.shape) if plain else None


def _split(operation: tf.Operation, entries: Entries, sizes: Any, _: Any) -> Any:
    plain = entries.ndim == 1 and (sizes >= 0).all()
    return np.split(entries, np.cumsum(sizes)[:-1]) if plain else None


def _arithmetic(operation: tf.Operation, first: Entries, second: Entries) -> Entries:
    pairs = np.broadcast(first, second)
    return _array([_ARITHMETIC[operation.type](*pair) if all(
        isinstance(each, _INTEGER) for each in pair) else None for pair in pairs],
        pairs.shape)


def _product(operation: tf.Operation, sizes: Any, _: Any) -> Entries:
    return np.array(int(sizes.prod()), object)


def _filled(operation: tf.Operation, _: Any, entry: Entries) -> Entries | None:
    shape = operation.outputs[0].shape
    return _array([entry[()]] * shape.num_elements(), shape) if shape.is_fully_defined() else None


def _offsets(operation: tf.Operation, axis: Any, *shapes: Any) -> list[Entries]:
    """Where each input of a concatenation begins: at zero but along the axis."""
    made, rank = [], operation.outputs[0].shape[0]
    start: int | None = 0
    for shape in shapes:
        made.append(_array([0] * rank, [rank]))
        made[-1][int(axis) % rank] = start
        size = None if shape is None else shape[int(axis) % rank]
        start = start + size if isinstance(size, _INTEGER) and start is not None else None
    return made


def _of_broadcast(operation: tf.Operation, *shapes: Any) -> list[Entries]:
    """Over which axes the gradients of a broadcast are summed."""
    rank = max(map(len, shapes))
    return [np.flatnonzero([*[True] * (rank - len(shape)), *(shape == 1)]).astype(object)
            for shape in shapes]


def _stitched(operation: tf.Operation, *inputs: Any) -> Entries | None:
    places, entries = inputs[:len(inputs) // 2], inputs[len(inputs) // 2:]
    shape = operation.outputs[0].shape
    found = np.full(shape.as_list() if shape.is_fully_defined() else [], None, object)
    for at, each in zip(map(_known, places), entries):
        if at is None or each is None or at.shape != each.shape or not found.ndim:
            return None
        found[at.ravel()] = each.ravel()
    return found


# An operation's type -> what is asked of each input, the last letter for all further ones (e: its
# entries, k: all of them known, -: nothing), and what makes the outputs' entries of them.
_MADE: dict[str, tuple[str, Callable[..., Any]]] = {
    **dict.fromkeys((*AS_IT_IS, "Cast"), ("e", lambda _, entries: entries)),
    "IdentityN": ("-", lambda _, *inputs: list(inputs)),
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze"), ("e-", _reshaped)),
    "Pack": ("e", lambda operation, *parts: np.stack(parts, operation.get_attr("axis"))),
    "ConcatV2": ("-", _concat), "Slice": ("ek", _slice), "StridedSlice": ("ek", _strided_slice),
    "GatherV2": ("ek-", _gather), "SplitV": ("ek-", _split), "Fill": ("-e", _filled),
    "Unpack": ("e", lambda _, entries: [_array([each], []) for each in entries]
               if entries.ndim == 1 else None),
    "Transpose": ("ek", lambda _, entries, order: entries.transpose(order)),
    "Prod": ("k-", _product), "BroadcastGradientArgs": ("k", _of_broadcast),
    "ConcatOffset": ("k-", _offsets), "DynamicStitch": ("-", _stitched),
    **dict.fromkeys(_ARITHMETIC, ("e", _arithmetic))}
