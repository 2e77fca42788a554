"""What XLA makes of a step: fewer kernels, and stretches that start and end as one.

Goes in: operations and what each costs.  Comes out: fewer of them, with their costs.

:func:`kernels` puts operations that go over tensors into one kernel, which reads what comes from
outside and writes what is read outside, once each; products, convolutions and other calls of
libraries stay as they are, and a reduction ends its kernel.  This is less than XLA can do (it makes
a tensor twice in place of writing it) and more (it does not fuse tensors of different shapes), in
bytes; that is part of what the factor on all costs stands for, see :mod:`gpus`.

:func:`clusters` makes one operation of all that TensorFlow compiles as one: it starts when all that
it takes is there, and gives all that it makes at its end.  TensorFlow's own clusters of a step of
ours (``TF_XLA_FLAGS=--tf_xla_clustering_debug``) are these: forward pass, backward pass, and each
sum of gradients.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Sequence

from benchmarks import flat, links

# Kernels of libraries or of their own in XLA, too; by how their names begin.
_WHOLE = ("Conv", "DepthwiseConv", "MatMul", "BatchMatMul", "Einsum", "MaxPool", "AvgPool",
          "FusedBatchNorm", "ResourceApply", "ResourceScatter", "ResourceGather", "GatherV2",
          "UnsortedSegment", "Scatter", "TopK", "Sort", "Unique", "While", "Stateless", "Random",
          "Placeholder", "Const", "NoOp", "ReadVariableOp", "VarHandle")
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "BiasAddGrad",
               "GivenFusedBatchNormGrad", "Softmax", "LogSoftmax", "SparseSoftmax")
_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_SMALL = 64  # bytes: what so few go to is not one kernel for that

Step = tuple[list[flat.Operation], dict[str, float]]


def kernels(operations: Sequence[flat.Operation], seconds: dict[str, float],
            machine: links.Machine, everything: bool) -> Step:
    """The operations that run when XLA has fused those that it compiles.

    Args:
      operations: a step's.
      seconds: what each costs, by name.
      machine: where.
      everything: all operations on GPUs are compiled, and not those alone that are marked.
    """
    def joins(each: flat.Operation) -> bool:
        return (each.device.startswith("GPU") and not each.link
                and (everything or bool(each.compiled)) and not each.type.startswith(_WHOLE))

    # When XLA compiles, shapes are known.
    operations = [dataclasses.replace(each, inputs=[]) if each.type in flat.OF_SHAPES else each
                  for each in (_handed_on(operations) if everything else operations)]
    groups = groups_of(operations, list(map(joins, operations)), of_kernels=True)
    made, seconds = _merged(operations, groups, seconds)
    rate = 1e9 * links.GPUS[machine.gpu].memory
    seconds.update({each.name: each.moved / rate for each in made if each.type == "Fusion"})
    return made, seconds


def clusters(operations: Sequence[flat.Operation], seconds: dict[str, float],
             machine: links.Machine, factor: float) -> Step:
    """The operations that run where what is marked starts and ends as one.

    Args:
      operations, seconds, machine: as for :func:`kernels`, which are these of a cluster.
      factor: how much longer than ``seconds`` a GPU takes.
    """
    groups = groups_of(operations, [bool(each.compiled) for each in operations], of_kernels=False)
    names: dict[int, str] = {}
    for each, group in zip(operations, groups):
        names.setdefault(group, each.name)
    inside, costs = kernels(
        [dataclasses.replace(each, compiled=each.compiled and names[group])
         for each, group in zip(operations, groups)], seconds, machine, everything=False)
    made, seconds = _merged(operations, groups, seconds)
    seconds.update({each.compiled: 0.0 for each in inside if each.compiled})
    for each in inside:
        if each.compiled and each.type not in flat.FREE:
            seconds[each.compiled] += max(costs[each.name], links.LAUNCH["GPU"] / factor)
    return made, seconds


def _handed_on(operations: Sequence[flat.Operation]) -> list[flat.Operation]:
    """The same, but what a compiled stretch reads of a variable that it has written is the value.
    """
    made = list(operations)
    for number, each in enumerate(operations):
        written = [wait for wait in each.waits if operations[wait].type in _WRITES
                   and operations[wait].inputs[0] == each.inputs[0]] \
            if each.type == "ReadVariableOp" else []
        if written:
            made[written[-1]] = dataclasses.replace(made[written[-1]], sizes=each.sizes)
            made[number] = dataclasses.replace(each, type="Identity", inputs=[(written[-1], 0)])
    return made


def groups_of(operations: Sequence[flat.Operation], member: Sequence[bool], of_kernels: bool = False
            ) -> list[int]:
    """For each operation the first one of its group.

    A way that leaves a group does not come back to it: who stands behind it is of a higher level,
    and a group is of one level.
    """
    first, level = list(range(len(operations))), [0] * len(operations)
    smallest = _SMALL if of_kernels else -1
    hangs_on: list[list[int]] = []
    readers: list[list[int]] = [[] for _ in operations]  # -1: one outside

    def root(number: int) -> int:
        while first[number] != number:
            first[number] = first[first[number]]
            number = first[number]
        return number

    for number, each in enumerate(operations):
        before = [(source, _size(operations[source], index)) for source, index in each.inputs]
        before += [(source, 0) for source in each.waits]

        def goes_on(source: int, each: flat.Operation = each, number: int = number) -> bool:
            ends = of_kernels and operations[source].type.startswith(_REDUCTIONS)
            return (member[source] and member[number] and not ends
                    and operations[source].device == each.device
                    and operations[source].compiled == each.compiled)

        level[number] = max((level[source] + (member[source] and not goes_on(source))
                             for source, _ in before), default=0)
        hangs_on.append([source for source, size in before if size > smallest and goes_on(source)])
        for source, _ in before:
            readers[source].append(number if goes_on(source) else -1)
    if of_kernels:  # what only kernels behind need is made there, and not written before
        for number in reversed(range(len(operations))):
            if readers[number] and min(readers[number]) >= 0:
                level[number] = min(level[reader] for reader in readers[number])
    for number, sources in enumerate(hangs_on):
        for source in sources:
            if level[source] == level[number]:
                first[root(number)] = root(source)
    return [root(number) for number in range(len(operations))]


def _merged(operations: Sequence[flat.Operation], groups: Sequence[int],
            seconds: dict[str, float]) -> Step:
    """One operation for each group of more than one."""
    members: dict[int, list[int]] = collections.defaultdict(list)
    for number, group in enumerate(groups):
        members[group].append(number)
    outside: set[flat.Source] = set()
    for number, each in enumerate(operations):
        outside.update(source for source in each.inputs if groups[source[0]] != groups[number])
    made: dict[int, flat.Operation] = {}
    outputs: dict[flat.Source, flat.Source] = {}
    costs = {}
    for group, numbers in members.items():
        inside = [operations[number] for number in numbers]
        given = [(number, index) for number in numbers
                 for index in range(len(operations[number].sizes))
                 if len(numbers) == 1 or (number, index) in outside]
        outputs.update({source: (group, place) for place, source in enumerate(given)})
        costs[inside[0].name] = sum(seconds.get(each.name, 0.0) for each in inside)
        made[group] = inside[0] if len(numbers) == 1 else _one(operations, inside, groups, group,
                                                               given)
    return _renumbered(operations, made, groups, outputs), costs


def _one(operations: Sequence[flat.Operation], inside: Sequence[flat.Operation],
         groups: Sequence[int], group: int, given: Sequence[flat.Source]) -> flat.Operation:
    taken = dict.fromkeys(source for each in inside for source in each.inputs
                          if groups[source[0]] != group)
    waits = dict.fromkeys(wait for each in inside for wait in each.waits if groups[wait] != group)
    sizes = [_size(operations[number], index) for number, index in given]
    had = {operations[number].inputs[0] for number, _ in taken
           if operations[number].type == "ReadVariableOp"}
    written = 0
    for each in inside:
        if each.type in _WRITES:  # of which those that add read what they add to
            adds = each.type != "AssignVariableOp" and each.inputs[0] not in had
            source, index = each.inputs[-1]
            written += (1 + adds) * _size(operations[source], index)
    written += sum(_size(operations[number], index) for number, index in {
        _origin(operations, source, groups, group) for source in given})
    read = sum(_size(operations[number], index) for number, index in taken)
    free = all(each.type in flat.FREE and each.type not in _WRITES for each in inside)
    return dataclasses.replace(inside[0], type="Identity" if free else "Fusion", asked=(),
                               inputs=list(taken), waits=list(waits), sizes=sizes,
                               moved=read + written)


def _origin(operations: Sequence[flat.Operation], source: flat.Source, groups: Sequence[int],
            group: int) -> flat.Source:
    """What is handed on under another name: one tensor in memory."""
    while True:
        each = operations[source[0]]
        if each.type not in flat.FREE or not each.inputs or groups[each.inputs[0][0]] != group:
            return source
        source = each.inputs[0]


def _renumbered(operations: Sequence[flat.Operation], made: dict[int, flat.Operation],
                groups: Sequence[int], outputs: dict[flat.Source, flat.Source]
                ) -> list[flat.Operation]:
    """In an order in which each stands behind what it takes."""
    before = {group: {groups[source] for source in (*(source for source, _ in each.inputs),
                                                    *each.waits)} - {group}
              for group, each in made.items()}
    behind: dict[int, list[int]] = collections.defaultdict(list)
    for group, sources in before.items():
        for source in sources:
            behind[source].append(group)
    missing = {group: len(sources) for group, sources in before.items()}
    ready = [group for group, count in missing.items() if not count]
    heapq.heapify(ready)
    place: dict[int, int] = {}
    while ready:
        group = heapq.heappop(ready)
        place[group] = len(place)
        for other in behind[group]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, other)
    if len(place) < len(made):
        raise ValueError(f"{len(made) - len(place)} operations of {len(operations)} wait for "
                         "themselves.")
    return [dataclasses.replace(
        made[group],
        inputs=[(place[outputs[source][0]], outputs[source][1]) for source in made[group].inputs],
        waits=list(dict.fromkeys(place[groups[wait]] for wait in made[group].waits)))
        for group in place]


def _size(operation: flat.Operation, index: int) -> int:
    return operation.sizes[index] if index < len(operation.sizes) else 0
