"""Branches and loop bodies that all towers run together, as functions.

Goes in: a branch or loop body with its layout, and the values of its inputs.  Comes out: a function
with one argument for each replicated input and one per tower for each other input.  If a body needs
more than its inputs, such as a tower's number of rows, it gets an extra argument; then all
functions of the operation take that argument.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import tensorflow as tf

from towerstrategy import _tensorflow as _tf
from towerstrategy.sharding.across import Across
from towerstrategy.sharding.builder import Builder, Ref
from towerstrategy.sharding.layout import LOOPS, Layout
from towerstrategy.sharding.rules.registry import Op
from towerstrategy.sharding.spec import PARTED, REPLICATED, ListOf, Replicated, Sharded, Spec
from towerstrategy.sharding.towers import Towers
from towerstrategy.sharding.values import Value


class Extra(NamedTuple):
    """An argument that a branch or loop takes in addition to its inputs."""

    placeholder: Callable[[], tf.Tensor]  # makes the argument in the function
    outer: Callable[[], Ref]  # makes its value outside


class Body:
    """A branch or loop body, as a function that takes all towers' inputs.

    Of an input that is ``only_read`` it takes what it uses: the tensor, or what ``read`` reads of
    the variable, on each device that uses it.
    """

    def __init__(self, outer: Towers, layout: Layout, specs: Sequence[Spec],
                 values: Sequence[Value], operation: Op, only_read: Set[int],
                 read: Callable[[Value, Op], Value]) -> None:
        self._outer, self.layout, self._only_read, self._read = outer, layout, only_read, read
        self.specs = [spec.given if isinstance(spec, Sharded) else spec for spec in specs]
        self.graph = _tf.new_function_graph(layout.graph, operation.name)
        self.extras: dict[Any, Extra] = {}
        self._placeholders: dict[Any, tf.Tensor] = {}
        self.results: list[Ref] = []
        self.ends: list[str] = []  # the device of each result, where a loop should start
        with self.graph.as_default():
            self._inputs, self.values = self._make_inputs(values, operation.type in LOOPS)

    def _make_inputs(self, values: Sequence[Value], loop: bool
                     ) -> tuple[list[tf.Tensor], list[Any]]:
        """Placeholders for the function's arguments, and the values of the body's inputs."""
        builder = self._builder = Builder(self.graph)
        outer = self._outer.across
        across = Across(outer.workers, outer.graph, builder, self._outside, outer.in_loop or loop)
        towers = self.towers = Towers(
            builder, self._outer.stage_devices, self._outer.merge, self._outer.host,
            self._outer.scopes, self._count, self._outer.on_cpu, self._outer.draws_rows, across,
            self._outer.spare, self._outer.first if self._outer.is_alone else None
        ).at(self._outer.stage)
        placeholders: list[tf.Tensor] = []
        inputs = []

        def arguments(like: tf.Tensor, spec: Spec) -> Iterator[tuple[Ref, str]]:
            while True:  # what is known of a list is the shape of entries with all rows
                placeholders.append(_tf.placeholder_like(like, not isinstance(spec, ListOf)))
                yield builder.take(placeholders[-1]), ""

        for index, (spec, value, inner) in enumerate(zip(
                self.specs, values, self.layout.graph.inputs)):
            if index in self._only_read:
                inputs.append(self._argument(index, inner, value))
                inputs[-1].read = functools.partial(self._read_outside, index, value)
            else:
                inputs.append(value_of(towers, spec, inner.shape, arguments(inner, spec)))
                inputs[-1].device = "" if value.constant else value.device
        return placeholders, inputs

    def _read_outside(self, index: int, variable: Value, operation: Op) -> Value:
        """What an operation reads of input ``index``, a variable."""
        return self._argument((index, operation.definition.attributes), operation.outputs[0],
                              self._read(variable, operation))

    def _argument(self, key: Any, like: tf.Tensor, outer: Value) -> Value:
        """A tensor that does not change: one argument for each tower that uses it, on the tower."""
        towers, placeholder = self._outer, functools.partial(_tf.placeholder_like, like)

        def whole() -> Ref:
            return self._extra(key, Extra(placeholder, outer.whole))

        def part(tower: int) -> Ref:
            return self._extra(("on", tower, key), Extra(placeholder, lambda: towers.brought(
                outer.part(tower), towers.devices[tower])))

        if towers.is_alone:  # what a tower by itself makes once is on the tower, too
            whole = functools.partial(part, 0)
        return Value(self.towers, REPLICATED, like.shape, whole, part, outer.device)

    def _count(self, name: Any, dtype: tf.DType, batch: str) -> Ref:
        """A number of rows, or each tower's, as an argument."""
        outer = self._outer
        make = {"each": outer.counts, "total": outer.total, "earlier": outer.earlier}.get(
            name, functools.partial(outer.count, name))
        return self._extra((name, dtype, batch), Extra(
            lambda: tf.compat.v1.placeholder(dtype, [outer.replicas] if name == "each" else []),
            functools.partial(make, dtype, batch)))

    def _outside(self, tensor: tf.Tensor) -> Ref:
        """A tensor of the step's graph, such as a collective operation's key, as an argument."""
        return self._extra(tensor.name, Extra(lambda: _tf.placeholder_like(tensor),
                                              lambda: self._outer.across.outside(tensor)))

    def _extra(self, key: Any, extra: Extra) -> Ref:
        if key not in self.extras:
            self.extras[key] = extra
            with self.graph.as_default():
                self._placeholders[key] = extra.placeholder()
        return self._builder.take(self._placeholders[key])

    def set_results(self, results: Iterable[Value], specs: Iterable[Spec],
                    partition: Any, returns_inputs: bool = False) -> None:
        """Makes the function return ``results`` with these specs, which ``partition`` has made.

        ``returns_inputs``: result i is what input i is in the next iteration.
        """
        for index, (value, spec) in enumerate(zip(results, specs)):
            if not (returns_inputs and index in self._only_read):
                refs = refs_of(value.as_spec(spec))
                self.ends += self.towers.devices if isinstance(spec, PARTED) else map(
                    self._builder.device if returns_inputs else lambda _: "", refs)
                self.results += refs
        self._outputs = [ref if ref.dtype == tf.resource else self._builder.make(
            "Identity", [ref], "") for ref in self.results]
        crossings = self.towers.across.finish()
        self.crosses, self._effects = bool(crossings), [
            *partition.effects, *partition.reads, *crossings]

    def finish(self, extras: Mapping[Any, Extra], returns_extras: bool) -> None:
        """Makes the function; it takes, and may return, the extras of all bodies, too.

        Its ``name`` is that by which the nodes outside call it.
        """
        _tf.hand_on_functions(self.layout.graph, self.graph)
        with self.graph.as_default():
            extra_inputs = [self._placeholders[key] if key in self._placeholders
                            else extra.placeholder() for key, extra in extras.items()]
            self.towers.rewire()
            self._builder.finish()
            outputs = [self._builder.tensor(ref) for ref in self._outputs]
        self.graph.inputs = [*self._inputs, *extra_inputs]
        self.graph.outputs = [*outputs, *(extra_inputs if returns_extras else [])]
        self.graph.control_outputs = [self._builder.operations[name]
                                      for name in dict.fromkeys(self._effects)]
        self.name = _tf.add_function(self._outer.builder.graph, self.graph)

    @property
    def is_stateful(self) -> bool:
        """Whether the finished function has effects, reads variables or draws."""
        return any(operation.op_def.is_stateful for operation in self.graph.get_operations())


