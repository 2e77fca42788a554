"""XLA for what the towers do, and for the update (``jit_compile=True``).

Goes in: the operations of a partitioned step, or of what ``strategy.run`` was given.  Comes out:
the same, those marked that XLA is to compile.  TensorFlow makes a function of marked operations
that hang together on a device, and compiles it for each shape that comes again; what comes once, a
remainder say, runs as it is.

Such a function begins when all its inputs are there.  So it is of one tower or micro-batch, or of
the update: together with a sum, a tower's work would wait for all of another tower's.

What stays outside: random numbers, which are those of one device without XLA; variables; lists of
tensors; small numbers made of small numbers; and what XLA does not have, which is said once a type.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.placement import scopes

SMALL = 8  # elements: what is known to have no more is not worth compiling

_FED = ("Placeholder", "PlaceholderWithDefault")

_log = logging.getLogger("towerstrategy")


class Xla:
    """Marks what the towers of one strategy do, for XLA: ``strategy.extended.xla``.

    Args:
      devices: the towers'; what is on others is not compiled.
    """

    def __init__(self, devices: Iterable[str]) -> None:
        self._devices = [tf.DeviceSpec.from_string(device).to_string() for device in devices]
        self._missing: set[str] = set()  # types of operations, which were said once

    @staticmethod
    def by_default(kinds: Collection[str]) -> bool:
        """Whether XLA compiles where nobody says, on towers of these kinds of device.

        It does on GPUs and does not on CPUs, as for a model of Keras 3 without a strategy.
        """
        return "CPU" not in kinds

    def mark(self, graph: tf.Graph, operations: Iterable[tf.Operation] | None = None
             ) -> None:
        """Marks those of ``operations``, where none are given of ``graph``, that XLA can compile.
        """
        can = {device: _Compilable(graph, device) for device in self._devices}
        for operation in graph.get_operations() if operations is None else operations:
            here = can.get(operation.device)
            if here is None or _is_small(operation):
                continue
            if here.compile(operation):
                owner = scopes.owner_in(operation.name)
                if owner and tf.variant not in {tensor.dtype for tensor in (*operation.inputs,
                                                                            *operation.outputs)}:
                    _tf.compile_by_xla(operation, f"{owner} {operation.device}")
                continue
            kind = here.missing(operation.node_def)
            if kind and kind not in self._missing and not operation.op_def.is_stateful:
                self._missing.add(kind)
                _log.info("%s (%s) is not compiled though jit_compile=True: XLA does not have it.",
                          kind, scopes.plain_name(operation.name))


def _is_small(operation: tf.Operation) -> bool:
    return all(tensor.shape.is_fully_defined() and tensor.shape.num_elements() <= SMALL
               for tensor in (*operation.inputs, *operation.outputs))


class _Compilable:
    """Looks at the operations of one graph.

    Args:
      graph: the graph, which knows its functions.
      device: the full name of the device of the tower whose operations are looked at.
    """

    def __init__(self, graph: tf.Graph, device: str) -> None:
        self._graph = graph
        self._device = device
        self._kind = tf.DeviceSpec.from_string(device).device_type
        self._missing_of: dict[str, str | None] = {}  # a function's name -> what XLA has not

    def compile(self, operation: tf.Operation) -> bool:
        """Whether an operation can go into a function that XLA compiles."""
        return self._is_pure(operation) and self.missing(operation.node_def) is None

    def _is_pure(self, operation: tf.Operation) -> bool:
        """Whether an operation makes values of values, on its tower's device."""
        return (bool(operation.outputs) and not operation.op_def.is_stateful
                and operation.type not in _FED
                and operation.device == self._device
                and all(tensor.dtype != tf.resource
                        for tensor in (*operation.inputs, *operation.outputs))
                and not self._draws(operation.node_def))

    def _draws(self, node: Any) -> bool:
        """Whether ``node`` draws random numbers, which XLA would draw others of."""
        definition = _tf.op_def(node.op)
        by_seed = definition is not None and any(
            arg.name in ("alg", "key", "seed") for arg in definition.input_arg)
        return by_seed or any(
            map(self._draws_in, _tf.functions_in_attributes(node)))

    def _draws_in(self, function: str) -> bool:
        definition = _tf.function_definition(self._graph, function)
        return any(map(self._draws, definition.node_def if definition is not None else ()))

    def missing(self, node: Any) -> str | None:
        """The type of the first operation in ``node`` that XLA does not have, or None."""
        if node.op == "Const":
            return None
        if not _tf.has_xla_kernel(node, self._kind):
            return str(node.op)
        found = (self._missing_in(name) for name in _tf.functions_in_attributes(node))
        return next(filter(None, found), None)

    def _missing_in(self, function: str) -> str | None:
        if function not in self._missing_of:
            self._missing_of[function] = None
            definition = _tf.function_definition(self._graph, function)
            nodes = definition.node_def if definition is not None else ()
            self._missing_of[function] = next(filter(None, map(self.missing, nodes)), None)
        return self._missing_of[function]
