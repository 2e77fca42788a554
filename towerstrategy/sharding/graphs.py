"""The operations of a traced graph in order, and the graphs of branches and loops.

Goes in: a graph, or an operation.  Comes out: the operations that outputs and effects need, each
after the ones that it needs; or the function graphs that the operation calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.rules.registry import Op


def function_of(operation: Op, attribute: str) -> Any:
    """The graph of the function that an attribute of an operation names."""
    caller = operation.operation
    return _tf.body_of(caller.graph, caller.get_attr(attribute).name)


def branches_of(operation: Op) -> list[Any]:
    """The graphs of the branches of an ``If`` or a ``Case``."""
    if operation.type.endswith("Case"):
        caller = operation.operation
        return [_tf.body_of(caller.graph, branch.name) for branch in caller.get_attr("branches")]
    return [function_of(operation, "then_branch"), function_of(operation, "else_branch")]


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