def refs_of(value: Value) -> list[Ref]:
    """The tensors that represent a value: the whole tensor, each tower's part, or both."""
    spec = value.spec
    refs = [] if isinstance(spec, PARTED) else [value.whole()]
    return refs if isinstance(spec, Replicated) else refs + value.parts()


def value_of(towers: Towers, spec: Spec, shape: tf.TensorShape, refs: Iterator[tuple[Ref, str]]
             ) -> Value:
    """The value that tensors, with their devices, represent: the inverse of :func:`refs_of`."""
    parted = isinstance(spec, PARTED)
    whole, device = (None, "") if parted else next(refs)
    if isinstance(spec, Replicated):
        return Value(towers, REPLICATED, shape, whole, None, device)
    parts = [next(refs)[0] for _ in range(len(towers))]
    return Value(towers, spec, shape, whole, parts.__getitem__, device)


def attributes_of(operation: Op, functions: Sequence[Body], takes: Sequence[Ref],
                  gives: Sequence[Ref], in_turn: bool) -> bytes:
    """The attributes of a branch or loop like ``operation`` with these functions.

    Args:
      operation: the branch or loop.
      functions: the finished functions.
      takes: their arguments.
      gives: their results; those of a loop are its arguments.
      in_turn: whether an iteration waits for the one before.
    """
    attr = tf.compat.v1.AttrValue
    node = tf.compat.v1.NodeDef.FromString(operation.definition.attributes)
    only_read = set.intersection(*({*_tf.only_read_inputs(body.graph)} for body in functions))
    first = int(operation.type not in LOOPS)  # behind a branch's condition
    node.attr[_tf.ONLY_READ].CopyFrom(attr(list=attr.ListValue(
        i=sorted(index + first for index in only_read))))
    unknown = tf.TensorShape(None).as_proto()  # without shapes a loop's results have its inputs'
    node.attr["output_shapes"].list.CopyFrom(attr.ListValue(shape=[unknown] * len(gives)))
    keys = _tf.function_attributes(operation.type)
    named = [{"name": body.name} for body in functions]
    for key, function in zip(keys, named):
        node.attr[key].CopyFrom(attr(func=function) if len(keys) > 1
                                else attr(list=attr.ListValue(func=named)))
    for key, refs in (("T", takes), ("Tin", takes), ("Tout", gives)):
        if key in node.attr:
            node.attr[key].list.type[:] = [ref.dtype.as_datatype_enum for ref in refs]
    if in_turn:
        node.attr["parallel_iterations"].i = 1
    return node.SerializeToString()
