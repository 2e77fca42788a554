"""A tower's number, its terms times the tower's share where they are no parts.

Goes in: a number of one tower, and what is known of its terms (:mod:`provenance`).  Comes out: its
part of the whole batch's number.
"""

from __future__ import annotations

import tensorflow as tf

from towerstrategy.losses import provenance, row_axes

PARTS = frozenset({provenance.Kind.PART})
# Terms of these kinds do not simply count by the tower's share.
LOOKED_INTO = frozenset({provenance.Kind.PART, provenance.Kind.COUNTED})
_LEFT_WHOLE = provenance.CALLS | provenance.BRANCHES | {"Placeholder"}


def scaled(walk: provenance.Walk, value: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    """``value`` with all terms but parts times ``share``, a float64 scalar.

    What divides by the number of the tower's rows divides by that of all rows on one device.
    """
    kinds = walk.kinds(value)
    if kinds == PARTS:
        return value
    operation = value.op
    inputs = list(operation.inputs)
    if kinds.isdisjoint(LOOKED_INTO) or operation.type in _LEFT_WHOLE:
        return value * tf.cast(share, value.dtype)
    if operation.type in provenance.ADDED:
        return row_axes.added(operation, [scaled(walk, part, share) for part in inputs])
    if operation.type == "Mul":
        one, other = inputs
        if walk.is_steady(other):
            return scaled(walk, one, share) * other
        return one * scaled(walk, other, share)
    first = scaled(walk, inputs[0], share)
    if operation.type in provenance.DIVIDED:
        divide = tf.math.divide_no_nan if operation.type == "DivNoNan" else tf.divide
        divided = divide(first, inputs[1])
        by_count = walk.divides_by_count(operation)
        return divided * tf.cast(share, value.dtype) if by_count else divided
    if operation.type in row_axes.REDUCED:
        return row_axes.REDUCED[operation.type](first, inputs[1],
                                                keepdims=operation.get_attr("keep_dims"))
    if operation.type == "Neg":
        return -first
    return tf.reshape(tf.cast(first, value.dtype), tf.shape(value))
