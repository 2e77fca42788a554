"""Where the batch's rows are in what operations make of them.

Goes in: an operation of the graph that is being traced, and for each tensor that it is given the
dimensions in which that has the batch's rows.  Comes out: the same for what it makes, and whether
it puts several rows into one value.  Of an operation that is not listed here nobody knows where it
has put them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from towerstrategy.losses import by_row

# The dimensions that have rows, or parts of several; none of them where nobody knows which; None
# where there are no rows.
Places = frozenset[int] | None
SOMEWHERE: Places = frozenset()
FIRST: Places = frozenset({0})


class Made(NamedTuple):
    """What an operation makes of rows.

    Attributes:
      places: where they are in each of its outputs.
      together: whether several are put into one value.
      alone: whether those dimensions have nothing but the rows.
    """

    places: Places = None
    together: bool = False
    alone: bool = True


_Rule = Callable[[tf.Operation, Sequence[tf.Tensor], Sequence[Places]], Made]
_LOST = Made(SOMEWHERE)


def made(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places],
         alone: bool) -> Made:
    """What ``operation`` makes of what is ``given`` to it, where rows are in those ``places``.

    Args:
      operation: an operation.
      given: its inputs.
      places: where rows are in each of them.
      alone: whether those dimensions have nothing but the rows.
    """
    if not any(place is not None for place in places):
        return Made()
    if operation.type == "Reshape":
        return _reshaped(operation, given, places, alone)
    rule = _RULES.get(operation.type)
    return (_LOST if rule is None else rule(operation, given, places))._replace(alone=alone)


def by_shape(value: tf.Tensor, rows: int | None) -> Places:
    """Where ``rows`` (0 where they are not known) may be in ``value``, as far as its shape tells.
    """
    if value.shape.rank is None or rows == 1:
        return SOMEWHERE
    likely = [axis for axis, size in enumerate(value.shape)
              if size is None or size == (rows or None)]
    return None if not likely else frozenset(likely) if len(likely) == 1 else SOMEWHERE


def _found(axes: set[int]) -> Places:
    return frozenset(axes) or None


def _elementwise(operation: tf.Operation, given: Sequence[tf.Tensor],
                 places: Sequence[Places]) -> Made:
    rank, axes = operation.outputs[0].shape.rank, set[int]()
    for value, place in zip(given, places):
        if place and rank is not None and value.shape.rank is not None:
            axes.update(axis + rank - value.shape.rank for axis in place)
    return Made(frozenset(axes))


def _same(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    """Of what leaves each dimension of its inputs where it is, or cuts or repeats it."""
    del operation, given
    return Made(frozenset().union(*(place for place in places if place is not None)))


def _first(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    """Of layers that have the batch in the first dimension."""
    del operation, given
    return Made(FIRST) if set(places) <= {None, FIRST} else _LOST


def _over_last(operation: tf.Operation, given: Sequence[tf.Tensor],
               places: Sequence[Places]) -> Made:
    """Of what makes the elements along the last dimension out of each other."""
    del operation
    place, rank = places[0], given[0].shape.rank
    return Made(place, bool(place and rank is not None and rank - 1 in place))


def _chosen(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    made = _over_last(operation, given, places)
    return _LOST if made.together else made


def _reduced(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    place, rank = places[0], given[0].shape.rank
    if place is None:
        return Made()
    known = tf.get_static_value(given[1])
    if not place or rank is None or known is None:
        return _LOST if operation.outputs[0].shape.rank != 0 else Made()
    axes = {int(axis) % rank for axis in known.reshape([-1])}
    left = set(place - axes)
    if given[0].shape.rank != operation.outputs[0].shape.rank:
        left = {axis - sum(other < axis for other in axes) for axis in left}
    return Made(_found(left), not place.isdisjoint(axes))


def _transposed(operation: tf.Operation, given: Sequence[tf.Tensor],
                places: Sequence[Places]) -> Made:
    del operation
    order = tf.get_static_value(given[1])
    if not places[0] or order is None:
        return _LOST
    return Made(frozenset(order.tolist().index(axis) for axis in places[0]))


def _expanded(operation: tf.Operation, given: Sequence[tf.Tensor],
              places: Sequence[Places]) -> Made:
    rank, new = operation.outputs[0].shape.rank, tf.get_static_value(given[1])
    if not places[0] or rank is None or new is None:
        return _LOST
    place = int(new.reshape([-1])[0]) % rank
    return Made(frozenset(axis + (place <= axis) for axis in places[0]))


def _squeezed(operation: tf.Operation, given: Sequence[tf.Tensor],
              places: Sequence[Places]) -> Made:
    shape = given[0].shape
    if not places[0] or shape.rank is None:
        return _LOST
    gone = {axis % shape.rank for axis in operation.get_attr("squeeze_dims")}
    if not gone and None in shape.as_list():
        return _LOST
    gone = gone or {axis for axis, size in enumerate(shape) if size == 1}
    return Made(_found({axis - sum(other < axis for other in gone)
                        for axis in places[0] - gone}))


def _packed(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    rank, own = operation.outputs[0].shape.rank, _same(operation, given, places).places
    if not own or rank is None:
        return _LOST
    new = operation.get_attr("axis") % rank
    return Made(frozenset(axis + (new <= axis) for axis in own))


def _unpacked(operation: tf.Operation, given: Sequence[tf.Tensor],
              places: Sequence[Places]) -> Made:
    rank = given[0].shape.rank
    if not places[0] or rank is None:
        return _LOST
    gone = operation.get_attr("axis") % rank
    return Made(_found({axis - (gone < axis) for axis in places[0] - {gone}}))


def _joined(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    return _same(operation, given, places[:-1])


def _split(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    return _same(operation, given, places[1:] if operation.type == "Split" else places[:1])


def _sliced(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    place, rank, count = places[0], given[0].shape.rank, given[1].shape[0]
    if not place or rank is None or count is None:
        return Made() if place is None else _LOST
    left_out, new, shrunk = (operation.get_attr(f"{name}_mask")
                             for name in ("ellipsis", "new_axis", "shrink_axis"))
    came: list[int | None] = []  # of each dimension that is left, where it was
    axis = 0
    for entry in range(count):
        if left_out >> entry & 1:
            named = sum(not new >> other & 1 for other in range(entry + 1, count))
            came += range(axis, rank - named)
            axis = rank - named
        elif new >> entry & 1:
            came.append(None)
        else:
            if not shrunk >> entry & 1:
                came.append(axis)
            axis += 1
    came += range(axis, rank)
    return Made(_found({after for after, before in enumerate(came) if before in place}))


def _reshaped(operation: tf.Operation, given: Sequence[tf.Tensor],
              places: Sequence[Places], alone: bool) -> Made:
    if not places[0] or given[0].shape.rank is None or operation.outputs[0].shape.rank is None:
        return Made() if places[0] is None else _LOST
    before, after = given[0].shape.as_list(), operation.outputs[0].shape.as_list()
    first, last = min(places[0]), max(places[0])
    if before[first] == 1:  # a single row: any dimension of 1 may be its
        return Made(places[0]) if before[:last + 1] == after[:last + 1] else _LOST
    begin = _behind(before[:first], after)
    if begin is None:
        return _LOST
    end = _of_size(after, begin + 1, before[last + 1:])
    if end is None or not alone:  # elements go on in their order: the first has some of each
        return Made(frozenset({begin}), alone=False)
    return Made(frozenset({begin, *(axis for axis in range(begin, end) if after[axis] != 1)}))


def _behind(leading: Sequence[int | None], sizes: Sequence[int | None]) -> int | None:
    """Behind which of ``sizes`` those that are ``leading`` end; None where they are others."""
    wanted, place = [size for size in leading if size != 1], 0
    while place < len(sizes) and (wanted or sizes[place] == 1):
        if sizes[place] != 1 and (sizes[place] is None or sizes[place] != wanted.pop(0)):
            return None
        place += 1
    return None if wanted or place == len(sizes) else place


def _of_size(sizes: Sequence[int | None], least: int, trailing: Sequence[int | None]
             ) -> int | None:
    """Where those last ``sizes`` begin that hold as much as ``trailing`` ones; None if not known.
    """
    if None in trailing:
        return None
    wanted, held, place = math.prod(size or 0 for size in trailing), 1, len(sizes)
    while held != wanted:
        place -= 1
        size = sizes[place]
        if place < least or size is None:
            return None
        held *= size
    return place


def _gathered(operation: tf.Operation, given: Sequence[tf.Tensor],
              places: Sequence[Places]) -> Made:
    of_table, of_indices = places[:2]
    rank, axis = given[1].shape.rank, 0
    if operation.type == "GatherV2":
        known = tf.get_static_value(given[2])
        if known is None or given[0].shape.rank is None:
            return _LOST
        axis = int(known.reshape([-1])[0]) % given[0].shape.rank
    if rank is None or of_table == SOMEWHERE or of_indices == SOMEWHERE:
        return _LOST
    shared = operation.get_attr("batch_dims")
    axes = {place if place < shared else axis + place - shared for place in of_indices or ()}
    for place in of_table or ():
        if place == axis:
            axes.update(range(axis, axis + rank - shared))
        else:
            axes.add(place if place < axis else place + rank - shared - 1)
    return Made(_found(axes))


def _taken(operation: tf.Operation, given: Sequence[tf.Tensor], places: Sequence[Places]) -> Made:
    """Of what is taken from a table by indices that have the last dimension."""
    del operation, given
    return _LOST if places[0] is not None else Made(places[1])


def _multiplied(operation: tf.Operation, given: Sequence[tf.Tensor],
                places: Sequence[Places]) -> Made:
    rank = operation.outputs[0].shape.rank
    if rank is None or SOMEWHERE in places or None in [value.shape.rank for value in given]:
        return _LOST
    names = (("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y"))
    axes, summed = set[int](), 0
    for value, place, name, own in zip(given, places, names, (2, 1)):
        if place is None:
            continue
        kept = 3 - own if operation.get_attr(name) else own
        for axis in place:
            from_end = value.shape.rank - axis
            if from_end > 2:
                axes.add(rank - from_end)
            elif from_end == kept:
                axes.add(rank - own)
            else:
                summed += 1
    return Made(_found(axes), summed == 2) if axes or summed == 2 else _LOST


def _subscripted(operation: tf.Operation, given: Sequence[tf.Tensor],
                 places: Sequence[Places]) -> Made:
    terms, result = operation.get_attr("equation").decode().replace(" ", "").split("->")
    pairs = list(zip(terms.split(","), given, places))
    if SOMEWHERE in places or None in [value.shape.rank for value in given]:
        return _LOST
    most = max([value.shape.rank - len(term) + 3 for term, value, _ in pairs if "." in term] + [0])
    spread = "".join(chr(ord("A") + 128 + number) for number in range(most))
    written = [term.replace("...", spread[most - (value.shape.rank - len(term) + 3):])
               for term, value, _ in pairs]
    result = result.replace("...", spread)
    found = [{term[axis] for axis in place or ()} for term, (_, _, place) in zip(written, pairs)]
    letters = set[str]().union(*found)
    # What only some have rows along puts those together that it says.
    summed = [letter for letter in letters if letter not in result and all(
        letter in own for own, term in zip(found, written) if letter in term)]
    axes = {result.index(letter) for letter in letters if letter in result}
    return Made(_found(axes), bool(summed)) if axes or summed else _LOST


def _of_matrices(operation: tf.Operation, given: Sequence[tf.Tensor],
                 places: Sequence[Places]) -> Made:
    """Of what works on the last two dimensions."""
    del operation
    rank, own = given[0].shape.rank, places[0]
    if not own or rank is None or max(own) >= rank - 2:
        return _LOST
    return Made(own)


def _one_hot(operation: tf.Operation, given: Sequence[tf.Tensor],
             places: Sequence[Places]) -> Made:
    del given
    return Made(places[0]) if operation.get_attr("axis") == -1 else _LOST


_RULES: dict[str, _Rule] = {
    **dict.fromkeys((
        *by_row.ELEMENTWISE, "BroadcastTo", "FakeQuantWithMinMaxVars", "LeftShift",
        "QuantizeAndDequantizeV2", "QuantizeAndDequantizeV4", "RightShift"), _elementwise),
    **dict.fromkeys((
        "Bitcast", "Cumprod", "Cumsum", "CumulativeLogsumexp", "FFT", "FusedBatchNorm",
        "FusedBatchNormV2", "FusedBatchNormV3", "IFFT", "IRFFT", "MatrixDiag", "MatrixDiagV3",
        "MirrorPad", "Pad", "PadV2", "RFFT", "ReverseV2", "Roll", "Select", "Slice", "Tile"),
        _same),
    **dict.fromkeys((
        "AdjustContrastv2", "AdjustHue", "AdjustSaturation", "AvgPool", "AvgPool3D",
        "BatchToSpaceND", "BiasAdd", "Conv", "Conv2D", "Conv2DBackpropInput", "Conv3D",
        "Conv3DBackpropInputV2", "DepthToSpace", "DepthwiseConv2dNative", "Dilation2D",
        "ExtractImagePatches", "HSVToRGB", "ImageProjectiveTransformV2",
        "ImageProjectiveTransformV3", "LRN", "MaxPool", "MaxPool3D", "RGBToHSV", "ResizeArea",
        "ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor", "ScaleAndTranslate",
        "SoftmaxCrossEntropyWithLogits", "SpaceToBatchND", "SpaceToDepth",
        "SparseSoftmaxCrossEntropyWithLogits"), _first),
    **dict.fromkeys((
        "All", "Any", "ArgMax", "ArgMin", "EuclideanNorm", "Max", "Mean", "Min", "Prod", "Sum"),
        _reduced),
    **dict.fromkeys((
        "Cholesky", "FFT2D", "IFFT2D", "IRFFT2D", "MatrixBandPart", "MatrixInverse", "RFFT2D"),
        _of_matrices),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "MatMul"), _multiplied),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _gathered),
    **dict.fromkeys(("LogSoftmax", "Softmax"), _over_last),
    **dict.fromkeys(("Split", "SplitV"), _split),
    "ConcatV2": _joined, "Einsum": _subscripted, "ExpandDims": _expanded, "GatherNd": _taken,
    "OneHot": _one_hot, "Pack": _packed, "Squeeze": _squeezed,
    "StridedSlice": _sliced, "TopKV2": _chosen, "Transpose": _transposed, "Unpack": _unpacked}
