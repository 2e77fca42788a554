"""Runs the micro-batches of a device one after another, by control dependencies.

Goes in: a traced graph, and the replica (here: the micro-batch of a tower) of each operation.
Comes out: control dependencies; a micro-batch starts when the one before it on its device ends.

TensorFlow runs an operation as soon as it has its inputs.  So all micro-batches of a device would
run side by side, and hold their activations at the same time.  With the control dependencies, the
first operations of a micro-batch, which need no others of it, wait for the last ones of the
micro-batch before, mostly gradients.  So a device holds the activations of one micro-batch.

If the replicas need a result of all replicas (a mean over all rows), no micro-batch can end before
all have reached this sync point.  Then the work is done in *rounds*: round 0 needs no sync point's
result, round 1 needs a result of round 0, and so on; micro-batches run one after another in each
round.  Two kinds of sync points make no round: those whose result no replica reads, such as the
update of a moving mean; and those that need only inputs of the step, such as the number of time
steps that a mask leaves in all rows.  What a replica computes for the latter is not put in order.

If a tower has stages, each stage does this on its own, with forward and backward passes in turn
(1F1B; Narayanan et al. 2021, docs/one_large_model.md).  Stage s of P starts a micro-batch when it
has finished the forward pass of the micro-batch before, and the backward pass of the one P - s
before.  It starts a backward pass when it has finished as many forward passes as it may hold.
"""

from __future__ import annotations

import collections
import graphlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import devices as devices_lib, scopes


class Leg(NamedTuple):
    """A part of a replica's work in a round: the forward or backward pass through a stage."""

    round: int
    replica: int
    stage: int = 0
    backward: bool = False


def put(graph: tf.Graph, replicas: Sequence[Collection[str]], placement: devices_lib.Placement,
        results: Any) -> None:
    """Adds the control dependencies to a graph with all replicas.

    ``replicas`` has the names of each replica's operations, ``results`` is a nest of their results.
    """
    if placement.micro_batches == 1:
        return
    owners = {name: replica for replica, names in enumerate(replicas) for name in names}
    traced = _Traced(graph)
    for name in _synced_inputs(traced, owners):
        del owners[name]
    legs = _legs(traced, owners, placement)
    first_ops, last_ops = _ends_of_legs(traced, legs, traced.live(results))
    ends: dict[Leg, tf.Operation] = {}
    for leg, earlier_legs in _earlier_legs(traced, first_ops, last_ops, placement).items():
        for earlier in earlier_legs:
            if earlier not in ends:
                with graph.as_default(), tf.control_dependencies(None), tf.device(None), \
                        tf.device(placement.row(earlier.replica)[earlier.stage]):
                    ends[earlier] = tf.no_op("end_of_micro_batch")
                for operation in last_ops[earlier]:
                    _tf.add_control_input(ends[earlier], operation)
            for operation in first_ops[leg]:
                _tf.add_control_input(operation, ends[earlier])


def _earlier_legs(traced: _Traced, first_ops: Mapping[Leg, Sequence[tf.Operation]],
                  last_ops: Mapping[Leg, Sequence[tf.Operation]],
                  placement: devices_lib.Placement) -> dict[Leg, list[Leg]]:
    """For each leg, the legs that have to end before it starts."""
    earlier_legs = {leg: [earlier for earlier in _earlier_in_turns(leg, placement)
                          if earlier in last_ops] for leg in first_ops}
    if placement.stages == 1 or _is_acyclic(traced, first_ops, last_ops, earlier_legs):
        return earlier_legs
    return {leg: earlier for leg, earlier in earlier_legs.items() if not leg.backward}


def _earlier_in_turns(leg: Leg, placement: devices_lib.Placement) -> Iterator[Leg]:
    """The legs before a leg, if forward and backward legs of a stage take turns."""
    micro_batch = leg.replica % placement.micro_batches
    last = leg.replica - micro_batch + placement.micro_batches - 1
    held = placement.stages - leg.stage  # the micro-batches that the stage may hold
    if micro_batch:
        yield leg._replace(replica=leg.replica - 1)
    if leg.backward:
        yield leg._replace(replica=min(leg.replica + held - 1, last), backward=False)
    elif placement.stages > 1 and micro_batch >= held:
        # Without a backward pass, a micro-batch is held until it has passed the last stage.
        at_last_stage = Leg(leg.round, leg.replica - held, placement.stages - 1)
        yield from (at_last_stage, at_last_stage._replace(stage=leg.stage, backward=True))


def _is_acyclic(traced: _Traced, first_ops: Mapping[Leg, Sequence[tf.Operation]],
                last_ops: Mapping[Leg, Sequence[tf.Operation]],
                earlier_legs: Mapping[Leg, Sequence[Leg]]) -> bool:
    """Whether this order has no cycle: a forward leg may need an earlier backward leg's result."""
    waits: dict[Any, Collection[Any]] = dict(traced.waits)
    for leg, earlier in earlier_legs.items():
        waits[leg] = {operation.name for other in earlier for operation in last_ops[other]}
        for operation in first_ops[leg]:
            waits[operation.name] = {*traced.waits[operation.name], leg}
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError:
        return False
    return True


