"""Micro-batches one after another: what waits for what.

Goes in: a traced graph, and which of its operations belong to which replica.  Comes out: control
dependencies, by which a micro-batch begins when the one before it on the same device has ended.

TensorFlow runs whatever has its inputs, so all micro-batches of a device would run side by side and
hold their activations at the same time.  Here the first operations of a micro-batch, those that
need nothing else of it, wait for the last ones of the micro-batch before, its gradients as a rule.
So a device holds the activations of one micro-batch.

Where replicas synchronize and go on with what all of them have brought (a mean over all rows), no
micro-batch can come to its end before all have come to that point.  Their work is in *rounds* then:
round 0 is what needs nothing of a sync point, round 1 what needs something made of round 0's
results, and so on; in each round micro-batches follow one another.  A sync point whose result no
replica reads, such as the update of a moving mean, makes no round.  Nor does one of what is made of
the inputs alone, such as how many steps of all rows a mask leaves: that is in no order, and done
when the inputs are there.

Where a tower has stages, each of these does the same for itself, forward and backward passes in
turn (1F1B; Narayanan et al. 2021, docs/one_large_model.md): of P stages, number s begins a
micro-batch when it has the forward pass of the one before behind it, and the backward pass of the
one P-s before; and a backward pass when it has as many forward passes behind it as it may.
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
    """A part of a replica's work in a round: one way through one of its stages."""

    round: int
    replica: int
    stage: int = 0
    backward: bool = False


def put(graph: tf.Graph, replicas: Sequence[Collection[str]], placement: devices_lib.Placement,
        results: Any) -> None:
    """Puts each device's micro-batches in order, when all replicas have been traced.

    ``replicas`` are the names of each one's operations, ``results`` what they returned, a nest.
    """
    if placement.micro_batches == 1:
        return
    owners = {name: replica for replica, names in enumerate(replicas) for name in names}
    traced = _Traced(graph)
    for name in _brought_of_inputs(traced, owners):
        del owners[name]
    legs = _legs(traced, owners, placement)
    begins, ends = _edges(traced, legs, traced.live(results))
    made: dict[Leg, tf.Operation] = {}
    for leg, legs_before in _before(traced, begins, ends, placement).items():
        for before in legs_before:
            if before not in made:
                with graph.as_default(), tf.control_dependencies(None), tf.device(None), \
                        tf.device(placement.row(before.replica)[before.stage]):
                    made[before] = tf.no_op("end_of_micro_batch")
                for operation in ends[before]:
                    _tf.add_control_input(made[before], operation)
            for operation in begins[leg]:
                _tf.add_control_input(operation, made[before])


def _before(traced: _Traced, begins: Mapping[Leg, Sequence[tf.Operation]],
            ends: Mapping[Leg, Sequence[tf.Operation]],
            placement: devices_lib.Placement) -> dict[Leg, list[Leg]]:
    """For each leg those that have to have ended when it begins."""
    found = {leg: [before for before in _in_turns(leg, placement) if before in ends]
             for leg in begins}
    if placement.stages == 1 or _is_possible(traced, begins, ends, found):
        return found
    return {leg: before for leg, before in found.items() if not leg.backward}


def _in_turns(leg: Leg, placement: devices_lib.Placement) -> Iterator[Leg]:
    """What a leg waits for where forward and backward legs of a stage take turns."""
    place = leg.replica % placement.micro_batches
    last = leg.replica - place + placement.micro_batches - 1
    held = placement.stages - leg.stage
    if place:
        yield leg._replace(replica=leg.replica - 1)
    if leg.backward:
        yield leg._replace(replica=min(leg.replica + held - 1, last), backward=False)
    elif placement.stages > 1 and place >= held:
        # Where there is no backward pass a micro-batch is held until it is through.
        through = Leg(leg.round, leg.replica - held, placement.stages - 1)
        yield from (through, through._replace(stage=leg.stage, backward=True))


def _is_possible(traced: _Traced, begins: Mapping[Leg, Sequence[tf.Operation]],
                 ends: Mapping[Leg, Sequence[tf.Operation]],
                 before: Mapping[Leg, Sequence[Leg]]) -> bool:
    """Whether nothing waits for itself: a forward pass may need an earlier backward pass'."""
    waits: dict[Any, Collection[Any]] = dict(traced.waits)
    for leg, legs_before in before.items():
        waits[leg] = {operation.name for other in legs_before for operation in ends[other]}
        for operation in begins[leg]:
            waits[operation.name] = {*traced.waits[operation.name], leg}
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError:
        return False
    return True


