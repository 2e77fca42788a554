"""Shapes and the entries of shapes, so far as they are known without running anything.

Goes in: a tensor.  Comes out: :func:`entries_of`, what is in a small tensor of integers, None for
entries that are known when the step runs only; :func:`sizes_of`, a tensor's static shape.
TensorFlow knows some of that (``tf.get_static_value(..., partial=True)``), but not through slices,
products and gathers, and forgets static shapes where one is computed from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.elementwise import BINARY, UNARY

_DEPTH, _LARGEST = 12, 64
# Whose first output is shaped as the input with this number.
_FIRST_AS = {"FusedBatchNormV3": 0, "FusedBatchNormGradV3": 1, "Softmax": 0, "LogSoftmax": 0}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": lambda x, y: x + y, "AddV2": lambda x, y: x + y, "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y, "Maximum": max, "Minimum": min,
    "FloorDiv": lambda x, y: x // y if y else None, "FloorMod": lambda x, y: x % y if y else None}


def entries_of(tensor: tf.Tensor) -> np.ndarray | None:
    """An array of ints and None of the tensor's shape; None where that is not known or is large."""
    return _entries(tensor, _DEPTH)


def sizes_of(tensor: tf.Tensor) -> list[int | None] | None:
    """A tensor's static shape; None if its rank is unknown."""
    return _sizes(tensor, _DEPTH)


def _sizes(tensor: tf.Tensor, depth: int) -> list[int | None] | None:
    if tensor.shape.rank is None:
        return None
    own: list[int | None] = list(tensor.shape.as_list())
    found: Sequence[Any] | np.ndarray | None = None
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


