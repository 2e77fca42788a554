"""Products with a weight, made once for the rows of all towers.

Goes in: the operations of tower 0 that are about to be copied for the others.  Comes out: those of
them that are left to copy; of each ``x @ weight`` and ``dy @ transpose(weight)`` one product of all
towers' rows, of which each tower has its own.

A product of few rows takes as long as the weight takes to pass through the cores, and R towers send
it through the same ones R times.  So this is for towers and merge devices that share their cores:
those on CPU (:attr:`devices.Placement.on_cpu`), as in :mod:`merge.factors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.towers import tables

# Where it was measured to be faster (BUILD.md, "Speed"); unknown rows count as few.
LEAST_WEIGHT = 2**18
MOST_ROWS = 256


class Missing(NamedTuple):
    """What a product is to be given when the other towers' operations are there.

    Attributes:
      operation: one that has tower 0's rows in the place of each tower's.
      rows: tower 0's.
      towers: how many there are.
    """

    operation: tf.Operation
    rows: tf.Tensor
    towers: int


def are_free(operations: Sequence[tf.Operation], table: tables.Table) -> bool:
    """Whether TensorFlow orders none of the ``operations`` of a tower behind another tower's.

    One that waits for what comes later in tower 0 would wait for itself, by a product of both.
    """
    for operation in operations:
        if operation.op_def.is_stateful:
            _, written = _tf.touched_resources(operation)
            if any(name not in table for name in written):
                return False
    return True


def join(graph: tf.Graph, stretch: Sequence[tf.Operation], table: tables.Table,
         towers: int) -> tuple[list[tf.Operation], list[Missing]]:
    """Makes the products that all towers share, and hands them to those who used tower 0's.

    Args:
      graph: the graph of ``stretch``.
      stretch: operations of tower 0, without the reads that serve all towers.
      table: what the towers have; each has its rows of the products there.
      towers: how many there are.

    Returns:
      What of ``stretch`` is left to copy, and what to give to :func:`complete` behind that.
    """
    copied = {operation.name for operation in stretch}
    found = [operation for operation in stretch if _pays(operation, copied, table)]
    missing: list[Missing] = []
    for operation in found:
        missing += _joined(graph, operation, table, towers)
    names = {operation.name for operation in found}
    return [operation for operation in stretch if operation.name not in names], missing


def complete(missing: Sequence[Missing], table: tables.Table) -> None:
    """Gives each product the rows of all towers, which ``table`` has now."""
    for operation, rows, towers in missing:
        for tower in range(1, towers):
            _tf.set_input(operation, tower, table.tensor(rows, tower))


def _pays(operation: tf.Operation, copied: set[str], table: tables.Table) -> bool:
    if operation.type != "MatMul" or operation.get_attr("transpose_a") or operation.control_inputs:
        return False
    rows, weight = operation.inputs
    if weight.op.type != "ReadVariableOp" or weight.op.name in copied or weight.name in table:
        return False
    count = rows.shape[0] if rows.shape.rank else None
    return ((rows.op.name in copied or rows.name in table)
            and weight.shape.is_fully_defined() and weight.shape.num_elements() >= LEAST_WEIGHT
            and (count is None or count <= MOST_ROWS))


def _joined(graph: tf.Graph, operation: tf.Operation, table: tables.Table,
            towers: int) -> list[Missing]:
    rows, weight = operation.inputs
    own = operation.outputs[0]
    with graph.as_default(), tf.control_dependencies(None), _tf.not_recorded(), \
            tf.device(None), tf.device(operation.device), tf.name_scope("merge/"):
        behind = tf.concat([rows] * towers, 0)
        missing = [Missing(behind.op, rows, towers)]
        sizes: int | tf.Tensor = towers
        if rows.shape[0] is None:
            shapes = tf.shape_n([rows] * towers)
            missing.append(Missing(shapes[0].op, rows, towers))
            sizes = tf.stack(shapes)[:, 0]
        if operation.get_attr("transpose_b"):  # in the form that copies no weight, see operands
            product = tf.transpose(tf.matmul(weight, behind, transpose_b=True))
        else:
            product = tf.matmul(behind, weight)
        parts = tf.split(product, sizes, num=towers)
    for part in parts:
        part.set_shape(own.shape)
    table.put(parts[0], parts[1:])
    table.put(own, parts[1:])  # where tower 0 hands on what the product was
    _tf.use_instead(own, parts[0])
    return missing
