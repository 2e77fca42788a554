"""On which device of its tower each operation of a replica function is.

Goes in: what a tower has traced since its last sync point.  Comes out: the same operations, each on
the device of its stage.

Layers, and whatever else runs within ``strategy.stage``, have the stage in their name scope, and so
have their gradients, which TensorFlow makes under the scope of what they are gradients of.  What is
left goes where most of its data is; of two stages forwards to the last, backwards to the first.  So
only activations cross from a stage to the next, and their gradients back.

A branch, a loop or a nested ``tf.function`` is one operation here: it runs in one stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import devices as devices_lib, scopes

_READ = "ReadVariableOp"


class Placer:
    """Puts the operations of one replica on the devices of its stages.

    Args:
      graph: the graph that is being traced.
      placement: where the strategy runs.
      replica: whose operations they are.
    """

    def __init__(self, graph: tf.Graph, placement: devices_lib.Placement, replica: int) -> None:
        self._graph = graph
        self._placement = placement
        self._row = placement.row(replica)
        self._stages: dict[str, int] = {}  # by the operation's name

    def place(self, operations: Sequence[tf.Operation]) -> None:
        """Finds the stages of ``operations``, in the order they were made in, and places them."""
        if len(self._row) == 1:
            return
        homes = {inner.name: self._placement.stage_at(outer.device)
                 for outer, inner in self._graph.captures
                 if outer.dtype == tf.resource and _tf.is_eager(outer)}
        for operation in operations:
            self._note(operation, self._find(operation, homes))
        for operation in reversed(operations):  # constants and the like: where they are needed
            if operation.name not in self._stages and self._is_free(operation):
                takers = (taker.name for output in operation.outputs
                          for taker in output.consumers())
                self._note(operation, min(
                    (self._stages[taker] for taker in takers if taker in self._stages),
                    default=None))

    def _find(self, operation: tf.Operation, homes: dict[str, int | None]) -> int | None:
        stage = scopes.stage_in(operation.name)
        if stage is not None:
            return stage
        if operation.type == _READ:
            return homes.get(operation.inputs[0].name)
        if not self._is_free(operation):
            return self._row.index(operation.device) if operation.device in self._row else None
        later = -1 if scopes.GRADIENTS in operation.name else 1
        known = [(_size(tensor), later * at) for tensor in operation.inputs
                 if (at := self._stages.get(tensor.op.name)) is not None]
        return abs(max(known)[1]) if known else None

    def _is_free(self, operation: tf.Operation) -> bool:
        """Whether nobody but the tower itself has said where it is."""
        return operation.device in ("", self._row[0])

    def _note(self, operation: tf.Operation, stage: int | None) -> None:
        if stage is not None:
            self._stages[operation.name] = stage
            if stage and operation.device == self._row[0]:
                _tf.set_device(operation, self._row[stage])


def _size(tensor: tf.Tensor) -> int:
    """The entries of a tensor, one for a size not known."""
    return math.prod(size or 1 for size in tensor.shape) if tensor.shape.rank else 1
