"""The stages of a tower: on which of its devices each operation is.

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
import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import devices as devices_lib, kind
from towerstrategy.towers import contexts, one_replica

SCOPE = "tower_stage_"
_SCOPE = re.compile(rf"\b{SCOPE}(\d+)(?:_\d+)?/")
GRADIENTS = "gradient_tape/"
_READ = "ReadVariableOp"
# From the scope on that is the same in a traced graph and in a profile of it.
_OWN = re.compile(r"(?:^|/)((?:tower_(\d+)_[A-Z]+_\d+|merge)/.+)")


class Stages(threading.local):
    """In which stage layers are made or called, in one thread.

    Attributes:
      index: the stage, or None.
      asked: the same, where the user has said it around what runs here.
    """

    index: int | None = None
    asked: int | None = None

    def __init__(self, placement: devices_lib.Placement) -> None:
        self._placement = placement
        kind.staged = kind.staged or bool(placement.rows)

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


@contextlib.contextmanager
def _placed(placement: devices_lib.Placement, index: int | None) -> Iterator[None]:
    tower = one_replica.current()
    if index is None or tower is None or not one_replica.has_stages_here(tower) \
            or tower.strategy.extended.placement is not placement:
        yield
        return
    if tower.stage_run is not None:
        tower.stage_run.entered.add(index)
    # A traced step with all rows is named alone: the towers, which do it, have a row each.
    alone = isinstance(tower, contexts.OneReplicaContext)
    row = placement.row(0) if alone else tower.row
    named_alone = alone and not tf.executing_eagerly()
    with contextlib.nullcontext() if named_alone else tf.device(row[index]), \
            _named(tower, row, index):
        yield


def _named(tower: contexts.TowerContext | contexts.OneReplicaContext, row: Sequence[str],
           index: int) -> contextlib.AbstractContextManager[Any]:
    """The stage in the names of what is done within; in a profile, where that is done eagerly."""
    scope = f"{SCOPE}{index}"
    if not tf.executing_eagerly():
        return tf.name_scope(scope)
    number = 0
    if isinstance(tower, contexts.TowerContext):
        number = tower.part_of(range(tower.count))  # not asked for, which would end a single trace
    return tf.profiler.experimental.Trace(f"{contexts.scope_name(number, row[0])}/{scope}")


def install() -> None:
    """Wraps how gradients that are functions are recorded, once a strategy has stages."""
    if kind.staged:
        _tf.wrap_gradient_functions(_in_its_stage)


def _in_its_stage(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """``gradient``, done in the stage that it is recorded in, with what it recomputes."""
    tower = one_replica.current()
    stages = None if tower is None else tower.strategy.extended.stages
    if stages is None or stages.index is None:
        return gradient
    index = stages.index

    @functools.wraps(gradient)
    def in_its_stage(*args: Any, **kwargs: Any) -> Any:
        with stages.within(index, asked=True):
            return gradient(*args, **kwargs)

    return in_its_stage


def scoped(name: str) -> int | None:
    """The stage in an operation's name scope; of several, the inner one's."""
    found = _SCOPE.findall(name)
    return int(found[-1]) if found else None


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

    def stage_of(self, operation: tf.Operation) -> int:
        """The stage of an operation that has been placed; 0 where it has none."""
        return self._stages.get(operation.name, 0)

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
        if GRADIENTS in name or any(other in self._backward for other in inputs):
            self._backward.add(name)
        stage = scoped(name)
        if stage is not None:
            return stage
        if operation.type == _READ:
            return homes.get(operation.inputs[0].name)
        if not self._is_free(operation):
            return self._row.index(operation.device) if operation.device in self._row else None
        known = [self._stages[other] for other in inputs if other in self._stages]
        if name not in self._backward:
            return max(known, default=None)
        of_forward = self._of_forward(name) if GRADIENTS in name else None
        return min(known, default=None) if of_forward is None else of_forward

    def _of_forward(self, name: str) -> int | None:
        """The stage of what ``name`` is a gradient of, where its scope is in one stage."""
        scope = name.rpartition(GRADIENTS)[2].rpartition("/")[0]  # its own name may be another's
        while scope and not contexts.TOWER_SCOPE.fullmatch(scope.rpartition("/")[2]):
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


class Places:
    """In which stage of which tower an operation ran, by the name that a profile has of it.

    Most names tell it by their scope.  Where others are is noted when a step has been traced.

    Args:
      placement: where the strategy runs.

    Attributes:
      kinds: by tower and stage, the kind of the device; empty where a tower is one device.
    """

    def __init__(self, placement: devices_lib.Placement) -> None:
        self._micro_batches = placement.micro_batches
        self.kinds = tuple(tuple(str(tf.DeviceSpec.from_string(device).device_type)
                                 for device in row) for row in placement.rows)
        self._at = {device: (tower, stage) for tower, row in enumerate(placement.rows)
                    for stage, device in enumerate(row)}
        self._noted: dict[str, tuple[int, int]] = {}

    def note(self, graph: tf.Graph) -> None:
        """A step has been traced in ``graph``, and each operation has its device."""
        for operation in graph.get_operations() if self._at else ():
            own = _OWN.search(operation.name)
            if own is not None and operation.device in self._at and _told(own) is None:
                self._noted[own[1]] = self._at[operation.device]

    def of(self, name: str) -> tuple[int, int] | None:
        """The tower and the stage of the operation ``name``; None where they are not known."""
        own = _OWN.search(name)
        if own is None:
            return None
        stage = _told(own)
        if stage is not None:
            return int(own[2]) // self._micro_batches, stage
        name = own[1]
        while name:  # of what is inside of a branch or a loop that is known itself
            if name in self._noted:
                return self._noted[name]
            name = name.rpartition("/")[0]
        return None


def _told(own: re.Match[str]) -> int | None:
    """The stage that the name of a tower's operation tells."""
    return None if own[2] is None else scoped(own[1])
