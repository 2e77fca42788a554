"""``strategy.stage``: the stage of layers and operations; the seam at which the core meets stages.

Goes in: a placement.  Comes out: :class:`Stages`, the object ``strategy.extended.stages``.  It
knows the current stage, puts a replica's operations on the devices of its stages, and puts
micro-batches in order.  If a tower is one device with one micro-batch, it does nothing.

Operations of layers, and others within ``strategy.stage``, have the stage in their name scope.  So
have their gradients, because TensorFlow makes a gradient under the scope of the forward operation.
:mod:`sharding.staging` places all other operations.  If towers are traced one by one, an operation
without a stage goes to the last stage of its inputs.  A branch, a loop or a nested ``tf.function``
is one operation, and runs in one stage.
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
    """The stages and micro-batches of the towers of one strategy."""

    index: int | None = None  # the current stage in this thread
    chosen: int | None = None  # the same if the user chose it, by ``strategy.stage`` or a device
    run: Any = None  # of the model that a tower is calling, see _keras/stages.py

    def __init__(self, placement: devices_lib.Placement) -> None:
        self._placement = placement
        if placement.rows:
            kind.staged = True
            _tf.RECORD.wrap(_record_in_stage)

    @contextlib.contextmanager
    def within(self, index: int | None, chosen: bool = False) -> Iterator[None]:
        """A context whose layers and operations belong to stage ``index``, or to none.

        A tower's operations in it run on the stage's device, except those inside of a function that
        the tower calls.
        """
        with _tf.patched(self, index=index, chosen=index if chosen else None), \
                _placed(self._placement, index):
            yield

    def place(self, replica: int, operations: Sequence[tf.Operation],
              known: dict[str, int]) -> None:
        """Puts operations of one replica, traced by itself, on the devices of its stages.

        They are in order of creation; ``known`` has the stages of those before, and gets theirs.
        """
        row = self._placement.row(replica)
        for operation in operations if row[1:] else ():
            stage = scopes.stage_in(operation.name)
            if stage is None:
                stage = max((known.get(tensor.op.name, 0) for tensor in operation.inputs),
                            default=0)
            known[operation.name] = stage
            if stage and operation.device == row[0]:  # the user has set no other device
                _tf.set_device(operation, row[stage])

    def put_in_order(self, graph: tf.Graph, replicas: Sequence[Collection[str]],
                     results: Any) -> None:
        """Puts micro-batches in order, see :mod:`order`; ``graph`` has all of the step."""
        order.put(graph, replicas, self._placement, results)


@contextlib.contextmanager
def _placed(placement: devices_lib.Placement, index: int | None) -> Iterator[None]:
    """A context with the name scope, and in a tower with the device, of stage ``index``."""
    tower = contexts.current()
    if index is None or tower is None or not tower.can_merge \
            or tower.strategy.extended.placement is not placement:
        yield
        return
    run = tower.strategy.extended.stages.run
    if run is not None:
        run.entered.add(index)
    # A traced step with all rows gets no devices, only names: each tower has its own devices.
    has_all_rows = isinstance(tower, contexts.OneReplicaContext)
    row = placement.row(0 if has_all_rows else tower.index)
    only_named = has_all_rows and not tf.executing_eagerly()
    with contextlib.nullcontext() if only_named else tf.device(row[index]), \
            tf.name_scope(f"{scopes.STAGE}{index}"):
        yield


def _record_in_stage(original: Callable[..., Any], op_type: Any, output_tensors: Any,
                           input_tensors: Any, backward_function: Any,
                           forward_function: Any = None) -> Any:
    """Records a gradient function so that it, and what it recomputes, runs in the current stage."""
    tower = contexts.current()
    stages = None if tower is None else tower.strategy.extended.stages
    if stages is not None and stages.index is not None:
        backward_function = stages.within(stages.index, chosen=True)(backward_function)
    return original(op_type, output_tensors, input_tensors, backward_function, forward_function)
