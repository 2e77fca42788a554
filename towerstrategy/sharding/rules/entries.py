"""Static values of small integer tensors, such as shapes, and static shapes computed from them.

Goes in: a tensor.  Comes out: :func:`entries_of`, the values in a small tensor of integers, None
for each that is not static; :func:`sizes_of`, a tensor's static shape.  :func:`outputs_of` applies
one op to such values, or to any objects that stand for them, such as the :class:`Size` of a number
of rows, with which it also computes.  TensorFlow knows some of this
(``tf.get_static_value(..., partial=True)``), but loses values in slices, products and gathers, and
loses the static shape of a tensor whose shape is computed from another's.
"""

from __future__ import annotations

import dataclasses
import fractions
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.families import AS_IT_IS, BINARY, UNARY
from towerstrategy.sharding.spec import Sharded, Size, concatenated

Entries = np.ndarray  # of objects: ints, None, or any object that stands for a number


class NoSize(Exception):
    """An op makes something else than a :class:`Size` of one."""


class _Open(NamedTuple):
    """The size of a tensor along a dimension, where it is not static."""

    tensor: str
    dim: int


_DEPTH = 12  # how many ops are followed backwards
_LARGEST = 64  # entries of a tensor whose values are looked for
_INTEGER = (int, np.integer)
# An op type and the index of an output -> the index of the input that has the same shape.
_SHAPED_AS = {("FusedBatchNormV3", 0): 0, ("FusedBatchNormGradV3", 0): 1, ("Softmax", 0): 0,
              ("LogSoftmax", 0): 0, ("SparseSoftmaxCrossEntropyWithLogits", 1): 0,
              ("AddN", 0): 0, ("Cumsum", 0): 0, ("ReverseV2", 0): 0, ("Roll", 0): 0}
# An op type -> the input that is the output's shape.
_SHAPES = {"BroadcastTo": 1, "Slice": 2, "StridedSliceGrad": 0}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "AddV2": operator.add, "Sub": operator.sub, "Mul": operator.mul,
    "Maximum": max, "Minimum": min, "FloorDiv": lambda x, y: x // y if y else None,
    "FloorMod": lambda x, y: x % y if y else None,
    "BroadcastArgs": lambda x, y: x if y == 1 else y}
_REDUCTIONS = {"Prod": "Mul", "Max": "Maximum", "Min": "Minimum"}


def entries_of(tensor: tf.Tensor) -> Entries | None:
    """The static values in a tensor, None for unknown ones; None if it is large or not of ints."""
    entries = _entries(tensor, _DEPTH)
    return None if entries is None else _array([
        None if isinstance(entry, _Open) else entry for entry in entries.flat], entries.shape)


def dimensions_in(shape: tf.Tensor, tensor: tf.Tensor) -> list[int | None]:
    """For each entry of ``shape``: the open dimension of ``tensor`` whose size it is, or None."""
    entries = _entries(shape, _DEPTH)
    return [] if entries is None else [
        entry.dim if isinstance(entry, _Open) and entry.tensor == tensor.name else None
        for entry in entries.flat]


def outputs_of(operation: tf.Operation, inputs: Sequence[Entries | None]) -> list[Entries | None]:
    """The entries of each output of an op, from the entries of its inputs; None if unknown."""
    needs, compute = _COMPUTE.get(operation.type, ("-", None))
    arguments: list[Any] = []
    for entries, need in zip(inputs, needs.ljust(len(inputs), needs[-1])):
        arguments.append(_as_integers(entries) if need == "k" else entries)
        if need != "-" and arguments[-1] is None:
            compute = None
    computed = None if compute is None else compute(operation, *arguments)
    outputs = computed if isinstance(computed, list) else [computed] * len(operation.outputs)
    return [entries if entries is not None and tensor.shape.is_compatible_with(entries.shape)
            else None for entries, tensor in zip(outputs, operation.outputs)]


