"""Shapes and the entries of shapes, so far as they are known without running anything.

Goes in: a tensor.  Comes out: :func:`entries_of`, what is in a small tensor of integers, None for
entries that are known when the step runs only; :func:`sizes_of`, a tensor's static shape.  Of an
operation on shapes: :func:`outputs_of`, where entries are behind it, whatever these are.
TensorFlow knows some of that (``tf.get_static_value(..., partial=True)``), but not through slices,
products and gathers, and forgets static shapes where one is computed from another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.elementwise import BINARY, UNARY

Entries = np.ndarray  # of objects: ints, None, or what else stands for a number

_DEPTH, _LARGEST = 12, 64
_INTEGER = (int, np.integer)
# Whose first output is shaped as the input with this number.
_FIRST_AS = {"FusedBatchNormV3": 0, "FusedBatchNormGradV3": 1, "Softmax": 0, "LogSoftmax": 0}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda x, y: x + y, "AddV2": lambda x, y: x + y, "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y, "Maximum": max, "Minimum": min,
    "FloorDiv": lambda x, y: x // y if y else None, "FloorMod": lambda x, y: x % y if y else None}


def entries_of(tensor: tf.Tensor) -> Entries | None:
    """An array of ints and None of the tensor's shape; None where that is not known or is large."""
    return _entries(tensor, _DEPTH)


def outputs_of(operation: tf.Operation, inputs: Sequence[Entries | None]) -> list[Entries | None]:
    """The entries of an operation's outputs, its inputs having these; None where not known.

    Of an output of unknown length the first ones, so far as they are known.
    """
    make = _MADE.get(operation.type)
    found = None if make is None else make(operation, *inputs)
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
        found = _entries(tensor.op.inputs[1], depth - 1)
    elif tensor.op.type in _FIRST_AS and not tensor.value_index:
        found = _sizes(tensor.op.inputs[_FIRST_AS[tensor.op.type]], depth - 1)
    elif tensor.op.type in UNARY:
        found = _sizes(tensor.op.inputs[0], depth - 1)
    elif tensor.op.type in (*BINARY, "SoftmaxCrossEntropyWithLogits"):
        found = _broadcast([_sizes(value, depth - 1) for value in tensor.op.inputs])
    if found is None or len(found) != len(own):
        return own
    return [size if size is not None or other is None or other < 0 else int(other)
            for size, other in zip(own, found)]


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
    if not tensor.dtype.is_integer or not tensor.shape.is_fully_defined() \
            or tensor.shape.num_elements() > _LARGEST:
        return None
    known = _tf.constant_value(tensor)
    if known is not None:
        return np.asarray(known).astype(object)
    operation, found = tensor.op, None
    if depth and operation.type in ("Shape", "ShapeN"):
        sizes = _sizes(operation.inputs[tensor.value_index], depth - 1)
        found = None if sizes is None else _array(sizes, [len(sizes)])
    elif depth and operation.type in _MADE:
        inputs = [_entries(each, depth - 1) for each in operation.inputs]
        found = outputs_of(operation, inputs)[tensor.value_index]
    unknown = np.full(tensor.shape.as_list(), None, object)
    return unknown if found is None or found.shape != unknown.shape else found


def _array(entries: Iterable[Any], shape: Any) -> Entries:
    made = np.empty(shape, object)
    for at, entry in enumerate(entries):
        made.flat[at] = entry
    return made


def _known(*inputs: Entries | None) -> Any:
    """Inputs as integers; None unless all their entries are known."""
    if any(each is None or not all(isinstance(entry, _INTEGER) for entry in each.flat)
           for each in inputs):
        return None
    return [np.asarray(each).astype(np.int64) for each in inputs]


def _same(operation: tf.Operation, *inputs: Entries | None) -> list[Entries | None]:
    return list(inputs)


def _reshaped(operation: tf.Operation, entries: Entries | None, *_: Any) -> Entries | None:
    shape = operation.outputs[0].shape
    return None if entries is None or not shape.is_fully_defined() else entries.reshape(shape)


def _pack(operation: tf.Operation, *parts: Any) -> Entries | None:
    return None if _any_none(parts) else np.stack(parts, operation.get_attr("axis"))


def _concat(operation: tf.Operation, *inputs: Any) -> Entries | None:
    *parts, axis = inputs
    where, first = _known(axis), list(itertools.takewhile(lambda part: part is not None, parts))
    return None if not first or where is None else np.concatenate(first, int(where[0]))


