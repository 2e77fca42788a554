"""The operations of a traced graph in order, and the graphs of branches and loops.

Goes in: a graph, or an operation.  Comes out: the operations that outputs and effects need, each
after the ones that it needs; or the function graphs that the operation calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.layout import LOOPS
from towerstrategy.sharding.rules.registry import Op


def function_attributes(type: str) -> list[str]:
    """The attributes of branches or loops that name functions: one for each, or a list."""
    return [attr.name for attr in _tf.op_def(type).attr if "func" in attr.type]


def functions_of(operation: tf.Operation) -> list[Any]:
    """The graphs of all branches, or of a loop's condition and body."""
    named = [operation.get_attr(name) for name in function_attributes(operation.type)]
    functions = named[0] if isinstance(named[0], list) else named
    # A loop's outputs have the shapes that its variables have in all iterations.
    arguments = operation.outputs if operation.type in LOOPS else operation.inputs[1:]
    return [_tf.body_of(operation.graph, function.name, arguments) for function in functions]


def are_read(condition: Any, body: Any) -> list[bool]:
    """Whether each variable of a loop is read in it before it is set."""
    passed_on = {tensor.name for number, tensor in enumerate(body.outputs)
                 if tensor is not body.inputs[number]}
    return [bool(tested.consumers() or tensor.consumers() or tensor.name in passed_on)
            for tested, tensor in zip(condition.inputs, body.inputs)]


def needed_in_order(graph: Any) -> list[Op]:
    """The operations that outputs or effects need, each after the ones that it needs.

    The order of creation does not do: a loop gets its accumulators when its gradient is taken.
    Assertions come before writes on which they do not depend.
    """
    notes: dict[Any, Any] = {}
    known = {operation.name: Op(operation, notes) for operation in graph.get_operations()}
    effects = [operation for operation in known.values()
               if operation.type != "Placeholder" and operation.has_effect]
    first = [operation.name for operation in effects if not operation.writes_variables]
    return in_order([*first, *(tensor.op.name for tensor in graph.outputs),
                     *(operation.name for operation in effects)], known)


def in_order(roots: Iterable[str], known: Mapping[str, Op]) -> list[Op]:
    """``roots`` and the ``known`` operations that they need, each after the ones that it needs."""
    done: set[str] = set()
    order: list[Op] = []
    stack: list[tuple[Op | None, Iterator[str]]] = [(None, iter(roots))]
    while stack:
        name = next(stack[-1][1], None)
        if name is None:
            operation, _ = stack.pop()
            order += [] if operation is None else [operation]
        elif name in known and name not in done:
            done.add(name)
            stack.append((known[name], iter([*known[name].before, *known[name].controls])))
    return order