def sizes_of(tensor: tf.Tensor, depth: int = _DEPTH) -> list[int | None] | None:
    """A tensor's static shape, with more sizes than TensorFlow knows; None for an unknown rank."""
    if tensor.shape.rank is None:
        return None
    static: list[int | None] = list(tensor.shape.as_list())
    computed: Sequence[Any] | Entries | None = None
    if static.count(None) < 2 or not depth:  # the rows are open, all else is known
        return static
    if tensor.op.type == "Reshape":
        computed = _reshape_target(tensor.op, depth - 1)
    elif tensor.op.type in _SHAPES:
        computed = _entries(tensor.op.inputs[_SHAPES[tensor.op.type]], depth - 1)
    elif tensor.op.type == "Sum":
        computed = _summed_shape(tensor.op, depth - 1)
    elif tensor.op.type == "Transpose":
        before, order = sizes_of(tensor.op.inputs[0], depth - 1), _tf.constant_value(
            tensor.op.inputs[1])
        computed = None if before is None or order is None else [before[dim] for dim in order]
    elif tensor.op.type == "Einsum":
        computed = _contracted_shape(tensor.op, depth - 1)
    elif (tensor.op.type, tensor.value_index) in _SHAPED_AS:
        source = tensor.op.inputs[_SHAPED_AS[tensor.op.type, tensor.value_index]]
        computed = sizes_of(source, depth - 1)
    elif tensor.op.type in UNARY:
        computed = sizes_of(tensor.op.inputs[0], depth - 1)
    elif tensor.op.type in (*BINARY, "SoftmaxCrossEntropyWithLogits"):
        computed = _broadcast_shape([sizes_of(value, depth - 1) for value in tensor.op.inputs])
    if computed is None or len(computed) != len(static):
        return static
    return [int(other) if size is None and isinstance(other, _INTEGER) and other >= 0 else size
            for size, other in zip(static, computed)]


class Quotient(NamedTuple):
    """The number ``known``, times the sizes ``times``, which are not known."""

    known: fractions.Fraction
    times: tuple[Any, ...] = ()


ONE = Quotient(fractions.Fraction(1))


def quotient(sizes: Sequence[Any], divisors: Sequence[Any]) -> Quotient | None:
    """The product of ``sizes`` over the product of ``divisors``; None if it is not known.

    A size is a number, None, or an object that stands for one size, equal wherever this size is.
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


def _reshape_target(operation: tf.Operation, depth: int) -> list[Any] | None:
    """The target shape of a reshape, with the size in place of -1 if it can be computed."""
    tensor, shape = operation.inputs
    target, sizes = _entries(shape, depth), sizes_of(tensor, depth)
    if target is None or sizes is None:
        return None
    rest = quotient([_Open(tensor.name, dim) if size is None else size
                     for dim, size in enumerate(sizes)], [size for size in target if size != -1])
    return list(target) if rest is None or rest.times else [
        int(rest.known) if size == -1 else size for size in target]


def _summed_shape(operation: tf.Operation, depth: int) -> list[int | None] | None:
    """The shape of a sum over some axes."""
    before, axes = sizes_of(operation.inputs[0], depth), _tf.constant_value(operation.inputs[1])
    if before is None or axes is None:
        return None
    kept = [1] if operation.get_attr("keep_dims") else []
    summed = {int(axis) % max(len(before), 1) for axis in axes.flat}
    return [each for dim, size in enumerate(before) for each in (kept if dim in summed else [size])]


def _contracted_shape(operation: tf.Operation, depth: int) -> list[int | None] | None:
    """The shape of an einsum, from the size of each of its letters."""
    inputs, output = operation.get_attr("equation").decode().replace(" ", "").split("->")
    sizes: dict[str, int | None] = {}
    for letters, value in zip(inputs.split(","), operation.inputs):
        shape = sizes_of(value, depth)
        if shape is None or "." in letters:
            return None
        sizes.update((letter, size) for letter, size in zip(letters, shape) if size is not None)
    return [sizes.get(letter) for letter in output]


def _broadcast_shape(shapes: Sequence[Any]) -> list[int | None] | None:
    """The shape of a broadcast; a size is known if one input's is above 1, or all are known."""
    if None in shapes:
        return None
    rank = max(map(len, shapes))
    return [next((size for size in sizes if size is not None and size > 1),
                 None if None in sizes else min(sizes))
            for sizes in zip(*([1] * (rank - len(shape)) + shape for shape in shapes))]


