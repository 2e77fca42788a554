"""One read of a variable for all towers, and small variables sent to a tower in one piece.

Goes in: a stretch of tower 0's operations that is about to be copied for the others.  Comes out:
the reads that need no copy, and what each tower has in the place of what they read.

There is one copy of a variable, so what one tower reads is what all read: a copy of the read would
cost an operation a tower and bring nothing.  A value crosses to each tower's device by itself,
which for a small one is nearly all overhead (a model of 150 small layers sends 302 of them to each
tower), so the small ones of one shape cross as one stacked tensor.
"""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator, Sequence, Set

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.merge import relays
from towerstrategy.placement import homes as homes_lib

# Bytes. Stacking copies the value once; above, the copy costs more than a transfer of its own.
LARGEST_STACKED = 2**16
# The name scope of what is brought to the towers in pieces.
RELAYS = "relays/"

# Of these GPUs have a kernel for Pack, and for Split (of int64: for StridedSlice).
_SPLIT = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128)
_SLICED = (tf.int64,)
_READ = "ReadVariableOp"
# Those that take a kernel or a bias, and no gamma or beta.
_OF_LAYERS = frozenset({"MatMul", "BatchMatMulV2", "BiasAdd", "Conv2D", "Conv2DBackpropInput",
                        "Shape", "ShapeN"})
_ONLY_READ = (_READ, "ResourceGather", "ResourceGatherNd")


def shared(stretch: Sequence[tf.Operation], differing: Container[str]) -> list[tf.Operation]:
    """The reads in ``stretch`` that give every tower the same.

    Args:
      stretch: operations of tower 0.
      differing: the names of the tensors that differ between the towers: a tower-local variable has
        its handle here.
    """
    written = {tensor.name for operation in stretch if operation.type not in _ONLY_READ
               for tensor in operation.inputs if tensor.dtype == tf.resource}
    return [operation for operation in stretch
            if operation.type == _READ and not operation.control_inputs
            and operation.inputs[0].name not in written
            and operation.inputs[0].name not in differing]


def stack(graph: tf.Graph, reads: Sequence[tf.Operation], devices: Sequence[str],
          scopes: Sequence[str]) -> Iterator[tuple[tf.Tensor, list[tf.Tensor]]]:
    """Stacks what is small among ``reads``.

    Args:
      graph: the graph of ``reads``.
      reads: what :func:`shared` gave.
      devices: the towers' devices, written in full.
      scopes: the name scopes of the towers' operations.

    Yields:
      A value that was read, and what towers 1.. have in its place.
    """
    for home, group in _alike(graph, reads):
        values = [operation.outputs[0] for operation in group]
        takers = {taker.type for value in values for taker in value.consumers()}
        towers: list[Sequence[tf.Tensor]] = []
        with graph.as_default(), tf.control_dependencies(None), _tf.not_recorded():
            with tf.device(None), tf.device(home), tf.name_scope("reads/"):
                stacked = tf.stack(values)
            there: dict[str, Sequence[tf.Tensor]] = {home: values}  # once for all micro-batches
            for device, scope in zip(devices[1:], scopes[1:]):
                if device not in there:
                    with tf.device(None), tf.device(device), tf.name_scope(f"{scope}/reads/"):
                        there[device] = _unstacked(stacked, takers)
                towers.append(there[device])
        for value, others in zip(values, zip(*towers)):
            yield value, list(others)


def are_data(takers: Sequence[tf.Operation]) -> bool:
    """Whether any of those who take a value looks at more than its shape."""
    return any(taker.type not in ("Shape", "ShapeN", "Size", "Rank") for taker in takers)


def relay(graph: tf.Graph, reads: Sequence[tf.Operation], devices: Sequence[str]
          ) -> Iterator[tuple[tf.Tensor, list[tf.Tensor]]]:
    """Brings what is large among ``reads`` to the towers in pieces, see :mod:`relays`.

    Args:
      graph: the graph of ``reads``.
      reads: what :func:`shared` gave.
      devices: the towers' devices, written in full.

    Yields:
      A value that was read, and what towers 0.. have in its place.
    """
    known = _homes(graph)
    dense = [(operation.outputs[0], known[operation.inputs[0].name]) for operation in reads
             if operation.inputs[0].name in known and operation.outputs[0].dtype in _SPLIT
             and operation.outputs[0].shape.is_fully_defined()]
    towers = list(dict.fromkeys(devices))
    chosen = relays.chosen([home for _, home in dense],
                           [homes_lib.size_of(value) for value, _ in dense], towers)
    for (value, home), is_chosen in zip(dense, chosen):
        if is_chosen:
            with graph.as_default(), tf.control_dependencies(None), _tf.not_recorded(), \
                    tf.device(None), tf.name_scope(RELAYS):
                there = relays.spread(value, home, towers)
            yield value, [there[device] for device in devices]


def _unstacked(stacked: tf.Tensor, takers: Set[str]) -> list[tf.Tensor]:
    """The values of a stack, each an operation of its own where the types of ``takers`` ask for it.

    TensorFlow's graph optimizer fuses a layer normalization (remapper, ``FindMklLayerNorm``) and
    does not look at which outputs of an operation its gamma and beta are: of ``tf.unstack`` it
    takes the first for both.
    """
    if stacked.dtype in _SLICED:
        return [stacked[number] for number in range(stacked.shape[0])]
    if takers <= _OF_LAYERS:
        return list(tf.unstack(stacked))
    shape = tf.constant(stacked.shape[1:].as_list(), tf.int32)
    return [tf.reshape(part, shape) for part in tf.split(stacked, stacked.shape[0])]


def _alike(graph: tf.Graph, reads: Sequence[tf.Operation]
           ) -> Iterator[tuple[str, list[tf.Operation]]]:
    """Small reads of one shape and dtype from one device, where there are several."""
    homes = _homes(graph)
    groups = collections.defaultdict(list)
    for operation in reads:
        value, home = operation.outputs[0], homes.get(operation.inputs[0].name)
        if home is None or not value.shape.is_fully_defined():
            continue
        if value.dtype in (*_SPLIT, *_SLICED) and homes_lib.size_of(value) <= LARGEST_STACKED:
            groups[home, value.dtype, tuple(value.shape)].append(operation)
    for (home, _, _), group in groups.items():
        if len(group) > 1:
            yield home, group


def _homes(graph: tf.Graph) -> dict[str, str]:
    """The devices of variables, by the name that their handle has in ``graph``."""
    return {inner.name: tf.DeviceSpec.from_string(outer.device).to_string()
            for outer, inner in _tf.captures_of(graph)
            if _tf.is_eager(outer) and outer.dtype == tf.resource}
