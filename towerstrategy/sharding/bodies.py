"""The branches and bodies of loops that all towers run together, as functions.

Goes in: a branch or body that has been propagated, and what the towers have of its inputs.  Comes
out: a function of all that: one argument for what is made once, one a tower for what each of them
has its own part of.  What a body needs beside its inputs, such as a tower's number of rows, becomes
an argument more, which all bodies of the operation then take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding import packing
from towerstrategy.sharding.across import Across
from towerstrategy.sharding.builder import Builder, Ref
from towerstrategy.sharding.propagate import Layout
from towerstrategy.sharding.rules.registry import Op
from towerstrategy.sharding.spec import REPLICATED, ListOf, Partial, Replicated, Sharded, Size, Spec
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Value


class Asked(NamedTuple):
    """What a branch or loop needs beside its inputs."""

    stands: Callable[[], tf.Tensor]  # makes what stands for it within
    outer: Callable[[], Ref]


class Body:
    """A branch or the body of a loop, as a function of what all towers have."""

    def __init__(self, outer: Towers, layout: Layout, specs: Sequence[Spec],
                 values: Sequence[Value], operation: Op) -> None:
        self._outer, self.layout, self._specs = outer, layout, specs
        self.graph = _tf.new_function_graph(layout.graph, operation.name)
        self.asked: dict[Any, Asked] = {}
        self._standing: dict[Any, tf.Tensor] = {}
        self.results: list[Ref] = []
        with self.graph.as_default():
            self._inputs, self.values = self._entered(values)

    def _entered(self, values: Sequence[Value]) -> tuple[list[tf.Tensor], list[Any]]:
        builder = self._builder = Builder(self.graph)
        across = Across(self._outer.across.workers, self._outer.across.graph, builder,
                        self._outside)
        towers = self.towers = Towers(
            builder, self._outer.rows, self._outer.merge, self._outer.host, self._outer.scopes,
            self._count, self._outer.on_cpu, self._outer.draws_rows, across,
            self._outer.spare).at(self._outer.stage)
        placeholders: list[tf.Tensor] = []
        entered = []
        for spec, value, inner in zip(self._specs, values, self.layout.graph.inputs):
            refs = []
            for _ in range(_number_of(spec, len(towers))):
                placeholders.append(_tf.placeholder_like(inner))
                refs.append(builder.take(placeholders[-1]))
            made = value_of(towers, spec, inner.shape, iter(refs))
            made.device = value.device
            entered.append(made)
        return placeholders, entered

    def _count(self, tower: int | None) -> Ref:
        one = tower is not None
        return self._ask(tower, Asked(
            lambda: tf.compat.v1.placeholder(tf.int64, [] if one else [self._outer.replicas]),
            lambda: self._outer.counts() if tower is None else self._outer.count(tower)))

    def _outside(self, tensor: tf.Tensor) -> Ref:
        """What stands for a tensor of the step's graph, such as a collective operation's key."""
        return self._ask(tensor.name, Asked(lambda: _tf.placeholder_like(tensor),
                                             lambda: self._outer.across.outside(tensor)))

    def _ask(self, key: Any, asked: Asked) -> Ref:
        if key not in self.asked:
            self.asked[key] = asked
            with self.graph.as_default():
                self._standing[key] = asked.stands()
        return self._builder.take(self._standing[key])

    def give(self, results: Iterable[Value], specs: Iterable[Spec], effects: Iterable[str]) -> None:
        """Makes its results, which are to be of these specs; and ``effects`` must run."""
        for value, spec in zip(results, specs):
            self.results += refs_of(value.as_spec(spec))
        self._identities = [self._builder.make("Identity", [ref], "") for ref in self.results]
        crossings = self.towers.across.finish()
        self.crosses, self._effects = bool(crossings), [*effects, *crossings]

    def finish(self, asked: Mapping[Any, Asked], hand_on: bool) -> None:
        """Makes a function of it, which also takes what it or another body has asked for."""
        _tf.hand_on_functions(self.layout.graph, self.graph)
        with self.graph.as_default():
            others = [self._standing[key] if key in self._standing else one.stands()
                      for key, one in asked.items()]
            packing.finish(self.towers)
            self._builder.finish()
            outputs = [self._builder.tensor(ref) for ref in self._identities]
            handed = [tf.identity(other) for other in others] if hand_on else []
        self.graph.inputs = [*self._inputs, *others]
        self.graph.outputs = [*outputs, *handed]
        self.graph.control_outputs = [self._builder.operation(name)
                                      for name in dict.fromkeys(self._effects)]


def _number_of(spec: Spec, towers: int) -> int:
    if isinstance(spec, Size):
        return towers + 1
    return towers if isinstance(spec, (Sharded, Partial, ListOf)) else 1


def refs_of(value: Value) -> list[Ref]:
    """The nodes that are a value: the whole, or each tower's part, or both."""
    spec = value.spec
    refs = [] if isinstance(spec, (Sharded, Partial, ListOf)) else [value.whole()]
    return refs if isinstance(spec, Replicated) else refs + value.parts()


def value_of(towers: Towers, spec: Spec, shape: tf.TensorShape, refs: Any) -> Value:
    """The inverse of :func:`refs_of`."""
    parted = isinstance(spec, (Sharded, Partial, ListOf))
    whole: Any = None if parted else next(refs)
    if isinstance(spec, Replicated):
        return Value(towers, REPLICATED, shape, whole)
    parts = [next(refs) for _ in range(len(towers))]
    return Value(towers, spec, shape, whole, parts.__getitem__)


def attributes_of(operation: Op, names: Sequence[str]) -> Any:
    """The attributes of such an operation that say its functions, with these."""
    found = [attr for attr in _tf.op_def(operation.type).attr if "func" in attr.type]
    if len(found) == 1:
        return {found[0].name: list(names)}
    return dict(zip((attr.name for attr in found), names))


def types_of(dtypes: Iterable[tf.DType]) -> Any:
    """The attribute that says types."""
    attr = tf.compat.v1.AttrValue
    return attr(list=attr.ListValue(type=[dtype.as_datatype_enum for dtype in dtypes]))