def _any_none(parts: Sequence[Any]) -> bool:
    return any(part is None for part in parts)


def _slice(operation: tf.Operation, entries: Entries | None, *limits: Any) -> Entries | None:
    known = _known(*limits)
    if entries is None or known is None:
        return None
    return entries[tuple(slice(start, None if count < 0 else start + count)
                         for start, count in zip(*known))]


def _strided_slice(operation: tf.Operation, entries: Entries | None, *limits: Any) -> Any:
    known = _known(*limits)
    masks = {name: operation.get_attr(f"{name}_mask") for name in
             ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    if entries is None or entries.ndim != 1 or known is None or len(known[0]) != 1 \
            or masks["ellipsis"] or masks["new_axis"]:
        return None
    begin, end, step = (int(limit[0]) for limit in known)
    if masks["shrink_axis"]:
        return _array([entries[begin]], [])
    return entries[slice(None if masks["begin"] else begin, None if masks["end"] else end, step)]


def _gather(operation: tf.Operation, entries: Entries | None, indices: Any, _: Any) -> Any:
    known = _known(indices)
    if entries is None or known is None or entries.ndim != 1 or operation.get_attr("batch_dims"):
        return None
    return _array(entries[known[0].ravel()], known[0].shape)


def _split(operation: tf.Operation, entries: Entries | None, sizes: Any, _: Any) -> Any:
    known = _known(sizes)
    if entries is None or known is None or entries.ndim != 1 or (known[0] < 0).any():
        return None
    return np.split(entries, np.cumsum(known[0])[:-1])


def _unpack(operation: tf.Operation, entries: Entries | None) -> Any:
    if entries is None or entries.ndim != 1:
        return None
    return [_array([entry], []) for entry in entries]


def _transposed(operation: tf.Operation, entries: Entries | None, order: Any) -> Entries | None:
    known = _known(order)
    return None if entries is None or known is None else entries.transpose(known[0])


def _arithmetic(operation: tf.Operation, first: Any, second: Any) -> Entries | None:
    if first is None or second is None:
        return None
    pairs = np.broadcast(first, second)
    return _array([_ARITHMETIC[operation.type](*pair) if all(
        isinstance(each, _INTEGER) for each in pair) else None for pair in pairs],
        pairs.shape)


def _product(operation: tf.Operation, entries: Entries | None, _: Any) -> Entries | None:
    known = _known(entries)
    return None if known is None else np.array(int(known[0].prod()), object)


def _filled(operation: tf.Operation, _: Any, entry: Entries | None) -> Entries | None:
    shape = operation.outputs[0].shape
    return None if entry is None or not shape.is_fully_defined() else _array(
        [entry[()]] * shape.num_elements(), shape)


def _offsets(operation: tf.Operation, axis: Any, *shapes: Any) -> Any:
    """Where each input of a concatenation begins: at zero but along the axis."""
    known = _known(axis)
    if known is None:
        return None
    made, rank = [], operation.outputs[0].shape[0]
    start: int | None = 0
    for shape in shapes:
        made.append(_array([0] * rank, [rank]))
        made[-1][int(known[0]) % rank] = start
        size = None if shape is None else shape[int(known[0]) % rank]
        start = start + size if isinstance(size, _INTEGER) and start is not None else None
    return made


def _stitched(operation: tf.Operation, *inputs: Any) -> Entries | None:
    count = len(inputs) // 2
    places, entries = _known(*inputs[:count]), inputs[count:]
    if places is None or _any_none(entries) or any(
            at.shape != each.shape for at, each in zip(places, entries)):
        return None
    found = np.full(operation.outputs[0].shape.as_list(), None, object)
    for at, each in zip(places, entries):
        found[at.ravel()] = each.ravel()
    return found


_MADE: dict[str, Callable[..., Any]] = {
    "Identity": _same, "IdentityN": _same, "Cast": _same, "StopGradient": _same,
    "Reshape": _reshaped, "ExpandDims": _reshaped, "Squeeze": _reshaped,
    "Pack": _pack, "ConcatV2": _concat, "Slice": _slice, "StridedSlice": _strided_slice,
    "GatherV2": _gather, "SplitV": _split, "Unpack": _unpack, "Transpose": _transposed,
    "Prod": _product, "Fill": _filled, "ConcatOffset": _offsets, "DynamicStitch": _stitched,
    **dict.fromkeys(_ARITHMETIC, _arithmetic)}
