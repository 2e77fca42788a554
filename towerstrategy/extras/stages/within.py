"""``strategy.stage``: which stage layers are of, and the seam at which stages hang.

Goes in: a placement.  Comes out: :class:`Stages`, which ``strategy.extended.stages`` is: what is
made or called within a stage, what a replica has traced put on its stages' devices, and
micro-batches put in order.  Where a tower is one device and runs one micro-batch, nothing happens.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf, contexts
from towerstrategy.extras.stages import order, placing
from towerstrategy.placement import devices as devices_lib, kind, scopes


class Stages(threading.local):
    """The stages, and the micro-batches, of the towers of one strategy.

    Args:
      placement: where the strategy runs.

    Attributes:
      index: the stage of what this thread makes or calls here, or None.
      asked: the same, where the user has said it around what runs here.
    """

    index: int | None = None
    asked: int | None = None

    def __init__(self, placement: devices_lib.Placement) -> None:
        self._placement = placement
        if placement.rows:
            kind.staged = True
            _tf.wrap_gradient_functions(_in_its_stage)

    @contextlib.contextmanager
    def within(self, index: int | None, asked: bool = False) -> Iterator[None]:
        """Within, what is made or called is of that stage, or of none.

        What a tower does there is done on the stage's device, unless it is in a function that the
        tower calls.
        """
        before = self.index, self.asked
        self.index, self.asked = index, index if asked else None
        try:
            with _placed(self._placement, index):
                yield
        finally:
            self.index, self.asked = before

    def placer(self, graph: tf.Graph, replica: int) -> placing.Placer:
        """What puts operations of ``replica`` on the devices of its stages."""
        return placing.Placer(graph, self._placement, replica)

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


def _in_its_stage(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """``gradient``, done in the stage that it is recorded in, with what it recomputes."""
    tower = contexts.current()
    stages = None if tower is None else tower.strategy.extended.stages
    if stages is None or stages.index is None:
        return gradient
    index = stages.index

    @functools.wraps(gradient)
    def in_its_stage(*args: Any, **kwargs: Any) -> Any:
        with stages.within(index, asked=True):
            return gradient(*args, **kwargs)

    return in_its_stage