class _Traced:
    """The operations of a graph, and the operations that each waits for.

    After the trace, TensorFlow orders the reads and writes of each resource as they were made;
    :attr:`waits` includes this order already.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.operations: dict[str, tf.Operation] = {
            operation.name: operation for operation in graph.get_operations()}
        self.waits: dict[str, set[str]] = {
            name: {*(tensor.op.name for tensor in operation.inputs),
                   *(control.name for control in operation.control_inputs)}
            for name, operation in self.operations.items()}
        last_write: dict[str, str] = {}
        reads_since: dict[str, list[str]] = collections.defaultdict(list)
        self.touched = {name: _tf.touched_resources(operation)  # what each reads, and writes
                        for name, operation in self.operations.items()}
        for name, (reads, writes) in self.touched.items():
            for resource in reads | writes:
                if resource in last_write:
                    self.waits[name].add(last_write[resource])
            for resource in reads - writes:
                reads_since[resource].append(name)
            for resource in writes:
                self.waits[name].update(reads_since.pop(resource, ()))
                last_write[resource] = name
        for name, waits in self.waits.items():
            waits.discard(name)

    def in_order(self) -> Iterable[str]:
        """The names of the operations in topological order."""
        return graphlib.TopologicalSorter(self.waits).static_order()

    def with_ancestors(self, names: Iterable[str]) -> set[str]:
        """These names, and the names of all operations that these operations need."""
        left, found = list(names), set[str]()
        while left:
            name = left.pop()
            if name not in found and name in self.operations:
                found.add(name)
                left += self.waits[name]
        return found

    def live(self, results: Any) -> set[str]:
        """The names of the operations that effects or results need."""
        return self.with_ancestors([
            *(name for name, operation in self.operations.items()
              if operation.op_def.is_stateful),
            *(leaf.op.name for leaf in tf.nest.flatten(results, expand_composites=True)
              if tf.is_symbolic_tensor(leaf))])


def _synced_inputs(traced: _Traced, owners: Mapping[str, int]) -> set[str]:
    """The replicas' operations before sync points that need only the inputs of the step."""
    inputs: set[str] = set()  # operations that need only these, and neither variables nor state
    shared: set[str] = set()  # operations of no replica that need one of a replica
    for name in traced.in_order():
        reads, writes = traced.touched[name]
        # What only writes and belongs to no replica takes a batch from an iterator.
        if inputs.issuperset(tensor.op.name for tensor in traced.operations[name].inputs) \
                and reads <= writes and not (writes and name in owners):
            inputs.add(name)
        if name not in owners and any(
                other in owners or other in shared for other in traced.waits[name]):
            shared.add(name)
    return owners.keys() & traced.with_ancestors(
        other for name in owners for other in traced.waits[name]
        if other in shared and other in inputs)


def _legs(traced: _Traced, owners: Mapping[str, int],
          placement: devices_lib.Placement) -> dict[str, Leg]:
    """The leg of each operation of a replica.

    An operation that needs another stage's result belongs to that stage's forward leg, on whatever
    device it is: a metric's count is on the first stage's device, but ends the step.  So no leg
    waits for a later one.
    """
    # For each operation, the last round, and its last micro-batch, that it needs or belongs to.
    latest: dict[str, tuple[int, int]] = {}
    legs: dict[str, Leg] = {}
    for name in traced.in_order():
        replica = owners.get(name)
        micro_batch = 0 if replica is None else replica % placement.micro_batches
        needed = 0, micro_batch
        for other in traced.waits[name]:
            number, last = latest[other]
            owner = owners.get(other)
            if replica is None:
                needed = max(needed, (number, last))
            elif owner != replica and last > (0 if owner is None else micro_batch):
                # All micro-batches end this round first.
                needed = max(needed, (number + 1, micro_batch))
            else:
                needed = max(needed, (number, micro_batch))
        latest[name] = needed
        if replica is not None:
            before = [legs[other] for other in traced.waits[name]
                      if other in legs and legs[other][:2] == (needed[0], replica)]
            legs[name] = Leg(needed[0], replica, *_stage_and_direction(
                traced.operations[name], before, placement, replica))
    return legs


def _stage_and_direction(operation: tf.Operation, before: Sequence[Leg],
                         placement: devices_lib.Placement, replica: int) -> tuple[int, bool]:
    """The stage of an operation that needs these legs, and whether it is in the backward pass."""
    if placement.stages == 1:
        return 0, False
    backward = scopes.GRADIENTS in operation.name or any(leg.backward for leg in before)
    reached = [leg.stage for leg in before if leg.backward == backward]
    stage, row = scopes.stage_in(operation.name), placement.row(replica)
    if stage is None and operation.device in row:  # and not on the host
        stage = row.index(operation.device)
    if stage is not None:
        reached.append(stage)
    return (min(reached, default=placement.stages - 1) if backward
            else max(reached, default=0)), backward


def _ends_of_legs(traced: _Traced, legs: Mapping[str, Leg], live: Collection[str]
                  ) -> tuple[dict[Leg, list[tf.Operation]], dict[Leg, list[tf.Operation]]]:
    """Each leg's first operations, which need no others of it, and its last ones.

    No live operation of the leg needs its last ones.
    """
    first_ops: dict[Leg, list[tf.Operation]] = collections.defaultdict(list)
    last_ops: dict[Leg, list[tf.Operation]] = collections.defaultdict(list)
    inner: set[str] = set()
    for name, leg in legs.items():
        in_leg = [other for other in traced.waits[name] if legs.get(other) == leg]
        if not in_leg:
            first_ops[leg].append(traced.operations[name])
        if name in live:
            inner.update(in_leg)
    for name, leg in legs.items():
        if name in live and name not in inner:
            last_ops[leg].append(traced.operations[name])
    return first_ops, last_ops
