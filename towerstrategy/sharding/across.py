"""Collective operations between the workers, for the nodes of a step.

Goes in: one value on each worker, and how they are merged: by sum, concatenation or extreme.  Comes
out: the merged value, on each worker.

Values are collected first.  When a graph has all its nodes, each value gets a level: the number of
collectives, one after another, before it.  Values of one level cross together, as ``Machines`` pack
them.  Each collective operation waits for the one before, and all workers make the same ones; so
they run in one order everywhere, also in branches and loops.
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
SUM, GATHER = "sum", "gather"  # Machines.extremes has the other kinds
_CONTROL_FLOW = "~"  # behind all other kinds of a level


class _Crossing(NamedTuple):
    kind: str
    ref: Ref  # this worker's value
    shape: tf.TensorShape
    axis: int


class Across:
    """The collective operations for the nodes that a builder collects.

    Args:
      workers: the ``Machines`` of ``extras/machines``; None on a single machine, where nothing
        crosses.
      graph: the step's graph; the builder's graph may be a branch or loop body in it.
      builder: collects the nodes.
      outside: makes a reference, for the builder's nodes, to a tensor of ``graph``.
      in_loop: whether the nodes are in a loop body.
    """

    def __init__(self, workers: Any, graph: tf.Graph, builder: Builder,
                 outside: Callable[[tf.Tensor], Ref], in_loop: bool = False) -> None:
        self.workers, self.graph, self.outside, self.in_loop = workers, graph, outside, in_loop
        self._builder = builder
        self._crossings: dict[str, _Crossing] = {}
        self._control_flow: list[str] = []
        self._last = ""  # the node that the next collective operation waits for

    def cross(self, kind: str, ref: Ref, device: str,
              shape: tf.TensorShape | None = None, axis: int = 0) -> Ref:
        """The merged value of all workers: this worker's until :meth:`finish`.

        Args:
          kind: "sum", "gather" (along ``axis``), or "max", "min", "and", "or".
          ref: this worker's value.
          device: the device that needs the result.
          shape: the value's static shape, the same on all workers.
          axis: the dimension along which values are gathered.
        """
        if self.workers is None:
            return ref
        result = self._builder.identity(ref, device, f"{_SCOPE}{kind}")
        self._crossings[result.node] = _Crossing(kind, ref, tf.TensorShape(shape), axis)
        return result

    def note_control_flow(self, node: str) -> None:
        """Notes a branch or loop that has collective operations in it."""
        self._control_flow.append(node)

    def finish(self) -> list[str]:
        """Makes all collective operations; returns the nodes that must run on each worker."""
        kinds = {name: crossing.kind if crossing.kind in (SUM, GATHER) else "extreme"
                 for name, crossing in self._crossings.items()}
        kinds.update(dict.fromkeys(self._control_flow, _CONTROL_FLOW))
        levels = self._builder.levels(kinds) if kinds else {}
        # Each in the order of the trace, which is the same on all workers.
        groups: dict[tuple[int, str], list[str]] = {}
        for name, kind in kinds.items():
            groups.setdefault((levels[name], kind), []).append(name)
        must_run: list[str] = []
        for (_, kind), names in sorted(groups.items()):
            if kind != _CONTROL_FLOW:
                must_run += self._make_group(kind, names)
                continue
            for node in names:
                self._builder.nodes[node].input.extend([f"^{self._last}"] if self._last else [])
                self._last = node
            must_run += names
        return must_run

    def _make_group(self, kind: str, names: list[str]) -> list[str]:
        """Makes the collective operations of values that cross together."""
        crossings = [self._crossings[name] for name in names]

        def cross(*values: tf.Tensor) -> Any:
            _tf.call_once(self.in_loop)
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
        must_run = self._copy_operations(traced, refs)
        for name, tensor in zip(names, traced.outputs):
            self._builder.nodes[name].input[:] = [refs[tensor.name].input]
        return must_run

    def _copy_operations(self, traced: Any, refs: dict[str, Ref]) -> list[str]:
        """Copies a graph's operations, and tensors to ``refs``; returns nodes that must run."""
        nodes: dict[str, str] = {}
        must_run = []
        for operation in map(Op, traced.get_operations()):
            if any(name in refs for name in operation.output_names):
                continue
            controls = [nodes[before] for before in operation.controls if before in nodes]
            in_turn = _tf.has_effect(operation.operation)  # a collective, or takes its key
            if in_turn and self._last:
                controls.append(self._last)
            outputs, node = self._builder.copy(
                operation, [refs[name] for name in operation.input_names],
                operation.operation.device, _SCOPE, controls)
            nodes[operation.name] = node
            refs.update(zip(operation.output_names, outputs))
            if in_turn:
                self._last = node
                must_run.append(node)
        return must_run
