"""``strategy.stage``: which stage layers are of, and the seam at which stages hang.

Goes in: a placement.  Comes out: :class:`Stages`, which ``strategy.extended.stages`` is: what is
made or called within a stage, what a replica has traced put on its stages' devices, and
micro-batches put in order.  Where a tower is one device and runs one micro-batch, nothing happens.

Layers, and whatever else runs within ``strategy.stage``, have the stage in their name scope, and so
have their gradients, which TensorFlow makes under the scope of what they are gradients of.  What is
left :mod:`sharding.staging` places; where towers are traced one by one, it goes to the last stage
that it needs something of.  A branch, a loop or a nested ``tf.function`` is one operation there: it
runs in one stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.extras.stages import order
from towerstrategy.placement import devices as devices_lib, kind, scopes


class Stages(threading.local):
    """The stages, and the micro-batches, of the towers of one strategy."""

    index: int | None = None  # the stage of what this thread makes or calls here
    chosen: int | None = None  # the same, where the user has said it around what runs here

    def __init__(self, placement: devices_lib.Placement) -> None:
        self._placement = placement
        if placement.rows:
            kind.staged = True
            _tf.RECORD.wrap(_recorded_in_its_stage)

    @contextlib.contextmanager
    def within(self, index: int | None, chosen: bool = False) -> Iterator[None]:
        """Within, what is made or called is of that stage, or of none.

        What a tower does there is done on the stage's device, unless it is in a function that the
        tower calls.
        """
        before = self.index, self.chosen
        self.index, self.chosen = index, index if chosen else None
        try:
            with _placed(self._placement, index):
                yield
        finally:
            self.index, self.chosen = before

    def placer(self, graph: tf.Graph, replica: int) -> Placer:
        """What puts operations of ``replica``, traced in ``graph``, on its stages' devices."""
        del graph
        return Placer(self._placement.row(replica))

    def put_in_order(self, graph: tf.Graph, replicas: Sequence[Collection[str]],
                     results: Any) -> None:
        """All of a step is in ``graph``: puts its micro-batches in order, see :mod:`order`."""
        order.put(graph, replicas, self._placement, results)


@contextlib.contextmanager
def _placed(placement: devices_lib.Placement, index: int | None) -> Iterator[None]:
    tower = contexts.current()
    if index is None or tower is None or not tower.can_merge \
            or tower.strategy.extended.placement is not placement:
        yield
        return
    if tower.stage_run is not None:
        tower.stage_run.entered.add(index)
    # A traced step with all rows is named alone: the towers, which do it, have a row each.
    alone = isinstance(tower, contexts.OneReplicaContext)
    row = placement.row(0 if alone else tower.index)
    named_alone = alone and not tf.executing_eagerly()
    with contextlib.nullcontext() if named_alone else tf.device(row[index]), \
            tf.name_scope(f"{scopes.STAGE}{index}"):
        yield


def _recorded_in_its_stage(original: Callable[..., Any], op_type: Any, output_tensors: Any,
                           input_tensors: Any, backward_function: Any,
                           forward_function: Any = None) -> Any:
    """Records a gradient, which is then done in the stage of now, with what it recomputes."""
    tower = contexts.current()
    stages = None if tower is None else tower.strategy.extended.stages
    if stages is not None and stages.index is not None:
        backward_function = stages.within(stages.index, chosen=True)(backward_function)
    return original(op_type, output_tensors, input_tensors, backward_function, forward_function)


class Placer:
    """Puts what one replica does, whose trace is its own, on the devices of its stages."""

    def __init__(self, row: Sequence[str]) -> None:
        self._row = row
        self._stages: dict[str, int] = {}  # by the operation's name

    def place(self, operations: Sequence[tf.Operation]) -> None:
        """Places ``operations``, in the order they were made in."""
        if not self._row[1:]:
            return
        for operation in operations:
            stage = scopes.stage_in(operation.name)
            if stage is None:
                stage = max((self._stages.get(tensor.op.name, 0) for tensor in operation.inputs),
                            default=0)
            self._stages[operation.name] = stage
            if stage and operation.device == self._row[0]:  # nobody but the tower has said where
                _tf.set_device(operation, self._row[stage])
