"""Whether a tensor has a value for each row of a batch, made of that row alone.

Goes in: a tensor of the graph that is being traced, and what its function was given.  Comes out:
whether an operation in between may have put several rows together: a mean over rows, a selection
of them, a product of rows with rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import tensorflow as tf

from towerstrategy.losses import provenance

Moves = Callable[[tf.Operation, list[bool]], bool]


def is_by_row(walk: provenance.Walk, rows: tf.Tensor, given: Container[int]) -> bool:
    """Whether each value of ``rows`` is made of one row of what was given.

    Args:
      walk: looks at the graph.
      rows: a tensor.
      given: the ids of the tensors behind which not to look.
    """
    return not any(_puts_together(walk, each.op) for each in _made_of(rows, given))


def _puts_together(walk: provenance.Walk, operation: tf.Operation) -> bool:
    moves = _MOVES.get(operation.type)
    if moves is None:
        return False
    steady = [walk.is_steady(value) or walk.is_size(value) for value in operation.inputs]
    return not all(steady) and moves(operation, steady)


def _made_of(value: tf.Tensor, given: Container[int]) -> Iterator[tf.Tensor]:
    """``value`` and what it was made of, up to what was given and to sizes."""
    waiting, seen = [value], set[int]()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen or id(tensor) in given:
            continue
        seen.add(id(tensor))
        yield tensor
        if tensor.op.type not in provenance.SIZES:
            waiting.extend(tensor.op.inputs)


def _always(operation: tf.Operation, steady: list[bool]) -> bool:
    del operation, steady
    return True


def _along(place: int) -> Moves:
    """Whether the axes that input ``place`` names may have the rows' among them."""
    def is_along(operation: tf.Operation, steady: list[bool]) -> bool:
        del steady
        shapes = (operation.inputs[0].shape, operation.outputs[0].shape)
        axes = tf.get_static_value(operation.inputs[place])
        if axes is None or None in (shapes[0].rank, shapes[1].rank):
            return True
        rank = max(shape.rank for shape in shapes)
        return 0 in [axis % max(rank, 1) for axis in axes.reshape([-1])]

    return is_along


def _sliced(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether a slice takes some of the rows, or puts a dimension before them."""
    del steady
    masks = {name: operation.get_attr(f"{name}_mask") & 1
             for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    strides = tf.get_static_value(operation.inputs[3])
    whole = masks["begin"] and masks["end"] and strides is not None and strides[0] == 1
    return bool(not masks["ellipsis"] and (masks["new_axis"] or masks["shrink_axis"] or not whole))


def _transposed(operation: tf.Operation, steady: list[bool]) -> bool:
    del steady
    order = tf.get_static_value(operation.inputs[1])
    return order is None or order.size > 0 and order[0] != 0


def _multiplied(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether a product of matrices is not one of rows with a matrix of weights."""
    return not steady[1] or operation.get_attr("transpose_a")


def _subscripted(operation: tf.Operation, steady: list[bool]) -> bool:
    """Whether terms with rows, or the result, do not all begin with the rows' subscript."""
    terms = operation.get_attr("equation").decode().replace("->", ",").split(",")
    return len({term[:1] for term, is_steady in zip(terms, [*steady, False])
                if not is_steady}) > 1


def _of_vector(operation: tf.Operation, steady: list[bool]) -> bool:
    del steady
    return operation.inputs[0].shape.rank == 1


# How to tell whether an operation may put several rows into one value; others never do.
_MOVES: dict[str, Moves] = {
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin",
                     "Cumsum", "Cumprod", "ReverseV2", "ExpandDims"), _along(1)),
    **dict.fromkeys(("Where", "Unique", "UniqueV2", "DynamicPartition", "SegmentSum",
                     "SegmentMean", "UnsortedSegmentSum", "Roll", "L2Loss"), _always),
    **dict.fromkeys(("TopKV2", "Softmax", "LogSoftmax"), _of_vector),
    "StridedSlice": _sliced, "Transpose": _transposed, "Einsum": _subscripted,
    "MatMul": _multiplied}
