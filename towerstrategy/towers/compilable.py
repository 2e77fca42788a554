"""Which of a tower's operations XLA can compile, and which may stay outside.

Goes in: an operation of a traced graph.  Comes out: whether it can be compiled, whether the step
may do without that, or an error that names it.

XLA makes values of values on one device.  Random numbers stay outside, as of the same seed it makes
others, and so does what has to do with variables.
"""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.towers import contexts

_ON_VARIABLES = ("ReadVariableOp", "VariableShape", "Assign", "Resource", "VarIsInitialized",
                 "RngReadAndSkip")
# Not the keys and counters of draws.
_DRAWS = ("StatelessRandomUniform", "StatelessRandomNormal", "StatelessRandomBinomial",
          "StatelessRandomGamma", "StatelessRandomPoisson", "StatelessTruncatedNormal",
          "StatelessParameterized", "StatelessMultinomial", "StatelessShuffle")
_FED = ("Placeholder", "PlaceholderWithDefault")


class Compilable:
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
        return self._is_pure(operation) and self._missing(operation.node_def) is None

    def missing(self, operation: tf.Operation) -> str | None:
        """The type of what XLA does not have of an operation, or None."""
        return self._missing(operation.node_def)

    def leave(self, operation: tf.Operation) -> bool:
        """Whether an operation may stay outside although something compiled needs it."""
        if "seed2" in operation.node_def.attr or operation.type.startswith(_ON_VARIABLES):
            return True
        if operation.device != self._device or operation.type in _FED \
                or self._draws(operation.node_def):
            return True
        uses = any(tensor.dtype == tf.resource for tensor in operation.inputs)
        if uses and not _tf.functions_of(operation):
            return False
        return self._missing(operation.node_def) is None

    def refuse(self, operation: tf.Operation) -> NoReturn:
        """Complains of an operation, by its name, layer and line."""
        kind = self._missing(operation.node_def) or operation.type
        where = contexts.plain_name(operation.name)
        where = where.rpartition("/")[0] or where
        line = _tf.line_of(operation)
        raise ValueError(
            f"XLA cannot compile {kind} on a {self._kind}, which jit_compile=True asks for here: "
            f"operation {where!r}{f' ({line})' if line else ''}. Nothing has been trained. Move it "
            "out of the step (for data: into dataset.map, before the strategy has the dataset), or "
            "leave jit_compile out.")

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
        return node.op.startswith(_DRAWS) or any(
            map(self._draws_in, _tf.functions_in_attributes(node)))

    def _draws_in(self, function: str) -> bool:
        definition = _tf.function_definition(self._graph, function)
        return any(map(self._draws, definition.node_def if definition is not None else ()))

    def _missing(self, node: Any) -> str | None:
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
            self._missing_of[function] = next(filter(None, map(self._missing, nodes)), None)
        return self._missing_of[function]