def _entries(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    if not tensor.dtype.is_integer or not tensor.shape.is_fully_defined() \
            or tensor.shape.num_elements() > _LARGEST:
        return None
    known = _tf.constant_value(tensor)
    if known is not None:
        return np.asarray(known).astype(object)
    found = _FOUND.get(tensor.op.type) if depth else None
    entries = None if found is None else found(tensor, depth - 1)
    if entries is None or entries.shape != tuple(tensor.shape.as_list()):
        return np.full(tensor.shape.as_list(), None, object)
    return entries


def _of(tensor: tf.Tensor, index: int, depth: int) -> Any:
    return _entries(tensor.op.inputs[index], depth)


def _value(tensor: tf.Tensor, index: int, depth: int) -> np.ndarray | None:
    """An input of which all entries are known."""
    found = _of(tensor, index, depth)
    if found is None or any(entry is None for entry in found.ravel()):
        return None
    return found.astype(np.int64)


def _shape(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    sizes = _sizes(tensor.op.inputs[tensor.value_index], depth)
    return None if sizes is None else _array(sizes)


def _array(entries: Any) -> np.ndarray:
    made = np.empty(len(entries), object)
    for at, entry in enumerate(entries):
        made[at] = entry
    return made


def _same(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    return _of(tensor, tensor.value_index, depth)


def _reshaped(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found = _of(tensor, 0, depth)
    return None if found is None else found.reshape(tensor.shape.as_list())


def _pack(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    parts = [_entries(part, depth) for part in tensor.op.inputs]
    if any(part is None for part in parts):
        return None
    return np.stack(parts, tensor.op.get_attr("axis"))  # type: ignore[arg-type]


def _concat(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    *parts, axis = [_entries(part, depth) for part in tensor.op.inputs]
    if any(part is None for part in parts) or axis is None or axis[()] is None:
        return None
    return np.concatenate(parts, int(axis[()]))  # type: ignore[arg-type]


def _slice(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found, begin, size = _of(tensor, 0, depth), _value(tensor, 1, depth), _value(tensor, 2, depth)
    if found is None or begin is None or size is None:
        return None
    return found[tuple(slice(start, None if count < 0 else start + count)
                       for start, count in zip(begin, size))]


def _strided_slice(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found, operation = _of(tensor, 0, depth), tensor.op
    limits = [_value(tensor, index, depth) for index in (1, 2, 3)]
    masks = {name: operation.get_attr(f"{name}_mask") for name in
             ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    if found is None or found.ndim != 1 or any(
            value is None or len(value) != 1 for value in limits):
        return None
    if masks["ellipsis"] or masks["new_axis"]:
        return None
    begin, end, step = (int(value[0]) for value in limits)  # type: ignore[index]
    if masks["shrink_axis"]:
        return np.array(found[begin], object)
    return found[slice(None if masks["begin"] else begin, None if masks["end"] else end, step)]


def _gather(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found, indices = _of(tensor, 0, depth), _value(tensor, 1, depth)
    if found is None or indices is None or found.ndim != 1 or tensor.op.get_attr("batch_dims"):
        return None
    return np.asarray(found[indices], object)


def _split(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found, sizes = _of(tensor, 0, depth), _value(tensor, 1, depth)
    if found is None or sizes is None or found.ndim != 1 or (sizes < 0).any():
        return None
    start = int(np.sum(sizes[:tensor.value_index]))
    return found[start:start + int(sizes[tensor.value_index])]


def _unpack(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found = _of(tensor, 0, depth)
    return None if found is None or found.ndim != 1 else np.array(found[tensor.value_index], object)


def _transposed(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found, order = _of(tensor, 0, depth), _value(tensor, 1, depth)
    return None if found is None or order is None else found.transpose([int(at) for at in order])


def _arithmetic(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    first, second = _of(tensor, 0, depth), _of(tensor, 1, depth)
    if first is None or second is None:
        return None
    do = _ARITHMETIC[tensor.op.type]
    flat = [None if x is None or y is None else do(x, y)
            for x, y in np.broadcast(first, second)]
    return _array(flat).reshape(np.broadcast(first, second).shape)


def _product(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found = _value(tensor, 0, depth)
    if found is None or tensor.shape.rank != 0:
        return None
    return np.array(int(np.prod(found, dtype=np.int64)), object)


def _filled(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    found = _of(tensor, 1, depth)
    return None if found is None else np.full(tensor.shape.as_list(), found[()], object)


def _offsets(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    """Where an input of a concatenation begins: at zero but along the axis."""
    axis = _value(tensor, 0, depth)
    if axis is None:
        return None
    sizes = [_entries(shape, depth) for shape in tensor.op.inputs[1:tensor.value_index + 1]]
    rank = tensor.shape[0]
    begin = [0 if size is None else size[int(axis) % rank] for size in sizes]
    known = all(size is not None and size[int(axis) % rank] is not None for size in sizes)
    found = _array([0] * rank)
    found[int(axis) % rank] = sum(begin) if known else None
    return found


def _stitched(tensor: tf.Tensor, depth: int) -> np.ndarray | None:
    count = len(tensor.op.inputs) // 2
    found = np.full(tensor.shape.as_list(), None, object)
    for index in range(count):
        places, entries = _value(tensor, index, depth), _of(tensor, count + index, depth)
        if places is None or entries is None or entries.shape != places.shape or found.ndim != 1:
            return None
        found[places.ravel()] = entries.ravel()
    return found


_FOUND: dict[str, Callable[[tf.Tensor, int], np.ndarray | None]] = {
    "Shape": _shape, "ShapeN": _shape, "Identity": _same, "IdentityN": _same, "Cast": _same,
    "StopGradient": _same, "Reshape": _reshaped, "ExpandDims": _reshaped, "Squeeze": _reshaped,
    "Pack": _pack, "ConcatV2": _concat, "Slice": _slice, "StridedSlice": _strided_slice,
    "GatherV2": _gather, "SplitV": _split, "Unpack": _unpack, "Transpose": _transposed,
    "Prod": _product, "Fill": _filled, "ConcatOffset": _offsets, "DynamicStitch": _stitched,
    **dict.fromkeys(_ARITHMETIC, _arithmetic)}
