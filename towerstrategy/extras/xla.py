"""XLA for what the towers do, and for the update (``jit_compile=True``).

Goes in: the operations of a partitioned step, or of what ``strategy.run`` was given.  Comes out:
the same, those marked that XLA is to compile.  TensorFlow makes a function of marked operations
that hang together on a device, and compiles it for each shape that comes again; what comes once, a
remainder say, runs as it is.

Such a function begins when all its inputs are there.  So it is of one tower or micro-batch, or of
the update: together with a sum, a tower's work would wait for all of another tower's.  And a tower
begins a new one with each :data:`STRETCH` of weights: its first layers need not wait for those of
the last ones.

What stays outside: what docs/xla.md says, and small numbers made of small numbers, but for those
that never change.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import scopes

SMALL = 8  # elements: what is known to have no more is not worth compiling
STRETCH = 2**27  # bytes; of less, a GPU computes while it is to send weights on

_FED = ("Placeholder", "PlaceholderWithDefault")

_log = logging.getLogger("towerstrategy")


class Xla:
    """Marks what towers do on ``devices``, their own, for XLA: ``strategy.extended.xla``."""

    def __init__(self, devices: Iterable[str]) -> None:
        specs = map(tf.DeviceSpec.from_string, devices)
        self._devices = {spec.to_string(): spec.device_type for spec in specs}
        self._missing: set[str] = set()  # types of operations, which were said once

    def mark(self, graph: tf.Graph, operations: Iterable[tf.Operation] | None = None) -> None:
        """Marks those of ``operations``, if none are given of ``graph``, that XLA can compile."""
        stretches, small, marked = _Stretches(), [], {}
        for operation in graph.get_operations() if operations is None else operations:
            kind = self._devices.get(operation.device)
            if kind is None or _is_small(operation):
                small += [operation] if kind else []
                continue
            nodes = list(_nodes_in(graph, operation.node_def))
            missing = next((node.op for node in nodes if node.op != "Const"
                            and not _tf.has_xla_kernel(node, kind)), None)
            if missing is None and _is_pure(operation) and not any(map(_draws, nodes)):
                owner = scopes.owner_in(operation.name)
                if owner and tf.variant not in _dtypes(operation):
                    number = 0 if owner == scopes.UPDATE else stretches.number(operation)
                    marked[operation] = f"{owner} {operation.device} {number}"
                    _tf.compile_by_xla(operation, marked[operation])
            elif missing and missing not in self._missing and not operation.op_def.is_stateful:
                self._missing.add(missing)
                _log.info("%s (%s) is not compiled though jit_compile=True: XLA does not have it.",
                          missing, scopes.plain_name(operation.name))
        for operation in small:  # what others take of these, TensorFlow makes again outside
            own = f"{scopes.owner_in(operation.name)} "
            takers = (marked.get(taker, "") for tensor in operation.outputs
                      for taker in tensor.consumers())
            taken = next((scope for scope in takers if scope.startswith(own)), "")
            if taken and _is_sent(operation):
                _tf.compile_by_xla(operation, taken)


class _Stretches:
    """Counts the bytes of weights, and of all else of known size, that devices have been sent."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, Any]] = set()
        self._bytes: collections.Counter[str] = collections.Counter()

    def number(self, operation: tf.Operation) -> int:
        """The stretch of an operation, which comes behind those that it takes."""
        for tensor in operation.inputs:
            key = operation.device, tensor.ref()
            if tensor.shape.is_fully_defined() and key not in self._seen and (
                    tensor.op.device != operation.device or tensor.op.type in _FED):
                self._seen.add(key)
                self._bytes[operation.device] += tensor.shape.num_elements() * tensor.dtype.size
        return self._bytes[operation.device] // STRETCH


def _nodes_in(graph: tf.Graph, node: Any) -> Iterator[Any]:
    """``node``, and all those of the functions that it calls."""
    yield node
    for name in _tf.functions_in_attributes(node):
        definition = _tf.function_definition(graph, name)
        for inner in () if definition is None else definition.node_def:
            yield from _nodes_in(graph, inner)


def _is_small(operation: tf.Operation) -> bool:
    return all(tensor.shape.is_fully_defined() and tensor.shape.num_elements() <= SMALL
               for tensor in (*operation.inputs, *operation.outputs))


def _is_sent(operation: tf.Operation) -> bool:
    """Whether a GPU would be sent numbers that never change, as a kernel has them on the host."""
    return _is_pure(operation) and all(_tf.host_memory(operation)[1]) and all(
        _tf.constant_value(tensor) is not None for tensor in operation.outputs)


def _is_pure(operation: tf.Operation) -> bool:
    """Whether an operation makes values of values."""
    return (bool(operation.outputs) and not operation.op_def.is_stateful
            and operation.type not in _FED and tf.resource not in _dtypes(operation))


def _dtypes(operation: tf.Operation) -> set[tf.DType]:
    return {tensor.dtype for tensor in (*operation.inputs, *operation.outputs)}


def _draws(node: Any) -> bool:
    """Whether ``node`` draws random numbers, which XLA would draw others of."""
    definition = _tf.op_def(node.op)
    return definition is not None and any(
        arg.name in ("alg", "key", "seed") for arg in definition.input_arg)