def _entries(tensor: tf.Tensor, depth: int) -> Entries | None:
    """Like :func:`entries_of`, but sizes that are not static are :class:`_Open`."""
    has_shape = tensor.shape.is_fully_defined()
    if not tensor.dtype.is_integer or not has_shape and tensor.shape.rank != 1 \
            or has_shape and tensor.shape.num_elements() > _LARGEST:
        return None
    operation, entries = tensor.op, None
    if depth and operation.type in ("Shape", "ShapeN"):
        shaped = operation.inputs[tensor.value_index]
        sizes = sizes_of(shaped, depth - 1) or ()
        entries = None if shaped.shape.rank is None else _array(
            (_Open(shaped.name, dim) if size is None else size for dim, size in enumerate(sizes)),
            [len(sizes)])
    elif depth and operation.type in _COMPUTE:
        inputs = [_entries(each, depth - 1) for each in operation.inputs]
        entries = outputs_of(operation, inputs)[tensor.value_index]
    elif depth and operation.type in _tf.BRANCHES:
        branch = _tf.taken_branch(operation)
        entries = branch and _entries(branch.outputs[tensor.value_index], depth - 1)
    if entries is None or not tensor.shape.is_compatible_with(entries.shape):
        value = _tf.constant_value(tensor)
        if value is None and not has_shape:
            return None
        entries = np.full(tensor.shape.as_list(), None, object) if value is None \
            else np.asarray(value).astype(object)
    return entries


def _array(entries: Iterable[Any], shape: Any) -> Entries:
    """An array of these objects; ``np.array`` would take objects apart that are tuples."""
    array = np.empty(shape, object)
    for index, entry in enumerate(entries):
        array.flat[index] = entry
    return array


def _as_integers(entries: Entries | None) -> Any:
    """An int64 array of the entries; None unless all are known."""
    if entries is None or not all(isinstance(entry, _INTEGER) for entry in entries.flat):
        return None
    return np.asarray(entries).astype(np.int64)


def _reshaped(operation: tf.Operation, entries: Entries, *_: Any) -> Entries | None:
    shape = operation.outputs[0].shape
    return entries.reshape(shape) if shape.is_fully_defined() else None


def _concat(operation: tf.Operation, *inputs: Any) -> Entries | None:
    axis = _as_integers(inputs[-1])
    known = axis is not None and all(part is not None for part in inputs[:-1])
    return np.concatenate(inputs[:-1], int(axis)) if known else None


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


def _padded(operation: tf.Operation, entries: Entries, paddings: Any, filler: Any = 0) -> Entries:
    return np.pad(entries, paddings, constant_values=filler)


def _gather(operation: tf.Operation, entries: Entries, indices: Any, _: Any) -> Entries | None:
    plain = entries.ndim == 1 and not operation.get_attr("batch_dims")
    return _array(entries[indices.ravel()], indices.shape) if plain else None


def _split(operation: tf.Operation, entries: Entries, sizes: Any, _: Any) -> Any:
    plain = entries.ndim == 1 and (sizes >= 0).all()
    return np.split(entries, np.cumsum(sizes)[:-1]) if plain else None


def _computed(kind: str, first: Any, second: Any) -> Any:
    """What an op of this type makes of two entries; None if unknown."""
    if isinstance(first, Size) or isinstance(second, Size):
        return _of_size(kind, first, second)
    known = isinstance(first, _INTEGER) and isinstance(second, _INTEGER)
    return _ARITHMETIC[kind](first, second) if known else None