class _Traced:
    """The operations of a graph, and what each waits for.

    TensorFlow is going to order the reads and writes of each resource as they were made, when the
    function has been traced; :attr:`waits` has that already.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.operations: dict[str, tf.Operation] = {
            operation.name: operation for operation in graph.get_operations()}
        self.waits: dict[str, set[str]] = {
            name: {*(tensor.op.name for tensor in operation.inputs),
                   *(control.name for control in operation.control_inputs)}
            for name, operation in self.operations.items()}
        written: dict[str, str] = {}
        read: dict[str, list[str]] = collections.defaultdict(list)
        for name, operation in self.operations.items():
            reads, writes = _tf.touched_resources(operation)
            for resource in reads | writes:
                if resource in written:
                    self.waits[name].add(written[resource])
            for resource in reads - writes:
                read[resource].append(name)
            for resource in writes:
                self.waits[name].update(read.pop(resource, ()))
                written[resource] = name
        for name, waits in self.waits.items():
            waits.discard(name)

    def in_order(self) -> Iterable[str]:
        """The names of the operations, each after all that it waits for."""
        return graphlib.TopologicalSorter(self.waits).static_order()

    def needed(self, names: Iterable[str]) -> set[str]:
        """The names of what operations of these names need, and of these themselves."""
        reached, found = list(names), set[str]()
        while reached:
            name = reached.pop()
            if name not in found and name in self.operations:
                found.add(name)
                reached += self.waits[name]
        return found

    def live(self, results: Any) -> set[str]:
        """The names of the operations that have an effect or are needed."""
        return self.needed([
            *(name for name, operation in self.operations.items()
              if operation.op_def.is_stateful),
            *(leaf.op.name for leaf in tf.nest.flatten(results, expand_composites=True)
              if isinstance(leaf, tf.Tensor) and not _tf.is_eager(leaf))])


def _brought_of_inputs(traced: _Traced, owners: Mapping[str, int]) -> set[str]:
    """The names of what replicas bring to sync points that need no variable and no state."""
    of_inputs: set[str] = set()
    shared: set[str] = set()  # what is no replica's and needs something of one
    for name in traced.in_order():
        operation, waits = traced.operations[name], traced.waits[name]
        if not operation.op_def.is_stateful and waits <= of_inputs \
                and not any(tensor.dtype == tf.resource for tensor in operation.inputs):
            of_inputs.add(name)
        if name not in owners and any(other in owners or other in shared for other in waits):
            shared.add(name)
    return owners.keys() & traced.needed(other for name in owners for other in traced.waits[name]
                                         if other in shared and other in of_inputs)


def _legs(traced: _Traced, owners: Mapping[str, int],
          placement: devices_lib.Placement) -> dict[str, Leg]:
    """The leg of each operation that belongs to a replica.

    What needs another stage's results is of that stage, forwards, wherever it is: a metric's count
    is on the first stage's device and the last thing of all.  So no leg waits for a later one.
    """
    # For each operation the last round, and the last micro-batch of it, that it needs or is of.
    until: dict[str, tuple[int, int]] = {}
    legs: dict[str, Leg] = {}
    for name in traced.in_order():
        own = owners.get(name)
        place = 0 if own is None else own % placement.micro_batches
        found = 0, place
        for other in traced.waits[name]:
            number, last = until[other]
            owner = owners.get(other)
            if own is None:
                found = max(found, (number, last))
            elif owner != own and last > (0 if owner is None else place):
                found = max(found, (number + 1, place))  # all micro-batches have to come so far
            else:
                found = max(found, (number, place))
        until[name] = found
        if own is not None:
            part = found[0], own
            before = [legs[other] for other in traced.waits[name]
                      if other in legs and legs[other][:2] == part]
            legs[name] = Leg(*part, *_way(traced.operations[name], before, placement, own))
    return legs


def _way(operation: tf.Operation, before: Sequence[Leg], placement: devices_lib.Placement,
         replica: int) -> tuple[int, bool]:
    """The stage of an operation that comes after these legs, and whether it goes backwards."""
    if placement.stages == 1:
        return 0, False
    backward = scopes.GRADIENTS in operation.name or any(leg.backward for leg in before)
    reached = [leg.stage for leg in before if leg.backward == backward]
    own, row = scopes.stage_in(operation.name), placement.row(replica)
    if own is None and operation.device in row:  # and not on the host
        own = row.index(operation.device)
    if own is not None:
        reached.append(own)
    return (min(reached, default=placement.stages - 1) if backward
            else max(reached, default=0)), backward


def _edges(traced: _Traced, legs: Mapping[str, Leg], live: Collection[str]
           ) -> tuple[dict[Leg, list[tf.Operation]], dict[Leg, list[tf.Operation]]]:
    """Each leg's operations that wait for no other of it, and those that no live one waits for."""
    begins: dict[Leg, list[tf.Operation]] = collections.defaultdict(list)
    ends: dict[Leg, list[tf.Operation]] = collections.defaultdict(list)
    inner: set[str] = set()
    for name, leg in legs.items():
        own = [other for other in traced.waits[name] if legs.get(other) == leg]
        if not own:
            begins[leg].append(traced.operations[name])
        if name in live:
            inner.update(own)
    for name, leg in legs.items():
        if name in live and name not in inner:
            ends[leg].append(traced.operations[name])
    return begins, ends
