"""Products with a transposed weight, written so that the weight is not copied.

Goes in: the operations of tower 0 that are about to be copied for the others.  Comes out: the same,
some ``dy @ transpose(weight)`` put as ``transpose(weight @ transpose(dy))``.

TensorFlow's CPU kernel copies a transposed right operand into another layout before it multiplies,
which for a sub-batch's few rows costs more than the product: 29 ms where the other form takes 6 (16
rows, a 3072 x 3072 weight).  A single device pays that once a step, R towers R times.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from towerstrategy import _tensorflow as _tf

# Where the other form was measured to be faster (BUILD.md, "Speed"); unknown rows count as enough.
LEAST_WEIGHT = 2**18
ROWS = range(16, 257)


def swap(graph: tf.Graph, operations: Sequence[tf.Operation]) -> None:
    """Makes the other form of each such product and hands it to those who used the first."""
    for operation in operations:
        if not _pays(operation):
            continue
        gradient, weight = operation.inputs
        with graph.as_default(), tf.control_dependencies(None), _tf.not_recorded(), \
                tf.device(operation.device), tf.name_scope(f"{operation.name}_swapped/"):
            product = tf.transpose(tf.matmul(weight, gradient, transpose_b=True))
        _tf.use_instead(operation.outputs[0], product)


def _pays(operation: tf.Operation) -> bool:
    if operation.type != "MatMul" or operation.get_attr("transpose_a") \
            or not operation.get_attr("transpose_b"):
        return False
    gradient, weight = operation.inputs
    rows = gradient.shape[0] if gradient.shape.rank else None
    return (weight.shape.is_fully_defined() and weight.shape.num_elements() >= LEAST_WEIGHT
            and weight.op.type == "ReadVariableOp" and (rows is None or rows in ROWS)
            and tf.DeviceSpec.from_string(operation.device).device_type == "CPU")
