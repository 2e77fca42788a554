"""XLA for what the towers do of a partitioned step (``jit_compile=True``).

Goes in: the step's operations.  Comes out: the same, those marked that XLA is to compile.
TensorFlow makes a function of marked operations that hang together on a device, and compiles it for
each shape that comes again; what comes once, a remainder say, runs as it is.

What stays outside: random numbers, which are those of one device without XLA; variables; lists of
tensors; small numbers made of small numbers; and what XLA does not have, which is said once a type.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.towers import compilable, contexts

SMALL = 8  # elements: what is known to have no more is not worth compiling

_log = logging.getLogger("towerstrategy")


def mark(graph: tf.Graph, operations: Iterable[tf.Operation], devices: Iterable[str],
         known: set[str]) -> None:
    """Marks those of the towers' operations that XLA can compile.

    Args:
      graph: in which they are.
      operations: all operations of the step.
      devices: the towers' devices; what is on others is not compiled.
      known: types that XLA is known not to have; more are added.
    """
    can = {device: compilable.Compilable(graph, device) for device in devices}
    for operation in operations:
        here = can.get(operation.device)
        if here is None or _is_small(operation):
            continue
        if here.compile(operation):
            if tf.variant not in {tensor.dtype for tensor in (*operation.inputs,
                                                              *operation.outputs)}:
                _tf.compile_by_xla(operation, f"tower {operation.device}")
            continue
        kind = here.missing(operation)
        if kind is not None and kind not in known and not operation.op_def.is_stateful:
            known.add(kind)
            _log.info("%s (%s) is not compiled though jit_compile=True: XLA does not have it.",
                      kind, contexts.plain_name(operation.name))


def _is_small(operation: tf.Operation) -> bool:
    return all(tensor.shape.is_fully_defined() and tensor.shape.num_elements() <= SMALL
               for tensor in (*operation.inputs, *operation.outputs))