def _of_size(kind: str, first: Any, second: Any) -> Size:
    """What an op makes of two entries of which one, or each, is a number of rows.

    Raises:
      NoSize: the towers' results do not add up to the batch's.
    """
    size, other = (first, second) if isinstance(first, Size) else (second, first)
    number = int(other) if isinstance(other, _INTEGER) else None
    result: Size | Sharded | None = None
    if kind == "Mul" and (other is None or number is not None and number > 0):
        result = dataclasses.replace(size, times=size.times and number and size.times * number)
    elif first == second and kind in ("Maximum", "Minimum", "BroadcastArgs") \
            or number == 1 and kind == "BroadcastArgs" \
            or number == 0 and (size is first or kind != "Sub") and kind in ("Add", "AddV2", "Sub"):
        result = size
    elif first == second and kind == "Sub" and size.times is not None:
        result = dataclasses.replace(size, times=0)
    elif isinstance(other, Size) and kind in ("Add", "AddV2"):
        result = concatenated([size.shards(0), other.shards(0)])
    elif number is not None and number > 0 and kind == "FloorDiv" and size is first:
        result = size.shards(0).repeated(fractions.Fraction(1, number))
        if result is None and size.times and size.times % number == 0:
            result = dataclasses.replace(size, times=size.times // number)
    if result is None:
        raise NoSize
    return result.size if isinstance(result, Sharded) else result


def _arithmetic(operation: tf.Operation, first: Entries, second: Entries) -> Entries:
    pairs = np.broadcast(first, second)
    return _array([_computed(operation.type, *pair) for pair in pairs], pairs.shape)


def _reduced(operation: tf.Operation, entries: Entries, _: Any) -> Entries | None:
    """The reduction of all entries."""
    numbers = [*([1] if operation.type == "Prod" else []), *entries.flat]
    compute = functools.partial(_computed, _REDUCTIONS[operation.type])
    return _array([functools.reduce(compute, numbers)], []) \
        if numbers and operation.outputs[0].shape.rank == 0 else None


def _broadcast_args(operation: tf.Operation, *shapes: Any) -> Entries:
    rank = max(map(len, shapes))
    return _arithmetic(operation, *(_array([*[1] * (rank - len(shape)), *shape], [rank])
                                    for shape in shapes))


def _filled(operation: tf.Operation, _: Any, entry: Entries) -> Entries | None:
    shape = operation.outputs[0].shape
    return _array([entry[()]] * shape.num_elements(), shape) if shape.is_fully_defined() else None


def _offsets(operation: tf.Operation, axis: Any, *shapes: Any) -> list[Entries]:
    """The offset of each input in a concatenation: 0 in all dimensions but the axis."""
    add, same = (functools.partial(_computed, kind) for kind in ("AddV2", "Maximum"))
    sizes = [*zip(*shapes)]
    starts = [*itertools.accumulate(sizes.pop(int(axis))[:-1], add, initial=0)]
    for others in sizes:
        functools.reduce(same, others)  # the kernel compares them
    offsets = [_array([0] * len(shape), [len(shape)]) for shape in shapes]
    for each, start in zip(offsets, starts):
        each[int(axis)] = start
    return offsets


def _broadcast_gradient_args(operation: tf.Operation, *shapes: Any) -> list[Entries]:
    """The axes over which the gradient of each operand of a broadcast is summed."""
    rank = max(map(len, shapes))
    return [np.flatnonzero([*[True] * (rank - len(shape)), *(shape == 1)]).astype(object)
            for shape in shapes]


def _stitched(operation: tf.Operation, *inputs: Any) -> Entries | None:
    indices, data = map(_as_integers, inputs[:len(inputs) // 2]), inputs[len(inputs) // 2:]
    pairs = [(at, entries) for at, entries in zip(indices, data) if at is None or at.size]
    if any(at is None or entries is None or at.shape != entries.shape for at, entries in pairs):
        return None
    stitched = np.full(max((int(at.max()) + 1 for at, _ in pairs), default=0), None, object)
    for at, entries in pairs:
        stitched[at.ravel()] = entries.ravel()
    return stitched


# An op type -> a letter for each input, the last letter for all further ones (e: its entries are
# needed, k: and all are known, -: they may be None); a function that computes the outputs' entries.
_COMPUTE: dict[str, tuple[str, Callable[..., Any]]] = {
    **dict.fromkeys((*AS_IT_IS, "Cast"), ("e", lambda _, entries: entries)),
    "IdentityN": ("-", lambda _, *inputs: list(inputs)),
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze"), ("e-", _reshaped)),
    "Pack": ("e", lambda operation, *parts: np.stack(parts, operation.get_attr("axis"))),
    "ConcatV2": ("-", _concat), "Slice": ("ek", _slice), "StridedSlice": ("ek", _strided_slice),
    "GatherV2": ("ek-", _gather), "SplitV": ("ek-", _split), "Fill": ("-e", _filled),
    "Split": ("ke", lambda operation, _, entries: np.split(entries, len(operation.outputs))
              if entries.ndim == 1 else None),
    **dict.fromkeys(("Pad", "PadV2"), ("ek", _padded)),
    "Unpack": ("e", lambda _, entries: [_array([each], []) for each in entries]
               if entries.ndim == 1 else None),
    "Transpose": ("ek", lambda _, entries, order: entries.transpose(order)),
    "Roll": ("ekk", lambda _, entries, *by: np.roll(entries, *by) if entries.ndim == 1 else None),
    "InvertPermutation": ("k", lambda _, order: np.argsort(order).astype(object)),
    "BroadcastArgs": ("e", _broadcast_args),
    "BroadcastGradientArgs": ("k", _broadcast_gradient_args),
    "ConcatOffset": ("ke", _offsets), "DynamicStitch": ("-", _stitched),
    **dict.fromkeys(_REDUCTIONS, ("e-", _reduced)),
    **dict.fromkeys(sorted({*_ARITHMETIC} - {"BroadcastArgs"}), ("e", _arithmetic))}
