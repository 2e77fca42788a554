"""Samples of reshapes, slices, shapes and sizes, gathers and scatters, and lists.

Goes in: nothing.  Comes out: samples, see :mod:`proof_samples`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from proof_samples import around, case, flags, real, whole

raw = tf.raw_ops


def _twice(x: Any, y: Any) -> Any:
    """What training does with two views of a batch: forward, a wish for whole rows, and back."""
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        both = tf.concat([x, y], 0)
        places = tf.range(tf.size(both[:, 0]), dtype=both.dtype)[:, None]
        loss = tf.reduce_sum(tf.square(both) * places)
    return tape.gradient(loss, [x, y])


def _views(x: Any, y: Any) -> Any:
    """Two views in a dimension of their own, behind each other, and back; and the gradients."""
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        both = tf.reshape(tf.stack([x, y]), [-1, 4])
        places = tf.range(tf.shape(both, tf.int64)[0])
        both *= tf.cast(places[:, None], x.dtype)
        apart = [tf.reshape(both, [2, -1, 4]), tf.reshape(both, [2, tf.shape(x)[0], 4])]
        loss = tf.add_n([tf.reduce_sum(views[0] * views[1]) for views in apart])
        loss += tf.reduce_sum(tf.tile(x, [2, 1]) * both)
        loss += tf.reduce_sum(tf.concat([both, y, both], 0) ** 3)
    return both, apart, tape.gradient(loss, [x, y])


def _quarters(x: Any, y: Any) -> Any:
    """Rows of two views beside all of both: one beside the other; and the gradients."""
    rows = tf.shape(x)[0]
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        both = tf.concat([x, y], 0)
        similar = tf.matmul(both, tf.stop_gradient(both), transpose_b=True)
        found = [similar[:rows, rows:], similar[rows:, :rows], similar[rows:, rows:]]
        loss = tf.add_n([tf.reduce_sum(each ** 2) for each in found])
    return found, tape.gradient(loss, [x, y])


def _asked_for(sizes: Sequence[int]) -> Callable[[tf.Tensor], tf.Tensor]:
    """A shape that is made of a tensor's own sizes."""
    return lambda x: raw.Reshape(
        tensor=x, shape=tf.stack([at if at < 0 else tf.shape(x)[at] for at in sizes]))


