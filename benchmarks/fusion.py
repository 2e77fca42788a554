"""A model of XLA: it fuses operations into kernels, and kernels into clusters.

Goes in: operations and the seconds of each.  Comes out: fewer operations, with their seconds.

:func:`kernels` fuses elementwise operations into one kernel.  The kernel reads each of its inputs
once, and writes each tensor that is read outside of it once.  Matrix products, convolutions and
other library calls are not fused, and a reduction is the last operation of its kernel.  XLA can do
better (it computes a tensor twice rather than write it) and worse (it does not fuse tensors of
different shapes).  The factor on all costs includes this error, see :mod:`gpus`.

:func:`clusters` makes one operation of each cluster that TensorFlow compiles: it starts when all
its inputs are there, and all its outputs are there when it ends.  In our steps TensorFlow's own
clusters (``TF_XLA_FLAGS=--tf_xla_clustering_debug``) are the forward pass, the backward pass, and
each sum of gradients.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Sequence

from benchmarks import flat, links

# Prefixes of types that XLA does not fuse: library calls and kernels of their own.
_UNFUSED = ("Conv", "DepthwiseConv", "MatMul", "BatchMatMul", "Einsum", "MaxPool", "AvgPool",
          "FusedBatchNorm", "ResourceApply", "ResourceScatter", "ResourceGather", "GatherV2",
          "UnsortedSegment", "Scatter", "TopK", "Sort", "Unique", "While", "Stateless", "Random",
          "Placeholder", "Const", "NoOp", "ReadVariableOp", "VarHandle")
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "BiasAddGrad",
               "InferenceFusedBatchNormGrad", "Softmax", "LogSoftmax", "SparseSoftmax")
_WRITES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_SMALL = 64  # bytes; a tensor that is not larger does not join two operations in one kernel

Step = tuple[list[flat.Operation], dict[str, float]]


def kernels(operations: Sequence[flat.Operation], seconds: dict[str, float],
            machine: links.Machine, compile_all: bool) -> Step:
    """The kernels of a step after XLA's fusion, and their seconds by name.

    Args:
      operations: the operations of the step.
      seconds: the seconds of each, by name.
      machine: the machine that runs them.
      compile_all: whether XLA compiles all operations on GPUs, or only those with an XLA scope.
    """
    def can_fuse(each: flat.Operation) -> bool:
        return (each.device.startswith("GPU") and not each.link
                and (compile_all or bool(each.xla_scope)) and not each.type.startswith(_UNFUSED))

    # XLA knows all shapes when it compiles: an operation on a shape does not wait for the tensor.
    operations = [dataclasses.replace(each, inputs=[]) if each.type in flat.SHAPE_OPS else each
                  for each in (_forward_writes(operations) if compile_all else operations)]
    groups = find_groups(operations, list(map(can_fuse, operations)), of_kernels=True)
    fused, seconds = _merge(operations, groups, seconds)
    rate = 1e9 * links.GPUS[machine.gpu].memory_bandwidth
    seconds.update({each.name: each.accessed_bytes / rate for each in fused
                    if each.type == "Fusion"})
    return fused, seconds


def clusters(operations: Sequence[flat.Operation], seconds: dict[str, float],
             machine: links.Machine, factor: float) -> Step:
    """The operations of a step, with one for each XLA cluster, and their seconds by name.

    A cluster takes as long as its kernels (:func:`kernels`), each at least the time of a launch.
    The host needs ``links.COMPILED`` to start it.

    Args:
      operations, seconds, machine: as for :func:`kernels`.
      factor: a GPU takes ``factor`` times ``seconds``.
    """
    groups = find_groups(operations, [bool(each.xla_scope) for each in operations])
    names: dict[int, str] = {}
    for each, group in zip(operations, groups):
        names.setdefault(group, each.name)
    inside, costs = kernels(
        [dataclasses.replace(each, xla_scope=each.xla_scope and names[group])
         for each, group in zip(operations, groups)], seconds, machine, compile_all=False)
    merged, seconds = _merge(operations, groups, seconds)
    seconds.update({each.xla_scope: 0.0 for each in inside if each.xla_scope})
    for each in inside:
        if each.xla_scope and each.type not in flat.FREE:
            seconds[each.xla_scope] += max(costs[each.name], links.LAUNCH["GPU"] / factor)
    return [dataclasses.replace(each, starting=links.COMPILED)
            if each.xla_scope and each.type not in flat.FREE else each for each in merged], seconds


def _forward_writes(operations: Sequence[flat.Operation]) -> list[flat.Operation]:
    """``operations``, in which a read after a write of the variable gets the written value."""
    forwarded = list(operations)
    for number, each in enumerate(operations):
        written = [wait for wait in each.waits if operations[wait].type in _WRITES
                   and operations[wait].inputs[0] == each.inputs[0]] \
            if each.type == "ReadVariableOp" else []
        if written:
            forwarded[written[-1]] = dataclasses.replace(forwarded[written[-1]], sizes=each.sizes)
            forwarded[number] = dataclasses.replace(each, type="Identity",
                                                    inputs=[(written[-1], 0)])
    return forwarded


def find_groups(operations: Sequence[flat.Operation], can_fuse: Sequence[bool],
                of_kernels: bool = False) -> list[int]:
    """For each operation, the number of the first operation of its group.

    No path leaves a group and comes back: all operations of a group have the same level, and an
    operation that depends on a group from outside has a higher level.

    Operations that ``can_fuse`` may be in a group with others.  The groups are kernels if
    ``of_kernels``, else clusters.
    """
    first, level = list(range(len(operations))), [0] * len(operations)
    smallest = _SMALL if of_kernels else -1
    fused_sources: list[list[int]] = []
    readers: list[list[int]] = [[] for _ in operations]  # -1: a reader that cannot be fused with it

    def root(number: int) -> int:
        while first[number] != number:
            first[number] = first[first[number]]
            number = first[number]
        return number

    for number, each in enumerate(operations):
        before = [(source, _size(operations[source], index)) for source, index in each.inputs]
        before += [(source, 0) for source in each.waits]

        def fuses(source: int, each: flat.Operation = each, number: int = number) -> bool:
            ends = of_kernels and operations[source].type.startswith(_REDUCTIONS)
            return (can_fuse[source] and can_fuse[number] and not ends
                    and operations[source].device == each.device
                    and operations[source].xla_scope == each.xla_scope)

        level[number] = max((level[source] + (can_fuse[source] and not fuses(source))
                             for source, _ in before), default=0)
        fused_sources.append([source for source, size in before
                              if size > smallest and fuses(source)])
        for source, _ in before:
            readers[source].append(number if fuses(source) else -1)
    if of_kernels:  # a tensor that only later kernels read is computed there and never written
        for number in reversed(range(len(operations))):
            if readers[number] and min(readers[number]) >= 0:
                level[number] = min(level[reader] for reader in readers[number])
    for number, sources in enumerate(fused_sources):
        for source in sources:
            if level[source] == level[number]:
                first[root(number)] = root(source)
    return [root(number) for number in range(len(operations))]


def _merge(operations: Sequence[flat.Operation], groups: Sequence[int],
           seconds: dict[str, float]) -> Step:
    """Merges each group into one operation, which takes the seconds of all of them."""
    members: dict[int, list[int]] = collections.defaultdict(list)
    for number, group in enumerate(groups):
        members[group].append(number)
    read_outside: set[flat.Source] = set()
    for number, each in enumerate(operations):
        read_outside.update(source for source in each.inputs if groups[source[0]] != groups[number])
    merged: dict[int, flat.Operation] = {}
    outputs: dict[flat.Source, flat.Source] = {}
    costs = {}
    for group, numbers in members.items():
        inside = [operations[number] for number in numbers]
        sources = [(number, index) for number in numbers
                   for index in range(len(operations[number].sizes))
                   if len(numbers) == 1 or (number, index) in read_outside]
        outputs.update({source: (group, index) for index, source in enumerate(sources)})
        costs[inside[0].name] = sum(seconds.get(each.name, 0.0) for each in inside)
        merged[group] = inside[0] if len(numbers) == 1 else _merge_group(
            operations, inside, groups, group, sources)
    return _in_order(operations, merged, groups, outputs), costs


def _merge_group(operations: Sequence[flat.Operation], inside: Sequence[flat.Operation],
                 groups: Sequence[int], group: int, outputs: Sequence[flat.Source]
                 ) -> flat.Operation:
    inputs = dict.fromkeys(source for each in inside for source in each.inputs
                           if groups[source[0]] != group)
    waits = dict.fromkeys(wait for each in inside for wait in each.waits if groups[wait] != group)
    sizes = [_size(operations[number], index) for number, index in outputs]
    variables_read = {operations[number].inputs[0] for number, _ in inputs
                      if operations[number].type == "ReadVariableOp"}
    accessed = sum(_size(operations[number], index) for number, index in inputs)
    for each in inside:
        if each.type in _WRITES:  # an addition reads the variable, too, if nothing else has read it
            adds = each.type != "AssignVariableOp" and each.inputs[0] not in variables_read
            source, index = each.inputs[-1]
            accessed += (1 + adds) * _size(operations[source], index)
    accessed += sum(_size(operations[number], index) for number, index in {
        _stored(operations, source, groups, group) for source in outputs})
    free = all(each.type in flat.FREE and each.type not in _WRITES for each in inside)
    return dataclasses.replace(inside[0], type="Identity" if free else "Fusion", query=(),
                               inputs=list(inputs), waits=list(waits), sizes=sizes,
                               accessed_bytes=accessed)


def _stored(operations: Sequence[flat.Operation], source: flat.Source, groups: Sequence[int],
            group: int) -> flat.Source:
    """The tensor in memory that ``source`` is, behind identities and reshapes of the group."""
    while True:
        each = operations[source[0]]
        if each.type not in flat.FREE or not each.inputs or groups[each.inputs[0][0]] != group:
            return source
        source = each.inputs[0]


def _in_order(operations: Sequence[flat.Operation], merged: dict[int, flat.Operation],
              groups: Sequence[int], outputs: dict[flat.Source, flat.Source]
              ) -> list[flat.Operation]:
    """The merged operations in topological order, with the numbers of this order."""
    before = {group: {groups[source] for source in (*(source for source, _ in each.inputs),
                                                    *each.waits)} - {group}
              for group, each in merged.items()}
    after: dict[int, list[int]] = collections.defaultdict(list)
    for group, sources in before.items():
        for source in sources:
            after[source].append(group)
    missing = {group: len(sources) for group, sources in before.items()}
    ready = [group for group, count in missing.items() if not count]
    heapq.heapify(ready)
    place: dict[int, int] = {}  # group -> its number in the new order
    while ready:
        group = heapq.heappop(ready)
        place[group] = len(place)
        for other in after[group]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, other)
    if len(place) < len(merged):
        raise ValueError(f"The groups have a cycle: {len(merged) - len(place)} operations of "
                         f"{len(operations)} wait for themselves.")
    return [dataclasses.replace(
        merged[group],
        inputs=[(place[outputs[source][0]], outputs[source][1]) for source in merged[group].inputs],
        waits=list(dict.fromkeys(place[groups[wait]] for wait in merged[group].waits)))
        for group in place]


def _size(operation: flat.Operation, index: int) -> int:
    return operation.sizes[index] if index < len(operation.sizes) else 0
