"""XLA for the towers' operations and for the update (``jit_compile=True``).

Goes in: the operations of a partitioned step or of a replica function.  Comes out: the same
operations; those that XLA is to compile are marked.  TensorFlow makes a function of connected
marked operations on a device.  It compiles the function for each shape that occurs again; a shape
that occurs once, such as the last batch's, runs uncompiled.

Such a function starts when it has all inputs.  So it belongs to one tower or micro-batch, or to the
update: in one function with a sum, a tower's work would wait for the other towers.  And a tower
gets a new function after each :data:`WEIGHTS_PER_FUNCTION` bytes of weights, so that its first
layers do not wait for the weights of the last ones.

Some operations are not compiled: see docs/xla.md.  Nor are those with few elements, unless their
results are constant and compiled operations use them, or stretches of fewer than :data:`FEWEST`
operations: starting a compiled function takes as long as several kernels.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import scopes

SMALL = 8  # elements of inputs and outputs up to which compiling does not pay
FEWEST = 5  # connected operations to compile; with fewer, starting takes longer than it saves
WEIGHTS_PER_FUNCTION = 2**27  # bytes; with less, a GPU computes while it has to send weights on

_FED = ("Placeholder", "PlaceholderWithDefault")

_log = logging.getLogger("towerstrategy")


class Xla:
    """Marks operations on the towers' ``devices`` for XLA: ``strategy.extended.xla``."""

    def __init__(self, devices: Iterable[str]) -> None:
        specs = map(tf.DeviceSpec.from_string, devices)
        self._devices = {spec.to_string(): spec.device_type for spec in specs}
        self._missing: set[str] = set()  # op types without an XLA kernel, each logged once

    def mark(self, graph: tf.Graph, operations: Iterable[tf.Operation] | None = None) -> None:
        """Marks those of ``operations``, by default all of ``graph``, that XLA can compile."""
        weights, small, marked = _WeightCounter(), [], {}
        operations = graph.get_operations() if operations is None else list(operations)
        for operation in operations:
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
                    number = 0 if owner == scopes.UPDATE else weights.function_of(operation)
                    marked[operation] = f"{owner} {operation.device} {number}"
            elif missing and missing not in self._missing and not operation.op_def.is_stateful:
                self._missing.add(missing)
                _log.info("%s (%s) is not compiled though jit_compile=True: XLA does not have it.",
                          missing, scopes.plain_name(operation.name))
        marked = _without_short_stretches(marked)
        for operation, scope in marked.items():
            _tf.compile_by_xla(operation, scope)
        self._send_first(graph, operations, marked)
        for operation in small:  # for uncompiled consumers, TensorFlow makes these again outside
            owner = f"{scopes.owner_in(operation.name)} "
            consumers = (marked.get(consumer, "") for tensor in operation.outputs
                         for consumer in tensor.consumers())
            scope = next((scope for scope in consumers if scope.startswith(owner)), "")
            if scope and _is_constant(operation):
                _tf.compile_by_xla(operation, scope)

    def _send_first(self, graph: tf.Graph, operations: Iterable[tf.Operation],
                    marked: dict[tf.Operation, str]) -> None:
        """Starts a device's compiled functions after it has sent what is made of variables alone.

        A copy waits for all that its GPU has been given to do (``gpu/gpu_util.cc``), so that the
        other towers would wait for this one's forward pass.
        """
        known, early = set(operations), set[tf.Operation]()
        sent: dict[str, list[tf.Operation]] = collections.defaultdict(list)
        for operation in operations:
            before = {*(tensor.op for tensor in operation.inputs), *operation.control_inputs}
            if not scopes.owner_in(operation.name) and early.issuperset(before & known):
                early.add(operation)
                if operation.device in self._devices and any(
                        consumer.device in self._devices and consumer.device != operation.device
                        for tensor in operation.outputs for consumer in tensor.consumers()):
                    sent[operation.device].append(operation)
        first: dict[str, tf.Operation] = {}
        for operation, scope in marked.items():
            first.setdefault(scope, operation)
        with graph.as_default():
            for device, made in sent.items():
                with tf.device(device), tf.control_dependencies(made):
                    gate = tf.no_op()
                for operation in first.values():
                    if operation.device == device and scopes.TOWER.search(operation.name):
                        _tf.add_control_input(operation, gate)


def _without_short_stretches(marked: dict[tf.Operation, str]) -> dict[tf.Operation, str]:
    """Those of ``marked`` that are connected to enough others of the same scope."""
    stretches: dict[tf.Operation, list[tf.Operation]] = {}
    for operation, scope in marked.items():
        stretch = stretches[operation] = [operation]
        for tensor in operation.inputs:
            other = stretches.get(tensor.op, stretch)
            if other is not stretch and marked[tensor.op] == scope:
                stretch, other = sorted((stretch, other), key=len, reverse=True)
                stretch += other
                stretches.update(dict.fromkeys(other, stretch))
    return {operation: scope for operation, scope in marked.items()
            if len(stretches[operation]) >= FEWEST}


class _WeightCounter:
    """Counts the bytes of weights, and of other inputs of known size, that each device receives."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, Any]] = set()
        self._bytes: collections.Counter[str] = collections.Counter()

    def function_of(self, operation: tf.Operation) -> int:
        """The number of an operation's function; call it in topological order."""
        for tensor in operation.inputs:
            key = operation.device, tensor.ref()
            if tensor.shape.is_fully_defined() and key not in self._seen and (
                    tensor.op.device != operation.device or tensor.op.type in _FED):
                self._seen.add(key)
                self._bytes[operation.device] += tensor.shape.num_elements() * tensor.dtype.size
        return self._bytes[operation.device] // WEIGHTS_PER_FUNCTION


def _nodes_in(graph: tf.Graph, node: Any) -> Iterator[Any]:
    """``node`` and all nodes of the functions that it calls."""
    yield node
    for name in _tf.functions_in_attributes(node):
        definition = _tf.function_definition(graph, name)
        for inner in () if definition is None else definition.node_def:
            yield from _nodes_in(graph, inner)


def _is_small(operation: tf.Operation) -> bool:
    return all(tensor.shape.is_fully_defined() and tensor.shape.num_elements() <= SMALL
               for tensor in (*operation.inputs, *operation.outputs))


def _is_constant(operation: tf.Operation) -> bool:
    """Whether an operation's outputs are constants on the host, which would be sent to a GPU."""
    return _is_pure(operation) and _tf.gives_on_host(operation) and all(
        _tf.constant_value(tensor) is not None for tensor in operation.outputs)


def _is_pure(operation: tf.Operation) -> bool:
    """Whether an operation has outputs, no state and no resources, and is no input of the graph."""
    return (bool(operation.outputs) and not operation.op_def.is_stateful
            and operation.type not in _FED and tf.resource not in _dtypes(operation))


def _dtypes(operation: tf.Operation) -> set[tf.DType]:
    return {tensor.dtype for tensor in (*operation.inputs, *operation.outputs)}


def _draws(node: Any) -> bool:
    """Whether ``node`` draws random numbers; XLA would draw other numbers."""
    definition = _tf.op_def(node.op)
    return definition is not None and any(
        arg.name in ("alg", "key", "seed") for arg in definition.input_arg)
