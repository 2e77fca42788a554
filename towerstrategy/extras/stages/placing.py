"""On which device of its tower each operation of a replica function is.

Goes in: what a tower has traced since it last met the others.  Comes out: the same operations, each
on the device of its stage.

Layers, and whatever else runs within ``strategy.stage``, have the stage in their name scope, and so
have their gradients, which TensorFlow makes under the scope of what they are gradients of.  What is
left goes where the data is: forwards to the last of its inputs' stages, backwards to the first.  So
only activations cross from a stage to the next, and their gradients back.

A branch, a loop or a nested ``tf.function`` is one operation here: it runs in one stage.
"""

from __future__ import annotations

import collections
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
        self._backward: set[str] = set()
        self._forward: dict[str, set[int]] = collections.defaultdict(set)  # by name scope

    def place(self, operations: Sequence[tf.Operation]) -> None:
        """Finds the stages of ``operations``, in the order they were made in, and places them."""
        if len(self._row) == 1:
            return
        homes = {inner.name: self._placement.stage_at(outer.device)
                 for outer, inner in self._graph.captures
                 if outer.dtype == tf.resource and _tf.is_eager(outer)}
        unknown: list[tf.Operation] = []
        for operation in operations:
            stage = self._find(operation, homes)
            if stage is None:
                unknown.append(operation)
            else:
                self._note(operation, stage)
        for operation in reversed(unknown):  # constants and the like: where they are first needed
            takers = [self._stages[taker.name] for output in operation.outputs
                      for taker in output.consumers() if taker.name in self._stages]
            if takers and self._is_free(operation):
                self._note(operation, min(takers))

    def _find(self, operation: tf.Operation, homes: dict[str, int | None]) -> int | None:
        name, inputs = operation.name, [tensor.op.name for tensor in operation.inputs]
        if scopes.GRADIENTS in name or any(other in self._backward for other in inputs):
            self._backward.add(name)
        stage = scopes.stage_in(name)
        if stage is not None:
            return stage
        if operation.type == _READ:
            return homes.get(operation.inputs[0].name)
        if not self._is_free(operation):
            return self._row.index(operation.device) if operation.device in self._row else None
        known = [self._stages[other] for other in inputs if other in self._stages]
        if name not in self._backward:
            return max(known, default=None)
        of_forward = self._of_forward(name) if scopes.GRADIENTS in name else None
        return min(known, default=None) if of_forward is None else of_forward

    def _of_forward(self, name: str) -> int | None:
        """The stage of what ``name`` is a gradient of, where its scope is in one stage."""
        # Its own name may be another's.
        scope = name.rpartition(scopes.GRADIENTS)[2].rpartition("/")[0]
        while scope and not scopes.TOWER.fullmatch(scope.rpartition("/")[2]):
            if scope in self._forward:
                stages = self._forward[scope]
                return next(iter(stages)) if len(stages) == 1 else None
            scope = scope.rpartition("/")[0]
        return None

    def _is_free(self, operation: tf.Operation) -> bool:
        """Whether nobody but the tower itself has said where it is."""
        return operation.device in ("", self._row[0])

    def _note(self, operation: tf.Operation, stage: int) -> None:
        self._stages[operation.name] = stage
        if operation.name not in self._backward:
            self._forward[operation.name].add(stage)
            self._forward[operation.name.rpartition("/")[0]].add(stage)
        if operation.device == self._row[0] and stage:
            _tf.set_device(operation, self._row[stage])