def _cross_entropy(x: Any, y: Any) -> Any:
    """Logits of rows by columns of which nobody knows how many there are."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        losses = tf.nn.softmax_cross_entropy_with_logits(y, x)
    return losses, tape.gradient(losses, x)


def _two_batches(x: Any, y: Any) -> Any:
    """Two tensors, of the same batch or not, that are concatenated, numbered and taken apart."""
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        both = tf.concat([x, y, x], 0)
        sizes = [tf.shape(tensor)[0] for tensor in (x, y, x)]
        parts = tf.split(both, sizes)
        results = [
            parts[0] * parts[2],
            both[sizes[0] :] ** 2,
            both[: sizes[0] + sizes[1]],
            both * tf.cast(tf.range(tf.shape(both)[0])[:, None], both.dtype),
        ]
    return results, tape.gradient(results, [x, y])


def _reshapes() -> None:
    for type in ("Reshape", "ConcatV2", "ConcatOffset", "Slice"):
        around(type, _views, real(6, 4), real(6, 4), title="views")
    for type in ("StridedSlice", "StridedSliceGrad"):
        around(type, _quarters, real(6, 4), real(6, 4), title="quarters")
    around("Reshape", lambda x: tf.reshape(x, [-1, 4 * tf.shape(x)[1]]), real(2, 6, 4))
    around("Reshape", lambda x, y: tf.reshape(x, [tf.shape(y)[0], -1]), real(12, 4), real(6, 3))
    around("Reshape", lambda x: tf.reshape(x, [tf.shape(x)[0] * 2, -1, tf.shape(x)[2]]),
           real(6, 4, 1))
    around("Reshape", _cross_entropy, real(6, 4), real(6, 4), title="logits")
    around("Reshape", _cross_entropy, real(6, 12, 3), real(6, 12, 3), title="logits")
    for shape, sizes in (
        ((6, 4), ((-1, 0), (0, 1, -1), (0, -1), (1, 0), (-1, 1), (1, -1), (-1, 1, 1), (0, 0, -1))),
        ((2, 6, 3), ((0, 1, 2), (1, -1, 2), (0, -1), (-1, 2), (0, -1, 2), (0, -1, 0), (2, 1, 0))),
    ):
        for asked in sizes:
            if np.prod(shape) % np.prod([shape[at] for at in asked if at >= 0]) == 0:
                around("Reshape", _asked_for(asked), real(*shape), title=str(asked))
    for shape, target in (
        ((6, 4), (-1, 4)),
        ((6, 4), (6, 2, 2)),
        ((6, 4), (-1,)),
        ((6, 4), (24,)),
        ((12, 4), (6, 2, 4)),
        ((12, 4), (6, 8)),
        ((6, 4), (-1, 2)),
        ((6, 12), (72,)),
        ((6, 12), (12, 6)),
        ((6, 6), (-1, 6)),
        ((2, 6, 3), (12, 3)),
        ((2, 6, 3), (-1, 3)),
        ((2, 2, 6, 2), (-1, 4)),
        ((12, 2), (2, -1, 2)),
        ((12, 2), (2, 2, -1)),
        ((2, 6, 3), (2, 18)),
        ((2, 6, 3), (6, 6)),
        ((12,), (2, 6)),
        ((12,), (6, 2)),
        ((6, 1), (6,)),
        ((1, 6), (-1,)),
        ((6, 4), (1, -1, 4)),
        ((6, 4), (4, 6)),
        ((6, 4), (1, 6, 4)),
        ((4, 6), (2, 2, -1)),
        ((6, 2, 2), (-1, 4)),
        ((6,), (-1, 1)),
        ((18, 2), (-1, 3, 2)),
        ((6, 4), (3, -1)),
        ((4, 6, 2), (2, 2, -1, 2)),
        ((6, 4), (6, -1)),
        ((12, 2), (-1, 8)),
    ):
        case("Reshape", real(*shape), target)
    case("Reshape", real(6, 4), np.asarray([6, 2, 2], np.int32))
    case("Reshape", real(12, 4), np.asarray([6, 8], np.int32))
    case("Reshape", real(6, 4), np.asarray([4, 6], np.int32))
    case("Reshape", np.asarray([6], np.int32), [])
    case("Reshape", np.asarray(6, np.int32), [1])
    case("Reshape", np.asarray([4, 6], np.int32), [2, 1])
    sizes = ((6, 2, 2), (2, 12), (24,), (1, 6, 4), (6, 1, 4))
    for before, after in (*(((6, 4), size) for size in sizes), ((2, 2, 6), (4, 6))):
        around(
            "Reshape",
            lambda x, y: raw.Reshape(tensor=x, shape=tf.shape(y)),
            real(*before),
            real(*after),
            title="as",
        )
    around(
        "Reshape",
        lambda x: raw.Reshape(tensor=x, shape=tf.stack([tf.shape(x)[0], 2, 2])),
        real(6, 4),
        title="rows, 2, 2",
    )
    around(
        "Reshape",
        lambda x: raw.Reshape(tensor=x, shape=tf.stack([tf.shape(x)[0] * 2, 2])),
        real(6, 4),
        title="twice the rows, 2",
    )
    around(
        "Reshape",
        lambda x: raw.Reshape(tensor=x, shape=tf.stack([-1, tf.shape(x)[1], 2])),
        real(6, 4, 2),
        title="-1, columns, 2",
    )
    around(
        "Reshape",
        lambda x: raw.Reshape(tensor=x, shape=tf.stack([tf.shape(x)[0] * tf.shape(x)[1], 3])),
        real(2, 6, 3),
        title="merged",
    )
    for shape, axis in (((6, 4), 0), ((6, 4), 1), ((6, 4), -1), ((6,), -1), ((6, 12), -2),
                        ((6, 4), [1])):
        case("ExpandDims", real(*shape), axis)
    case("ExpandDims", np.asarray(6, np.int32), 0)
    for shape, axes in (
        ((6, 1), [1]),
        ((6, 1), []),
        ((1, 12, 1), [0]),
        ((1, 12, 1), [-1, 0]),
        ((1, 6, 1), []),
    ):
        case("Squeeze", real(*shape), axis=axes)
    case("Squeeze", np.asarray([6], np.int32), axis=[0])
    for shape in ([6, 4], [None, 4], [6, None]):
        case("EnsureShape", real(6, 4), shape=shape)
    case("EnsureShape", real(3, 12), shape=[3, None])
    case("EnsureShape", np.asarray([4, 6], np.int32), shape=[2])
    case("ConjugateTranspose", real(6, 12) + 1j * real(6, 12), [0, 1])
    around("Transpose", lambda x, y: tf.transpose(x, tf.concat([[0], _positive(y)], 0)),
           real(6, 2, 3), np.asarray([2, -1, 1], np.int32), title="others unknown")
    for type in ("Transpose", "ConjugateTranspose"):
        case(type, real(6, 12), [1, 0])
        case(type, real(6, 12, 3), [1, 2, 0])
        case(type, real(6, 4), np.asarray([1, 0], np.int32))
        if tuple(map(int, tf.__version__.split(".")[:2])) > (2, 20):  # whose kernels it ends before
            case(type, real(6, 4, 3), [-1, 0, -2])


def _positive(numbers: tf.Tensor) -> Any:
    """A vector of unknown length."""
    return tf.boolean_mask(numbers, numbers > 0)


def _joints() -> None:
    for axis in (0, 1, -1, -2):
        case("ConcatV2", [real(6, 4), real(6, 4)], axis)
        case("Pack", [real(6, 4), real(6, 4)], axis=axis)
    case("ConcatV2", [real(3, 6, 2), real(3, 6, 6)], 2)
    case("ConcatV2", [real(6, 6), real(6, 6)], 1)
    case("ConcatV2", [real(6, 4), real(6, 4), real(6, 4)], 0)
    case("ConcatV2", [real(12, 4), real(12, 4)], 0)
    around("ConcatV2", _twice, real(6, 4), real(6, 4))
    for type in ("SplitV", "Slice", "StridedSlice", "StridedSliceGrad", "Range", "AddV2"):
        around(type, _two_batches, real(6, 4), real(12, 4), title="two batches")
    for shapes in (([6, 4], [6, 4], [6, 4]), ([4, 6], [4, 6])):
        axis = shapes[0].index(6)
        case("ConcatOffset", axis, [np.asarray(shape, np.int32) for shape in shapes])
    case("ConcatOffset", 1, [np.asarray(shape, np.int32) for shape in ([6, 4], [6, 2])])
    case("ConcatOffset", -1, [np.asarray(shape, np.int32) for shape in ([6], [6])])
    case("ConcatOffset", -2, [np.asarray(shape, np.int32) for shape in ([6, 4], [6, 4])])
    around(
        "ConcatV2",
        lambda x, y: raw.ConcatV2(values=[tf.shape(x)[:1], [2], tf.shape(y)[1:]], axis=0),
        real(6, 4),
        real(2, 12),
    )
    around("ConcatV2", lambda x: raw.ConcatV2(values=[[2, 3], tf.shape(x)], axis=0), real(4, 6))
    around(
        "Pack", lambda x: raw.Pack(values=[3, tf.shape(x)[0], tf.shape(x)[1]], axis=0), real(6, 12)
    )
    case("Pack", [np.asarray(6, np.int32), np.asarray(2, np.int32)], axis=0)
    case("Pack", [np.asarray(6, np.int32), np.asarray(12, np.int32)], axis=0)
    for axis in (0, 1, -1):
        case("Unpack", real(6, 12), num=12 if axis else 6, axis=axis)
        case("Unpack", real(3, 6, 2), num=(3, 6, 2)[axis], axis=axis)
        case("Split", axis, real(6, 12), num_split=3)
        case("SplitV", real(6, 12), [2, 4] if not axis else [4, 8], axis, num_split=2)
    case("Unpack", np.asarray([4, 6, 3], np.int32), num=3)
    case("SplitV", real(6, 12), np.asarray([6, 6], np.int32), 1, num_split=2)
    case("Split", 0, np.asarray([4, 6], np.int32), num_split=2)
    for parts in (2, 4):
        case("Split", 0, real(12, 4), num_split=parts)


def _slices() -> None:
    arrays: Sequence[np.ndarray] = (real(6, 12), real(3, 6, 4), np.asarray([6, 3, 12], np.int32))
    cuts: Sequence[Callable[[Any], dict[str, Any]]] = (
        lambda rank: {"begin": [0], "end": [2], "strides": [1]},
        lambda rank: {"begin": [0], "end": [0], "strides": [1], "begin_mask": 1, "end_mask": 1},
        lambda rank: {"begin": [0], "end": [0], "strides": [-1], "begin_mask": 1, "end_mask": 1},
        lambda rank: {"begin": [1], "end": [0], "strides": [1], "end_mask": 1},
        lambda rank: {"begin": [1], "end": [2], "strides": [1], "shrink_axis_mask": 1},
        lambda rank: {
            "begin": [-1], "end": [0], "strides": [1], "shrink_axis_mask": 1, "end_mask": 1},
        lambda rank: {"begin": [0, 1], "end": [0, 3], "strides": [1, 1], "ellipsis_mask": 1},
        lambda rank: {
            "begin": [0, 0], "end": [0, 0], "strides": [1, 1], "new_axis_mask": 1, "begin_mask": 2,
            "end_mask": 2},
        lambda rank: {
            "begin": [0, 1], "end": [0, 3], "strides": [1, 2], "begin_mask": 1, "end_mask": 1},
        lambda rank: {
            "begin": [0, 1], "end": [0, 2], "strides": [1, 1], "begin_mask": 1, "end_mask": 1,
            "shrink_axis_mask": 2},
        lambda rank: {
            "begin": [0, 0, 0], "end": [0, 0, 1], "strides": [1, 1, 1], "ellipsis_mask": 1,
            "new_axis_mask": 2, "shrink_axis_mask": 4},
        lambda rank: {"begin": [0, 0], "end": [6, 2], "strides": [1, 1], "end_mask": 0},
        lambda rank: {"begin": [0], "end": [6], "strides": [1]},
    )
    for array in arrays:
        for cut in cuts:
            given = cut(array.ndim)
            if (
                len(given["begin"]) > array.ndim
                and not given.get("ellipsis_mask", 0)
                and not given.get("new_axis_mask", 0)
            ):
                continue
            try:
                small = raw.StridedSlice(input=array, **given).numpy()
            except (ValueError, tf.errors.OpError):
                continue
            places = [given.pop(name) for name in ("begin", "end", "strides")]
            case("StridedSlice", array, *places, **given)
            if array.ndim > 1:
                _slice_gradients(array, small, places, given)
    case(
        "StridedSlice", real(6, 4), np.asarray([0, 1], np.int32), [6, 3], [1, 1], begin_mask=1,
        end_mask=1)
    for first in (1, 2, 9):
        case("StridedSlice", real(6, 4), np.asarray([0, 1], np.int32), [first, 3], [1, 1])
    case("StridedSlice", real(6, 4), *np.asarray([[0], [2 ** 31], [1]]))
    around(
        "StridedSlice",
        lambda x: raw.StridedSlice(input=x, begin=[0], end=[tf.shape(x)[0]], strides=[1]),
        real(6, 4),
    )
    for begin, size in (
        ([0, 0], [-1, 2]),
        ([0, 1], [6, -1]),
        ([1, 0], [-1, -1]),
        ([0, 0], [2, 12]),
        ([0, 0], [6, 12]),
    ):
        case("Slice", real(6, 12), begin, size)
    for begin, size in ((0, 6), (6, 6), (0, 12), (6, -1)):
        begin = np.asarray([begin, 0], np.int32) if begin else [0, 0]
        case("Slice", real(12, 4), begin, np.asarray([size, 4], np.int32) if size > 0 else [-1, 4])
    for between in (lambda x, n: x[n:], lambda x, n: x[:n], lambda x, n: x[n:2 * n],
                    lambda x, n: x[n:, :2]):
        around("StridedSlice", between, real(12, 4), np.asarray(6, np.int32))
    around(
        "Slice",
        lambda x: raw.Slice(input=x, begin=[0, 1], size=tf.stack([tf.shape(x)[0], 2])),
        real(6, 4),
    )
    around(
        "Slice",
        lambda x, y: raw.Slice(input=x, begin=[0, 1], size=tf.stack([tf.shape(y)[0], 2])),
        real(12, 4),
        real(6),
        title="of others' rows",
    )
    case("Slice", real(6, 4), [0, 1], np.asarray([6, 2], np.int32))
    case("Slice", np.asarray([4, 6, 2], np.int32), [1], [2])


def _slice_gradients(
    array: np.ndarray, small: np.ndarray, places: list[Any], given: dict[str, Any]
) -> None:
    names = dict(zip(("begin", "end", "strides"), places))
    around(
        "StridedSliceGrad",
        lambda x, d: raw.StridedSliceGrad(shape=tf.shape(x), dy=d, **names, **given),
        array,
        small,
        title=f"{names} {given}",
    )
    case("StridedSliceGrad", np.asarray(array.shape, np.int32), *places, small, **given)
    shape, rows = np.asarray([12, 4], np.int32), np.asarray([6], np.int32)
    case("StridedSliceGrad", shape, rows, [0], [1], real(6, 4), end_mask=1)
    case("StridedSliceGrad", shape, [0], rows, [1], real(6, 4), begin_mask=1)
    case("StridedSliceGrad", shape, [0], rows, [1], real(6, 4))
    case("FloorDiv", np.asarray(12, np.int32), 2)


def _pads_and_fills() -> None:
    for edges in ([[0, 0], [1, 2]], [[1, 0], [0, 0]], [[0, 0], [0, 0]]):
        case("Pad", real(6, 12), edges)
        case("PadV2", real(6, 12), edges, 0.5)
        case("PadV2", real(6, 4), edges, real())
        for mode in ("REFLECT", "SYMMETRIC"):
            case("MirrorPad", real(6, 12), edges, mode=mode)
            around("MirrorPad", lambda x, mode=mode, edges=edges: tf.strings.length(
                tf.pad(tf.strings.as_string(x), edges, mode)), real(6, 12), title=f"{edges} {mode}")
            case("MirrorPadGrad", real(6, 12), edges, mode=mode)
    case("Pad", real(6, 12), np.asarray([[0, 0], [1, 1]], np.int32))
    for edge in ([1, 0], [0, 2], [0, 0]):
        case("PadV2", np.asarray([4, 6], np.int32), [edge], 1)
    around(
        "Pad",
        lambda x, y: tf.pad(x, [[0, tf.shape(x)[0] - tf.shape(y)[0]], [1, 2]]),
        real(6, 12),
        real(6, 4),
        title="rows less rows",
    )
    around(
        "Pad",
        lambda x, y: raw.Pad(input=x, paddings=[[0, 0], [0, 5 - tf.shape(y)[0]]]),
        real(6, 12),
        real(2, 3),
    )
    case("Fill", np.asarray([6, 2], np.int32), 0.5)
    case("Fill", np.asarray([4, 12], np.int32), real())
    around("Fill", lambda x, v: raw.Fill(dims=tf.shape(x), value=v), real(6, 12), real())
    for value in ((6, 12), (12,), (6, 1), (1, 1), (1, 12), ()):
        around(
            "BroadcastTo",
            lambda v, x: raw.BroadcastTo(input=v, shape=tf.shape(x)),
            real(*value),
            real(6, 12),
        )
        case("BroadcastTo", real(*value), np.asarray([6, 12], np.int32))
        around(
            "BroadcastArgs",
            lambda v, x: raw.BroadcastArgs(s0=tf.shape(v), s1=tf.shape(x)),
            real(*value),
            real(6, 12),
        )
    case("BroadcastArgs", np.asarray([6, 4], np.int32), np.asarray([6, 1, 1], np.int32))
    case("BroadcastTo", real(6, 1), [6, 3])
    case("BroadcastTo", real(6), [2, 6])
    for times in ([1, 2], [2, 1], [1, 1], [6, 1]):
        case("Tile", real(6, 12), times)
        case("Tile", real(1, 4), np.asarray([6, 1], np.int32))
        case("Tile", real(6, 4), np.asarray(times, np.int32))
    case("Tile", real(1, 4), np.asarray([12, 6], np.int32))
    around(
        "Tile",
        lambda x, y: raw.Tile(input=x, multiples=tf.stack([tf.shape(y)[0], 2])),
        real(1, 3),
        real(6, 2),
    )
    around(
        "Tile",
        lambda x, y: raw.Tile(input=x, multiples=tf.stack([tf.shape(y)[0], 1])),
        real(2, 3),
        real(6, 2),
    )
    around(
        "Tile",
        lambda x, y: raw.Tile(input=x, multiples=tf.stack([1, tf.shape(y)[0]])),
        real(6, 3),
        real(6, 2),
    )
    for axis in (-1, 0, 1):
        case("OneHot", whole(6, 12), 4, 1.0, 0.0, axis=axis)
    case("OneHot", whole(6), 6, real(), 0.0)
    case("OneHot", whole(6), np.asarray(6, np.int32), 1.0, 0.0)


def _sizes() -> None:
    for shape in ((6, 4), (4, 12), (6, 12, 3), (12,)):
        for kind in (tf.int32, tf.int64):
            case("Shape", real(*shape), out_type=kind)
            case("Size", real(*shape), out_type=kind)
        case("ShapeN", [real(*shape), real(6, 2)])
        case("Rank", real(*shape))
    for first, second in (
        ((6, 4), (4,)),
        ((6, 1), (6, 4)),
        ((6, 4), (1, 4)),
        ((12, 4), (12, 4)),
        ((6, 12), (6, 1)),
        ((6, 6), (6,)),
        ((6, 1, 4), (12, 1)),
        ((6, 4), ()),
        ((1, 6), (6, 1)),
    ):
        around(
            "BroadcastGradientArgs", lambda x, y: _summed_again(x, y), real(*first), real(*second)
        )
        case("BroadcastGradientArgs", np.asarray(first, np.int32), np.asarray(second, np.int32))
        around("FloorMod", functools.partial(_summed_again, rank=max(len(first), len(second))),
               real(*first), real(*second))
    for equation in ("...x,xy->...y", "...ax,xy->...ya", "a...x,xy->a...y"):
        for type in ("AddV2", "Sum"):
            around(type, _of_einsum(equation), real(6, 3, 4), real(4, 2), title=equation)
    for axis in (0, 1, [1, 2]):
        around("Transpose", lambda x, axis=axis: tf.gradients(tf.reduce_prod(x, axis), x),
               real(6, 2, 3), title=f"of products over {axis}")
    for values in ([4, 6, 2], [6], [12, 4]):
        case("Prod", np.asarray(values, np.int32), [0])
    around("Prod", lambda x: raw.Prod(input=tf.shape(x), axis=[0]), real(6, 4))
    around("Prod", lambda x: raw.Prod(input=tf.shape(x)[1:], axis=[0]), real(3, 12, 2))
    case("DynamicStitch", [[0, 2], [1]], [np.asarray([6, 4], np.int32), np.asarray([3], np.int32)])
    case("DynamicStitch", [[0, 1], [1]], [np.asarray([4, 6], np.int32), np.asarray([1], np.int32)])
    case("DynamicStitch", [[1], [0, 2]], [np.asarray([6], np.int32), np.asarray([12, 3], np.int32)])
    around(
        "DynamicStitch",
        lambda x: raw.DynamicStitch(indices=[tf.range(2), [1]], data=[tf.shape(x), [1]]),
        real(6, 4),
    )
    case("Range", 0, np.asarray(12, np.int32), 1)
    case("Range", 2, np.asarray(12, np.int32), 1)
    case("Range", 0, np.asarray(12, np.int32), 2)
    case("Range", np.asarray(0, np.int32), np.asarray(6, np.int32), 1)
    for type in ("Maximum", "Minimum"):
        larger = getattr(tf, type.lower())
        around(type, lambda x, y, of=larger: tf.broadcast_to(
            x, [of(tf.shape(x)[0], tf.shape(y)[0]), 4]), real(6, 4), real(6, 2))
    around("Max", lambda x, y: tf.broadcast_to(x, tf.concat([raw.Max(
        input=[tf.shape(x)[0], tf.shape(y)[0]], axis=0, keep_dims=True), [4]], 0)),
        real(6, 4), real(6, 2))
    around("Range", lambda x: raw.Range(start=0, limit=tf.shape(x)[1], delta=1), real(4, 12))


def _of_einsum(equation: str) -> Callable[..., Any]:
    """The gradients of an einsum, summed over what is broadcast of its dots."""
    def call(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            made = tf.einsum(equation, x, w) ** 2
        return tape.gradient(made, [x, w])

    return call


def _summed_again(x: tf.Tensor, y: tf.Tensor, rank: int = 0) -> Any:
    """A broadcast's gradients: the axes alone are not all that has to be right.

    With a ``rank`` the axes are counted modulo, as in the gradient of a sum.
    """
    axes = raw.BroadcastGradientArgs(s0=tf.shape(x), s1=tf.shape(y))
    axes = [(axis + rank) % rank for axis in axes] if rank else axes
    both = x * y
    return (
        *axes,
        *(
            tf.reshape(raw.Sum(input=both * 2, axis=axis), tf.shape(own))
            for axis, own in zip(axes, (x, y))
        ),
    )


def _gathers() -> None:
    for values, indices, axis, batch in (
        ((4, 3), (6,), 0, 0),
        ((4, 3), (12, 2), 0, 0),
        ((6, 4), (3,), 1, 0),
        ((6, 4), (6,), 1, 0),
        ((4, 6), (2, 3), 0, 0),
        ((6, 4, 12), (2, 6), 1, 0),
        ((6, 4), (6, 3), 1, 1),
        ((6, 4, 2), (6, 3), 1, 1),
        ((6, 6), (6,), 0, 0),
        ((6, 2, 4, 12), (6, 2, 3), 2, 2),
        ((6, 2, 4), (6, 2, 6), -1, 2),
        ((6, 4, 12), (6, 12), 1, 1),
        ((6, 4, 5), (6, 12), 2, 1),
        ((6, 4, 5), (6, 12), -1, -1),
        ((4, 3), (), 0, 0),
    ):
        case("GatherV2", real(*values), whole(*indices), axis, batch_dims=batch)
    for values, chosen in (
        ([6, 4, 2], [0]),
        ([4, 6, 2], [2, 1]),
        ([4, 6, 2], [2, 0]),
        ([6, 4], 0),
        ([4, 6, 2], 1),
        ([6, 4], [0, 0]),
        ([4, 6, 2], [[1, 0]]),
        ([4, 6], 1),
    ):
        case("GatherV2", np.asarray(values, np.int32), chosen, 0)
    case("GatherNd", real(4, 4), whole(6, 2))
    case("GatherNd", real(4, 4), whole(6, 12, 1))
    case("GatherNd", real(6, 4), whole(6, 2))
    case("GatherNd", real(6, 4, 6), whole(3, 2))
    around("ResourceGather", lambda at: _looked_up(at, 0), whole(6, 12))
    around("ResourceGather", lambda at: _looked_up(at, 1), whole(4, 6))
    for kind in ("Sum", "Max", "Min"):
        for shape, segments in (
            ((6, 4), (6,)),
            ((12, 6), (12,)),
            ((6, 12, 2), (6, 12)),
            ((4, 6), (4,)),
        ):
            case(f"UnsortedSegment{kind}", real(*shape), whole(*segments, low=-1), 4)
        case(f"UnsortedSegment{kind}", whole(6, 2), whole(6), np.asarray(6, np.int32))
    case("ScatterNd", whole(6, 1), real(6, 3), [4, 3])
    around("ScatterNd", lambda at, x: tf.strings.length(tf.scatter_nd(
        at, tf.strings.as_string(x), [9])), np.arange(6)[:, None], whole(6), title="of strings")
    around("StringSplitV2", lambda x: raw.StringSplitV2(
        input=tf.strings.as_string(x), sep="1").shape, whole(6, high=300), title="shape")
    around("StringSplitV2", lambda x: tf.strings.length(tf.strings.split(
        tf.strings.as_string(x), "1").to_tensor()), whole(12, high=300), title="padded")
    for shape in (-1, [-1, 3]):
        around("RaggedTensorToTensor", lambda x, rows, shape=shape: raw.RaggedTensorToTensor(
            shape=shape, values=x, default_value=-1.0, row_partition_tensors=[rows, [
                0, 0, 1, 4, 4, 4, 4, 5]], row_partition_types=["FIRST_DIM_SIZE", "VALUE_ROWIDS"]),
            real(8), np.asarray(6), title=f"to {shape}")
    for shape in ([6, 3], [3, 6]):
        case("SparseToDense", [[0, 1], [2, 2]], np.asarray(shape, np.int32), [1.0, 2.0], 0.5)
    around("SparseTensorDenseMatMul", lambda values, shape, b: raw.SparseTensorDenseMatMul(
        a_indices=[[0, 1], [5, 2]], a_values=values, a_shape=shape, b=b),
        real(2), np.asarray([6, 3]), real(3, 4))
    for turned in (False, True):  # all rows beside each other, as of signals on one graph
        case("SparseTensorDenseMatMul", [[0, 1], [3, 2]], real(2), [4, 3],
             real(*([6, 3] if turned else [3, 6])), adjoint_b=turned)
    case("UnsortedSegmentMax", [[1.0, 3.0], [2.0, 4.0]], [5, 2], np.asarray(6, np.int32))
    case("ScatterNd", [[1], [5]], [2.0, 3.0], np.asarray([6], np.int32))
    case("ScatterNd", whole(6, 12, 2), real(6, 12), [4, 4])
    case("ScatterNd", whole(4, 6), real(4), [4] * 6)
    case("ScatterNd", whole(6, 1), real(6, 6), [4, 6])
    case("ScatterNd", whole(12, 1), real(12, 3), np.asarray([6, 3], np.int32))
    for weights in (real(6, 12), real(0)):
        case("DenseBincount", whole(6, 12), 4, weights)
    case("DenseBincount", whole(6), 4, real(6))
    case("DenseBincount", whole(6, 2), 4, real(0), binary_output=True)


def _looked_up(indices: tf.Tensor, batch: int) -> tf.Tensor:
    handle = raw.VarHandleOp(dtype=tf.float64, shape=[4, 5], shared_name="looked_up")
    table = tf.constant(np.arange(20.0).reshape(4, 5) / 7)
    with tf.control_dependencies([raw.AssignVariableOp(resource=handle, value=table)]):
        return raw.ResourceGather(
            resource=handle, indices=indices, dtype=tf.float64, batch_dims=batch
        )


def _others() -> None:
    case("IdentityN", [real(6, 4), whole(12), flags(6)])
    case("IdentityN", [np.asarray(6, np.int32), real(2, 6)])
    case("Select", flags(6, 4), real(6, 4), real(6, 4))
    case("Select", flags(6), real(6, 4), real(6, 4))
    case("Select", flags(6), real(6, 12), real(6, 12))
    case("Select", flags(), real(6, 12), real(6, 12))
    case("Select", flags(6, 6), real(6, 6), real(6, 6))
    case("Select", flags(6), real(6), real(6))


def _lists() -> None:
    """Each sample shows its list stacked, or what it took from it."""
    kind: dict[str, Any] = {"element_dtype": tf.float64}

    def pushed(shape: Any, *entries: tf.Tensor) -> tf.Tensor:
        held = raw.EmptyTensorList(element_shape=shape, max_num_elements=9, **kind)
        for entry in entries:
            held = raw.TensorListPushBack(input_handle=held, tensor=entry)
        return held

    def stacked(held: tf.Tensor, shape: Any) -> tf.Tensor:
        return raw.TensorListStack(input_handle=held, element_shape=shape, **kind)

    def kept(x: tf.Tensor) -> Any:
        held = raw.OptionalFromValue(components=[x])
        return [raw.OptionalGetValue(optional=held, output_types=[x.dtype], output_shapes=[shape])
                for shape in (None, x.shape)]

    for type in ("OptionalFromValue", "OptionalGetValue"):
        around(type, kept, real(6, 12))

    def set_items(shape: Any, *entries: tf.Tensor) -> tf.Tensor:
        held = raw.TensorListReserve(element_shape=shape, num_elements=len(entries), **kind)
        for at, entry in enumerate(entries):
            held = raw.TensorListSetItem(input_handle=held, index=len(entries) - 1 - at, item=entry)
        return held

    def popped(x: tf.Tensor, y: tf.Tensor) -> Any:
        rest, last = raw.TensorListPopBack(input_handle=pushed(-1, x, y), element_shape=-1, **kind)
        return last, stacked(rest, [-1, 4])

    def shapes(x: tf.Tensor, y: tf.Tensor) -> Any:
        held = pushed([-1, 4], x, y)
        return raw.TensorListElementShape(input_handle=held, shape_type=tf.int32), stacked(
            held, [-1, 4]
        )

    def cut(x: tf.Tensor, *at: int) -> Any:
        held = raw.TensorListFromTensor(tensor=x, element_shape=-1)
        return stacked(held, -1), [
            raw.TensorListGetItem(input_handle=held, index=index, element_shape=-1, **kind)
            for index in at
        ]

    def of_rows(x: tf.Tensor) -> Any:
        held = raw.TensorListFromTensor(tensor=x, element_shape=[4])
        resized = raw.TensorListResize(input_handle=held, size=tf.shape(x)[0])
        empty = raw.TensorListReserve(element_shape=[4], num_elements=tf.shape(x)[0], **kind)
        return stacked(resized, [4]), stacked(empty, [4]), raw.TensorListLength(input_handle=held)

    for type in ("TensorListFromTensor", "TensorListResize", "TensorListReserve",
                 "TensorListStack", "TensorListLength"):
        around(type, of_rows, real(6, 4))

    pair = (real(6, 4), real(6, 4))
    for type in ("TensorListPushBack", "TensorListStack", "EmptyTensorList"):
        around(type, lambda x, y: stacked(pushed([-1, 4], x, y), [-1, 4]), *pair)
        around(type, lambda x, y: stacked(pushed(-1, x, y), tf.shape(x)), *pair)
        around(type, lambda x, y: stacked(pushed(tf.shape(x), x, y), tf.shape(x)), *pair)
    for type in ("TensorListSetItem", "TensorListReserve"):
        around(type, lambda x, y: stacked(set_items([-1, 4], x, y), [-1, 4]), *pair)
        around(type, lambda x, y: stacked(set_items(tf.shape(x), x, y), tf.shape(x)), *pair)
        around(
            type,
            lambda x, y: stacked(set_items(tf.shape(x), x, y), [-1, 6]),
            real(4, 6),
            real(4, 6),
        )
    around("TensorListPopBack", popped, *pair)
    around(
        "TensorListLength",
        lambda x, y: (
            raw.TensorListLength(input_handle=pushed(-1, x, y)),
            stacked(pushed(-1, x, y), [-1, 4]),
        ),
        *pair,
    )
    around("TensorListElementShape", shapes, *pair)
    for type in ("TensorListFromTensor", "TensorListGetItem"):
        around(type, lambda x: cut(x, 0, 2), real(3, 6, 2))
        around(type, lambda x: cut(x, 1), real(6, 12))


for _fill in (_reshapes, _joints, _slices, _pads_and_fills, _sizes, _gathers, _others, _lists):
    _fill()
