"""What crosses the workers, while the nodes of a step are collected.

Goes in: one value a worker, and how they are merged: by sum, concatenation or extreme.  Comes out:
the merged value, on each worker.

Nothing crosses by itself.  When all nodes of a graph are there, what crosses is sorted by how often
something has crossed before it; what crosses as often goes together, as ``Workers`` pack it.
All collective operations of a graph wait for one another, and all workers have made the same ones,
so they come in one order everywhere: also those within branches and loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import homes
from towerstrategy.sharding.builder import Builder, Ref
from towerstrategy.sharding.rules.registry import Op

_SCOPE = f"{homes.ONCE}across/"
SUM, GATHER = "sum", "gather"  # other kinds are those of Machines.extremes


class _Crossing(NamedTuple):
    kind: str
    ref: Ref  # this worker's value
    shape: tf.TensorShape
    axis: int
    device: str  # where it is wanted


class Across:
    """What crosses the workers of the nodes that a builder collects.

    Args:
      workers: what synchronizes them; None with a single machine, where nothing crosses.
      graph: the graph of the step, from which this one may be a branch or a loop.
      builder: collects the nodes.
      outside: what stands among the nodes for a tensor of ``graph``.
    """

    def __init__(self, workers: Any, graph: tf.Graph, builder: Builder,
                 outside: Callable[[tf.Tensor], Ref]) -> None:
        self.workers, self.graph, self.outside = workers, graph, outside
        self._builder = builder
        self._crossings: dict[str, _Crossing] = {}
        self._control_flow: set[str] = set()
        self._last = ""  # what the next collective operation waits for

    def cross(self, kind: str, ref: Ref, device: str,
              shape: tf.TensorShape | None = None, axis: int = 0) -> Ref:
        """What all workers' values make together.

        Args:
          kind: "sum", "gather" (along ``axis``), or "max", "min", "and", "or".
          ref: this worker's value.
          device: where the result is wanted.
          shape: what is known of the value's shape, the same on all workers.
          axis: along which it is gathered.
        """
        if self.workers is None:
            return ref
        name = self._builder.reserve(f"{_SCOPE}{kind}")
        self._crossings[name] = _Crossing(
            kind, ref, tf.TensorShape(None) if shape is None else shape, axis, device)
        return Ref(name, 0, ref.dtype)

    def note_control_flow(self, node: str) -> None:
        """Remembers a branch or loop within which something crosses."""
        self._control_flow.add(node)

    def finish(self) -> list[str]:
        """Makes the nodes of all that crosses; gives those that must run on every worker."""
        order: list[str] = []
        groups: dict[tuple[int, str], list[tuple[int, str]]] = {}
        places, control_flow = self._places()
        for name, crossing in self._crossings.items():
            level, depth = places(crossing.ref.node)
            kind = crossing.kind if crossing.kind in (SUM, GATHER) else "extreme"
            groups.setdefault((level, kind), []).append((depth, name))
        for level, kind in sorted({*groups, *((level, "~") for level in control_flow)}):
            if kind == "~":
                for node in control_flow[level]:
                    self._builder.wait(node, self._last)
                    self._last = node
            else:  # the last values are taken to be ready first
                order += self._together(kind, [name for _, name in sorted(
                    groups[level, kind], key=lambda found: -found[0])])
        return [*order, *(node for nodes in control_flow.values() for node in nodes)]

    def _places(self) -> tuple[Callable[[str], tuple[int, int]], dict[int, list[str]]]:
        """How often something crosses before a node, and how many nodes are before it."""
        found: dict[str, tuple[int, int]] = {}
        control_flow: dict[int, list[str]] = {}

        def place(name: str) -> tuple[int, int]:
            crossing = self._crossings.get(name)
            if crossing is None:
                return found.get(name, (0, 0))
            level, depth = place(crossing.ref.node)
            return level + 1, depth

        if self._crossings or self._control_flow:
            for node in self._builder.nodes.values():
                before = [place(text.lstrip("^").split(":")[0]) for text in node.input]
                level = max((level for level, _ in before), default=0)
                if node.name in self._control_flow:
                    control_flow.setdefault(level, []).append(node.name)
                    level += 1
                found[node.name] = level, 1 + max((depth for _, depth in before), default=0)
        return place, control_flow

    def _together(self, kind: str, names: list[str]) -> list[str]:
        """Makes the nodes of values that cross together."""
        crossings = [self._crossings[name] for name in names]

        def cross(*values: tf.Tensor) -> Any:
            _tf.call_once()
            if kind == SUM:
                return self.workers.sum(values)
            if kind == GATHER:
                return self.workers.gather_along(values, [each.axis for each in crossings])
            return self.workers.extremes(values, [each.kind for each in crossings])

        with self.graph.as_default(), tf.device(None):
            traced = _tf.trace(cross, [tf.TensorSpec(each.shape, each.ref.dtype)
                                       for each in crossings], "across")
        refs = dict(zip((tensor.name for tensor in traced.inputs),
                        (each.ref for each in crossings)))
        refs.update((inner.name, self.outside(self.graph.capture(outer)))
                    for outer, inner in traced.captures)
        _tf.hand_on_functions(traced, self._builder.graph)
        must_run = self._copied(traced, refs)
        for name, crossing, tensor in zip(names, crossings, traced.outputs):
            self._builder.define(name, refs[tensor.name], crossing.device)
        return must_run

    def _copied(self, traced: Any, refs: dict[str, Ref]) -> list[str]:
        """Copies the operations of a graph; gives the nodes that must run."""
        nodes: dict[str, str] = {}
        must_run = []
        for operation in map(Op, traced.get_operations()):
            if any(name in refs for name in operation.output_names):
                continue
            controls = [nodes[before] for before in operation.controls if before in nodes]
            crosses = _tf.crosses_machines(operation.operation)
            if crosses and self._last:
                controls.append(self._last)
            made, node = self._builder.copy(
                operation, [refs[name] for name in operation.input_names],
                operation.operation.device, _SCOPE, controls)
            nodes[operation.name] = node
            refs.update(zip(operation.output_names, made))
            if crosses:
                self._last = node
                must_run.append(node)
        return must_run
